"""The target's answers: asked through its service, many at once, and kept in a file."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hippo.base.tasks import gather_or_cancel
from hippo.client.json_lines import JsonLines
from hippo.errors import HippoError, InvalidRequestError, OverloadedError, UnavailableError
from hippo.lab.distill.questions import TargetQuestion
from hippo.models.interface.context import most_text_tokens, visual_limit
from hippo.rpc.client import TargetClient
from hippo.types import (
    ChatMessage,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    ModelInfo,
    OpenRequest,
    PromptInfo,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    TextPart,
    Verdict,
)

TOP_LOGPROBS = 8  # likeliest tokens of the target that are kept per position
_PAUSE_S = 0.5
_LONGEST_S = 3600.0  # for an answer, its wait for a slot included


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswer:
    """An answer, and what the draft needs to follow it.

    ``kept`` are ascending indices into the prompt's visual tokens; None: all. ``top`` has (token
    id, log-probability) pairs for each token, the likeliest first.
    """

    id: str
    token_ids: tuple[int, ...]  # with the end token, if there is one
    top: tuple[tuple[tuple[int, float], ...], ...]
    kept: tuple[int, ...] | None
    num_prompt_tokens: int
    num_visual_tokens: int
    prompt_hash: str  # hexadecimal
    max_visual_tokens: int  # in the frame plan

    @property
    def num_draft_prompt_tokens(self) -> int:
        """Prompt tokens that the draft sees."""
        num_dropped = 0 if self.kept is None else self.num_visual_tokens - len(self.kept)
        return self.num_prompt_tokens - num_dropped


class AnswerFile:
    """Answers by id, each a line of a JSONL file. A last line that is not whole is removed.

    Raises InvalidRequestError for a file of other content, or one that cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, TargetAnswer] = {}
        self._file = JsonLines(path, self._take, kind="answer")

    def add(self, answer: TargetAnswer) -> None:
        """Appends an answer."""
        self._file.append({name: getattr(answer, name) for name in answer.__dataclass_fields__})
        self.answers[answer.id] = answer

    def _take(self, number: int, line: bytes) -> None:
        answer = _answer_of(json.loads(line))
        self.answers[answer.id] = answer


def _answer_of(line: dict[str, Any]) -> TargetAnswer:
    kept = line["kept"]
    changed = {
        "token_ids": tuple(line["token_ids"]),
        "top": tuple(tuple((int(a), float(b)) for a, b in each) for each in line["top"]),
        "kept": None if kept is None else tuple(kept),
    }
    return TargetAnswer(**{**line, **changed})


def frame_plan(info: ModelInfo, prompt: str, max_tokens: int) -> FramePlan:
    """Returns the plan of a video beside a question and an answer in the target's context."""
    num_others = most_text_tokens(prompt) + max_tokens
    return FramePlan(max_visual_tokens=visual_limit(info.max_context_length, num_others))


def question_message(prompt: str) -> ChatMessage:
    """Returns a question's message: the video, and the text behind it."""
    return ChatMessage("user", (MediaPart(0), TextPart(prompt)))


def video_of(path: Path) -> Media:
    """Returns a video file as media that a service opens by its path."""
    resolved = path.resolve()
    status = resolved.stat()
    return Media(
        MediaKind.VIDEO,
        path=str(resolved),
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns % 2**64,
    )


@dataclass(slots=True)
class Asking:
    """Asks the target's service, ``num_together`` questions at once, each decoded target-only.

    ``min_visual_tokens`` is the gateway's --pruning-min-visual-tokens. ``on_answer`` is called
    after each question. ``refused`` has the service's reason for each question that it refused.
    """

    client: TargetClient
    info: ModelInfo
    file: AnswerFile
    max_tokens: int
    min_visual_tokens: int
    on_answer: Callable[[], None]
    refused: dict[str, str]

    async def ask_all(self, questions: Sequence[TargetQuestion], num_together: int) -> None:
        """Asks the questions and adds their answers to the file. Raises HippoError if the service
        fails; the answers until then are kept."""
        waiting = iter(questions)
        await gather_or_cancel(self._ask_in_turn(waiting) for _ in range(num_together))

    async def _ask_in_turn(self, waiting: Iterator[TargetQuestion]) -> None:
        for question in waiting:
            try:
                answer = await self._ask(question)
            except (InvalidRequestError, OSError) as error:
                self.refused[question.id] = str(error)
            else:
                self.file.add(answer)
            self.on_answer()

    async def _ask(self, question: TargetQuestion) -> TargetAnswer:
        request = self._request(question)
        while True:
            try:
                return await self._read(question, request)
            except OverloadedError:  # others use the service too
                await asyncio.sleep(_PAUSE_S)

    async def _read(self, question: TargetQuestion, request: OpenRequest) -> TargetAnswer:
        prompt: PromptInfo | None = None
        selection: Selection | None = None
        verdicts: list[Verdict] = []
        async with self.client.verify(request, timeout_s=_LONGEST_S) as stream:
            async for message in stream:
                if isinstance(message, PromptInfo):
                    prompt = message
                elif isinstance(message, Selection):
                    selection = message
                elif isinstance(message, Verdict):
                    verdicts.append(message)
        if prompt is None or selection is None or not verdicts or not verdicts[-1].finish_reason:
            raise UnavailableError("the target service ended an answer before its end")
        is_whole = len(selection.kept_indices) == selection.num_visual_tokens
        return TargetAnswer(
            id=question.id,
            token_ids=tuple(each for verdict in verdicts for each in verdict.token_ids),
            top=tuple(
                tuple((token_id, round(logprob, 5)) for token_id, logprob in each.top)
                for verdict in verdicts
                for each in verdict.logprobs
            ),
            kept=None if is_whole else selection.kept_indices,
            num_prompt_tokens=prompt.num_prompt_tokens,
            num_visual_tokens=prompt.num_visual_tokens,
            prompt_hash=prompt.prompt_hash.hex(),
            max_visual_tokens=request.frame_plan.max_visual_tokens,
        )

    def _request(self, question: TargetQuestion) -> OpenRequest:
        return OpenRequest(
            request_id="distill",
            messages=(question_message(question.prompt),),
            media=(video_of(question.video),),
            sampling=SamplingParams(temperature=question.temperature, seed=question.seed),
            frame_plan=frame_plan(self.info, question.prompt, self.max_tokens),
            pruning=Pruning(
                PruningStrategy.HOLISTIC, question.ratio, min_visual_tokens=self.min_visual_tokens
            ),
            max_tokens=self.max_tokens,
            end_token_ids=self.info.end_token_ids,
            num_top_logprobs=TOP_LOGPROBS,
            is_max_tokens_default=True,
        )


async def ask_target(
    address: str,
    questions: Sequence[TargetQuestion],
    file: AnswerFile,
    *,
    max_tokens: int,
    min_visual_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Asks the target service at ``address`` (host:port) the questions that the file does not
    answer; returns the service's reason by id for each question that it refused.

    Two more questions than the service has slots are open, so that their videos are decoded before
    a slot is free. Raises HippoError if the service fails or refuses all questions.
    """
    client = TargetClient(address)
    try:
        info = await client.get_model()
        asking = Asking(client, info, file, max_tokens, min_visual_tokens, on_answer, {})
        todo = [question for question in questions if question.id not in file.answers]
        await asking.ask_all(todo, info.num_slots + 2)
    finally:
        await client.close()
    if not file.answers and asking.refused:
        raise HippoError(f"no question was answered: {next(iter(asking.refused.values()))}")
    return asking.refused
