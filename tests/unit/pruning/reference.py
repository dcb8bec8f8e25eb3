"""The scores and strategies of the papers, written as plain loops over tokens."""

import math
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

Grid = tuple[int, int, int]
Grids = tuple[Grid, ...]
Vector = Sequence[float]
GRIDS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3
).map(tuple)


def size_of(grids: Sequence[Grid]) -> int:
    return sum(frames * rows * columns for frames, rows, columns in grids)


def cosine(one: Vector, other: Vector) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return product / lengths if lengths else 0.0


def token_index(grids: Sequence[Grid], video: int, frame: int, row: int, column: int) -> int:
    _, rows, columns = grids[video]
    return size_of(grids[:video]) + (frame * rows + row) * columns + column


def attention(
    query: Sequence[Sequence[Vector]],  # [num_queries][num_heads][head_dim]
    key: Sequence[Sequence[Vector]],  # [num_kv_heads][tokens][head_dim]
    *,
    scaling: float,
    visual: Sequence[int],
    scope: str,
    rows: Sequence[int],  # [num_queries], the keys of the queries' own tokens
) -> list[float]:
    num_heads, num_kv_heads = len(query[0]), len(key)
    total = [0.0] * len(visual)
    for heads, row in zip(query, rows, strict=True):
        for head, vector in enumerate(heads):
            keys = key[head * num_kv_heads // num_heads]
            logits = [scaling * sum(a * b for a, b in zip(vector, k, strict=True)) for k in keys]
            last = row if scope == "causal" else len(keys) - 1
            seen = list(visual) if scope == "visual" else range(last + 1)
            most = max(logits[token] for token in seen)
            mass = sum(math.exp(logits[token] - most) for token in seen)
            for place, token in enumerate(visual):
                if token <= last:
                    total[place] += math.exp(logits[token] - most) / mass
    return [value / (len(query) * num_heads) for value in total]


def _each_token(grids: Sequence[Grid], score: Callable[[int, int, int, int], float]) -> list[float]:
    return [
        score(video, frame, row, column)
        for video, (frames, rows, columns) in enumerate(grids)
        for frame in range(frames)
        for row in range(rows)
        for column in range(columns)
    ]


def temporal(features: Sequence[Vector], grids: Sequence[Grid]) -> list[float]:
    def score(video: int, frame: int, row: int, column: int) -> float:
        if grids[video][0] == 1:
            return 0.0
        other = frame - 1 if frame > 0 else 1
        here = features[token_index(grids, video, frame, row, column)]
        there = features[token_index(grids, video, other, row, column)]
        return 1 - cosine(here, there)

    return _each_token(grids, score)


def spatial(
    features: Sequence[Vector], grids: Sequence[Grid], how: str = "contrast", crop: int = 5
) -> list[float]:
    half = crop // 2

    def score(video: int, frame: int, row: int, column: int) -> float:
        _, rows, columns = grids[video]
        here = features[token_index(grids, video, frame, row, column)]
        cosines = [
            cosine(here, features[token_index(grids, video, frame, other_row, other_column)])
            for other_row in range(row - half, row + half + 1)
            for other_column in range(column - half, column + half + 1)
            if 0 <= other_row < rows
            and 0 <= other_column < columns
            and (other_row, other_column) != (row, column)
        ]
        if len(cosines) < (1 if how == "contrast" else 2):
            return 0.0
        mean = sum(cosines) / len(cosines)
        if how == "contrast":
            return 1 - mean
        return sum((value - mean) ** 2 for value in cosines) / (len(cosines) - 1)

    return _each_token(grids, score)


def normalised(scores: Sequence[float], grids: Sequence[Grid]) -> list[float]:
    result: list[float] = []
    for frames, rows, columns in grids:
        for _ in range(frames):
            values = scores[len(result) : len(result) + rows * columns]
            least, most = min(values), max(values)
            spread = most - least
            result += [(value - least) / spread if spread else 0.0 for value in values]
    return result


def by_score(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def best(scores: Sequence[float], num_kept: int) -> list[int]:
    return sorted(by_score(scores)[:num_kept])


def two_stages(scores: Sequence[float], num_kept: int, share: float) -> list[int]:
    """SpecVLM: tokens until the share of the mass is reached, then others, evenly spaced between
    the first and the last of them."""
    kept: list[int] = []
    for token in by_score(scores):
        if len(kept) == num_kept or sum(scores[t] for t in kept) >= share * sum(scores):
            break
        kept.append(token)
    others = [token for token in range(len(scores)) if token not in kept]
    num_added = num_kept - len(kept)
    places = [math.floor(i * (len(others) - 1) / max(1, num_added - 1)) for i in range(num_added)]
    return sorted([*kept, *(others[place] for place in places)])


def alignment(hidden: Sequence[Vector], visual: Sequence[int], text: Sequence[int]) -> list[float]:
    return [sum(cosine(hidden[v], hidden[t]) for t in text) / len(text) for v in visual]


def filled_evenly(scores: Sequence[float], kept: list[int], num_kept: int) -> list[int]:
    """The kept ones and evenly spaced others."""
    others = [token for token in range(len(scores)) if token not in kept]
    num_filled = num_kept - len(kept)
    kept += [others[(2 * i + 1) * len(others) // (2 * num_filled)] for i in range(num_filled)]
    return sorted(kept)
