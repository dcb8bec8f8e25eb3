"""Scores of visual tokens for pruning: attention, temporal and spatial distinctness.

All functions are pure. Visual tokens are flattened, video after video, each in the order frame,
row, column. Scores stay on the device of their input, and no function waits for the device.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch.nn.functional import normalize

from hippo.catalog.sizes import SCORED_LOGITS
from hippo.types import SpatialScore

VisualGrid = tuple[int, int, int]  # frames, rows, columns of one video
Scope = Literal["visual", "causal"]
"""The keys over which the softmax of attention scores is taken."""

# Elements of features that are converted to float32 at once: few enough for a CPU's cache, or
# many for few kernel launches.
_BLOCK_ELEMENTS_CPU = 1 << 21
_BLOCK_ELEMENTS = 1 << 24
_ROUNDING = 1e-6  # bound of float32 rounding errors in cosines
_CROP = 5  # rows and columns of the spatial score's window


def attention_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scaling: float,
    visual: torch.Tensor,
    scope: Scope = "visual",
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns how much text attends to each visual token in one layer: float32 ``[num_visual]``.

    The score is the mean over heads and queries of ``softmax(scaling * query keyᵀ)``: over the
    visual keys (``scope`` "visual", HIPPO's global relevance), or over the keys up to the query's
    own ("causal", SpecVLM's Stage I score). ``rows`` are the indices of the queries' own keys
    (int64 ``[num_queries]``); only "causal" needs them.

    ``query`` is ``[num_queries, num_heads, head_dim]`` after the rotary embedding, with at least
    one query. ``key`` is ``[num_kv_heads, tokens, head_dim]``, from the KV cache. ``visual`` are
    int64 indices of tokens in ``key``. Products and sums are float32. The queries are processed in
    blocks that bound the number of logits in memory.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    assert num_queries > 0 and num_heads % num_kv_heads == 0, (query.shape, key.shape)
    visual = visual.to(key.device)
    keys = (key.index_select(1, visual) if scope == "visual" else key).float().transpose(1, 2)
    heads = query.float().view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)
    heads = (scaling * heads).reshape(num_kv_heads, -1, head_dim)  # all queries of a key-value head
    last = None  # the last key that each of these queries sees
    if scope == "causal":
        assert rows is not None and rows.shape == (num_queries,)
        last = rows.to(key.device).repeat_interleave(num_heads // num_kv_heads)
    per_block = max(1, SCORED_LOGITS // max(1, num_kv_heads * keys.shape[2]))
    mass = torch.zeros(keys.shape[2], device=key.device)
    columns = torch.arange(keys.shape[2], device=key.device)
    for start in range(0, heads.shape[1], per_block):
        part = slice(start, start + per_block)
        logits = torch.bmm(heads[:, part], keys)
        if last is not None:
            logits.masked_fill_(columns > last[part, None], -torch.inf)
        mass += logits.softmax(-1).sum((0, 1))
    if scope == "causal":
        mass = mass[visual]
    return mass / (num_queries * num_heads)


def alignment(hidden: torch.Tensor, visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Returns the mean cosine of each visual token's hidden state with the text's states: float32
    ``[num_visual]``.

    ``hidden`` is ``[rows, hidden]``; ``visual`` and ``text`` are int64 indices of its rows, on its
    device. The mean over the text's rows is one product with the mean of their unit vectors, so no
    ``[num_visual, num_text]`` matrix is formed. Rows are converted to float32 in blocks.
    """
    toward = normalize(hidden.index_select(0, text).float(), dim=-1).mean(0)
    per_block = max(1, SCORED_LOGITS // hidden.shape[1])
    parts = [hidden.new_zeros(0, dtype=torch.float32)]
    for block in torch.split(visual, per_block):
        state = hidden.index_select(0, block).float()
        parts.append(state @ toward / torch.linalg.vector_norm(state, dim=-1).clamp(min=1e-12))
    return torch.cat(parts)


def distinctness(
    features: torch.Tensor,
    grids: Sequence[VisualGrid],
    *,
    spatial: SpatialScore = SpatialScore.CONTRAST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns temporal and spatial distinctness of ``features`` ``[N, hidden]``: float32 ``[N]``
    each.

    Temporal distinctness is ``1 - cos(v[f, r, c], v[f - 1, r, c])`` (HIPPO), 0 to 2. The first
    frame is compared with the second. The tokens of a video with one frame score 0.

    Spatial distinctness compares a token with its neighbours ``u`` in a window of 5 x 5 tokens:
    "contrast" is ``mean(1 - cos(v[f, r, c], u))``, and "variance" is ``Var(cos(v[f, r, c], u))``
    (HIPPO's formula). The window excludes tokens outside the frame and the token itself, whose
    cosine of 1 would weigh more where neighbours are few. For the same reason the variance is the
    unbiased estimate. The variance is 0 with fewer than two neighbours, and the contrast is 0
    without neighbours.
    """
    changes, contrasts = [], []
    for video, (_, rows, columns) in _videos(features, grids):
        is_cpu = video.device.type == "cpu"
        elements = _BLOCK_ELEMENTS_CPU if is_cpu else _BLOCK_ELEMENTS
        exists = _existing(rows, columns, video.device)
        previous: torch.Tensor | None = None
        steps = []
        for block in torch.split(video, max(1, elements // max(1, video[0].numel()))):
            unit = normalize(block.float(), dim=-1)  # [frames, rows, columns, hidden]
            if previous is not None:
                steps.append(_cosine(previous, unit[:1]))
            if unit.shape[0] > 1:
                steps.append(_cosine(unit[:-1], unit[1:]))
            previous = unit[-1:]
            contrasts.append(_spatial(unit, exists, spatial).flatten())
        if steps:
            change = _distance(torch.cat(steps))  # [frames - 1, rows, columns]
            changes.append(torch.cat((change[:1], change)).flatten())
        else:
            changes.append(torch.zeros(rows * columns, device=video.device))
    empty = torch.zeros(0, device=features.device)
    return torch.cat((empty, *changes)), torch.cat((empty, *contrasts))


def normalise(scores: torch.Tensor, grids: Sequence[VisualGrid]) -> torch.Tensor:
    """Maps the scores of each frame to 0 to 1: float32 ``[N]``; equal scores become zeros.

    This removes differences between whole frames, and so the bias to early and late frames (HIPPO).
    """
    parts = []
    for video, _ in _videos(scores.float(), grids):
        frames = video.flatten(1)  # [frames, rows * columns]
        least, most = frames.aminmax(dim=1, keepdim=True)
        parts.append(((frames - least) / (most - least)).masked_fill(most == least, 0.0).flatten())
    return torch.cat(parts) if parts else scores.float()


def _videos(
    values: torch.Tensor, grids: Sequence[VisualGrid]
) -> Iterator[tuple[torch.Tensor, VisualGrid]]:
    """Yields the values and grid of each nonempty video, as ``[frames, rows, columns, ...]``."""
    sizes = [frames * rows * columns for frames, rows, columns in grids]
    assert sum(sizes) == values.shape[0], (grids, values.shape)
    for grid, size, part in zip(grids, sizes, torch.split(values, sizes), strict=True):
        if size:
            yield part.reshape(*grid, *part.shape[1:]), grid


def _cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum(-1)


def _distance(cosine: torch.Tensor) -> torch.Tensor:
    """Returns ``1 - cosine``, and exactly 0 for differences within rounding errors."""
    distance = 1 - cosine
    return distance.masked_fill(distance < _ROUNDING, 0.0)


def _existing(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Marks each token's neighbours within its frame: bool ``[rows, columns, crop, crop]``."""
    half = _CROP // 2

    def inside(length: int) -> torch.Tensor:
        place = torch.arange(length, device=device)[:, None]
        there = place + torch.arange(-half, half + 1, device=device)
        return (there >= 0) & (there < length)  # [length, crop]

    exists = inside(rows)[:, None, :, None] & inside(columns)[None, :, None, :]
    exists[:, :, half, half] = False
    return exists


def _spatial(unit: torch.Tensor, exists: torch.Tensor, how: SpatialScore) -> torch.Tensor:
    """Returns the contrast or variance to the neighbours that exist: ``[frames, rows, columns]``.

    A shift of the grid pairs each token with one of its neighbours. A pair's cosine counts for both
    tokens, so half of the shifts suffice.
    """
    frames, rows, columns, _ = unit.shape
    half = _CROP // 2
    cosines = unit.new_zeros(frames, rows, columns, _CROP, _CROP)
    for down in range(min(half, rows - 1) + 1):
        reach = min(half, columns - 1)
        for right in range(-reach if down else 1, reach + 1):
            left_edge, right_edge = max(0, -right), columns - max(0, right)
            here = (slice(None), slice(0, rows - down), slice(left_edge, right_edge))
            there = (slice(None), slice(down, rows), slice(left_edge + right, right_edge + right))
            cosine = _cosine(unit[here], unit[there])
            cosines[(*here, half + down, half + right)] = cosine
            cosines[(*there, half - down, half - right)] = cosine
    number = exists.sum((-1, -2))  # [rows, columns]
    distances = _distance(cosines) * exists
    mean = distances.sum((-1, -2)) / number.clamp(min=1)
    if how is SpatialScore.CONTRAST:
        return mean
    deviations = (distances - mean[..., None, None]) * exists
    return deviations.square().sum((-1, -2)) / (number - 1).clamp(min=1)
