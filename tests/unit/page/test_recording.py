"""The page's files, and the one file of a recording."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from hippo.page import POLICY, page_file, player, recording

FOLDER = Path(__file__).resolve().parents[3] / "hippo/page"


def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["__init__.py", "../types.py", "none.js", "", "..", "a/../dom.js"])
def test_nothing_else_is_given_out(name: str) -> None:
    assert page_file(name) is None


def test_nothing_is_loaded_from_elsewhere_and_no_html_is_made_of_text() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".html", ".css"):
            text = path.read_text("utf-8")
            assert not re.search(r"https?://(?!www\.w3\.org)", text), path.name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text), (
                path.name
            )
    assert "style=" not in _text("index.html") and " on" + "click" not in _text("index.html")
    assert "unsafe" not in POLICY


def test_a_recording_allows_only_its_own_script_and_style() -> None:
    page = player()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        contents = re.findall(rf"<{element}(?: type=\"module\")?>(.*?)</{element}>", page, re.S)
        (content,) = contents
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)


def test_data_cannot_end_its_element() -> None:
    data = {"turns": [], "model": "</script><script>alert(1)</script><!-- $& \u2028"}
    page = recording(data)
    assert page.count("</script>") == player().count("</script>")
    (held,) = re.findall(r'<script type="application/json" id="recording">(.*?)</script>', page)
    assert json.loads(held) == data
