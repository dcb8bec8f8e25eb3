"""``python -m bench.pruning`` on pairs and videos of one's own."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.drafts.samples import HeldOutWorld, QuestionsFile
from bench.pruning import __main__ as pruning
from bench.pruning import pair
from bench.pruning.bias import boundaries
from bench.pruning.services import option_systems, preset_systems, strategy_systems, write_clips
from demo.world import clips
from gateway.api.schemas import SpeculationOptions
from gateway.api.speculation import speculation_plan
from gateway.common.config import GatewaySettings
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.load import load_model
from hippo.types import PruningStrategy
from tests.support.models.families import write_family


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question about one clip of the bundled world, and two about another."""
    folder = tmp_path_factory.mktemp("videos")
    lines = []
    for index, asked in ((0, ("What moves?",)), (1, ("What is there?", "How many are red?"))):
        clip = clips.held_out("short", index)
        clips.write_clip(clip, folder)
        for text in asked:
            options = [] if index else ["a ball", "two"]
            fields = {"id": f"{index} {text}", "video": f"{clip.name}.mp4", "question": text}
            lines.append(json.dumps({**fields, "options": options}))
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "load_model", cache(load_model))
    monkeypatch.setattr("bench.drafts.traces.MAX_TOKENS", 8)
    monkeypatch.setattr("bench.pruning.speed._REPEATS", 2)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Undoes what a command sets for its process."""
    handler, num_threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(num_threads)


def run(experiment: str, out: Path, *flags: object) -> dict[str, Any]:
    """Runs an experiment; returns what it wrote."""
    pruning.main([experiment, "--out", str(out), *map(str, flags)])
    path = out / f"{experiment}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def test_experiments_run_on_a_file_of_questions(tmp_path: Path, questions: Path) -> None:
    flags = ("--questions", questions, "--dtype", "bfloat16")
    run("traces", tmp_path, *flags)
    ratio = run("ratio", tmp_path, *flags)
    ablation = run("ablation", tmp_path, *flags, "--clips", 1)
    rows = {row["label"]: row for row in ratio["rows"]}
    assert {rows[label]["num_samples"] for label in ("none", "holistic 0.9")} == {6}  # both orders
    assert rows["none"]["num_clips"] == 2 == ratio["num_clips"]
    assert "content_agreement" not in rows["none"]  # nothing tells content words
    assert rows["none"]["minus none"]["mean"] == 0.0
    assert len(ablation["rows"]) > 40 and ablation["dtype"] == "bfloat16"
    variants = {row["label"]: row for row in ablation["rows"]}
    assert {"preset specvlm", "preset hippo", "uv, layers: 2"} <= set(variants)
    for row in (*rows.values(), *variants.values()):
        assert row["tokens_a_pass"]["mean"] >= 1.0 and row["decode_speedup"]["mean"] > 0
    assert set(ratio["step_times"]["target_ms"]) == {"1", "2", "4", "8", "16", "32"}
    bias = run("bias", tmp_path, *flags)
    assert "change of alignment (uv)" in {row["label"] for row in bias["rows"]}
    assert sum(bias["grids"].values()) == 2
    for row in bias["rows"]:
        assert row["ring, over all"]["mean"] == pytest.approx(
            row["ring"]["mean"] / row["ring, all"]["mean"], rel=0.1
        )
    frames = run("frames", tmp_path, *flags, "--frames", "2,4", "--clips", "1")
    shown = {row["label"]: row for row in frames["rows"]}
    few, more = shown["2 frames, none"], shown["4 frames, none"]
    assert (few["num_frames"], more["num_frames"]) == (2, 4)
    assert more["prompt_tokens"] > few["prompt_tokens"] > 0
    assert shown["4 frames, holistic 0.9"]["kept_tokens"] < few["kept_tokens"]


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_any_family_runs(tmp_path: Path, questions: Path, family: str) -> None:
    target = write_family(tmp_path / "target", family)
    draft = write_family(tmp_path / "draft", family, noise=0.1)
    flags = ["--questions", questions, "--target-model", target, "--draft-model", draft]
    flags += ["--clips", 1, "--frames", "4", "--max-context-length", 2048]
    result = run("frames", tmp_path / "out", *flags)
    assert [row["label"] for row in result["rows"]] == ["4 frames, none", "4 frames, holistic 0.9"]
    assert result["target"] == "target" and result["rows"][1]["kept_tokens"] > 0


def test_the_world_knows_content_words() -> None:
    source = HeldOutWorld()
    first, second = source.clips(2)
    assert first.name != second.name and [s.is_video_first for s in first.samples] == [True, False]
    assert source.content_mask(["A", " red", " ball", "<end>"]) == [False, True, False, False]


def test_what_cannot_run_is_said_in_a_sentence(tmp_path: Path, questions: Path) -> None:
    lost = tmp_path / "lost.jsonl"
    lost.write_text('{"id": "1", "video": "no.mp4", "question": "What?"}', encoding="utf-8")
    far = tmp_path / "far.jsonl"
    far.write_text('{"id": "1", "video": "https://a/b.mp4", "question": "?"}', encoding="utf-8")
    empty = tmp_path / "empty.mp4"
    empty.write_bytes(b"no video")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "1", "video": "empty.mp4", "question": "?"}', encoding="utf-8")
    for flags, said in (
        (("--questions", lost), "line 1: there is no video"),
        (("--questions", far), "https://a/b.mp4 is not a file on this machine"),
        (("--questions", broken), "0000-empty: "),
        (("--target-model", tmp_path / "none"), "none' does not exist"),
        (("--target-model", tmp_path), "it is not a checkpoint folder"),
        (("--dtype", "float8", "--questions", questions), "dtype 'float8' is unknown"),
    ):
        with pytest.raises(SystemExit, match=said):
            run("ratio", tmp_path / "out", *flags)
    with pytest.raises(SystemExit, match="leave --questions out"):
        run("confirm", tmp_path / "out", "--questions", questions)


def test_a_sharded_or_changed_checkpoint_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        found = find_checkpoint(str(folder), progress=lambda *_: None)
        return pair.fingerprint(found)

    one = write_family(tmp_path / "one", "qwen3_vl")
    same = shutil.copytree(one, tmp_path / "same")
    noisy = write_family(tmp_path / "noisy", "qwen3_vl", noise=0.1)
    assert fingerprint(one) == fingerprint(same) != fingerprint(noisy)
    (same / "model.safetensors").rename(same / "model-1-of-1.safetensors")
    index = {"weight_map": {"all": "model-1-of-1.safetensors"}}
    (same / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert len(fingerprint(same)) == 12


def test_both_boundaries_are_marked() -> None:
    found = boundaries([(2, 4, 5), (1, 3, 3)])
    assert found["ring"].sum() == 2 * (20 - 6) + 8
    assert not found["ring"].view(-1)[[6, 7, 8, 11, 12, 13, 44]].any()
    assert found["ends"].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 45, 46, 47, 48]
    assert torch.equal(boundaries([(1, 2, 2)])["ring"], torch.ones(4, dtype=torch.bool))


def test_the_services_are_asked_each_question_in_turning_order(
    tmp_path: Path, questions: Path
) -> None:
    files = write_clips(tmp_path, QuestionsFile(questions).clips(None))
    assert [file.is_video_first for file in files] == [True, False, True]
    assert files[1].path == files[2].path and files[0].question.endswith("directly.")


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
