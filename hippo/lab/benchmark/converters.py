"""Questions of six published benchmarks, from the annotation files that their authors publish.

Fields and prompts come from the data sets' own files and from lmms-eval's tasks (0.7.3).
"""

import json
import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hippo.base.extras import needs_extra
from hippo.client.requests import VIDEO_SUFFIXES
from hippo.errors import InvalidRequestError

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedBenchmark:
    """How a data set's records become questions.

    ``lines`` gets a record, its number and the name of its file without the suffix; it yields
    objects of ``video_questions.read_questions``, in which `video` is a file's name, with or
    without folder and suffix.
    """

    title: str
    files: str  # those that the authors publish
    lines: Callable[[Record, int, str], Iterator[dict[str, Any]]]


def convert(
    benchmark: PublishedBenchmark, annotations: Sequence[Path], videos: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the questions about videos below a folder, and the names of the missing videos.

    `video` of a question is relative to the folder. Raises InvalidRequestError for a file that is
    not of this benchmark, and for a name that several videos have.
    """
    find = _finder(videos)
    found: list[dict[str, Any]] = []
    missing: dict[str, None] = {}
    for path in annotations:
        for number, record in enumerate(read_records(path)):
            try:
                lines = list(benchmark.lines(record, number, path.stem))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise InvalidRequestError(
                    f"{path}, record {number + 1} is not one of {benchmark.title} ({reason}); "
                    f"expected {benchmark.files}"
                ) from None
            for line in lines:
                video = find(line["video"])
                if video is None:
                    missing[line["video"]] = None
                else:
                    found.append({**line, "video": video})
    return found, list(missing)


def read_records(path: Path) -> list[Record]:
    """Returns the records of a .json, .jsonl or .parquet file.

    Raises InvalidRequestError for a file of another kind, and HippoError for a Parquet file if
    pyarrow is not installed.
    """
    try:
        if path.suffix == ".parquet":
            records: Any = _parquet(path)
        elif path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").split("\n")
            records = [json.loads(line) for line in lines if line.strip()]
        else:
            records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidRequestError(f"{path} cannot be read: {reason}") from None
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise InvalidRequestError(f"{path} is no list of records")
    return records


def _parquet(path: Path) -> list[Record]:
    with needs_extra("parquet", "a Parquet file"):
        from pyarrow import parquet
    records: list[Record] = parquet.read_table(path).to_pylist()
    return records


def _finder(videos: Path) -> Callable[[str], str | None]:
    """Returns a function from a video's name to its path below the folder, or None."""
    if not videos.is_dir():
        raise InvalidRequestError(f"there is no folder {videos}")
    by_stem: dict[str, list[PurePosixPath]] = defaultdict(list)
    for path in sorted(videos.rglob("*")):
        if path.suffix.lower() in VIDEO_SUFFIXES:
            by_stem[path.stem].append(PurePosixPath(path.relative_to(videos).as_posix()))

    def find(name: str) -> str | None:
        wanted = PurePosixPath(name)
        is_file = wanted.suffix.lower() in VIDEO_SUFFIXES
        folders = wanted.parent.parts
        below = [
            path
            for path in by_stem[wanted.stem if is_file else wanted.name]
            if path.parent.parts[len(path.parent.parts) - len(folders) :] == folders
        ]
        named = [path for path in below if path.name == wanted.name] or below
        if len(named) > 1:
            raise InvalidRequestError(
                f"several videos below {videos} are {name}: {named[0]}, {named[1]}; give the "
                "folder of one of them to --videos"
            )
        return str(named[0]) if named else None

    return find


def _lettered(options: Sequence[str]) -> str:
    """Returns options as lines "(A) ..."."""
    pairs = zip(string.ascii_uppercase, options, strict=False)
    return "\n".join(f"({letter}) {option}" for letter, option in pairs)


def _video_mme(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    options = record["options"]  # such as "A. Apples."
    yield {
        "id": record["question_id"],
        "video": record["videoID"],
        "question": record["question"],
        "options": [re.sub(r"^[A-Z]\.\s*", "", option) for option in options],
        "answer": record["answer"],
        "category": record["duration"],
        "prompt": "Select the best answer to the following multiple-choice question based on the "
        "video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
        + "\n".join([record["question"], *options, "The best answer is:"]),
    }


def _mvbench(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    options = record["candidates"]
    yield {
        "id": f"{stem}-{number}",
        "video": record["video"],
        "question": record["question"],
        "options": options,
        "answer": record["answer"],
        "category": stem,
        "prompt": f"Question:{record['question']}\nOption:\n{_lettered(options)}\n"
        "Only give the best option.\n",
    }


def _mlvu(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    line = {
        "id": f"{stem}-{number}",
        "video": record["video"],
        "question": record["question"],
        "category": record["question_type"],
    }
    if options := record.get("candidates"):
        line |= {
            "options": options,
            "answer": record["answer"],
            "prompt": f"{record['question']}\n{_lettered(options)}\n"
            "Only give the best option.\nBest option: (",
        }
    yield line


def _long_video_bench(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    if "candidates" in record:  # the JSON files
        options = record["candidates"]
    else:  # the Parquet files
        options = [record[f"option{index}"] for index in range(5)]
        options = [option for option in options if option != "N/A"]
    line = {
        "id": record["id"],
        "video": record["video_path"],
        "question": record["question"],
        "options": options,
        "category": f"{record['duration_group']} s",
    }
    choice = record.get("correct_choice", -1)  # the test part has none
    yield line if choice < 0 else {**line, "answer": string.ascii_uppercase[choice]}


def _lvbench(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    for each in record["qa"]:
        question, *options = re.split(r"\n\([A-Z]\)\s*", each["question"])
        yield {
            "id": str(each["uid"]),
            "video": record["key"],
            "question": question,
            "options": options,
            "answer": each["answer"],
            "category": each["question_type"][0],
            "prompt": each["question"] + "\nAnswer the question with the option letter",
        }


def _video_detail_caption(record: Record, number: int, stem: str) -> Iterator[dict[str, Any]]:
    yield {"id": str(number), "video": record["video_name"], "question": record["question"]}


BENCHMARKS: Mapping[str, PublishedBenchmark] = {
    "video-mme": PublishedBenchmark(
        "Video-MME", "videomme/test-00000-of-00001.parquet of lmms-lab/Video-MME", _video_mme
    ),
    "mvbench": PublishedBenchmark("MVBench", "json/*.json of OpenGVLab/MVBench", _mvbench),
    "mlvu": PublishedBenchmark("MLVU", "MLVU/json/*.json of MLVU/MVLU", _mlvu),
    "longvideobench": PublishedBenchmark(
        "LongVideoBench",
        "lvb_val.json or validation-00000-of-00001.parquet of longvideobench/LongVideoBench",
        _long_video_bench,
    ),
    "lvbench": PublishedBenchmark("LVBench", "video_info.meta.jsonl of zai-org/LVBench", _lvbench),
    "video-detail-caption": PublishedBenchmark(
        "VideoDetailCaption",
        "data/test-00000-of-00001.parquet of lmms-lab/VideoDetailCaption",
        _video_detail_caption,
    ),
}
"""The benchmarks by the names that ``hippo questions`` takes."""
