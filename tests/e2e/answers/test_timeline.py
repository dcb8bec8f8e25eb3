"""What the page draws of an answer's events."""

import pytest
from playwright.sync_api import Page

from tests.e2e.support import Running

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
        *(["vision", 9, 34], ["wait", 34, 80], ["prefill", 80, 83]),
    ]
