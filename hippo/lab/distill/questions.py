"""Which questions the target is asked about which videos, and which videos are held out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hippo.client.requests import VIDEO_SUFFIXES
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.video_questions import read_questions

DEFAULT_QUESTIONS = (
    "Describe the video in detail.",
    "What happens in this video, from the beginning to the end?",
    "Describe the setting, the objects and the people in the video.",
    "Describe the video.",
    "Which actions can be seen, and in which order?",
    "What changes between the beginning and the end of the video?",
    "Summarise the video in a few sentences.",
    "List everything that can be seen in the video.",
)
_WHOLE_SHARE = 0.1  # share of training questions with nothing dropped, as in short prompts
_SERVED_SHARE = 0.5  # share of other questions with serving's ratio; the rest keep half to twice
_MOST_RATIO = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetQuestion:
    """One question to the target; ``ratio`` is the share of visual tokens that the draft misses.

    The questions of held-out videos have the ratio of serving and temperature 0.
    """

    id: str
    video: Path
    prompt: str
    ratio: float
    temperature: float = 0.0
    seed: int = 0
    is_held_out: bool = False


def find_videos(folder: Path) -> list[Path]:
    """Returns the video files below a folder, by name. Raises InvalidRequestError if it has none or
    is no folder."""
    if not folder.is_dir():
        raise InvalidRequestError(f"--videos: {folder} is not a folder")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES)
    if not found:
        raise InvalidRequestError(
            f"--videos: {folder} has no videos ({', '.join(VIDEO_SUFFIXES)}), in its folders either"
        )
    return found


def asked_about(
    folder: Path, file: Path | None, *, num_default: int
) -> list[tuple[str, Path, str]]:
    """Returns id, video and prompt of each question in a file, as `hippo bench --questions`
    takes it, or else ``num_default`` of DEFAULT_QUESTIONS about each video.

    Raises InvalidRequestError for a folder without videos, a file that is none of questions, and a
    question about a video that is not on this machine.
    """
    if file is None:
        return [
            (
                f"{video.relative_to(folder)}#{number}",
                video,
                DEFAULT_QUESTIONS[(index * num_default + number) % len(DEFAULT_QUESTIONS)],
            )
            for index, video in enumerate(find_videos(folder))
            for number in range(num_default)
        ]
    asked = []
    for question in read_questions(file, str(folder)):
        video = Path(question.video)
        if not video.is_file():
            raise InvalidRequestError(
                f"{file}: the video of question {question.id!r} is {question.video}; give files of "
                "this machine"
            )
        asked.append((question.id, video, question.prompt))
    return asked


def plan_questions(
    asked: Sequence[tuple[str, Path, str]],
    *,
    ratio: float,
    temperatures: Sequence[float],
    held_out_share: float,
    seed: int,
) -> list[TargetQuestion]:
    """Returns what the target is asked, the questions of held-out videos first.

    A share of the videos is held out with all of their questions. A question for training is asked
    once at each temperature, with a ratio drawn around serving's ratio. The result depends only on
    the arguments. Raises InvalidRequestError for fewer than two videos.
    """
    videos = sorted({video for _, video, _ in asked})
    if len(videos) < 2:
        raise InvalidRequestError(
            "one video is held out and the draft is trained on others: give two videos at least"
        )
    num_held_out = min(max(round(held_out_share * len(videos)), 1), len(videos) - 1)
    held_out = set(random.Random(seed).sample(videos, num_held_out))
    planned = []
    for name, video, prompt in asked:
        if video in held_out:
            planned.append(
                TargetQuestion(id=name, video=video, prompt=prompt, ratio=ratio, is_held_out=True)
            )
            continue
        for number, temperature in enumerate(temperatures):
            rng = random.Random(f"{seed} {name} {number}")
            planned.append(
                TargetQuestion(
                    id=f"{name} T={temperature:g}" if temperature else name,
                    video=video,
                    prompt=prompt,
                    ratio=_drawn_ratio(rng, ratio),
                    temperature=temperature,
                    seed=rng.getrandbits(53),
                )
            )
    return sorted(planned, key=lambda question: not question.is_held_out)


def _drawn_ratio(rng: random.Random, ratio: float) -> float:
    if rng.random() < _WHOLE_SHARE:
        return 0.0
    if rng.random() < _SERVED_SHARE:
        return ratio
    return min(max(1 - (1 - ratio) * 2 ** rng.uniform(-1, 1), 0.0), _MOST_RATIO)
