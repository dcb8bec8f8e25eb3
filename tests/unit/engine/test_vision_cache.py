"""The vision cache: least recently used, bounded in bytes."""

import torch

from hippo.engine.bounded import VisionCache

ROW_BYTES = 4 * 8


def rows(number: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((number, 8), value)


def test_the_least_recently_used_give_way_when_the_bytes_are_spent() -> None:
    cache = VisionCache(10 * ROW_BYTES)
    for value, digest in enumerate((b"a", b"b", b"c")):
        cache.put(digest, rows(3, float(value)))
    found = [cache.get(digest) for digest in (b"c", b"b", b"a")]
    assert [None if each is None else each[0, 0].item() for each in found] == [2.0, 1.0, 0.0]
    cache.get(b"c")
    cache.get(b"a")

    cache.put(b"d", rows(4))

    assert cache.num_bytes == 10 * ROW_BYTES
    assert [cache.get(digest) is not None for digest in (b"a", b"b", b"d")] == [True, False, True]
    assert (cache.num_hits, cache.num_misses) == (7, 1)


def test_what_is_larger_than_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    cache = VisionCache(4 * ROW_BYTES)
    cache.put(b"small", rows(2))
    cache.put(b"large", rows(5))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None


def test_a_view_does_not_keep_what_it_is_a_view_of() -> None:
    cache = VisionCache(10 * ROW_BYTES)
    whole = rows(1000, 2.0)
    cache.put(b"part", whole[:2])
    part = cache.get(b"part")
    assert part is not None
    assert part.untyped_storage().nbytes() == 2 * ROW_BYTES
    assert torch.equal(part, whole[:2])
