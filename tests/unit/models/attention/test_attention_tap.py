"""The early-layer tap scores visual tokens as transformers' own layers would, float32."""

import dataclasses
from typing import Any

import pytest
import torch

from hippo.models.attention.tap import AttentionScorer, scored_rows
from hippo.models.interface.base import AttentionTap, DecodedMedia, Prompt, VideoLanguageModel
from hippo.pruning.scores import Scope
from tests.support.devices.attention import reference_alignment, reference_scores
from tests.support.models.reference import arranged, clip, image, prefill, prepare, user
from tests.unit.models.conftest import Held

QUESTION = "what is in the thing?"
CLIPS = clip(), clip(num_frames=6, size=112, fps=0.7, seed=1)
TURNS: dict[str, tuple[str | DecodedMedia, ...]] = {
    "video first": (CLIPS[0], QUESTION),
    "question first": (QUESTION, CLIPS[0]),
    "two videos": (CLIPS[0], "this one, or", CLIPS[1], "this other thing?"),
    "two videos last": ("what is in", CLIPS[0], "and in", CLIPS[1]),
    "video and image": (CLIPS[0], QUESTION, image()),
}


def run(model: VideoLanguageModel, prompt: Prompt, tap: AttentionTap) -> tuple[torch.Tensor, int]:
    """Logits of a tapped prefill, and how many of its pieces ran before the scores were there."""
    num_early = 0
    pieces = model.prefill(0, prompt, model.embed_visual(prompt), None, tap)
    for piece in pieces:
        if piece is not None:
            return piece, num_early
        num_early += tap.scores is None
    raise AssertionError("a prefill ends with logits")


def tapped(
    model: VideoLanguageModel, prompt: Prompt, *, num_layers: int = 2, scope: Scope = "visual"
) -> torch.Tensor:
    """The layers' scores; checks that the tap leaves the prefill as it is."""
    tap = AttentionTap(num_layers, scope)
    logits, _ = run(model, prompt, tap)
    assert torch.equal(logits, prefill(model, 1, prompt))
    assert tap.layer_scores is not None
    return tap.layer_scores


@pytest.mark.parametrize("turn", TURNS)
def test_scores_and_alignment_equal_those_of_transformers_layers(
    held: Held, turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = held.model, held.reference.model
    messages, media = arranged(TURNS[turn])
    inputs = held.reference.inputs(messages, media)
    prompt = prepare(model, messages, *media)
    scopes: tuple[Scope, ...] = ("visual", "causal")
    scores = {
        scope: reference_scores(reference, inputs, prompt, num_layers=2, scope=scope)
        for scope in scopes
    }
    aligned = {
        num_layers: reference_alignment(reference, inputs, prompt, num_layers=num_layers)
        for num_layers in range(1, model.num_layers)
    }
    for chunk_rows in (2048, 37, 8):
        monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
        for scope, expected in scores.items():
            found = tapped(model, prompt, scope=scope)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        for num_layers, expected in aligned.items():
            tap = AttentionTap(num_layers, is_alignment=True)
            logits, _ = run(model, prompt, tap)
            assert torch.equal(logits, prefill(model, 1, prompt))
            assert tap.scores is not None and expected.std() > 1e-3
            torch.testing.assert_close(tap.scores, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_scores_are_there_as_soon_as_their_layers_have_run(
    model: VideoLanguageModel, num_layers: int
) -> None:
    assert model.num_layers == 3  # each is a group of its own
    prompt = prepare(model, user(0, "what?"), clip())
    _, num_early = run(model, prompt, AttentionTap(num_layers))
    assert num_early == num_layers - 1


@pytest.mark.parametrize("chunk_rows", [2048, 8])
def test_a_long_question_scores_by_evenly_spaced_rows(
    held: Held, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("hippo.models.attention.tap.SCORED_ROWS", 4)
    messages, media = arranged((CLIPS[0], QUESTION))
    prompt = prepare(held.model, messages, *media)
    question = prompt.question_indices
    rows = scored_rows(AttentionTap(2), prompt)
    assert question.shape[0] > 6
    assert (rows.shape[0], rows[0], rows[-1]) == (4, question[0], question[-1])
    steps = rows.diff()
    assert int(steps.max() - steps.min()) <= 1
    few = dataclasses.replace(prompt, question_indices=rows)
    inputs = held.reference.inputs(messages, media)
    expected = reference_scores(held.reference.model, inputs, few, num_layers=2, scope="visual")
    torch.testing.assert_close(tapped(held.model, prompt), expected, rtol=1e-3, atol=1e-6)


def test_queries_are_kept_for_one_group_of_layers(
    model: VideoLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers: list[int] = []
    measure = AttentionScorer._measure

    def note(scorer: AttentionScorer, *given: Any) -> None:
        num_layers.append(len(scorer._queries))
        measure(scorer, *given)

    monkeypatch.setattr(AttentionScorer, "_measure", note)
    prompt = prepare(model, user(0, "what?"), clip())
    assert tapped(model, prompt, num_layers=3).shape[0] == 3
    assert num_layers == [0, 1, 1, 1]
