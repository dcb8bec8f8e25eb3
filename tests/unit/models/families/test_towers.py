"""Vision towers: pixels are bytes, products and windows give what transformers' modules give."""

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.families import windows
from hippo.models.families.pixels import PixelScale, byte_options
from hippo.models.families.vision import replace_products, widen_range
from hippo.models.families.windows import attend_in_windows
from hippo.models.interface.base import DecodedMedia, VideoLanguageModel
from hippo.models.products.linear import Linear, MakeLinear, make_half_linear, make_linear
from hippo.types import MediaKind
from tests.support.models.llava import llava_processor
from tests.support.models.pairs import load
from tests.support.models.reference import clip, image, prepare, user

NOISE = torch.randint(
    0, 256, (5, 3, 91, 77), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "llava-onevision"])
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("mean", [[0.5, 0.5, 0.5], [0.48145466, 0.4578275, 0.40821073]])
def test_normalised_bytes_are_the_processors_pixels_to_the_last_bit(
    family: str, kind: str, mean: list[float], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = reference.processor if family == "qwen2.5-vl" else llava_processor()
    processor = getattr(both, f"{kind}_processor")
    options: dict[str, Any] = {"image_mean": mean, "return_tensors": "pt"}
    if kind == "image":
        options, key = options | {"images": NOISE[:1]}, "pixel_values"
    else:
        options |= {"videos": [NOISE], "do_sample_frames": False}
        key = "pixel_values_videos"
    expected = processor(**options)[key]
    pixels = processor(**options, **byte_options(processor))[key]
    assert (pixels.dtype, expected.dtype) == (torch.uint8, torch.float32)
    monkeypatch.setattr(processor, "image_mean", mean)
    assert torch.equal(PixelScale(processor).normalise(pixels), expected)


def test_a_processor_that_does_not_normalise_only_rescales() -> None:
    processor = llava_processor().video_processor
    processor.do_normalize = False
    assert byte_options(processor) == {}
    pixels = processor([NOISE], do_sample_frames=False, return_tensors="pt")["pixel_values_videos"]
    assert PixelScale(processor).normalise(pixels) is pixels
    scaled = PixelScale(processor).normalise(NOISE)
    torch.testing.assert_close(scaled, NOISE * processor.rescale_factor)


def test_pixels_are_bytes_and_leave_with_the_tower(family: VideoLanguageModel) -> None:
    prompt = prepare(family, user(0, 1, "what?"), clip(), image())
    pixels = [item.pixels for item in prompt.items]
    assert [each.dtype for each in pixels if each is not None] == [torch.uint8] * 2
    freed = [weakref.ref(each) for each in pixels if each is not None]
    del pixels
    expected = family.embed_visual(prompt)
    bare = prompt.without_pixels()
    del prompt
    assert [reference() for reference in freed] == [None, None]
    assert [item.pixels for item in bare.items] == [None, None]
    *_, logits = family.prefill(0, bare, expected, None)
    assert logits is not None


def _pieces(model: VideoLanguageModel, *media: DecodedMedia) -> tuple[int, torch.Tensor | None]:
    found: torch.Tensor | None = None
    prompt = prepare(model, user(*range(len(media)), "what?"), *media)

    def run() -> Iterator[torch.Tensor]:
        nonlocal found
        found = yield from model.embed_pieces(prompt)

    return len(list(run())), found


@pytest.mark.parametrize("name", ["target_checkpoint", "llava_checkpoint"])
def test_pieces_are_parts_of_videos_and_whole_images(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = request.getfixturevalue(name)
    model = load(folder)
    assert _pieces(model) == (0, None)
    media = clip(num_frames=6), image(), clip(num_frames=2, seed=1)
    num_separators = name == "llava_checkpoint"
    num_pieces, whole = _pieces(model, *media)
    assert num_pieces == 3 + num_separators
    # One of Qwen-VL's frames of 36 patches, or two of LLaVA-OneVision's of 25.
    monkeypatch.setattr("hippo.models.families.family.CPU_VISION_PATCHES", 50)
    model = load(folder)
    num_pieces, parts = _pieces(model, *media)
    assert num_pieces == 5 + num_separators
    assert whole is not None and parts is not None
    torch.testing.assert_close(parts, whole)
    assert torch.equal(parts, model.embed_visual(prepare(model, user(0, 1, 2, "?"), *media)))  # type: ignore[arg-type]


def test_a_kind_is_normalised_by_its_own_processor(llava_checkpoint: Path) -> None:
    model = load(llava_checkpoint)
    tower: Any = model._tower
    pixels = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    assert torch.equal(tower.on_device(pixels, MediaKind.IMAGE), torch.ones(1, 3, 2, 2))
    tower._scales[MediaKind.VIDEO]._mean[:] = 255.0
    assert torch.equal(tower.on_device(pixels, MediaKind.VIDEO), torch.zeros(1, 3, 2, 2))


class Tower(torch.nn.Module):
    """Cuts images into patches, and a linear layer behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch_embedding = torch.nn.Conv2d(3, 24, **options)
        self.product = torch.nn.Linear(24, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.patch_embedding.weight.dtype)
        out: torch.Tensor = self.product(self.patch_embedding(images).flatten(2).transpose(1, 2))
        return out


WHOLE = {"kernel_size": 14, "stride": 14}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("options", "dtype", "make", "tolerance"),
    [
        ({**WHOLE, "padding": "valid"}, torch.float32, make_linear, 1e-5),
        ({"kernel_size": (7, 4), "stride": (7, 4)}, torch.float32, make_linear, 1e-5),
        ({"kernel_size": 4, "stride": 3}, torch.float32, make_linear, 1e-5),
        ({"kernel_size": 4, "stride": 4, "padding": 1}, torch.float32, make_linear, 1e-5),
        (WHOLE, torch.bfloat16, make_linear, 2e-2),
        (WHOLE, torch.float32, make_half_linear, 2e-3),
    ],
)
@pytest.mark.parametrize("side", [28, 33])  # of the latter 5 pixels are left over
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_the_convolution_s(
    options: dict[str, Any],
    dtype: torch.dtype,
    make: MakeLinear,
    tolerance: float,
    side: int,
    bias: bool,
) -> None:
    tower = Tower(bias=bias, **options).to(dtype)
    images = torch.randn(2, 3, side, side + 14)
    expected = tower(images)
    replace_products(tower, make)
    are_patches = options["kernel_size"] == options["stride"] and options.get("padding") != 1
    assert isinstance(tower.patch_embedding, torch.nn.Conv2d) != are_patches
    found = tower(images)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_weight_is_freed_before_the_next_is_packed() -> None:
    tower = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    weights = [weakref.ref(product) for product in tower]
    num_alive = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        num_alive.append(sum(each() is not None for each in weights))
        return make_linear(weight.clone(), bias)

    replace_products(tower, make)
    assert num_alive == [3, 2, 1]


def test_a_tower_of_float16_computes_in_bfloat16_on_a_gpu() -> None:
    for device, stored, computed in (
        ("cuda", torch.float16, torch.bfloat16),
        ("cuda", torch.float32, torch.float32),
        ("cpu", torch.float16, torch.float16),
    ):
        tower = torch.nn.Linear(2, 2, dtype=stored)
        widen_range(tower, torch.device(device))
        assert tower.weight.dtype == computed


HEADS, HEAD_DIM, SCALING = 3, 8, 0.3
MODULE = torch.nn.Identity()  # of no interest


def rows(num_rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value as transformers lays them out: heads of rows that stand together."""
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(num_rows, 3, HEADS, HEAD_DIM, generator=generator)
    return tuple(x.transpose(0, 1)[None] for x in joined.permute(1, 0, 2, 3).unbind(0))


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, scale=SCALING).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    found, _ = attend_in_windows(
        MODULE, query, key, value, None, scaling=SCALING, cu_seq_lens_q=bounds
    )
    return found


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 4, 6, 16]), min_size=1, max_size=12), st.integers(0, 99))
def test_windows_see_themselves_alone(sizes: list[int], seed: int) -> None:
    sizes = [*sizes, 4]
    bounds = [0, *itertools.accumulate(sizes)]
    given = rows(bounds[-1], seed)
    boundaries = torch.tensor(bounds, dtype=torch.int32)
    parts = [
        alone(*(x[:, :, first:last] for x in given)) for first, last in itertools.pairwise(bounds)
    ]
    for _ in range(2):  # layers
        torch.testing.assert_close(attend(*given, bounds=boundaries), torch.cat(parts, 1))
    torch.testing.assert_close(attend(*given), alone(*given))  # without windows all see each other


def test_layers_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mock.Mock(side_effect=windows._plan)
    monkeypatch.setattr(windows, "_plan", plan)
    given = rows(10, 0)
    for boundaries in (torch.tensor([0, 4, 8, 10]), torch.tensor([0, 5, 10])):
        for _ in range(3):
            attend(*given, bounds=boundaries)
    assert plan.call_count == 2
