"""The world: scenes and frames follow from their seeds, and texts can be read back."""

from __future__ import annotations

import numpy as np
import pytest

from demo.figures import Score
from demo.world import scenes as world
from demo.world import texts
from demo.world.scenes import Scene

TIMES_S = np.linspace(0.0, 3.5, 8)


def scene_of(seed: int, side: int = 140, least: int = 3) -> Scene:
    """A scene of that seed."""
    rng = np.random.default_rng(seed)
    return world.sample_scene(rng, height=side, width=side, duration_s=4.0, min_objects=least)


def test_a_seed_gives_one_scene_and_one_rendering() -> None:
    first, again = scene_of(3), scene_of(3)
    assert first == again
    assert np.array_equal(world.render(first, TIMES_S), world.render(again, TIMES_S))
    assert scene_of(4) != first


@pytest.mark.parametrize("seed", range(20))
def test_the_long_description_reads_back_as_exactly_the_facts(seed: int) -> None:
    scene = scene_of(seed, least=1)
    assert set(texts.parse(texts.detailed(scene))) == set(texts.facts(scene))


def test_the_shorter_styles_say_true_things_about_every_object() -> None:
    for seed in range(20):
        scene = scene_of(seed)
        facts = set(texts.facts(scene))
        for text in (texts.report(scene), texts.listing(scene)):
            said = texts.parse(text)
            assert set(said) <= facts
            assert {item.cell for item in scene.objects} == {statement.cell for statement in said}


def test_questions_are_answered_from_the_scene_alone() -> None:
    scene = scene_of(11, least=5)
    asked = texts.short_questions(scene, np.random.default_rng(0), 7)
    assert asked == texts.short_questions(scene, np.random.default_rng(0), 7)
    counts = [exchange.answer for exchange in asked if exchange.kind == "count"]
    assert counts == [f"There are {texts.NUMBERS[len(scene.objects)]} objects."]


def test_the_score_of_a_true_description_is_full_and_of_a_foreign_one_is_not() -> None:
    own, foreign = Score(), Score()
    for seed in range(30):
        facts = texts.facts(scene_of(seed))
        own.add_clip(texts.parse(texts.detailed(scene_of(seed))), facts)
        foreign.add_clip(texts.parse(texts.detailed(scene_of(seed + 100))), facts)
    assert all(tally.percent == 100.0 for tally in own.strict.values())
    assert own.recall.percent == 100.0
    assert foreign.strict["colour"].percent < 40.0
