"""Teacher-forced agreement on the toy model: traces, the cache of results, choices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.drafts.samples import HeldOutWorld, Sample, SampleClip
from bench.drafts.traces import (
    ClipTrace,
    SampleTrace,
    TraceStore,
    messages_of,
    stored_traces,
    target_output,
    trace_clip,
    trace_missing,
)
from bench.pruning.agreement import AgreementCache, DraftRunner
from bench.pruning.choices import Choice
from bench.pruning.speed import MeasuredTimes, measure_steps, replay_agreement
from bench.pruning.teacher import run_choices
from hippo.errors import InvalidRequestError
from hippo.lab.commands.scoring import decode
from hippo.lab.simulation.machine import ForwardTime
from hippo.lab.simulation.traces import Trace
from hippo.models.interface.base import DecodedMedia, SequenceRows, StepPlan
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.pruning.scores import Scope
from hippo.types import FramePlan, MediaKind, PruningStrategy
from tests.support.models.families import write_family
from tests.support.models.toy_model import NUM_TOKEN_IDS, ToyModel

NONE = Choice(strategy=PruningStrategy.NONE, ratio=0.0, num_layers=1)


def some_sample(name: str = "toy/detailed") -> Sample:
    return Sample(name, "detailed", "What is it?", "A thing.", True)


def start(model: ToyModel, sample: Sample, frames: int = 3) -> tuple[SampleTrace, torch.Tensor]:
    """A trace of the toy target and its visual features."""
    media = DecodedMedia(
        MediaKind.VIDEO, torch.zeros(frames, 4, 4, 3, dtype=torch.uint8), (0.0,) * frames, 2.0
    )
    prompt = model.prepare_prompt(messages_of(sample), [media], FramePlan())
    features = model.embed_visual(prompt)
    assert features is not None
    *_, logits = model.prefill(0, prompt, features, None)
    assert logits is not None
    output = target_output(model, int(logits.argmax()), (), max_tokens=24)
    attention = torch.arange(4.0 * frames).expand(2, -1)
    content = tuple(token % 2 == 0 for token in output)
    scores: dict[Scope, torch.Tensor] = {"visual": attention}
    return SampleTrace(sample, prompt, output, content, scores, {1: -attention[0]}), features


def clip_trace(model: ToyModel) -> ClipTrace:
    trace, features = start(model, some_sample())
    return ClipTrace("toy", trace.prompt.visual_grids, features, features, (trace,))


def step_by_step(model: ToyModel, trace: SampleTrace, features: torch.Tensor) -> list[int]:
    *_, logits = model.prefill(0, trace.prompt, features, None)
    assert logits is not None
    output = [int(logits.argmax())]
    while output[-1] not in model.info.end_token_ids and len(output) < 24:
        row = SequenceRows(0, len(output) - 1, (output[-1],))
        output.append(int(model.forward(StepPlan((row,)))[-1].argmax()))
    return output


def test_a_guess_saves_time_and_changes_nothing() -> None:
    model = ToyModel()
    trace, features = start(model, some_sample())
    true = step_by_step(model, trace, features)
    assert list(trace.output_ids) == true and len(true) > 6
    wrong_at_4 = [*true[:4], (true[4] + 1) % NUM_TOKEN_IDS, *true[5:]]
    for guess in (true, true[:3], wrong_at_4, [0] * 40, [*true, 5, 6, 7]):
        *_, logits = model.prefill(0, trace.prompt, features, None)
        assert logits is not None
        first_id = int(logits.argmax())
        assert list(target_output(model, first_id, guess, max_tokens=24)) == true
        assert len(target_output(model, first_id, guess, max_tokens=3)) == 3


def test_a_draft_like_the_target_agrees_on_every_token_and_a_noisy_one_does_not(
    tmp_path: Path,
) -> None:
    clip = clip_trace(ToyModel())
    kept = NONE.kept(clip, clip.samples[0], 0)
    same = DraftRunner(ToyModel(), AgreementCache(tmp_path / "same.jsonl"))
    length = len(clip.samples[0].output_ids)
    assert same.agreement(clip, clip.samples[0], NONE, kept) == "1" * length
    noisy = DraftRunner(ToyModel(noise=4.0), AgreementCache(tmp_path / "noisy.jsonl"))
    assert "0" in noisy.agreement(clip, clip.samples[0], NONE, kept)


def test_a_trace_has_all_parts_of_the_visual_rows_for_the_draft(tmp_path: Path) -> None:
    model = load_model(LoadPlan(str(write_family(tmp_path, "qwen3_vl")), dtype="float32"))
    source = HeldOutWorld()
    (clip,) = source.clips(1)
    clip = replace(clip, samples=clip.samples[:1])
    trace = trace_clip(model, model, clip, source)
    media = decode(clip.read_video(), FramePlan(), model.frame_limits)
    prompt = model.prepare_prompt(messages_of(clip.samples[0]), [media], FramePlan())
    rows = model.embed_visual(prompt)
    assert rows is not None and torch.equal(trace.draft_features, rows)
    assert torch.equal(trace.target_features, rows[:, : model.hidden_size])


def test_what_is_known_is_not_run_again_even_after_a_break(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    clip = clip_trace(ToyModel())
    kept = NONE.kept(clip, clip.samples[0], 0)
    cache = AgreementCache(path)
    agrees = DraftRunner(ToyModel(), cache).agreement(clip, clip.samples[0], NONE, kept)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut o')
    idle = ToyModel()
    resumed = DraftRunner(idle, AgreementCache(path))
    assert resumed.agreement(clip, clip.samples[0], NONE, kept) == agrees
    assert idle.plans == []
    other = Choice(strategy=PruningStrategy.UNIFORM, ratio=0.5, num_layers=1)
    resumed.agreement(clip, clip.samples[0], other, other.kept(clip, clip.samples[0], 0))
    moved = replace(NONE, is_compacted=True)
    resumed.agreement(clip, clip.samples[0], moved, kept)
    assert len(idle.plans) == 2
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3
    assert AgreementCache(path).get_trace("nothing") is None


def test_every_choice_is_judged_on_every_sample_and_recorded(tmp_path: Path) -> None:
    clip = clip_trace(ToyModel())
    runner = DraftRunner(ToyModel(noise=1.0), AgreementCache(tmp_path / "cache.jsonl"))
    choices = {
        "none": NONE,
        "attention": Choice(strategy=PruningStrategy.ATTENTION, ratio=0.5, num_layers=2),
        "uv": Choice(strategy=PruningStrategy.UV, ratio=0.5, num_layers=1),
        "uv reversed": Choice(PruningStrategy.UV, ratio=0.5, num_layers=1, is_falling=True),
        "blind": Choice(strategy=PruningStrategy.BLIND, ratio=1.0, num_layers=1),
    }
    records = tmp_path / "records.jsonl"
    outcomes = run_choices([clip], runner, choices, records=records)
    length = len(clip.samples[0].output_ids)
    assert {label: sum(o.tokens.totals.values()) for label, o in outcomes.items()} == dict.fromkeys(
        choices, length
    )
    assert outcomes["attention"].num_kept == 6 and outcomes["blind"].num_kept == 0
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    by_choice = {line["choice"]: line for line in lines}
    assert by_choice["attention"]["kept"] == [6, 7, 8, 9, 10, 11]  # the most attended to
    assert by_choice["uv"]["kept"] == [0, 1, 2, 3, 4, 5]  # whose alignment grows most
    assert by_choice["uv reversed"]["kept"] == [6, 7, 8, 9, 10, 11]
    assert len(by_choice["none"]["agrees"]) == length
    assert {outcome.num_samples for outcome in outcomes.values()} == {1}


def test_traces_are_made_once_and_read_back_and_a_refused_clip_is_named(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "traces")
    trace = clip_trace(ToyModel())
    clip = SampleClip("toy", (some_sample(),), lambda: b"")
    console = Console(quiet=True)

    def refuse(clip: SampleClip) -> ClipTrace:
        raise InvalidRequestError("it is no video")

    with pytest.raises(InvalidRequestError, match="toy: it is no video"):
        trace_missing(console, store, [clip], refuse)
    trace_missing(console, store, [clip], lambda clip: trace)
    trace_missing(console, store, [clip], refuse)  # is there already
    (found,) = stored_traces(console, store, [clip], device="cpu", title="")
    assert found.samples[0].output_ids == trace.samples[0].output_ids
    assert torch.equal(found.target_features, trace.target_features)


def test_step_times_are_of_every_number_of_rows_and_every_ratio() -> None:
    clip = clip_trace(ToyModel())
    times = measure_steps(ToyModel(), ToyModel(), clip)
    assert list(times.target) == [1, 2, 4, 8, 16, 32]
    assert times.draft_step.keys() == times.draft_prefill.keys() >= {0.0, 0.9, 1.0}
    assert all(ms > 0 for ms in (*times.target.values(), *times.draft_step.values()))


@pytest.mark.parametrize(
    ("steps", "level", "slope"), [((3.0, 1.0), 1.0, 20.0), ((1.0, 3.0), 2.0, 0.0)]
)
def test_a_replayed_draft_step_takes_no_less_time_with_more_tokens(
    steps: tuple[float, float], level: float, slope: float
) -> None:
    times = MeasuredTimes(
        100, 100, {1: 10.0, 2: 10.0}, {}, dict(zip((0.0, 1.0), steps, strict=True))
    )
    draft = times.machine.draft
    assert isinstance(draft, ForwardTime)
    assert draft.one_row_ms == pytest.approx(level)
    assert draft.kilotoken_ms == pytest.approx(slope)


def test_a_replay_is_of_the_agreement_and_the_step_times() -> None:
    """A draft that is always right, ten times as fast as the target; one that is always wrong."""
    machine = MeasuredTimes(
        100,
        50,
        dict.fromkeys((1, 2, 4, 8, 16, 32), 10.0),
        {0.0: 5.0, 0.9: 1.0},
        {0.0: 1.0, 0.9: 1.0},
    ).machine
    right, wrong = (
        replay_agreement([Trace((mark,) * 121, 100, 60, f"clip {k}") for k in range(3)], machine)
        for mark in (True, False)
    )
    assert 8 < right.decode_speedup.share <= right.tokens_a_pass.share * 1.05
    assert right.tokens_a_pass.num_clips == 3
    assert wrong.tokens_a_pass.share == 1.0
    assert 0.8 < wrong.decode_speedup.share <= 1.01
