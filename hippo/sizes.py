"""How much memory a model takes on a device, worked out from its configuration alone.

Standard library only: asked before anything is installed or downloaded. The weights are counted
as transformers would build the model, the cache as hippo.models.cache allocates it, and the room
to work, the vision cache and the shares of a tensor-parallel target as the target reckons before
it loads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hippo.errors import InvalidRequestError

GIB = 2**30

DEVICE_BYTES: Mapping[int, int] = MappingProxyType(
    # What nvidia-smi calls total: A100 40 GB, A100 and H100 80 GB, H200.
    {40: 40_960 * 2**20, 80: 81_559 * 2**20, 141: 143_771 * 2**20}
)
"""Memory of a device by the size it is sold under."""

RESERVED_BYTES = GIB
"""What the driver, CUDA's context and its libraries take of each device."""

VISION_CACHE_BYTES = 256_000_000
"""What a service may keep of earlier media on its (first) device; the default of
``--vision-cache-mb``."""

_QWEN_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
)
_SIGLIP_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "patch_size": 14,
    }
)


def _public(
    family: str, width: int, layers: int, heads: tuple[int, int], mlp: int, ids: int, **more: Any
) -> Mapping[str, Any]:
    text = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp,
        "vocab_size": ids,
        "tie_word_embeddings": more.get("is_tied", False),
    }
    vision = _QWEN_VISION if family == "qwen2_5_vl" else _SIGLIP_VISION
    vision = {**vision, **more.get("vision", {})}
    return MappingProxyType({"model_type": family, "text_config": text, "vision_config": vision})


PUBLIC_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen2.5-VL-3B-Instruct": _public(
            "qwen2_5_vl", 2048, 36, (16, 2), 11008, 151936, is_tied=True
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": _public("qwen2_5_vl", 3584, 28, (28, 4), 18944, 152064),
        "Qwen/Qwen2.5-VL-32B-Instruct": _public(
            "qwen2_5_vl", 5120, 64, (40, 8), 27648, 152064, vision={"intermediate_size": 3456}
        ),
        "Qwen/Qwen2.5-VL-72B-Instruct": _public(
            "qwen2_5_vl", 8192, 80, (64, 8), 29568, 152064, vision={"intermediate_size": 3456}
        ),
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": _public(
            "llava_onevision", 896, 24, (14, 2), 4864, 152000, is_tied=True
        ),
        "llava-hf/llava-onevision-qwen2-7b-ov-hf": _public(
            "llava_onevision", 3584, 28, (28, 4), 18944, 152128
        ),
        "llava-hf/llava-onevision-qwen2-72b-ov-hf": _public(
            "llava_onevision", 8192, 80, (64, 8), 29568, 152128
        ),
    }
)
"""What sizes depend on, of the config.json at https://huggingface.co/NAME."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's memory depends on."""

    name: str
    family: str
    num_parameters: int
    num_shared_parameters: int  # of them those that tensor-parallel ranks divide among them
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    tokens_per_side: int  # LLaVA-OneVision: of a frame's pooled grid; Qwen2.5-VL: 0
    token_pixels: int  # side of the square that one token covers; LLaVA-OneVision: 0
    token_frames: int  # frames that one token covers

    def cache_bytes(self, num_tokens: int, *, num_slots: int = 1, bytes_each: int = 2) -> int:
        """Keys and values of ``num_slots`` sequences of ``num_tokens``."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_each
        return per_token * num_tokens * num_slots

    def num_visual_tokens(self, num_frames: int, frame_size: tuple[int, int] | None) -> int:
        """Tokens of a video; ``frame_size`` is width and height as the model sees a frame.

        Raises InvalidRequestError for a size that a model of fixed frames does not take.
        """
        if num_frames < 1:
            raise InvalidRequestError(f"a video of {num_frames} frames: at least 1 is needed")
        if self.tokens_per_side:
            if frame_size is not None:
                raise InvalidRequestError(
                    f"{self.name} looks at every frame at one size: leave --frame-size out"
                )
            return num_frames * self.tokens_per_side**2 + 1  # and the newline
        width, height = frame_size or (448, 448)
        columns, rows = (max(1, round(side / self.token_pixels)) for side in (width, height))
        return math.ceil(num_frames / self.token_frames) * rows * columns

    def can_divide(self, num_devices: int) -> bool:
        """Whether a tensor-parallel target of so many devices is possible."""
        counts = (self.num_kv_heads, self.num_heads, self.mlp_width)
        return not any(count % num_devices for count in counts)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each of a model's devices."""

    weights: int
    cache: int

    @property
    def room(self) -> int:
        """For activations and buffers: a tenth of the weights, as the services reckon."""
        return self.weights // 10

    @property
    def total(self) -> int:
        return self.weights + self.room + self.cache + VISION_CACHE_BYTES

    def fits(self, device_bytes: int) -> bool:
        return self.total + RESERVED_BYTES <= device_bytes


def memory(
    shape: ModelShape,
    *,
    num_tokens: int,
    num_slots: int,
    num_devices: int = 1,
    bytes_each: int = 2,
) -> Memory:
    """What each of ``num_devices`` holds, in a dtype of ``bytes_each`` (2: bfloat16)."""
    shared = shape.num_shared_parameters
    per_device = shape.num_parameters - shared + shared / num_devices
    cache = shape.cache_bytes(num_tokens, num_slots=num_slots, bytes_each=bytes_each)
    return Memory(math.ceil(per_device * bytes_each), math.ceil(cache / num_devices))


def most_slots(
    shape: ModelShape, device_bytes: int, *, num_tokens: int, num_devices: int = 1
) -> int:
    """Sequences at once that fit beside bfloat16 weights; 0 when not even one does."""
    one = memory(shape, num_tokens=num_tokens, num_slots=1, num_devices=num_devices)
    left = device_bytes - RESERVED_BYTES - (one.total - one.cache)
    return max(0, left // one.cache)


def find_shape(name: str) -> ModelShape:
    """The shape of a public model, or of a folder with its config.json; weights need not be there.

    Raises InvalidRequestError for what is neither, or of an unknown architecture.
    """
    if name in PUBLIC_CONFIGS:
        return shape_of(name, PUBLIC_CONFIGS[name])
    path = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequestError(
            f"{name!r} is neither a folder with config.json nor one of {', '.join(PUBLIC_CONFIGS)}"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None
    return shape_of(Path(name).expanduser().resolve().name, config)


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Reads a config.json; raises InvalidRequestError for an unknown or incomplete one."""
    family = config.get("model_type")
    if family not in ("qwen2_5_vl", "llava_onevision"):
        raise InvalidRequestError(
            f"{name} is of architecture {family!r}; supported: llava_onevision, qwen2_5_vl"
        )
    text = config.get("text_config") or config  # flat in older repositories
    try:
        return _shape(name, family, config, text, config["vision_config"])
    except KeyError as error:
        raise InvalidRequestError(f"the configuration of {name} lacks {error}") from None


def _shape(
    name: str,
    family: str,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
) -> ModelShape:
    width, num_layers, mlp = (
        text["hidden_size"], text["num_hidden_layers"], text["intermediate_size"]
    )  # fmt: skip
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = width // num_heads
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    products = width * (2 * head_dim * (num_heads + num_kv_heads) + 3 * mlp)
    per_layer = products + head_dim * (num_heads + 2 * num_kv_heads) + 2 * width  # biases, norms
    embeddings = text["vocab_size"] * width * (1 if is_tied else 2)
    is_qwen = family == "qwen2_5_vl"
    tower = _qwen_tower(vision, width) if is_qwen else _siglip_tower(vision, width)
    side = 0 if is_qwen else math.ceil(vision["image_size"] // vision["patch_size"] / 2)
    return ModelShape(
        name=name,
        family=family,
        num_parameters=embeddings + num_layers * per_layer + width + tower,
        num_shared_parameters=num_layers * products,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=mlp,
        tokens_per_side=side,
        token_pixels=vision["patch_size"] * vision["spatial_merge_size"] if is_qwen else 0,
        token_frames=vision["temporal_patch_size"] if is_qwen else 1,
    )


def _qwen_tower(vision: Mapping[str, Any], width: int) -> int:
    """Parameters of Qwen2.5-VL's vision tower and merger."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    patch = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = hidden * vision["spatial_merge_size"] ** 2
    attention = 4 * hidden * hidden + 4 * hidden
    block = 2 * hidden + attention + 3 * hidden * mlp + 2 * mlp + hidden
    merger = hidden + merged * merged + merged + merged * width + width
    return int(patch * hidden + vision["depth"] * block + merger)


def _siglip_tower(vision: Mapping[str, Any], width: int) -> int:
    """Parameters of LLaVA-OneVision's vision tower, projector and newline."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    num_patches = (vision["image_size"] // vision["patch_size"]) ** 2
    patch = 3 * vision["patch_size"] ** 2 * hidden + hidden
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    projector = hidden * width + width + width * width + width
    tower = patch + num_patches * hidden + vision["num_hidden_layers"] * block + 2 * hidden
    return int(tower + projector + width)
