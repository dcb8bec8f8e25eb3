"""``python -m bench.pruning``: agreement along the target's outputs, whole experiments, figures."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.drafts.teacher import target_output
from bench.pruning import __main__ as pruning
from bench.pruning.bias import boundaries
from bench.pruning.choices import Choice
from bench.pruning.judge import agreement, run_choices
from bench.pruning.services import (
    answer_times,
    option_systems,
    preset_systems,
    strategy_systems,
    write_clips,
)
from bench.pruning.speed import MeasuredTimes, replay_agreement
from bench.pruning.statistics import Counts, difference, interval
from bench.pruning.tables import accepted_tokens
from bench.pruning.traces import ClipTrace, Sample, SampleTrace, clip_samples, trace_clip
from gateway.api.schemas import SpeculationOptions
from gateway.api.translate import speculation_plan
from gateway.common.config import GatewaySettings
from hippo.client.answers import Answer
from hippo.client.latency import Record
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


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short answers; undoes what a command sets for its process."""
    monkeypatch.setattr(pruning, "load_model", cache(load_model))
    monkeypatch.setattr("bench.pruning.traces.MAX_TOKENS", 8)
    monkeypatch.setattr("bench.pruning.speed._REPEATS", 2)
    handler, num_threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(num_threads)


def clip_trace(model: ToyModel) -> ClipTrace:
    """A trace of the toy target."""
    frames = torch.zeros(3, 4, 4, 3, dtype=torch.uint8)
    media = DecodedMedia(MediaKind.VIDEO, frames, (0.0,) * 3, 2.0)
    sample = Sample("toy", b"", "What is it?", "A thing.", True)
    prompt = model.prepare_prompt([sample.message], [media], FramePlan())
    features = model.embed_visual(prompt)
    assert features is not None
    *_, logits = model.prefill(0, prompt, features, None)
    assert logits is not None
    output = target_output(model, int(logits.argmax()), (), max_tokens=24)
    attention = torch.arange(12.0).expand(2, -1)
    content = tuple(token % 2 == 0 for token in output)
    scores: dict[Scope, torch.Tensor] = {"visual": attention}
    trace = SampleTrace(prompt, output, content, scores, {1: -attention[0]})
    return ClipTrace("toy", prompt.visual_grids, features, features, (trace,))


def test_a_guess_saves_time_and_changes_nothing() -> None:
    model = ToyModel()
    clip = clip_trace(model)
    trace = clip.samples[0]

    def first_id() -> int:
        *_, logits = model.prefill(0, trace.prompt, clip.target_features, None)
        assert logits is not None
        return int(logits.argmax())

    true = [first_id()]
    while true[-1] not in model.info.end_token_ids and len(true) < 24:
        row = SequenceRows(0, len(true) - 1, (true[-1],))
        true.append(int(model.forward(StepPlan((row,)))[-1].argmax()))
    assert list(trace.output_ids) == true and len(true) > 6
    wrong_at_4 = [*true[:4], (true[4] + 1) % NUM_TOKEN_IDS, *true[5:]]
    for guess in (true, true[:3], wrong_at_4, [0] * 40, [*true, 5, 6, 7]):
        assert list(target_output(model, first_id(), guess, max_tokens=24)) == true
        assert len(target_output(model, first_id(), guess, max_tokens=3)) == 3


def test_a_draft_like_the_target_agrees_on_every_token_and_a_noisy_one_does_not() -> None:
    clip = clip_trace(ToyModel())
    trace = clip.samples[0]
    kept = NONE.kept(clip, trace, 0)
    same, noisy = (
        agreement(ToyModel(noise=noise), clip, trace, kept, is_compacted=False)
        for noise in (0.0, 4.0)
    )
    assert len(same) == len(trace.output_ids) and all(same) and not all(noisy)


def test_every_choice_is_judged_on_every_sample_and_the_same_tokens_once() -> None:
    clip = clip_trace(ToyModel())
    choices = {
        "none": NONE,
        "none again": NONE,
        "compacted": replace(NONE, is_compacted=True),
        "attention": Choice(PruningStrategy.ATTENTION, ratio=0.5, num_layers=2),
        "uv": Choice(PruningStrategy.UV, ratio=0.5, num_layers=1),
        "uv reversed": Choice(PruningStrategy.UV, ratio=0.5, num_layers=1, is_falling=True),
        "blind": Choice(PruningStrategy.BLIND, ratio=1.0, num_layers=1),
    }
    kept = {name: each.kept(clip, clip.samples[0], 0).tolist() for name, each in choices.items()}
    assert kept["attention"] == kept["uv reversed"] == [6, 7, 8, 9, 10, 11]  # most attended to
    assert kept["uv"] == [0, 1, 2, 3, 4, 5]  # whose alignment grows most
    draft = ToyModel(noise=1.0)
    outcomes = run_choices([clip], draft, choices)
    assert len(draft.plans) == 5
    trace = clip.samples[0]
    for outcome in outcomes.values():
        assert sum(outcome.tokens.totals.values()) == len(trace.output_ids)
        assert sum(outcome.content.totals.values()) == sum(trace.content)
    assert outcomes["attention"].num_kept == 6 and outcomes["blind"].num_kept == 0


def test_a_trace_has_all_parts_of_the_visual_rows_for_the_draft(tmp_path: Path) -> None:
    model = load_model(LoadPlan(str(write_family(tmp_path, "qwen3_vl")), dtype="float32"))
    first, second = clip_samples(0, seed=2)
    assert (first.is_video_first, second.is_video_first) == (True, False)
    trace = trace_clip(model, model, [first])
    media = decode(first.video, FramePlan(), model.frame_limits)
    rows = model.embed_visual(model.prepare_prompt([first.message], [media], FramePlan()))
    assert rows is not None and torch.equal(trace.draft_features, rows)
    assert torch.equal(trace.target_features, rows[:, : model.hidden_size])


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
    target_ms = dict.fromkeys((1, 2, 4, 8, 16, 32), 10.0)
    draft_ms = {0.0: 1.0, 0.9: 1.0}
    machine = MeasuredTimes(100, 50, target_ms, draft_ms, draft_ms).machine
    right, wrong = (
        replay_agreement([Trace((mark,) * 121, 100, 60, f"clip {k}") for k in range(3)], machine)
        for mark in (True, False)
    )
    assert 8 < right.decode_speedup.share <= right.tokens_a_pass.share * 1.05
    assert right.tokens_a_pass.num_clips == 3
    assert wrong.tokens_a_pass.share == 1.0
    assert 0.8 < wrong.decode_speedup.share <= 1.01


def pair(folder: Path, family: str) -> list[object]:
    """Flags for one clip and a pair of a family."""
    target = write_family(folder / "target", family)
    draft = write_family(folder / "draft", family, noise=0.1)
    flags = ["--target-model", target, "--draft-model", draft, "--clips", 1]
    return [*flags, "--max-context-length", 2048]


def run(experiment: str, out: Path, *flags: object) -> dict[str, Any]:
    """Runs an experiment; returns what it wrote."""
    pruning.main([experiment, "--out", str(out), *map(str, flags)])
    found: dict[str, Any] = json.loads((out / f"{experiment}.json").read_text(encoding="utf-8"))
    return found


def test_ablation_and_bias_have_a_row_for_each_choice(tmp_path: Path) -> None:
    flags = pair(tmp_path, "qwen2_5_vl")
    ablation = run("ablation", tmp_path, *flags)
    variants = {row["label"]: row for row in ablation["rows"]}
    assert {"preset specvlm", "preset hippo", "uv, layers: 1"} <= set(variants)
    assert len(variants) > 40
    for row in variants.values():
        assert row["num_samples"] == 2  # both orders
        assert row["tokens_a_pass"]["mean"] >= 1.0 and row["decode_speedup"]["mean"] > 0
    assert variants["none"]["minus none"]["mean"] == 0.0
    assert set(ablation["step_times"]["target_ms"]) == {"1", "2", "4", "8", "16", "32"}
    bias = run("bias", tmp_path, *flags)
    assert "change of alignment (uv)" in {row["label"] for row in bias["rows"]}
    assert len(bias["grids"]) == 1
    for row in bias["rows"]:
        assert row["ring, over all"]["mean"] == pytest.approx(
            row["ring"]["mean"] / row["ring, all"]["mean"], rel=0.1
        )


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_any_family_runs(tmp_path: Path, family: str) -> None:
    result = run("frames", tmp_path / "out", *pair(tmp_path, family), "--frames", "2,4")
    shown = {row["label"]: row for row in result["rows"]}
    few, more = shown["2 frames, none"], shown["4 frames, none"]
    assert result["target"] == "target" and (few["num_frames"], more["num_frames"]) == (2, 4)
    assert more["prompt_tokens"] > few["prompt_tokens"] > 0
    assert 0 < shown["4 frames, holistic 0.9"]["kept_tokens"] < few["kept_tokens"]


def test_what_cannot_run_is_said_in_a_sentence(tmp_path: Path) -> None:
    for flags, said in (
        (("--target-model", tmp_path / "none"), "none' does not exist"),
        (("--target-model", tmp_path), "it is not a checkpoint folder"),
        (("--dtype", "float8"), "dtype 'float8' is unknown"),
    ):
        with pytest.raises(SystemExit, match=said):
            run("ratio", tmp_path / "out", *flags)


def test_both_boundaries_are_marked() -> None:
    found = boundaries([(2, 4, 5), (1, 3, 3)])
    assert found["ring"].sum() == 2 * (20 - 6) + 8
    assert not found["ring"].view(-1)[[6, 7, 8, 11, 12, 13, 44]].any()
    assert found["ends"].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 45, 46, 47, 48]
    assert torch.equal(boundaries([(1, 2, 2)])["ring"], torch.ones(4, dtype=torch.bool))


def test_the_services_are_asked_each_question_in_turning_order(tmp_path: Path) -> None:
    samples = [
        [Sample(name, b"a video", "What?", "", is_first) for is_first in (True, False)]
        for name in "abc"
    ]
    files = write_clips(tmp_path, samples)
    assert [file.is_video_first for file in files] == [True, False, True]
    assert files[1].path.read_bytes() == b"a video" and files[1].question == "What?"


def test_the_services_are_asked_for_what_their_rows_name() -> None:
    systems = [*strategy_systems(0.8), *option_systems(0.8), *preset_systems()]
    asked = {system.name: system.speculative for system in systems}
    assert len(asked) == len(systems)
    assert asked["uv 0.95"] == {"pruning": {"strategy": "uv", "ratio": 0.95}}
    assert asked["holistic 0.8, spread 0"]["pruning"]["spread"] == 0.0
    settings = GatewaySettings(target=("localhost:1",))
    plans = [
        speculation_plan(SpeculationOptions.model_validate(each), settings)
        for each in asked.values()
    ]
    assert {plan.pruning.strategy for plan in plans} == set(PruningStrategy)
    by_name = dict(zip(asked, plans, strict=True))
    as_published = by_name["preset specvlm"].pruning
    original = by_name["preset specvlm, original positions"].pruning
    assert as_published == replace(original, compacted_positions=True)


def counted(clips: dict[str, tuple[int, int]]) -> Counts:
    counts = Counts()
    for clip, (hits, total) in clips.items():
        counts.add_hits(clip, hits, total)
    return counts


def test_an_interval_is_of_all_tokens_and_resamples_clips() -> None:
    counts = counted({"a": (9, 10), "b": (45, 90)})
    found = interval(counts)
    # The ends: all draws "b", all draws "a".
    assert found == pytest.approx({"mean": 0.54, "low": 0.5, "high": 0.9})


def test_a_paired_difference_does_not_see_what_both_sides_share() -> None:
    first = counted({str(clip): (50 + clip, 100) for clip in range(40)})
    second = counted({str(clip): (48 + clip, 100) for clip in range(40)})
    found = difference(first, second)
    assert found == pytest.approx(dict.fromkeys(("mean", "low", "high"), 0.02))
    alone = interval(first)
    assert alone["high"] - alone["low"] > 0.04


def test_differences_of_other_clips_and_shares_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="same clips"):
        difference(counted({"a": (1, 1)}), counted({"b": (1, 1)}))
    with pytest.raises(ValueError, match="no clips"):
        interval(Counts())


def test_accepted_tokens_are_those_between_rejections() -> None:
    """Of 100 tokens ten are wrong: nine right ones before each."""
    agreement = interval(counted({"a": (90, 100)}))
    assert accepted_tokens(agreement) == "9.0"
    assert accepted_tokens({"mean": 1.0}) == "∞"


def record(system: str, *, rejections: int, prefill_ms: float | None) -> Record:
    """An answer of two tokens that took half a second, and target-only twice as long."""
    figures = {
        "num_rejections": rejections,
        "timings_ms": {"decode": 250.0, "draft_prefill": prefill_ms},
        "mean_tokens_per_forward": 3.0,
        "acceptance_rate": 0.75,
    }
    answer = Answer(text="a", asked_s=1.0, piece_s=(1.25, 1.5), token_ids=(1, 2), figures=figures)
    return Record("clip", system, 0.0, answer, 0.5, 1.0, (1, 2))


def test_accepted_tokens_and_times_of_services_are_of_all_answers() -> None:
    records = [
        record("holistic 0.9", rejections=0, prefill_ms=20.0),
        record("holistic 0.9", rejections=1, prefill_ms=40.0),
    ]
    found = answer_times(records)
    assert found == {"end_to_end_ms": 500.0, "draft_prefill_ms": 30.0, "accepted_tokens": 3.0}
    alone = answer_times([record("target-only", rejections=0, prefill_ms=None)])
    assert alone["draft_prefill_ms"] is None and alone["accepted_tokens"] is None
