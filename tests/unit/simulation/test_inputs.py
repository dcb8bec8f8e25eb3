"""Traces, machines, hardware: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hippo.errors import InvalidRequestError
from hippo.shapes import find_shape
from hippo.simulation.hardware import GPUS, Placement, read_parameters
from hippo.simulation.pairs import PAIRS
from hippo.simulation.traces import (
    agreement_of_run_length,
    drawn_traces,
    mean_agreement,
    read_traces,
)

H200 = GPUS["h200"]


def test_traces_are_read_plain_and_as_json_and_short_ones_left_out(tmp_path: Path) -> None:
    lines = ["1101", "1", "", json.dumps({"agrees": "10", "clip": "a", "num_prompt_tokens": 7})]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(lines))
    plain, rich = read_traces(path, num_prompt_tokens=5)
    assert plain.agrees == (True, True, False, True)
    assert plain.num_prompt_tokens == plain.num_draft_prompt_tokens == 5
    assert (rich.name, rich.num_prompt_tokens, rich.num_draft_prompt_tokens) == ("a", 7, 7)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("11x", "line 1"),
        ('{"agrees": 5}', "line 1"),
        ("{", "no JSON"),
        ('{"agrees": "11", "num_prompt_tokens": null}', "line 1: numbers of prompt tokens"),
        ("1\n", "two tokens"),
        ("\xff\n", "no text in UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_traces_is_refused_with_its_line(
    tmp_path: Path, text: str | None, part: str
) -> None:
    path = tmp_path / "traces"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequestError, match=part):
        read_traces(path)


def test_drawn_traces_have_the_rate_asked_for_bursty_or_not() -> None:
    for burstiness in (0.0, 0.5, 1.0):
        traces = drawn_traces(
            agreement=0.85, num_traces=20, num_tokens=1000, burstiness=burstiness, seed=1
        )
        assert mean_agreement(traces) == pytest.approx(0.85, abs=0.02)
    assert traces == drawn_traces(
        agreement=0.85, num_traces=20, num_tokens=1000, burstiness=1.0, seed=1
    )


def test_a_run_length_is_turned_into_a_rate() -> None:
    assert agreement_of_run_length(8) == pytest.approx(7 / 8)


def test_a_step_reads_the_weights_and_the_cache_once() -> None:
    shape = PAIRS["qwen-7b-72b"].target
    assert read_parameters(shape, 1) == pytest.approx(71.4e9, rel=0.01)  # 72.7e9 and an embedding
    place = Placement(
        gpu=H200, num_gpus=2, bandwidth_share=1, layer_us=0, block_us=0, sum_us=0, step_us=0,
        launch_us=0,
    )  # fmt: skip
    expected = 1e3 * (2 * read_parameters(shape, 1) + shape.cache_bytes(1000)) / 9.6e12
    assert place.step_ms(shape, 1, 1000) == pytest.approx(expected)
    assert place.step_ms(shape, 16, 1000) == pytest.approx(expected)  # still the memory
    assert place.step_ms(shape, 512, 1000) > 1.5 * expected  # arithmetic by now


def test_quantised_layers_are_read_as_fast_as_kernels_were_measured() -> None:
    """docs/gpu.md: microseconds for gate, up and down of a layer in nf4, of one row and of 16."""
    shape, place = PAIRS["qwen-7b-72b-nf4"].target, Placement(gpu=GPUS["h100"])
    products = 3 * shape.mlp_width * shape.hidden_size / shape.num_shared_parameters
    head_ms = 2e3 * shape.num_head_parameters / (0.8 * 3.35e12)
    small_ms = place.layer_us / 1e3 * shape.num_layers + place.step_us / 1e3
    for num_rows, measured_us in ((1, 110 + 64), (16, 126 + 71)):
        others_ms = small_ms + (num_rows > 1) * place.block_us / 1e3 * shape.num_layers
        layers_ms = place.step_ms(shape, num_rows, 0) - head_ms - others_ms
        assert 1e3 * products * layers_ms == pytest.approx(measured_us, rel=0.02)
    assert place.memory_gib(shape, 1000) == pytest.approx(41, abs=0.5)


def test_rows_read_the_experts_that_they_choose() -> None:
    shape = find_shape("Qwen/Qwen3-VL-30B-A3B-Instruct")
    experts = 48 * 3 * 2048 * 768  # parameters of one expert of each layer
    others = shape.num_shared_parameters - 128 * experts + shape.num_head_parameters
    assert read_parameters(shape, 1) == pytest.approx(others + 8 * experts)
    assert read_parameters(shape, 2) == pytest.approx(others + (16 - 8 / 16) * experts)


def test_a_line_meets_the_roofline_at_one_and_sixteen_rows() -> None:
    shape, place = PAIRS["llava-0.5b-7b"].target, Placement(gpu=H200)
    line = place.step_time(shape, 25_000)
    for rows in (1, 16):
        assert line.ms(rows, 25_000) == pytest.approx(place.step_ms(shape, rows, 25_000))


def test_a_small_models_step_takes_the_launches_without_graphs() -> None:
    small, large = PAIRS["llava-0.5b-7b"].draft, PAIRS["qwen-7b-72b"].draft
    eager, captured = Placement(gpu=H200, has_graphs=False), Placement(gpu=H200)
    launches_ms = 0.15 + small.num_layers * 15 * 0.020
    assert eager.step_ms(small, 1, 1000) == pytest.approx(launches_ms)
    assert eager.step_ms(small, 4, 1000) > launches_ms > 2 * captured.step_ms(small, 1, 1000)
    assert eager.step_ms(large, 1, 1000) > captured.step_ms(large, 1, 1000)


@pytest.mark.parametrize(
    ("size", "has_graphs", "context", "of_one_row", "of_eight"),
    [
        ("3B", True, 2816, 3.91, 4.88),
        ("7B", True, 25_600, 5.97, 6.82),
        ("32B", True, 8192, 21.16, 24.32),
        ("3B", False, 1024, 10.4, 15.9),
        ("7B", False, 1024, 8.97, 12.45),
    ],
)
def test_steps_are_about_those_that_were_measured(
    size: str, has_graphs: bool, context: int, of_one_row: float, of_eight: float
) -> None:
    """On an H200; docs/gpu.md."""
    shape = find_shape(f"Qwen/Qwen2.5-VL-{size}-Instruct")
    place = Placement(gpu=H200, has_graphs=has_graphs)
    for num_rows, measured in ((1, of_one_row), (8, of_eight)):
        assert place.step_ms(shape, num_rows, context) == pytest.approx(measured, rel=0.1)


def test_a_model_that_its_gpus_cannot_share_is_refused_with_those_that_can() -> None:
    shape = PAIRS["qwen-7b-72b"].target
    with pytest.raises(InvalidRequestError, match="cannot share; choose 1, 2, 4, 8"):
        Placement(gpu=H200, num_gpus=3).check_fits(shape, 25_000)


@pytest.mark.parametrize("name", PAIRS)
def test_each_pair_fits_and_its_draft_is_faster_than_its_target(name: str) -> None:
    machine = PAIRS[name].machine()
    assert machine.draft.one_row_ms < machine.target.one_row_ms / 1.3
    assert machine.draft_prefill_ms < machine.target_prefill_ms
