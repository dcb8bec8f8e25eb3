"""The draft's inputs on disk: the rows that it has in serving of each answer, and their labels.

The vision tower is not trained, so its features are computed once, by the code that serves, and
kept for the visual tokens that the draft sees. An example is a safetensors file.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hippo.base.local_files import LocalFiles
from hippo.catalog.sizes import GIB
from hippo.errors import HippoError, IncompatiblePairError
from hippo.lab.distill.answers import TargetAnswer, question_message, video_of
from hippo.lab.distill.questions import TargetQuestion
from hippo.models.interface.base import DecodedMedia, FeatureCache, Prompt, VideoLanguageModel
from hippo.models.interface.content import cached_places
from hippo.types import FramePlan
from hippo.video.decoder import MediaDecoder

_SPARE_BYTES = 1 << 30  # bytes of the disk that are left for other files


@dataclass(frozen=True, slots=True, eq=False)
class DraftExample:
    """A prompt without its dropped visual tokens, the answer behind it, and the target's tokens.

    The logits of the last ``num_answer_tokens`` rows should give ``answer_ids``.
    """

    input_ids: torch.Tensor  # int64 [length]
    positions: torch.Tensor  # int64 [num_axes, length]
    visual_rows: torch.Tensor  # int64 [num_visual], ascending
    features: torch.Tensor  # [num_visual, width], as VideoLanguageModel.embed_visual
    answer_ids: torch.Tensor  # int64 [num_answer_tokens]
    top_ids: torch.Tensor  # int64 [num_answer_tokens, k]: the target's likeliest tokens
    top_logprobs: torch.Tensor  # float32 [num_answer_tokens, k]

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all. Raises HippoError if it cannot be written."""
        tensors = {name: getattr(self, name).contiguous() for name in self.__dataclass_fields__}
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise HippoError(f"{path} cannot be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that ``save`` wrote. Raises HippoError if it is damaged."""
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise HippoError(
                f"{path} is damaged: {error}; delete it, and the command writes it again"
            ) from None


def num_rows(path: Path) -> int:
    """Returns the length of an example by its file's header. Raises HippoError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_slice("input_ids").get_shape()[0])
    except (OSError, SafetensorError) as error:
        raise HippoError(
            f"{path} is damaged: {error}; delete it, and the command writes it again"
        ) from None


class LastFeatures:
    """The features of the last video, because questions about one video follow each other."""

    def __init__(self) -> None:
        self._digest = b""
        self._features: torch.Tensor | None = None

    def get(self, digest: bytes, /) -> torch.Tensor | None:
        """See FeatureCache.get."""
        return self._features if digest == self._digest else None

    def put(self, digest: bytes, features: torch.Tensor, /) -> None:
        """See FeatureCache.put."""
        self._digest, self._features = digest, features


def write_examples(
    model: VideoLanguageModel,
    wanted: Sequence[tuple[Path, TargetQuestion, TargetAnswer]],
    on_example: Callable[[], None],
) -> None:
    """Writes the examples of questions to their files; calls ``on_example`` after each.

    Raises IncompatiblePairError if the draft's prompts are not the target's, and HippoError if a
    file cannot be written.
    """

    async def write_all() -> None:
        files = LocalFiles([question.video.resolve().parent for _, question, _ in wanted])
        features = LastFeatures()
        last: tuple[Path, FramePlan] | None = None
        async with MediaDecoder(files=files) as decoder:
            decoder.frame_limits = model.frame_limits
            for path, question, answer in wanted:
                plan = FramePlan(max_visual_tokens=answer.max_visual_tokens)
                if last != (question.video, plan):
                    clip = await decoder.decode(video_of(question.video), plan)
                    last = question.video, plan
                make_example(model, question, answer, clip, features).save(path)
                on_example()

    asyncio.run(write_all())


@torch.inference_mode()
def make_example(
    model: VideoLanguageModel,
    question: TargetQuestion,
    answer: TargetAnswer,
    clip: DecodedMedia,
    cache: FeatureCache | None = None,
) -> DraftExample:
    """Runs the draft's processor and vision tower. Raises IncompatiblePairError if its prompt is
    not the target's."""
    plan = FramePlan(max_visual_tokens=answer.max_visual_tokens)
    prompt = model.prepare_prompt([question_message(question.prompt)], [clip], plan)
    if prompt.prompt_hash.hex() != answer.prompt_hash:
        raise IncompatiblePairError(
            f"the draft makes another prompt of {question.video} than the target: their processors "
            "or chat templates differ, so that the target would be served alone; or the video has "
            "changed since the target's answer"
        )
    features = model.embed_visual(prompt, cache)
    assert features is not None, "the prompt has a video"
    kept = None if answer.kept is None else torch.tensor(answer.kept, dtype=torch.int64)
    return example_of(prompt, features, kept, answer)


def example_of(
    prompt: Prompt, features: torch.Tensor, kept: torch.Tensor | None, answer: TargetAnswer
) -> DraftExample:
    """Returns the rows that the draft caches of a prompt, and the answer behind them.

    features: [num_visual_rows, width], the rows of embed_visual; kept: int64 indices into
    ``prompt.visual_indices``.
    """
    cached = cached_places(prompt, kept)
    if cached is None:
        cached = torch.arange(prompt.length)
    tokens = torch.tensor(answer.token_ids, dtype=torch.int64)
    tail = torch.arange(len(tokens) - 1) + prompt.next_position
    places, order = torch.cat((prompt.visual_indices, prompt.other_indices)).sort()
    is_seen = torch.isin(places, cached)
    top = torch.tensor(answer.top, dtype=torch.float64)  # [tokens, k, 2]
    return DraftExample(
        input_ids=torch.cat((prompt.input_ids[cached], tokens[:-1])),
        positions=torch.cat(
            (prompt.positions[:, cached], tail.expand(prompt.positions.shape[0], -1)), 1
        ),
        visual_rows=torch.searchsorted(cached, places[is_seen]),
        features=features[order[is_seen].to(features.device)].cpu(),
        answer_ids=tokens,
        top_ids=top[..., 0].long(),
        top_logprobs=top[..., 1].float(),
    )


def check_disk(folder: Path, answers: Sequence[TargetAnswer], model: VideoLanguageModel) -> None:
    """Raises HippoError if the features of these answers do not fit on the folder's disk."""
    token_bytes = model.feature_bytes / model.info.max_context_length
    num_kept = sum(
        answer.num_visual_tokens if answer.kept is None else len(answer.kept) for answer in answers
    )
    needed, free = num_kept * token_bytes, shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise HippoError(
            f"the vision features of {len(answers)} answers need {needed / GIB:.1f} GiB, and the "
            f"disk of {folder} has {free / GIB:.1f} GiB free: give fewer videos, or an --out on a "
            "larger disk"
        )


def example_path(folder: Path, number: int) -> Path:
    """Returns the file of a question's example, by the question's place in the plan."""
    return folder / f"{number:06}.safetensors"
