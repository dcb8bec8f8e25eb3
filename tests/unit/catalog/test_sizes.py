"""Sizes worked out from a configuration are those of the model that is loaded."""

import argparse
import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.catalog.shapes import INT4_WITH_ZEROS, find_shape, shape_of
from hippo.catalog.sizes import DEVICE_BYTES, PROCESS_BYTES, cache_limit, memory_of, most_slots
from hippo.cli import main
from hippo.cli.up import add_stack_arguments
from hippo.errors import InvalidRequestError
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.service.settings import EngineSettings
from tests.support.models.hub_forms import HUB_FORMS, write_hub_form
from tests.support.models.pairs import load
from tests.support.models.quantized import AWQ_CONFIG, FORMS, GPTQ_CONFIG, add_config

QWEN_32B, QWEN_72B = "Qwen/Qwen2.5-VL-32B-Instruct", "Qwen/Qwen2.5-VL-72B-Instruct"
LLAVA = "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"
INTERNVL_38B = "OpenGVLab/InternVL3_5-38B-HF"
EXPERTS = "Qwen/Qwen3-VL-30B-A3B-Instruct"


@pytest.fixture
def sizes(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What the command prints, and with --json the models of it."""

    def run(*arguments: str) -> Any:
        assert main(["sizes", *arguments]) == 0
        shown = capsys.readouterr().out
        return json.loads(shown)["models"] if "--json" in arguments else shown

    return run


@pytest.mark.parametrize("name", HUB_FORMS)
def test_parameters_are_counted_as_the_checkpoint_holds_them(name: str, tmp_path: Path) -> None:
    folder = write_hub_form(tmp_path / "model", name)
    stored = find_checkpoint(str(folder), progress=lambda stage, share: None)
    # Norms and biases are left out, which weigh more in a small model.
    assert find_shape(str(folder)).num_parameters == pytest.approx(stored.num_floats, rel=0.03)
    assert stored.num_packed_bytes == 0


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        (LLAVA, 893_675_552),
        ("OpenGVLab/InternVL3_5-1B-HF", 1_060_897_792),
        ("OpenGVLab/InternVL3_5-4B-HF", 4_732_489_216),
        (INTERNVL_38B, 38_390_405_504),
        ("Qwen/Qwen2-VL-72B-Instruct", 73_405_560_320),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        (QWEN_72B, 73_410_777_344),
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032),
        ("Qwen/Qwen3-VL-32B-Instruct", 33_357_390_064),
        (EXPERTS, 31_070_754_032),
    ],
)
def test_public_models_have_as_many_parameters_as_the_hub_says_and_transformers_builds(
    name: str, num_parameters: int
) -> None:
    assert find_shape(name).num_parameters == pytest.approx(num_parameters, rel=1e-3)


def test_a_configuration_may_leave_out_what_is_qwen2_vls_own() -> None:
    """As those of the AWQ and GPTQ repositories."""
    name = "Qwen/Qwen2-VL-2B-Instruct"
    public = PUBLIC_CONFIGS[name]
    flat = {"model_type": "qwen2_vl", **public["text_config"]}
    vision = {"hidden_size": 1536, "in_chans": 3, "model_type": "qwen2_vl"}
    assert shape_of(name, flat | {"vision_config": vision}) == find_shape(name)


def test_the_room_for_earlier_media_is_one_longest_prompts_and_at_least_256_mb() -> None:
    shape = find_shape(QWEN_72B)
    short = memory_of(shape, num_tokens=8960, num_slots=1)
    long = memory_of(shape, num_tokens=102_400, num_slots=1)
    assert short.earlier_media == 256_000_000
    assert long.earlier_media == 102_400 * 8192 * 2
    assert cache_limit(0, 1000) == 0
    assert cache_limit(5, 1000) == 5


def test_frames_take_three_bytes_a_pixel() -> None:
    assert find_shape(QWEN_72B).frame_bytes(256) == 448 * 448 * 2 * 3
    assert find_shape(LLAVA).frame_bytes(196) == 378 * 378 * 3  # of 384 x 384: the whole patches
    assert find_shape(INTERNVL_38B).frame_bytes(256) == 448 * 448 * 3


def test_a_loaded_model_has_room_for_a_longest_prompts_media(target_checkpoint: Path) -> None:
    model = load(target_checkpoint, max_context_length=640)
    shape = find_shape(str(target_checkpoint))
    assert model.feature_bytes == shape.feature_bytes(640, bytes_each=4)
    assert model.frame_bytes == shape.frame_bytes(640)


def test_frames_become_as_many_tokens_as_the_processors_make_of_them() -> None:
    qwen, llava = find_shape(QWEN_32B), find_shape(LLAVA)
    assert qwen.num_visual_tokens(64, (448, 448)) == 32 * 16 * 16
    assert qwen.num_visual_tokens(64, None) == 32 * 16 * 16
    assert qwen.num_visual_tokens(63, (1288, 728)) == 32 * 46 * 26
    assert find_shape("Qwen/Qwen3-VL-8B-Instruct").num_visual_tokens(64, None) == 32 * (
        14 * 14 + 12
    )
    assert llava.num_visual_tokens(32, None) == 32 * 14 * 14 + 1
    assert find_shape(INTERNVL_38B).num_visual_tokens(32, None) == 32 * (16 * 16 + 10)
    with pytest.raises(InvalidRequestError, match="at one size"):
        llava.num_visual_tokens(32, (448, 448))


def test_memory_is_planned_for_the_pixels_that_the_operator_allows() -> None:
    plan = EngineSettings(model="m", max_image_pixels=9, max_video_pixels=12_845_056).load_plan
    shape = find_shape(QWEN_32B)

    def work(num_tokens: int, max_pixels: int) -> int:
        return memory_of(shape, num_tokens=num_tokens, num_slots=1, max_pixels=max_pixels).work

    assert work(4096, 9) == work(4096, 0) == work(4096, plan.max_pixels)
    assert work(16_384, plan.max_pixels) > 3 * work(16_384, 0)


def test_as_many_slots_are_promised_as_fit_and_no_more() -> None:
    shape = find_shape(QWEN_32B)
    slots = most_slots(shape, DEVICE_BYTES[80], num_tokens=9216)
    assert slots > 1
    fitting = memory_of(shape, num_tokens=9216, num_slots=slots)
    assert fitting.fits(DEVICE_BYTES[80])
    assert not memory_of(shape, num_tokens=9216, num_slots=slots + 1).fits(DEVICE_BYTES[80])
    assert most_slots(shape, DEVICE_BYTES[40], num_tokens=9216) == 0


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="neither a folder"):
        find_shape("Qwen/Qwen2.5-VL-1B-Instruct")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidRequestError, match="'llama'; supported"):
        find_shape(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="lacks 'hidden_size'"):
        shape_of("m", {"model_type": "qwen2_5_vl", "text_config": {"a": 1}, "vision_config": {}})


def test_the_command_shows_a_pair_on_three_sizes_of_devices(sizes: Callable[..., Any]) -> None:
    arguments = ["--target", QWEN_72B, "--draft", "Qwen/Qwen2.5-VL-7B-Instruct"]
    assert "prefill helper" not in sizes(*arguments)  # the target takes two devices
    shown = sizes(*arguments, "--weights-bits", "4.25")
    assert re.search(r"helper, beside the draft on 80 GB: 40 of 80 layers, 2\d\.\d GiB\n", shown)
    target, draft = sizes(*arguments, "--json", "--concurrency", "2")
    assert target["max_context_length"] == 8960
    assert target["devices"]["141"]["num_devices"] == 2
    assert target["devices"]["80"]["num_devices"] == 2
    assert draft["devices"]["40"]["num_devices"] == 1
    assert draft["devices"]["40"]["most_slots"] >= 2
    shown = sizes(*arguments)
    assert "loading needs" in shown
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser, port=0)
    for role in ("target", "draft"):
        (flags,) = re.findall(rf"{role}, for hippo up: (.*);", shown)
        given = parser.parse_args(flags.split())
        assert getattr(given, f"{role}_args") == ["--slots=4"]
        assert given.max_context_length == 8960
    assert "gateway, for hippo up: --gateway-arg=--max-visual-tokens=8192\n" in shown


def test_on_a_cpu_the_head_the_process_and_frames_count_too(sizes: Callable[..., Any]) -> None:
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    (gpu,), (cpu,) = (sizes("--target", name, "--json", *more) for more in ([], ["--cpu"]))
    assert cpu["weight_bytes"] - gpu["weight_bytes"] == 2 * find_shape(name).num_head_parameters
    assert cpu["cache_bytes"] == 2 * gpu["cache_bytes"] and cpu["devices"] == {}
    parts = sum(cpu[f"{part}_bytes"] for part in ("weight", "work", "cache"))
    assert cpu["total_bytes"] == parts + 2 * 256_000_000 + PROCESS_BYTES
    assert "on a CPU, with the packed copy" in sizes("--target", name, "--cpu")


def test_a_quantised_72b_fits_on_one_device(sizes: Callable[..., Any]) -> None:
    (target,) = sizes("--target", QWEN_72B, "--weights-bits", "4.4", "--json")
    assert 39 < target["weight_bytes"] / 2**30 < 42
    assert target["devices"]["80"]["num_devices"] == 1
    assert target["devices"]["40"]["num_devices"] == 0  # ranks do not share quantised layers
    assert find_shape(QWEN_72B).layer_bits is None
    (by_name,) = sizes("--target", f"{QWEN_72B}-AWQ", "--json")
    assert by_name == {**target, "model": f"{QWEN_72B}-AWQ"}
    assert find_shape("Qwen/Qwen2-VL-72B-Instruct-GPTQ-Int8").layer_bits == 8.2
    assert find_shape(f"{QWEN_72B}-AWQ", layer_bits=5).layer_bits == 5


def test_a_quantised_folder_takes_the_bytes_of_hippos_layout_or_of_its_files(
    tmp_path: Path,
) -> None:
    folder = write_hub_form(tmp_path / "model", QWEN_72B)
    plain = memory_of(find_shape(str(folder)), num_tokens=256, num_slots=1).weights
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for config in (AWQ_CONFIG, GPTQ_CONFIG):  # of layers that are left in 16 bits
        add_config(folder, config)
        kept = memory_of(find_shape(str(folder)), num_tokens=256, num_slots=1).weights
        assert abs(kept - stored) <= 1
    integers = copy.deepcopy(FORMS["RedHatAI quantized.w4a16"][1])
    integers["config_groups"]["group_0"]["weights"]["symmetric"] = False  # dequantised at load
    add_config(folder, integers)
    assert memory_of(find_shape(str(folder)), num_tokens=256, num_slots=1).weights == plain
    add_config(folder, GPTQ_CONFIG)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(InvalidRequestError, match="give --weights-bits"):
        find_shape(str(folder))
    assert find_shape(str(folder), layer_bits=4.2).layer_bits == 4.2
    add_config(folder, AWQ_CONFIG)
    # A scale and a zero point for 64 weights.
    assert find_shape(str(folder)).layer_bits == INT4_WITH_ZEROS


def test_all_known_pairs_are_rows_of_a_table(sizes: Callable[..., Any]) -> None:
    shown = sizes("--all", "--markdown")
    roles = re.findall(r"^\| (target|draft) \| \S+ \|", shown, re.MULTILINE)
    assert roles == ["target", "draft"] * 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", QWEN_72B, "--frame-size", "448"], "expected WIDTHxHEIGHT"),
        (["--target", QWEN_72B, "--device-memory", "80,x"], "expected whole GB"),
        (["--target", QWEN_72B, "--concurrency", "0"], "at least 1"),
        (["--target", LLAVA, "--frame-size", "448x448"], "at one size"),
        (["--target", QWEN_72B, "--weights-bits", "0.5"], "must be 1 to 16"),
        (["--all", "--draft", LLAVA], "leave --draft out"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sizes", *arguments]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_states_take_the_same_memory_in_every_context() -> None:
    shape = find_shape("Qwen/Qwen3.5-27B")
    states = shape.states
    assert states is not None and shape.num_attending == 16
    one = 4 * states.num_layers * states.num_heads * states.key_dim * states.value_dim
    assert one == 150_994_944
    assert 4 * one < shape.cache_bytes(0) == states.num_bytes(2) < 6 * one
    assert shape.cache_bytes(1000) - shape.cache_bytes(0) == 1000 * 16 * 2 * 4 * 256 * 2
    assert not shape.can_divide(2)
    assert shape.work_bytes(4096) > replace(shape, states=None).work_bytes(4096)
