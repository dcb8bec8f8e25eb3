"""What the pruning benchmark asks, and what it takes an answer's tokens to be about."""

from __future__ import annotations

from bench.pruning.samples import (
    CONFIRM_SEED,
    DESCRIPTION_KINDS,
    QUESTION_KINDS,
    held_out_clips,
    is_at_border,
    places_of,
    samples_of,
    sentence_cells,
)
from demo import texts


def test_clips_are_the_same_each_time_and_large_enough() -> None:
    first, again = list(held_out_clips(6)), list(held_out_clips(6))
    assert first == again
    assert len({clip.name for clip in first}) == 6
    for clip in first:
        _, rows, columns = clip.size.grid
        assert min(rows, columns) >= 12 and clip.size.num_visual >= 1000
        assert len(clip.scene.objects) >= 5


def test_clips_of_another_seed_show_other_scenes() -> None:
    chosen, others = held_out_clips(6), held_out_clips(6, CONFIRM_SEED)
    assert not {clip.scene for clip in chosen} & {clip.scene for clip in others}


def test_every_clip_is_described_in_both_orders_and_questions_of_all_kinds_occur() -> None:
    kinds = set()
    for index, clip in enumerate(held_out_clips(12)):
        samples = samples_of(clip, index)
        detailed = [sample for sample in samples if sample.kind == "detailed"]
        assert sorted(sample.is_video_first for sample in detailed) == [False, True]
        assert len({sample.name for sample in samples}) == len(samples)
        kinds |= {sample.kind for sample in samples}
        for sample in samples:
            is_about_no_place = sample.kind in (*DESCRIPTION_KINDS, "count")
            assert bool(sample.subject_cells) != is_about_no_place, sample
    assert kinds == {*DESCRIPTION_KINDS, *QUESTION_KINDS}


def test_objects_stand_at_the_border_or_in_the_centre() -> None:
    places = [place for clip in held_out_clips(10) for place in places_of(clip.scene).values()]
    assert 0.2 < places.count("border") / len(places) < 0.8
    for clip in held_out_clips(10):
        for item in clip.scene.objects:
            if item.cell == 4:  # of 3 x 3 cells the middle one is four tokens wide
                assert not is_at_border(item, clip.scene)


def test_tokens_are_about_the_object_of_their_sentence() -> None:
    scene = next(held_out_clips(1)).scene
    text = texts.detailed(scene)
    pieces = [piece for word in text.split(" ") for piece in (word, " ")][:-1]
    cells = sentence_cells(pieces)
    found: dict[int, str] = {}
    for piece, cell in zip(pieces, cells, strict=True):
        found[cell] = found.get(cell, "") + piece
    assert set(found) == {-1, *(item.cell for item in scene.objects)}
    for item in scene.objects:
        assert found[item.cell].strip().startswith(f"At the {texts.CELLS[item.cell]} there is")
        assert found[item.cell].count(".") == 1
    assert found[-1].startswith("The video shows") and found[-1].endswith("in all.")


def test_lists_name_the_cell_first_and_broken_text_is_about_nothing() -> None:
    assert sentence_cells(["Top", " left", ":", " a", " ring", "."]) == [0] * 6
    assert sentence_cells(["No", " idea"]) == [-1, -1]
    assert sentence_cells([]) == []
