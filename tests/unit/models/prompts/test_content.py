"""Media by content: equal digests are equal features, and what is known is not computed again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt, VideoLanguageModel, VisualItem
from hippo.models.interface.content import cached_places, cached_rows, compacted, visual_digest
from hippo.types import MediaKind
from tests.support.models.pairs import load
from tests.support.models.reference import clip, image, prepare, user


class Kept(dict[bytes, torch.Tensor]):
    """A feature cache without a bound."""

    put = dict.__setitem__


def several(model: VideoLanguageModel) -> Prompt:
    """Two videos with an image between them, and text around each."""
    return prepare(
        model, user("see", 0, "and", 1, "and", 2, "what?"), clip(), image(), clip(seed=1)
    )


def test_a_digest_is_of_every_value_the_shape_the_kind_and_the_parameters() -> None:
    pixels = torch.arange(24, dtype=torch.float32).view(4, 6)
    grid = ((1, 2, 2),)
    digest = visual_digest(MediaKind.VIDEO, pixels, grid)
    strided = torch.empty(6, 4).t().copy_(pixels)  # lies otherwise in memory
    for same in (pixels.clone(), strided):
        assert digest == visual_digest(MediaKind.VIDEO, same, ((1, 2, 2),))
    others = [
        visual_digest(MediaKind.IMAGE, pixels, grid),
        visual_digest(MediaKind.VIDEO, pixels.view(6, 4), grid),
        visual_digest(MediaKind.VIDEO, pixels.double(), grid),
        visual_digest(MediaKind.VIDEO, pixels, ((2, 1, 2),)),
        visual_digest(MediaKind.VIDEO, pixels, ()),
    ]
    for place in range(24):
        changed = pixels.clone()
        changed.view(-1)[place] = torch.nextafter(changed.view(-1)[place], torch.tensor(99.0))
        others.append(visual_digest(MediaKind.VIDEO, changed, grid))
    assert len({digest, *others}) == 1 + len(others)


def test_equal_frames_are_equal_items_wherever_they_stand(family: VideoLanguageModel) -> None:
    alone = prepare(family, user(0, "what?"), clip())
    twice = prepare(family, user(1, "and", 0), clip(), clip())
    changed = clip()
    changed.frames[2, :12, :12] = 0
    other = prepare(family, user(0, "what?"), changed)

    digest = alone.items[0].digest
    assert [item.digest for item in twice.items] == [digest, digest]
    assert other.items[0].digest != digest


def test_features_from_a_cache_equal_computed_ones_to_the_last_bit(
    family: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt with known and new items only the new ones are computed."""
    prompt = several(family)
    expected = family.embed_visual(prompt)
    assert expected is not None
    kept, computed = Kept(), list[VisualItem]()
    family.embed_visual(prepare(family, user(0, "what?"), clip(seed=1)), kept)
    embed_item = family._tower.embed_item

    def embed(item: VisualItem) -> Iterator[torch.Tensor]:
        computed.append(item)
        return embed_item(item)

    monkeypatch.setattr(family._tower, "embed_item", embed)
    for _ in range(2):
        found = family.embed_visual(prompt, kept)
        assert found is not None and torch.equal(found, expected)
    assert computed == [prompt.items[0], prompt.items[2]]
    assert kept.keys() == {item.digest for item in prompt.items}


def test_several_images_keep_their_features_and_a_lone_one_has_its_own(
    llava_checkpoint: Path,
) -> None:
    model = load(llava_checkpoint)
    lone = prepare(model, user(0, "what?"), image())
    two = prepare(model, user(0, 1, "what?"), image(), image(seed=1))
    three = prepare(model, user(0, 1, 2, "what?"), image(), image(seed=1), image(seed=2))
    assert [item.digest for item in two.items] == [item.digest for item in three.items[:2]]
    assert lone.items[0].digest != two.items[0].digest  # which is not cut into tiles

    whole, part = model.embed_visual(three), model.embed_visual(two)
    assert whole is not None and part is not None
    torch.testing.assert_close(whole[: part.shape[0]], part)


def test_compacted_prompts_number_what_is_kept_one_by_one(family: VideoLanguageModel) -> None:
    prompt = several(family)
    kept = torch.tensor([0, 5, 11])
    moved = compacted(prompt, kept)
    num_cached = prompt.length - prompt.visual_indices.shape[0] + 3
    assert moved.next_position == num_cached
    axes = moved.positions[:, cached_places(prompt, kept)]
    assert torch.equal(axes, torch.arange(num_cached).expand_as(axes))
    rows = cached_rows(prompt).moved(moved.positions)
    assert rows.common_length(cached_rows(moved)) == prompt.length
    first_moved = int((prompt.positions != moved.positions).any(0).nonzero()[0])
    assert rows.common_length(cached_rows(prompt)) == first_moved
