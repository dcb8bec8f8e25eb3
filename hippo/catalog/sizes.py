"""Computes a model's memory on a device from its configuration alone.

Standard library only, because the sizes are needed before anything is installed or downloaded. The
products' weights and the KV cache are counted; activations have a margin (``work_bytes``), which
the longest prompt's run at the start of a service tests (hippo.engine.warmup).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hippo.catalog.public_models import Tower
from hippo.catalog.states import StateShape
from hippo.errors import InvalidRequestError

GIB = 2**30

DEVICE_BYTES: Mapping[int, int] = MappingProxyType(
    # nvidia-smi's total memory of A100 40 GB, of A100 and H100 80 GB, and of H200.
    {40: 40_960 * 2**20, 80: 81_559 * 2**20, 141: 143_771 * 2**20}
)
"""Memory of a device in bytes, by its nominal size in GB."""

RESERVED_BYTES = GIB
"""Memory that the driver, CUDA's context and CUDA's libraries use on each device."""

PROCESS_BYTES = 350_000_000
"""Memory of a service's process before it reads weights: the interpreter, torch, transformers and a
tokenizer of 150,000 ids, without pages of files (342 to 352 MB were measured)."""

CACHE_BYTES = 256_000_000
"""Least size of a cache of earlier media with ``--vision-cache-mb auto`` or
``--media-cache-mb auto``."""

USED_SHARE = 0.9
"""Share of a device's free memory that is planned; the rest is for fragmentation and libraries."""

MOST_AUTO_SLOTS = 32
"""Upper limit of the number of slots with ``--slots auto``."""

CHUNK_ROWS = 2048
"""Rows of a prompt that run through the layers in one forward."""

LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS = 128, 512
"""Rows of a prefill helper's chunk: fewer make the products slower (on a CPU core by 10 to 20 % at
64); with more, the two devices wait longer for each other's first and last chunk."""

_CHUNKS = 8  # two devices then take 9/16 of the time of one

LEAST_LAYER_GROUPS = 8
"""Groups of layers of a prefill; the engine may step other sequences between two groups."""

SCORED_ROWS = 256
"""Rows of a question whose attention scores the visual tokens. A score costs as much as a row of
attention without its values, in float32: for 25,000 tokens, 256 rows add 1 % of the arithmetic of
a layer's attention."""

SCORED_LOGITS = 1 << 23
"""Most logits in memory at once when a layer is scored."""

VISION_PATCHES, CPU_VISION_PATCHES = 4096, 1024
"""Patches of a video in one run of the vision tower, on a GPU and on a CPU. Other sequences step
between two runs, and a prefill helper begins behind the first. A GPU needs this many rows; on a CPU
core, parts of 1,024 and 4,096 take equally long, of 512 15 % longer, of 16,384 50 % longer."""

IMAGE_TOKENS = 4096
"""Tokens of an image for which memory is planned; the vision towers do not split an image. A larger
image is made smaller, unless the operator allows more pixels (``--max-image-pixels``)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts that stand in place of some layers' MLPs."""

    num_layers: int  # that have one
    num_experts: int  # in each of them
    num_chosen: int  # for each row
    width: int  # an expert's MLP has it


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that determine a model's memory."""

    name: str
    num_parameters: int
    num_shared_parameters: int  # the part that tensor-parallel ranks divide among them
    num_head_parameters: int  # in the output embedding, tied or not
    is_tied: bool  # whether input and output embedding are one weight
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int  # in the layers that have no experts
    tower: Tower
    layer_bits: float | None = None  # for a layer's weight with its scales; None: not quantised
    experts: Experts | None = None
    states: StateShape | None = None  # of the layers that have no keys and values

    @property
    def num_attending(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers - (self.states.num_layers if self.states else 0)

    def first_layers(self, num_layers: int) -> "ModelShape":
        """Returns the shape of the model's first layers, with embeddings and tower."""
        share = num_layers / self.num_layers
        shared = round(share * self.num_shared_parameters)
        experts = self.experts
        if experts is not None:
            experts = replace(experts, num_layers=round(share * experts.num_layers))
        return replace(
            self,
            num_parameters=self.num_parameters - self.num_shared_parameters + shared,
            num_shared_parameters=shared,
            num_layers=num_layers,
            experts=experts,
        )

    @property
    def _largest_experts(self) -> int:
        """Parameters of a layer's largest stored tensor of experts: all gate and up projections."""
        experts = self.experts
        return 2 * experts.num_experts * experts.width * self.hidden_size if experts else 0

    def num_read_parameters(self, num_rows: int) -> float:
        """Returns the parameters of the layers' products that a forward of ``num_rows`` reads.

        Rows choose their experts independently of each other and equally often: an assumption.
        """
        if self.experts is None:
            return self.num_shared_parameters
        chosen, count = self.experts.num_chosen, self.experts.num_experts
        unread = (1 - chosen / count) ** num_rows
        held = self.experts.num_layers * self._largest_experts * 3 / 2
        return self.num_shared_parameters - held * unread

    def cache_bytes(self, num_tokens: int, *, num_slots: int = 1, bytes_each: int = 2) -> int:
        """Returns the bytes of keys, values and states of so many sequences of ``num_tokens``."""
        per_token = 2 * self.num_attending * self.num_kv_heads * self.head_dim * bytes_each
        states = self.states.num_bytes(bytes_each) if self.states else 0
        return num_slots * (per_token * num_tokens + states)

    def feature_bytes(self, num_tokens: int, *, bytes_each: int = 2) -> int:
        """Returns the bytes of the vision tower's output for a prompt of ``num_tokens``."""
        return num_tokens * self.hidden_size * self.tower.feature_parts * bytes_each

    def frame_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the frames that ``num_tokens`` tokens cover, as the model sees them:
        three a pixel."""
        return round(num_tokens * self.tower.patches_per_token * self.tower.patch_values)

    def work_bytes(
        self, num_tokens: int, *, bytes_each: int = 2, cache_each: int = 2, max_pixels: int = 0
    ) -> int:
        """Returns a margin for activations while a prompt of ``num_tokens`` is read, nearly all of
        them of a video or an image. It has room for the largest tensors that are held at once:
        features of two longest prompts, and beside them one image in the vision tower, or one chunk
        of the prompt in a layer with its mask and the scores of visual tokens. ``bytes_each`` and
        ``cache_each`` are the item sizes of the weights' and the cache's dtype; the operator allows
        images and frames of ``max_pixels`` (0: the operator says nothing).
        """
        tower, side = self.tower, self.tower.token_pixels
        image = max(IMAGE_TOKENS, max_pixels // side**2 if side else 0)
        patch = (16 + 10 * bytes_each) * tower.width + (5 + bytes_each) * tower.patch_values
        vision = min(num_tokens, image) * tower.patches_per_token * patch
        widest = 3 * self.mlp_width
        if (experts := self.experts) is not None:
            copies = experts.num_chosen * 5 * max(self.hidden_size, experts.width)
            widest = max(widest, copies)
        chunk = min(num_tokens, CHUNK_ROWS)
        layer = chunk * (widest + 8 * self.hidden_size) * bytes_each
        layer += self.states.work_bytes(chunk) if self.states else 0
        keys = num_tokens * self.num_kv_heads * self.head_dim * (cache_each + 4)
        scores = keys + 8 * min(SCORED_LOGITS, SCORED_ROWS * self.num_heads * num_tokens)
        for_tokens = num_tokens * (8 * self.head_dim + (num_tokens > chunk) * chunk * cache_each)
        layers = 1.1 * (max(layer, scores) + for_tokens)
        features = self.feature_bytes(num_tokens, bytes_each=bytes_each)
        return math.ceil(2 * features + max(vision, features, layers))

    def num_visual_tokens(self, num_frames: int, frame_size: tuple[int, int] | None) -> int:
        """Returns the tokens of a video with the text of its frames; ``frame_size`` is a resized
        frame's width and height.

        Raises InvalidRequestError without frames, and for a size if the model's frames are fixed.
        """
        tower = self.tower
        if num_frames < 1:
            raise InvalidRequestError(f"a video of {num_frames} frames: at least 1 is needed")
        if tower.tokens_per_side:
            if frame_size is not None:
                raise InvalidRequestError(
                    f"{self.name} looks at every frame at one size: leave --frame-size out"
                )
            per_frame = tower.tokens_per_side**2 + tower.frame_text_tokens
            return num_frames * per_frame + tower.num_separators
        width, height = frame_size or (448, 448)
        columns, rows = (max(1, round(side / tower.token_pixels)) for side in (width, height))
        per_frame = rows * columns + tower.frame_text_tokens
        return math.ceil(num_frames / tower.token_frames) * per_frame

    def weight_bytes(
        self, *, num_devices: int = 1, bytes_each: int = 2, packs_weights: bool = False
    ) -> int:
        """Returns the bytes of all weights on each of ``num_devices``. A tied head is stored beside
        the embedding where it is copied: a CPU's products pack their weights
        (``packs_weights``), and a tensor-parallel rank copies its rows of the head."""
        each = bytes_each if self.layer_bits is None else self.layer_bits / 8
        shared = self.num_shared_parameters
        held = (self.num_parameters - shared) * bytes_each + shared * each / num_devices
        if self.is_tied and (packs_weights or num_devices > 1):
            held += self.num_head_parameters * bytes_each / num_devices
        return math.ceil(held)

    def host_bytes(self, bytes_each: int = 2) -> int:
        """Returns the most bytes of host memory that reading the weights to a GPU takes.

        transformers' four threads hold a tensor each; the largest are the embedding, the head and
        two of the MLP's, or all experts of two layers.
        """
        dense = 2 * (self.num_head_parameters + self.mlp_width * self.hidden_size)
        return max(dense, 3 * self._largest_experts) * bytes_each

    def packing_bytes(self, bytes_each: int = 2) -> int:
        """Returns the most bytes that copies take while one product's weights are joined (gate and
        up projection) and packed, or experts are read, which are stored transposed."""
        joined = 4 * self.mlp_width * self.hidden_size
        return max(self.num_head_parameters, joined, self._largest_experts) * bytes_each

    def can_divide(self, num_devices: int) -> bool:
        """Whether ``num_devices`` tensor-parallel ranks can share the layers."""
        if self.layer_bits is not None or self.experts or self.states:
            return num_devices == 1
        counts = (self.num_kv_heads, self.num_heads, self.mlp_width)
        return not any(count % num_devices for count in counts)


@dataclass(frozen=True, slots=True)
class Memory:
    """A model's memory on each of its devices, in bytes."""

    weights: int
    work: int  # a margin for activations while the longest prompt is read
    cache: int
    earlier_media: int  # most that is kept of them: features and, on a CPU, frames
    process: int = 0  # PROCESS_BYTES where they count

    @property
    def total(self) -> int:
        return self.weights + self.work + self.cache + self.earlier_media + self.process

    def fits(self, device_bytes: int) -> bool:
        """Whether the model fits by the rule of ``--slots auto``, which leaves a share free."""
        left = device_bytes - RESERVED_BYTES - self.weights
        return self.total - self.weights <= USED_SHARE * left


def memory_of(
    shape: ModelShape,
    *,
    num_tokens: int,
    num_slots: int,
    cache_tokens: int | None = None,
    num_devices: int = 1,
    bytes_each: int = 2,
    cache_each: int | None = None,
    packs_weights: bool = False,
    vision_cache_bytes: int | None = None,
    media_cache_bytes: int | None = 0,
    process_bytes: int = 0,
    max_pixels: int = 0,
) -> Memory:
    """Returns the memory on each of ``num_devices``, for sequences of ``num_tokens`` tokens, of
    which ``cache_tokens`` are cached (None: all).

    ``bytes_each`` is the item size of the weights' dtype and ``cache_each`` of the cache's (None:
    the same one). ``packs_weights`` is ModelShape.weight_bytes'. ``vision_cache_bytes`` and
    ``media_cache_bytes`` are the settings of the caches of earlier media (None: as cache_limit has
    it); with a GPU, frames are in the host's memory. A service counts no ``process_bytes``, as its
    process is there when it measures how much memory is free. ``max_pixels`` is
    ModelShape.work_bytes'.
    """
    cache_each = bytes_each if cache_each is None else cache_each
    cached = num_tokens if cache_tokens is None else cache_tokens
    cache = shape.cache_bytes(cached, num_slots=num_slots, bytes_each=cache_each)
    features = shape.feature_bytes(num_tokens, bytes_each=bytes_each)
    return Memory(
        weights=shape.weight_bytes(
            num_devices=num_devices, bytes_each=bytes_each, packs_weights=packs_weights
        ),
        work=shape.work_bytes(
            num_tokens,
            bytes_each=bytes_each,
            cache_each=cache_each,
            max_pixels=max_pixels,
        ),
        cache=math.ceil(cache / num_devices),
        earlier_media=cache_limit(vision_cache_bytes, features)
        + cache_limit(media_cache_bytes, shape.frame_bytes(num_tokens)),
        process=process_bytes,
    )


def most_slots(
    shape: ModelShape,
    device_bytes: int,
    *,
    num_tokens: int,
    cache_tokens: int | None = None,
    num_devices: int = 1,
) -> int:
    """Returns how many slots fit beside the weights; see memory_of."""
    one = memory_of(
        shape,
        num_tokens=num_tokens,
        num_slots=1,
        cache_tokens=cache_tokens,
        num_devices=num_devices,
    )
    free = device_bytes - RESERVED_BYTES - one.weights
    return slots_that_fit(
        free, slot_bytes=one.cache, work_bytes=one.work, reserved_bytes=one.earlier_media
    )


def chunk_rows_for(num_rows: int) -> int:
    """Returns how many rows of a prompt of ``num_rows`` a prefill helper's chunk has."""
    return min(max(-(-num_rows // _CHUNKS), LEAST_CHUNK_ROWS), MOST_CHUNK_ROWS)


def cache_limit(given: int | None, prompt_bytes: int) -> int:
    """Returns the limit of a cache of earlier media: the given one, or by default the bytes of one
    longest prompt, whose media could not be kept otherwise, and at least CACHE_BYTES."""
    return max(CACHE_BYTES, prompt_bytes) if given is None else given


def slots_that_fit(
    free_bytes: int,
    *,
    slot_bytes: int,
    work_bytes: int,
    reserved_bytes: int = 0,
    used_share: float = USED_SHARE,
) -> int:
    """Returns how many slots fit into ``free_bytes``, the memory left beside the weights."""
    left = used_share * free_bytes - work_bytes - reserved_bytes
    return max(0, int(left // slot_bytes))
