"""How a draft learns the weight of the noise in its choices."""

from hippo.speculation.sharpness import SHARPNESSES, Sharpness, SharpnessByTemperature


def test_the_sharpness_that_was_right_most_often_of_late_is_the_best() -> None:
    sharpness = Sharpness()
    assert SHARPNESSES[sharpness.place] == 1.0
    for _ in range(3):
        sharpness.observe_choices((5, 6, 9), 6)
    assert sharpness.place == 1
    sharpness.observe_choices((8, 8, 8), 8)
    assert sharpness.place == 1
    for _ in range(2000):
        sharpness.observe_choices((1, 2, 3), 3)
    assert sharpness.place == 2


def test_sequences_of_one_temperature_learn_together_and_greedy_ones_do_not() -> None:
    known = SharpnessByTemperature()
    assert known.at(0.8) is known.at(0.81) is not known.at(1.0)
    assert known.at(0.0) is None
