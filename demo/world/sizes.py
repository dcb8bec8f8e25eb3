"""The sizes of clips."""

from dataclasses import dataclass

from demo.world import pixels

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Size:
    """A clip size: pixels, number of frames (two per second), and its share of the batches."""

    height: int
    width: int
    num_frames: int
    share: float
    max_objects: int = 6

    @property
    def grid(self) -> Grid:
        """Merged tokens along time, height and width."""
        side = pixels.PATCH * pixels.MERGE
        return self.num_frames // pixels.TEMPORAL_PATCH, self.height // side, self.width // side

    @property
    def num_visual(self) -> int:
        """Visual tokens of the clip."""
        time, rows, cols = self.grid
        return time * rows * cols
