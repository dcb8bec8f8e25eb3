"""From answers to the rows of tables, growth of memory, and what ``bench.all`` would run."""

from pathlib import Path

import pytest

from bench import __main__ as latency
from bench import all as every
from bench import load
from bench.answers.memory import growth
from bench.answers.systems import systems
from bench.base.cells import cells
from bench.base.clips import filmed_clip
from bench.base.environment import ROOT
from bench.compare import COLUMNS, compare
from bench.drafts.levels import best_systems, level
from bench.drafts.weaker import find_draft
from bench.load import typical_lines
from hippo.client.answers import Answer
from hippo.client.latency import TARGET_ONLY, Record


def answer(decode_ms: float, *, token_ids: tuple[int, ...] = (1, 2, 3)) -> Answer:
    """An answer that took 50 ms longer from the request to its end."""
    verdicts = [{"wait": 9.0}, {"wait": 1.0}, {"wait": 2.0}]  # the first is the prefill's
    return Answer(
        text="text",
        asked_s=1.0,
        piece_s=(1.01, 1.05 + decode_ms / 1000),
        token_ids=token_ids,
        figures={
            "timeline_ms": {"verdicts": verdicts},
            "timings_ms": {"decode": decode_ms},
            "num_blocks": 5,
        },
    )


def test_each_gateway_is_held_against_the_first_answer_by_answer() -> None:
    first = [answer(10.0), answer(30.0)]
    second = [answer(5.0), answer(60.0, token_ids=(1, 2, 4))]
    rows = compare(["", ""], [first, second])
    assert [row["num_equal"] for row in rows] == [2, 1]
    assert [row["ms_per_token"] for row in rows] == pytest.approx([10.0, 16.25])
    assert rows[0]["decode"]["mean"] == rows[0]["decode"]["low"] == 1.0
    assert rows[1]["decode"]["mean"] == pytest.approx(1.25)
    assert (rows[1]["decode"]["minimum"], rows[1]["decode"]["maximum"]) == (0.5, 2.0)
    assert rows[1]["end_to_end"]["minimum"] == pytest.approx(55 / 60, abs=1e-4)
    assert (rows[0]["num_forwards"], rows[0]["num_blocks"], rows[0]["wait_ms"]) == (2, 5, 3.0)


def test_the_table_says_what_each_gateway_was_given() -> None:
    rows = compare(["", "--gamma 3"], [[answer(10.0)], [answer(5.0)]])
    first, second = cells(COLUMNS, rows)
    assert (first[0], second[0]) == ("(defaults)", "--gamma 3")
    assert second[5] == "0.500 [0.500, 0.500]"


def _record(clip: str, system: str, decode_s: float) -> Record:
    """An answer of ten tokens, of which one was rejected."""
    figures = {
        "num_rejections": 1,
        "mean_run_length": 5.0,
        "mean_tokens_per_forward": 3.0,
        "timings_ms": {"decode": 1e3 * decode_s},
    }
    answer = Answer(
        text="text",
        asked_s=0.0,
        piece_s=(0.1, 0.1 + decode_s),
        token_ids=tuple(range(10)),
        figures=figures,
    )
    return Record(clip, system, 0.0, answer, 1.0, 1.1, tuple(range(10)))


def test_a_row_compares_adaptive_with_the_best_lengths() -> None:
    times = {TARGET_ONLY: (1.0, 1.0), "serial γ=5": (0.5, 1.0), "serial γ=10": (0.4, 0.8)}
    times |= {"vpsd γ=5": (0.3, 0.6), "adaptive": (0.2, 0.2)}
    tried = [
        _record(clip, system, each[place])
        for place, clip in enumerate("ab")
        for system, each in times.items()
    ]
    best = [TARGET_ONLY, "serial γ=10", "vpsd γ=5", "adaptive"]
    assert best_systems(tried) == dict(
        zip(("off", "serial", "vpsd", "adaptive"), best, strict=True)
    )
    found = level([each for each in tried if each.system != "serial γ=5"])
    assert found["agreement"] == pytest.approx(0.9)
    assert (found["serial"]["gamma"], found["vpsd"]["gamma"]) == (10, 5)
    assert found["first_token"]["mean"] == pytest.approx(1.0)
    assert found["over_serial"]["mean"] == pytest.approx((2 + 4) / 2)
    assert found["over_vpsd"]["mean"] == pytest.approx((1.5 + 3) / 2)
    assert found["least_over_better"] == pytest.approx(1.5)
    assert (found["num_equal"], found["num_answers"]) == (6, 6)


def test_a_weaker_draft_differs_from_the_bundled_one_in_its_weights(tmp_path: Path) -> None:
    bundled = find_draft("bundled", tmp_path, "short")
    made = find_draft("85%", tmp_path, "short")
    assert find_draft(made, tmp_path, "short") == made
    files = {path.name for path in Path(bundled).iterdir()}
    assert files == {path.name for path in Path(made).iterdir()}
    differ = [n for n in files if (Path(bundled) / n).read_bytes() != (Path(made) / n).read_bytes()]
    assert differ == ["model.safetensors"]


def test_the_typical_run_of_a_load_is_that_of_median_throughput() -> None:
    speeds = (("a", 1, 5.0), ("a", 1, 9.0), ("a", 1, 7.0), ("a", 2, 1.0))
    counts = {"num_equal": 2, "num_answers": 3}
    lines = [
        {"system": system, "num_clients": count, "tokens_per_s": speed, **counts}
        for system, count, speed in speeds
    ]
    first, second = typical_lines(lines)
    assert (first["tokens_per_s"], first["tokens_per_s_range"]) == (7.0, [5.0, 9.0])
    assert (first["num_equal"], first["num_answers"], first["num_runs"]) == (6, 9, 3)
    assert second["tokens_per_s"] == 1.0


def test_growth_compares_the_ends_behind_the_warm_up() -> None:
    samples = [{"target": 10.0}] * 5 + [{"target": 100.0}] * 30 + [{"target": 107.0}] * 25
    (row,) = growth(samples, num_warm_up=5)
    assert row["growth"] == pytest.approx(0.07)
    assert row["largest_mb"] == 107.0
    with pytest.raises(ValueError, match="at least 2 more"):
        growth(samples, num_warm_up=59)


def test_clips_of_different_numbers_differ() -> None:
    numbers = (0, 1, 255, 256, 257, 512, 1000)
    assert len({filmed_clip(n, width=64, height=64, num_frames=2) for n in numbers}) == len(numbers)


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_each_command_is_one_that_its_module_takes(name: str) -> None:
    module, *arguments = every.command_of(name)
    args = {"bench": latency, "bench.load": load}[module]._parse(arguments)
    assert args.out == (every.OUT / f"{name}.json").relative_to(ROOT)
    if module == "bench" and args.systems:
        assert latency._chosen(args.systems, systems("none", 0.0))


def test_nothing_is_run_to_list_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(["--list", "--only", "load"]) == 0
    assert "bench/out/load.json" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        every.main(["--only", "none"])
