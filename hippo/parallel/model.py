"""A model shared among ranks: rank 0's interface, and the command loop of the followers."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator

import torch

from hippo.errors import HippoError, UnavailableError
from hippo.models.interface.base import (
    AttentionTap,
    DelegatingModel,
    Prompt,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.products.group import RankGroup
from hippo.parallel.commands import (
    Advance,
    BeginPrefill,
    Call,
    Command,
    Drop,
    RankCommand,
    Stop,
    without_pixels,
)
from hippo.parallel.followers import FollowerProcesses

_SETTLE_SECONDS = 1.0


class ParallelModel(DelegatingModel):
    """Rank 0's VideoLanguageModel, which sends each device call to the followers.

    Only rank 0 prepares prompts and runs the vision tower. A HippoError occurs on all ranks alike,
    before any collective. Any other error may leave the ranks out of step: it sets the followers'
    ``lost``, and later calls raise UnavailableError.
    """

    def __init__(
        self, local: VideoLanguageModel, group: RankGroup, followers: FollowerProcesses
    ) -> None:
        super().__init__(local)
        self._group = group
        self._followers = followers
        self._numbers = itertools.count()

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill; every rank reuses the same rows."""
        number = next(self._numbers)
        command = BeginPrefill(
            number,
            slot,
            without_pixels(prompt),
            None if visual is None else (tuple(visual.shape), visual.dtype),
            None if kept is None else kept.cpu(),
            tap,
            num_reused,
        )
        with self._in_step(command):
            if visual is not None:
                self._group.broadcast(visual.contiguous())
        groups = self._model.prefill(slot, prompt, visual, kept, tap, num_reused)
        del visual  # its memory is freed when its rows are in the prompt's
        is_over = False
        try:
            while not is_over:
                with self._in_step(Advance(number)):
                    logits = _advance(groups, tap, self._group)
                is_over = logits is not None
                yield logits
        except HippoError:
            is_over = True  # the followers met the same error, or have ended
            raise
        finally:
            if not is_over:
                groups.close()
                with contextlib.suppress(UnavailableError):
                    self._send_command(Drop(number))

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """See VideoLanguageModel.copy_rows; every rank copies the rows of its own heads."""
        with self._in_step(Call("copy_rows", (source, slot, num_rows))):
            self._model.copy_rows(source, slot, num_rows)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See VideoLanguageModel.forward."""
        with self._in_step(Call("forward", (plan,))):
            return self._model.forward(plan)

    @contextlib.contextmanager
    def _in_step(self, command: Command) -> Iterator[None]:
        """Sends ``command`` to the followers, and handles errors of this rank's part (the body)."""
        self._send_command(command)
        try:
            yield
        except HippoError:
            raise
        except Exception as error:
            lost = self._followers.lost
            # If the cause is a lost follower, its listener thread will soon set ``lost``.
            with contextlib.suppress(TimeoutError):
                raise UnavailableError(lost.result(timeout=_SETTLE_SECONDS).message) from error
            self._followers.give_up(UnavailableError(f"rank 0 failed: {error}"))
            raise

    def _send_command(self, command: Command) -> None:
        lost = self._followers.lost
        if lost.done():
            raise UnavailableError(lost.result().message)
        self._followers.send_command(command)


def follow(model: VideoLanguageModel, group: RankGroup, receive: Callable[[], RankCommand]) -> None:
    """Runs rank 0's commands on this rank's part until Stop."""
    prefills: dict[int, tuple[Generator[torch.Tensor | None], AttentionTap | None]] = {}
    while not isinstance(command := receive(), Stop):
        try:
            if isinstance(command, Call):
                getattr(model, command.method)(*command.arguments)
            elif isinstance(command, BeginPrefill):
                prefills[command.number] = _begin(model, group, command), command.tap
            elif isinstance(command, Advance):
                groups, tap = prefills[command.number]
                if _advance(groups, tap, group) is not None:
                    del prefills[command.number]
            else:
                prefills.pop(command.number)[0].close()
        except HippoError:
            # Rank 0 raises the same error.
            if isinstance(command, Advance):
                del prefills[command.number]


def _begin(
    model: VideoLanguageModel, group: RankGroup, command: BeginPrefill
) -> Generator[torch.Tensor | None]:
    """Receives the visual embeddings, and returns a follower's prefill with them."""
    visual = None
    if command.visual is not None:
        shape, dtype = command.visual
        visual = torch.empty(shape, dtype=dtype, device=group.device)
        group.broadcast(visual)
    return model.prefill(
        command.slot, command.prompt, visual, command.kept, command.tap, command.num_reused
    )


def _advance(
    pieces: Generator[torch.Tensor | None], tap: AttentionTap | None, group: RankGroup
) -> torch.Tensor | None:
    """Runs the next piece, and averages a tap's new scores over all ranks."""
    was_scored = tap is not None and tap.layer_scores is not None
    logits = next(pieces)
    if tap is not None and tap.layer_scores is not None and not was_scored:
        tap.layer_scores = group.mean(tap.layer_scores)
    return logits
