"""A real browser for the tests of the page."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
FAST_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium (apt-get install chromium)")
    with sync_playwright() as library:
        browser = library.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A page that may not complain: neither errors of scripts nor breaches of the policy. A test
    may set further options of its context."""
    further = getattr(request, "param", {})
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **further})
    context.set_default_timeout(FAST_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def hear(message: ConsoleMessage) -> None:
        # An answer with an error status is logged, and no fault of the page.
        is_heard = message.type in ("error", "warning")
        if is_heard and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    page.on("console", hear)
    yield page
    shots = os.environ.get("HIPPO_SCREENSHOTS")
    if shots:
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
        page.screenshot(path=f"{shots}/{name}.png", full_page=True)
    context.close()
    assert complaints == []
