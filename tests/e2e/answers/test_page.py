"""The page at / in a real browser: upload, race, errors, cancel, replay; and what it looks like."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Request, expect

from hippo.cli.record import STRATEGIES
from hippo.page import recording
from tests.e2e.answers.conftest import FAST_MS
from tests.e2e.support import CHAT, Running, further_gateway, hippo, wait_until

KEY = "sk-alice-0123456789"
QUESTION = "Describe the video."


def _ask(page: Page, question: str = QUESTION, *, tokens: int = 24, race: bool = True) -> None:
    page.get_by_label("Question").fill(question)
    page.locator("#ask details").first.evaluate("node => node.open = true")
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("race against").set_checked(race)
    page.get_by_role("button", name="Ask", exact=True).click()


def _drop(page: Page, clip: Path) -> None:
    """Drops a file on the page, as from the desktop."""
    transfer = page.evaluate_handle(
        """([data, name]) => {
            const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, { type: "video/mp4" }));
            return transfer;
        }""",
        [base64.b64encode(clip.read_bytes()).decode(), clip.name],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def _is_idle(page: Page) -> None:
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden(timeout=FAST_MS)


def test_a_first_race_is_one_click_away_and_the_video_plays(running: Running, page: Page) -> None:
    page.goto(running.url)
    expect(page.locator("#intro p")).to_contain_text("the text is the same")
    samples = page.locator("#samples button")
    expect(samples.first.locator("canvas")).to_be_visible()
    sample = page.get_by_role("button", name="handful.mp4")
    expect(sample).to_contain_text(re.compile(r"handful\.mp4\s*0:0\d"))
    sample.press("Enter")  # by keyboard alone
    expect(sample).to_have_attribute("aria-pressed", "true")
    page.wait_for_function("() => document.getElementById('preview').currentTime > 0")  # it plays
    expect(page.locator("#chosen")).to_contain_text(
        re.compile(r"handful\.mp4, .* MB, 0:0\d long, \d+ × \d+")
    )
    seen = page.locator("#seen")
    expect(seen).to_contain_text(re.compile(r"see \d+ frames of .*: about \d+ visual tokens"))

    told = re.search(r"about (\d+) visual", seen.inner_text())
    page.locator("#ask details").first.evaluate("node => node.open = true")
    page.get_by_label("Most tokens").fill("16")
    page.get_by_role("button", name="Race over a sample").press("Enter")
    _is_idle(page)
    turn = page.locator(".turn")
    expect(turn.locator("h2")).to_have_text("Describe the video in detail.")
    expect(turn.locator(".verdict")).to_contain_text("token for token (16 tokens)")
    expect(turn.locator(".frames-section .detail")).to_contain_text(f"{told and told[1]} visual")
    expect(page.locator("#intro")).to_be_hidden()


def _window(width: int, scheme: str) -> dict[str, Any]:
    """Options of a page's context; axe needs to run beside the policy."""
    size = {"width": width, "height": 900}
    return {"viewport": size, "color_scheme": scheme, "bypass_csp": True}


@pytest.mark.parametrize("page", [_window(400, "dark"), _window(1280, "light")], indirect=True)
def test_axe_finds_nothing_before_and_after_a_race(running: Running, page: Page) -> None:
    page.goto(running.url)
    expect(page.locator("#samples canvas").first).to_be_visible()
    _has_no_violations(page)
    page.get_by_role("button", name="handful.mp4").click()
    _ask(page, tokens=8)
    _is_idle(page)
    expect(page.locator(".frames canvas").first).to_be_visible()
    _has_no_violations(page)
    assert _overflow(page) <= 0


def _has_no_violations(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert not found, json.dumps(
        [(each["id"], [node["html"] for node in each["nodes"]]) for each in found], indent=1
    )


def test_a_dropped_video_is_raced_over_and_the_race_is_saved_and_replayed(
    running: Running, page: Page, clip: Path, tmp_path: Path
) -> None:
    bodies: list[Any] = []

    def keep(request: Request) -> None:
        if request.url.endswith(CHAT):
            bodies.append(request.post_data_json)

    page.on("request", keep)
    page.goto(running.url)
    expect(page.locator("#about")).to_contain_text("target")
    _drop(page, clip)
    expect(page.locator("#chosen")).to_contain_text("clip.mp4")
    _ask(page)
    _is_idle(page)
    turn = page.locator(".turn")
    expect(turn.locator(".verdict")).to_contain_text("token for token (24 tokens)")
    answers = turn.locator(".answer").all_inner_texts()
    assert len(answers) == 2 and answers[0] and answers[0] == answers[1]
    assert turn.locator(".lane.alone .token.draft").count() == 0
    expect(turn.locator(".figures")).to_contain_text("Tokens per forward")

    # Who wrote a token, and its place, by keyboard alone.
    turn.locator(".answer").first.focus()
    page.keyboard.press("ArrowRight")
    expect(turn.locator(".detail").first).to_contain_text("by its prefill")
    turn.locator("canvas[role=img]").first.focus()
    page.keyboard.press("ArrowRight")
    expect(turn.locator(".timeline .detail")).to_contain_text("target")

    # The frames, and another strategy's choice.
    frames = turn.locator(".frames li")
    assert frames.count() > 1
    turn.get_by_role("button", name="uniform").click()
    note = turn.locator(".frames-section .detail")
    expect(note).to_contain_text(re.compile(r"uniform: \d+ of \d+"))
    expect(note).not_to_contain_text("not at hand")

    # A second turn, of the same conversation.
    _ask(page, "What else?", tokens=8, race=False)
    _is_idle(page)
    assert page.locator(".turn").count() == 2
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert bodies[-1]["messages"][1]["content"] == answers[0]

    with page.expect_download() as started:
        page.get_by_role("button", name="Save as one file").last.click()
    saved = tmp_path / "saved.html"
    started.value.save_as(saved)
    page.route(re.compile("^http"), lambda route: route.abort())  # there is no server
    page.goto(saved.as_uri())
    replayed = page.locator(".turn")
    assert replayed.count() == 2
    assert replayed.first.locator(".answer").all_inner_texts() == answers
    replayed.first.get_by_role("button", name="uniform").click()
    expect(replayed.first.locator(".frames-section .detail")).to_contain_text("uniform")
    slider = replayed.first.get_by_label("Time of the replay")
    slider.fill("0")
    assert replayed.first.locator(".lane.pair .token:visible").count() == 0
    replayed.first.get_by_role("button", name="Replay the race").click()
    expect(replayed.first.locator(".lane.alone .clock.done")).to_be_visible()


def test_errors_are_the_servers_own_words_and_a_cancelled_answer_frees_its_slots(
    running: Running, page: Page, tmp_path: Path, mended: None
) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video at all")
    page.goto(running.url)
    page.set_input_files("#file", str(broken))
    _ask(page)
    _is_idle(page)
    expect(page.locator(".lane .problem")).to_contain_text("(400, invalid_media)")

    page.reload()
    _ask(page, "Hello", tokens=100_000)
    _is_idle(page)
    expect(page.locator(".lane .problem")).to_contain_text("400")

    page.reload()
    page.get_by_role("button", name="handful.mp4").click()
    expect(page.locator("#chosen")).to_contain_text("handful.mp4")
    running.stack.child("target").send_signal(19)  # SIGSTOP: the answer cannot end before
    _ask(page, tokens=200)
    expect(page.locator(".lane")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    _is_idle(page)
    expect(page.locator(".lane .problem")).to_contain_text("Cancelled")
    assert page.locator(".lane").count() == 1
    running.stack.child("target").send_signal(18)
    wait_until(lambda: running.slots_used() == 0)


def test_the_page_works_without_its_samples(running: Running, page: Page) -> None:
    page.route("**/v1/samples", lambda route: route.fulfill(status=500, body="broken"))
    page.goto(running.url)
    expect(page.locator("#about")).to_contain_text("target")
    expect(page.locator("#samples-field")).to_be_hidden()
    expect(page.locator("#problem")).to_be_hidden()


def test_a_key_is_asked_for_and_the_keyboard_suffices(running: Running, page: Page) -> None:
    with further_gateway(running, "--api-keys", f"alice={KEY}") as door:
        page.goto(door.url)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("sk-mallory-0123456789")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_contain_text("401")
        key.fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("target")
        page.locator("summary", has_text="Options").press("Enter")
        page.get_by_label("Most tokens").press("Control+a")
        page.keyboard.type("4")
        page.get_by_label("race against").press("Space")
        page.get_by_label("Question").press_sequentially("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".answer")).not_to_be_empty()
        _is_idle(page)


@pytest.mark.parametrize("page", [_window(400, "dark"), _window(400, "light")], indirect=True)
def test_a_recording_of_the_command_line_fits_400_pixels_in_both_schemes(
    page: Page, recorded: Path
) -> None:
    page.goto(recorded.as_uri())
    assert page.locator(".lane").count() == 2
    assert page.locator(".frames li").count() > 1
    assert _overflow(page) <= 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(each) for each in re.findall(r"\d+", background)[:3]]
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (max(channels) < 60) == is_dark


def _open(page: Page, path: Path, text: str, *tokens: dict[str, Any]) -> None:
    """Shows a recording of these tokens, whose other texts are ``text``."""
    told = [{"id": 1, "index": i, "source": "target", **each} for i, each in enumerate(tokens)]
    times = {"at": 9.0, "forward": 5.0, "wait": 0.0, "vision": 0.0, "context": 0}
    counts = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "is_rejection": False}
    verdict = {"type": "verdict", "forward_number": 0, "mode": "prefill", "tokens": told}
    run = {"events": [verdict | times | counts], "hippo": None, "metrics": None, "error": None}
    turn = {"question": text, "note": text, "video": text, "runs": {"pair": run}}
    data = {"model": text, "made_at": "", "turns": [turn | {"selections": {}, "pictures": []}]}
    path.write_text(recording(data), "utf-8")
    page.goto(path.as_uri())


def test_a_thought_is_folded(page: Page, tmp_path: Path) -> None:
    thought = [{"text": each, "is_thought": True} for each in ("a ball", "?", "")]
    _open(page, tmp_path / "run.html", "Is it?", *thought, {"text": "A ball."})
    expect(page.locator(".answer > .token")).to_have_text("A ball.")
    folded = page.get_by_text("a ball", exact=True)
    expect(folded).to_be_hidden()
    page.get_by_text("Thought").click()
    expect(folded).to_be_visible()


def test_the_text_of_a_model_is_only_text(page: Page, tmp_path: Path) -> None:
    text = "<img src=x onerror=alert(1)></script><b>bold</b>"
    _open(page, tmp_path / "run.html", text, {"text": text})
    expect(page.locator(".answer")).to_have_text(text)
    assert page.locator("main img, main b:not(.timeline-labels b), header b").count() == 0


def _overflow(page: Page) -> int:
    """How much wider the document is than the window, in pixels."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.fixture(scope="module")
def recorded(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.html"
    done = hippo(
        "ask", str(running.clip), QUESTION, "--url", running.url, "--max-tokens", "16",
        "--record", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def test_ask_records_both_answers_the_strategies_and_the_frames(recorded: Path) -> None:
    held = re.search(r'id="recording">(.*?)</script>', recorded.read_text("utf-8"))
    assert held is not None
    (turn,) = json.loads(held.group(1))["turns"]
    assert sorted(turn["runs"]) == ["alone", "pair"]
    assert turn["runs"]["alone"]["hippo"]["policy"] == "off"
    assert len(turn["selections"]) == len(STRATEGIES) and len(turn["pictures"]) > 1
    assert turn["pictures"][0].startswith("data:image/jpeg;base64,")


def test_a_recording_is_refused_before_anything_is_asked(running: Running, tmp_path: Path) -> None:
    for path in (tmp_path / "run.png", tmp_path / "none" / "run.html"):
        done = hippo("ask", "Hello?", "--url", running.url, "--record", str(path))
        assert done.returncode == 1 and "--record" in done.stderr


HELPED = [
    {"type": "prompt", "service": "draft", "at": 9, "preprocess": 5, "queue": 0,
     "num_prompt_tokens": 9, "num_visual_tokens": 4},
    {"type": "selection", "at": 80, "kept": [1], "num_visual_tokens": 4, "strategy": "holistic",
     "score": 1},
    {"type": "verdict", "at": 100, "mode": "prefill", "forward_number": 0, "forward": 90,
     "vision": 20, "helper_wait": 5, "helper": 65, "num_draft_tokens": 0, "num_reused_tokens": 0,
     "num_accepted_tokens": 0, "num_accepted_reused": 0, "context": 0, "tokens": []},
    {"type": "draft_prefill", "at": 110, "forward": 28, "vision": 25, "context": 0},
]  # fmt: skip
_SPANS = """async (events) => {
    const { Run } = await import("/page/run.js");
    const { spans } = Run.fromRecord({ events });
    return spans
        .filter(({ device, kind }) => device === "draft" && kind !== "read")
        .map(({ kind, start, end }) => [kind, start, end])
        .sort((one, other) => one[1] - other[1]);
}"""


@pytest.mark.parametrize("is_draft_first", [False, True])
def test_the_drafts_device_shows_the_layers_of_the_helper(
    running: Running, page: Page, is_draft_first: bool
) -> None:
    page.goto(running.url)
    prompt, selection, verdict, draft = HELPED
    last = [draft, verdict] if is_draft_first else [verdict, draft]
    assert page.evaluate(_SPANS, [prompt, selection, *last]) == [
        *(["wait", 9, 15], ["helper", 15, 80]),
        *(["wait", 80, 82], ["vision", 82, 107], ["prefill", 107, 110]),
    ]
    early = {**draft, "at": 83}  # whose tower ran before the selection
    assert page.evaluate(_SPANS, [prompt, selection, early]) == [
        *(["vision", 9, 34], ["wait", 34, 80], ["prefill", 80, 83])
    ]
