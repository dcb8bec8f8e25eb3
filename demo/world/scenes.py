"""The synthetic world: scenes of shapes that move, appear, vanish and change colour.

A scene is plain data (seconds and pixels), a pure function of its seed, and can be rendered at any
time. All texts about a clip follow from its scene. Each object stays within a home cell of the
3 x 3 grid over the frame; texts name objects by their cells. The background has a faint colour
gradient (warm to cool from left to right, green to magenta from top to bottom), and moving objects
leave a short fading trail.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

FrameArray = npt.NDArray[np.uint8]  # [num_frames, height, width, 3]

COLOURS: Final = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES: Final = ("circle", "square", "triangle", "cross", "ring")
SIZES: Final = ("small", "large")
MOTIONS: Final = ("still", "left", "right", "up", "down")
EVENTS: Final = ("none", "appears", "vanishes", "turns")
TONES: Final = ("dark", "pale")
TEXTURES: Final = ("plain", "striped", "checked", "speckled")
NUM_CELLS: Final = 9
FADE_S: Final = 1.2  # duration of an appearance, a disappearance or a change of colour

_RGB: Final = np.array(
    [(220, 40, 40), (40, 170, 50), (45, 70, 230), (235, 215, 40), (165, 50, 190), (40, 205, 215)],
    dtype=np.float32,
)
_STEP: Final = np.array(
    [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], dtype=np.float32
)  # MOTIONS, as (x, y)
_GHOSTS: Final = ((0.7, 0.28), (0.35, 0.5))  # a trail: (radii behind the object, opacity)


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One object; attributes index the tuples above, lengths are pixels, times are seconds."""

    cell: int  # 0..8 in reading order
    size: int
    colour: int
    shape: int
    motion: int
    event: int
    new_colour: int  # == colour unless the event is "turns"
    event_s: float  # middle of the fade
    is_late: bool  # the event falls in the second half
    radius: float
    x: float  # centre at the start
    y: float
    travel: float  # path length over the whole clip
    shade: tuple[float, float, float]  # small per-object colour offset

    def centre_at(
        self, times_s: npt.NDArray[np.float64], duration_s: float
    ) -> npt.NDArray[np.float32]:
        """Returns the centre (x, y) at each time, [num_times, 2]."""
        part = np.clip(times_s / duration_s, 0.0, 1.0).astype(np.float32)[:, None]
        start = np.array([self.x, self.y], np.float32)
        return np.asarray(start + part * self.travel * _STEP[self.motion], np.float32)

    def change_at(self, times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Returns the progress of the event at each time, 0 to 1, [num_times]."""
        return np.clip((times_s - self.event_s) / FADE_S + 0.5, 0.0, 1.0).astype(np.float32)

    def opacity_at(self, times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Returns the opacity at each time, 0 to 1, [num_times]."""
        change = self.change_at(times_s)
        if EVENTS[self.event] == "appears":
            return change
        if EVENTS[self.event] == "vanishes":
            return 1.0 - change
        return np.ones_like(change)

    def colour_at(self, times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Returns the colour at each time, [num_times, 3]."""
        change = self.change_at(times_s)[:, None]
        if EVENTS[self.event] != "turns":
            change = np.zeros_like(change)
        shade = np.array(self.shade, np.float32)
        mixed = (1.0 - change) * _RGB[self.colour] + change * _RGB[self.new_colour]
        return np.asarray(mixed + shade, np.float32)


@dataclass(frozen=True, slots=True)
class Scene:
    """The description of a clip: frame size in pixels, duration, background, objects."""

    height: int
    width: int
    duration_s: float
    tone: int
    texture: int
    level: float  # mean grey of the background
    texture_seed: int
    objects: tuple[SceneObject, ...]  # in reading order of their cells


def sample_scene(
    rng: np.random.Generator,
    *,
    height: int,
    width: int,
    duration_s: float,
    min_objects: int = 1,
    max_objects: int = 6,
    is_still: bool = False,
) -> Scene:
    """Returns a random scene; with `is_still` nothing moves or changes (for single frames)."""
    wanted = int(rng.integers(min_objects, max_objects + 1))
    placed: list[SceneObject] = []
    cells = rng.permutation(NUM_CELLS)
    attempts = [int(cell) for _ in range(4) for cell in cells]
    for cell in attempts:
        if len(placed) == wanted:
            break
        if any(other.cell == cell for other in placed):
            continue
        candidate = _sample_object(rng, cell, height, width, duration_s, is_still)
        if all(_keeps_apart(candidate, other, duration_s) for other in placed):
            placed.append(candidate)
    tone = int(rng.integers(len(TONES)))
    return Scene(
        height=height,
        width=width,
        duration_s=duration_s,
        tone=tone,
        texture=int(rng.integers(len(TEXTURES))),
        level=float(rng.uniform(62, 92) if tone == 0 else rng.uniform(155, 190)),
        texture_seed=int(rng.integers(2**31)),
        objects=tuple(sorted(placed, key=lambda item: item.cell)),
    )


def _sample_object(
    rng: np.random.Generator, cell: int, height: int, width: int, duration_s: float, is_still: bool
) -> SceneObject:
    cell_w, cell_h = width / 3, height / 3
    size = int(rng.integers(len(SIZES)))
    smaller_side = min(cell_w, cell_h)
    radius = float(
        rng.uniform(11.5, 13.0)
        if size == 0
        else rng.uniform(17.0, min(23.0, max(18.5, smaller_side / 2)))
    )
    col, row = cell % 3, cell // 3
    low_x, high_x = (
        max(col * cell_w + 3, 0.75 * radius),
        min((col + 1) * cell_w - 3, width - 0.75 * radius),
    )
    low_y, high_y = (
        max(row * cell_h + 3, 0.75 * radius),
        min((row + 1) * cell_h - 3, height - 0.75 * radius),
    )
    motion = 0 if is_still or rng.random() < 0.3 else int(rng.integers(1, len(MOTIONS)))
    event = 0 if is_still or rng.random() < 0.5 else int(rng.integers(1, len(EVENTS)))
    x, y = float(rng.uniform(low_x, high_x)), float(rng.uniform(low_y, high_y))
    travel = 0.0
    if motion:
        horizontal = motion in (1, 2)
        low, high = (low_x, high_x) if horizontal else (low_y, high_y)
        travel = min(high - low, rng.uniform(4.0, 8.0) * duration_s)
        start = rng.uniform(low, max(low, high - travel))
        start = float(start if motion in (2, 4) else start + travel)
        x, y = (start, y) if horizontal else (x, start)
    colour = int(rng.integers(len(COLOURS)))
    shift = int(rng.integers(1, len(COLOURS)))
    is_late = bool(rng.random() < 0.5)
    event_at = rng.uniform(0.62, 0.8) if is_late else rng.uniform(0.2, 0.38)
    return SceneObject(
        cell=cell,
        size=size,
        colour=colour,
        shape=int(rng.integers(len(SHAPES))),
        motion=motion,
        event=event,
        new_colour=(colour + shift) % len(COLOURS) if EVENTS[event] == "turns" else colour,
        event_s=float(event_at * duration_s),
        is_late=is_late,
        radius=radius,
        x=x,
        y=y,
        travel=float(travel),
        shade=(
            float(rng.uniform(-12, 12)),
            float(rng.uniform(-12, 12)),
            float(rng.uniform(-12, 12)),
        ),
    )


def _keeps_apart(first: SceneObject, second: SceneObject, duration_s: float) -> bool:
    times_s = np.linspace(0.0, duration_s, 5)
    gap = first.centre_at(times_s, duration_s) - second.centre_at(times_s, duration_s)
    return bool(np.all(np.hypot(gap[:, 0], gap[:, 1]) >= 0.85 * (first.radius + second.radius)))


def render(scene: Scene, times_s: npt.NDArray[np.float64]) -> FrameArray:
    """Returns the frames at the given times."""
    frames, _ = render_with_ids(scene, times_s, want_ids=False)
    return frames


def render_with_ids(
    scene: Scene, times_s: npt.NDArray[np.float64], *, want_ids: bool = True
) -> tuple[FrameArray, npt.NDArray[np.int8] | None]:
    """Returns the frames, and the index of the topmost object at each pixel (-1: background).

    The indices are [num_frames, height, width], or None without `want_ids`.
    """
    count = len(times_s)
    backdrop = background(scene)
    canvas = np.repeat(backdrop[None], count, axis=0)  # [num_frames, height, width, 3] float32
    ids = np.full((count, scene.height, scene.width), -1, np.int8) if want_ids else None
    for index, item in enumerate(scene.objects):
        centres = item.centre_at(times_s, scene.duration_s)
        opacity = item.opacity_at(times_s)
        colours = item.colour_at(times_s)
        ghosts = _GHOSTS if item.motion else ()
        for behind, strength in (*ghosts, (0.0, 1.0)):
            places = centres - behind * item.radius * _STEP[item.motion]
            for frame in range(count):
                if opacity[frame] <= 0.02:
                    continue
                target = _window(places[frame], item.radius, scene.height, scene.width)
                if target is None:
                    continue
                rows, cols = target
                cover = _coverage(item.shape, item.radius, places[frame], rows, cols)
                alpha = cover * (opacity[frame] * strength)
                patch = canvas[frame, rows, cols]
                patch += alpha[..., None] * (colours[frame] - patch)
                if ids is not None and behind == 0.0 and opacity[frame] > 0.12:
                    ids[frame, rows, cols][cover > 0.5] = index
    np.clip(canvas, 0, 255, out=canvas)
    return (canvas + 0.5).astype(np.uint8), ids


def _window(
    centre: npt.NDArray[np.float32], radius: float, height: int, width: int
) -> tuple[slice, slice] | None:
    reach = radius + 1.5
    top, bottom = max(int(centre[1] - reach), 0), min(int(centre[1] + reach) + 2, height)
    left, right = max(int(centre[0] - reach), 0), min(int(centre[0] + reach) + 2, width)
    if top >= bottom or left >= right:
        return None
    return slice(top, bottom), slice(left, right)


def _coverage(
    shape: int, radius: float, centre: npt.NDArray[np.float32], rows: slice, cols: slice
) -> npt.NDArray[np.float32]:
    """Returns the share of each pixel that the shape covers, by signed distance, [rows, cols]."""
    y = (np.arange(rows.start, rows.stop, dtype=np.float32) + 0.5 - centre[1])[:, None]
    x = (np.arange(cols.start, cols.stop, dtype=np.float32) + 0.5 - centre[0])[None, :]
    name = SHAPES[shape]
    if name == "circle":
        distance = np.sqrt(x * x + y * y) - radius
    elif name == "ring":
        distance = np.abs(np.sqrt(x * x + y * y) - 0.74 * radius) - 0.26 * radius
    elif name == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.86 * radius
    elif name == "triangle":
        sides = 0.894 * np.abs(x) - 0.447 * y
        distance = np.maximum(sides - 0.447 * radius, y - 0.85 * radius)
    else:
        arm = 0.3 * radius
        ax, ay = np.abs(x), np.abs(y)
        distance = np.minimum(np.maximum(ax - radius, ay - arm), np.maximum(ax - arm, ay - radius))
    return np.asarray(np.clip(0.5 - distance, 0.0, 1.0), np.float32)


def background(scene: Scene) -> npt.NDArray[np.float32]:
    """Returns the textured background with its colour gradient, [height, width, 3]."""
    rng = np.random.default_rng(scene.texture_seed)
    y = np.linspace(-1.0, 1.0, scene.height, dtype=np.float32)[:, None]
    x = np.linspace(-1.0, 1.0, scene.width, dtype=np.float32)[None, :]
    grey = np.full((scene.height, scene.width), scene.level, np.float32)
    rows, cols = np.arange(scene.height)[:, None], np.arange(scene.width)[None, :]
    period = int(rng.integers(9, 15))
    contrast = float(rng.uniform(7, 11))
    name = TEXTURES[scene.texture]
    if name == "striped":
        slope = int(rng.integers(0, 3))
        phase = rows + cols if slope == 2 else (rows + 0 * cols if slope == 1 else cols + 0 * rows)
        grey += contrast * np.where((phase // (period // 2)) % 2 == 0, 1.0, -1.0).astype(np.float32)
    elif name == "checked":
        grey += contrast * np.where((rows // period + cols // period) % 2 == 0, 1.0, -1.0).astype(
            np.float32
        )
    elif name == "speckled":
        coarse = rng.random((scene.height // 3 + 1, scene.width // 3 + 1)) < 0.16
        grey += (
            2.6
            * contrast
            * np.kron(coarse, np.ones((3, 3)))[: scene.height, : scene.width].astype(np.float32)
        )
    tint = np.empty((scene.height, scene.width, 3), np.float32)
    tint[..., 0] = -24.0 * x + 10.0 * y
    tint[..., 1] = -24.0 * y
    tint[..., 2] = 24.0 * x + 10.0 * y
    return np.asarray(grey[..., None] + tint, np.float32)
