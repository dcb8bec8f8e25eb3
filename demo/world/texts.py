"""Texts about a scene: one fixed answer for each scene and question, and a parser for answers.

Answers mention objects in reading order of their home cells, place first. The wording of the
question determines the style of a description.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from demo.world import scenes as world
from demo.world.scenes import (
    COLOURS,
    EVENTS,
    MOTIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    TONES,
    Scene,
    SceneObject,
)

CELLS: Final = tuple(
    f"{row} {col}" for row in ("top", "middle", "bottom") for col in ("left", "centre", "right")
)
NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DETAILED: Final = (
    "Describe the video in detail.",
    "Describe this video.",
    "What does the video show?",
)
REPORT: Final = ("What happens in the video?", "Summarise the video.")
LIST: Final = ("List the objects.", "Which objects are there?")
_WHEN: Final = ("early", "late")

# Words that depend on the video; all other words are template.
CONTENT_WORDS: Final = frozenset(
    (
        "top middle bottom left centre right up down stays moves still"
        " never appears vanishes turns early late nothing then"
    ).split()
) | frozenset(COLOURS + SHAPES + SIZES + TONES + TEXTURES + NUMBERS)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question about a scene with its only right answer; `kind` is a group for evaluation."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A value of an attribute of the object at a cell, or of the whole scene (cell -1)."""

    cell: int
    attribute: str
    value: str


def detailed(scene: Scene) -> str:
    """Returns the long description, with about 20 tokens per object."""
    parts = [f"The video shows a {TONES[scene.tone]} {TEXTURES[scene.texture]} background."]
    for item in scene.objects:
        parts.append(
            f"At the {CELLS[item.cell]} there is a {_looks(item)};"
            f" it {_motion(item)} and {_event(item)}."
        )
    count = len(scene.objects)
    parts.append(f"That makes {NUMBERS[count]} {'object' if count == 1 else 'objects'} in all.")
    return " ".join(parts)


def report(scene: Scene) -> str:
    """Returns a report of motions and changes, with about 11 tokens per object."""
    return " ".join(
        f"At the {CELLS[item.cell]}, the {COLOURS[item.colour]} {SHAPES[item.shape]}"
        f" {_motion(item)} and {_event(item)}."
        for item in scene.objects
    )


def listing(scene: Scene) -> str:
    """Returns the list of objects."""
    return " ".join(f"{CELLS[item.cell].capitalize()}: a {_looks(item)}." for item in scene.objects)


def _looks(item: SceneObject) -> str:
    return f"{SIZES[item.size]} {COLOURS[item.colour]} {SHAPES[item.shape]}"


def _motion(item: SceneObject) -> str:
    return f"moves {MOTIONS[item.motion]}" if item.motion else "stays still"


def _event(item: SceneObject) -> str:
    event, when = EVENTS[item.event], _WHEN[item.is_late]
    if event == "none":
        return "never changes"
    if event == "turns":
        return f"turns {COLOURS[item.new_colour]} {when}"
    return f"{event} {when}"


def descriptions(scene: Scene, rng: np.random.Generator) -> list[Exchange]:
    """Returns an exchange for each style of description, with one of its wordings."""
    return [
        Exchange("detailed", str(rng.choice(DETAILED)), detailed(scene)),
        Exchange("report", str(rng.choice(REPORT)), report(scene)),
        Exchange("list", str(rng.choice(LIST)), listing(scene)),
    ]


def short_questions(scene: Scene, rng: np.random.Generator, count: int) -> list[Exchange]:
    """Returns up to `count` different questions with short answers."""
    makers: list[Callable[[Scene, np.random.Generator], Exchange | None]] = [
        _ask_count, _ask_what, _ask_colour, _ask_direction, _ask_event, _ask_position, _ask_order,
    ]  # fmt: skip
    found: list[Exchange] = []
    for index in rng.permutation(len(makers)):
        exchange = makers[int(index)](scene, rng)
        if exchange is not None and len(found) < count:
            found.append(exchange)
    return found


def _pick(scene: Scene, rng: np.random.Generator) -> SceneObject:
    return scene.objects[int(rng.integers(len(scene.objects)))]


def _ask_count(scene: Scene, rng: np.random.Generator) -> Exchange:
    count = len(scene.objects)
    answer = "There is one object." if count == 1 else f"There are {NUMBERS[count]} objects."
    return Exchange(
        "count", str(rng.choice(["How many objects are there?", "Count the objects."])), answer
    )


def _ask_what(scene: Scene, rng: np.random.Generator) -> Exchange:
    cell = int(rng.integers(world.NUM_CELLS)) if rng.random() < 0.25 else _pick(scene, rng).cell
    here = [item for item in scene.objects if item.cell == cell]
    answer = f"A {_looks(here[0])}." if here else "Nothing."
    return Exchange("what", f"What is at the {CELLS[cell]}?", answer)


def _ask_colour(scene: Scene, rng: np.random.Generator) -> Exchange:
    item = _pick(scene, rng)
    later = f", then {COLOURS[item.new_colour]}" if EVENTS[item.event] == "turns" else ""
    question = f"What colour is the object at the {CELLS[item.cell]}?"
    return Exchange("colour", question, f"It is {COLOURS[item.colour]}{later}.")


def _ask_direction(scene: Scene, rng: np.random.Generator) -> Exchange:
    item = _pick(scene, rng)
    question = f"Which way does the object at the {CELLS[item.cell]} move?"
    return Exchange("direction", question, f"It {_motion(item)}.")


def _ask_event(scene: Scene, rng: np.random.Generator) -> Exchange:
    item = _pick(scene, rng)
    return Exchange(
        "event", f"What happens to the object at the {CELLS[item.cell]}?", f"It {_event(item)}."
    )


def _ask_position(scene: Scene, rng: np.random.Generator) -> Exchange | None:
    item = _pick(scene, rng)
    same = [
        other for other in scene.objects if (other.colour, other.shape) == (item.colour, item.shape)
    ]
    if len(same) != 1:
        return None
    question = f"Where is the {COLOURS[item.colour]} {SHAPES[item.shape]}?"
    return Exchange("position", question, f"At the {CELLS[item.cell]}.")


def _ask_order(scene: Scene, rng: np.random.Generator) -> Exchange | None:
    early = [item for item in scene.objects if item.event and not item.is_late]
    late = [item for item in scene.objects if item.event and item.is_late]
    if not early or not late:
        return None
    first = early[int(rng.integers(len(early)))]
    second = late[int(rng.integers(len(late)))]
    one, two = (first, second) if rng.random() < 0.5 else (second, first)
    question = (
        f"Which changes first, the object at the {CELLS[one.cell]}"
        f" or the object at the {CELLS[two.cell]}?"
    )
    return Exchange("order", question, f"The object at the {CELLS[first.cell]}.")


SMALL_TALK: Final = (
    Exchange("talk", "Hello!", "Hello! Show me a video of moving shapes and ask me about it."),
    Exchange("talk", "Hi", "Hello! Show me a video of moving shapes and ask me about it."),
    Exchange(
        "talk", "Who are you?", "I am a small demo model that describes videos of moving shapes."
    ),
    Exchange(
        "talk",
        "What can you do?",
        "I can describe a video of moving shapes and answer questions about it.",
    ),
    Exchange("talk", "Thank you.", "You are welcome."),
)


def facts(scene: Scene) -> list[Statement]:
    """Returns all true statements about the scene."""
    found = [
        Statement(-1, "tone", TONES[scene.tone]),
        Statement(-1, "texture", TEXTURES[scene.texture]),
        Statement(-1, "count", NUMBERS[len(scene.objects)]),
    ]
    for item in scene.objects:
        found += [
            Statement(item.cell, "position", CELLS[item.cell]),
            Statement(item.cell, "size", SIZES[item.size]),
            Statement(item.cell, "colour", COLOURS[item.colour]),
            Statement(item.cell, "shape", SHAPES[item.shape]),
            Statement(item.cell, "direction", _motion(item)),
            *_event_statements(item.cell, _event(item)),
        ]
    return found


def _event_statements(cell: int, event: str) -> list[Statement]:
    words = event.split()
    found = [Statement(cell, "event", words[0])]
    if words[0] == "turns":
        found.append(Statement(cell, "new_colour", words[1]))
    if words[0] != "never":
        found.append(Statement(cell, "time", words[-1]))
    return found


_EVENT = r"(?P<event>never changes|appears \w+|vanishes \w+|turns \w+ \w+)"
_DETAILED = re.compile(
    r"At the (?P<cell>\w+ \w+) there is a (?P<size>\w+) (?P<colour>\w+) (?P<shape>\w+);"
    rf" it (?P<direction>\w+ \w+) and {_EVENT}\."
)
_REPORT = re.compile(
    r"At the (?P<cell>\w+ \w+), the (?P<colour>\w+) (?P<shape>\w+)"
    rf" (?P<direction>\w+ \w+) and {_EVENT}\."
)
_LIST = re.compile(r"(?P<cell>[A-Z]\w+ \w+): a (?P<size>\w+) (?P<colour>\w+) (?P<shape>\w+)\.")
_BACKGROUND = re.compile(r"shows a (?P<tone>\w+) (?P<texture>\w+) background\.")
_COUNT = re.compile(r"That makes (?P<count>\w+) objects? in all\.")


def parse(text: str) -> list[Statement]:
    """Returns the statements of a description in any style; ignores unknown sentences."""
    found: list[Statement] = []
    for pattern in (_BACKGROUND, _COUNT):
        match = pattern.search(text)
        if match:
            found += [Statement(-1, name, value) for name, value in match.groupdict().items()]
    for pattern in (_DETAILED, _REPORT, _LIST):
        for match in pattern.finditer(text):
            values = match.groupdict()
            name = values.pop("cell").lower()
            if name not in CELLS:
                continue
            cell = CELLS.index(name)
            event = values.pop("event", None)
            found.append(Statement(cell, "position", name))
            found += [Statement(cell, attribute, value) for attribute, value in values.items()]
            if event is not None:
                found += _event_statements(cell, event)
    return found


def content_spans(text: str) -> list[tuple[int, int]]:
    """Returns the character ranges of content words; other words are template."""
    return [
        match.span()
        for match in re.finditer(r"\w+", text)
        if match.group().lower() in CONTENT_WORDS
    ]
