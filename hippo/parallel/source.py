"""Loading a model on several devices, and ending its processes."""

import contextlib
import logging
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hippo.catalog.shapes import shape_of
from hippo.errors import HippoError, InvalidRequestError, ModelLoadError, UnavailableError
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Checkpoint, Progress, find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import check_form, load_model
from hippo.models.loading.placement import parse_device
from hippo.models.products.group import RankGroup, backend_for
from hippo.models.products.shards import Shards, check_divisible
from hippo.parallel.followers import FollowerProcesses
from hippo.parallel.model import ParallelModel

_log = logging.getLogger(__name__)

_SETTLE_SECONDS = 5.0


class ParallelSource:
    """Loads a model in this process, which is rank 0, and in a follower for every other device.

    Any thread may call ``load``, once. ``close`` ends the followers in any state. ``lost`` is set
    when a rank has ended or failed, possibly while ``load`` still waits.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.lost: Future[HippoError] = Future()
        self._plan = plan
        self._lock = threading.Lock()
        self._is_closed = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # holds the rendezvous file
        self._followers: FollowerProcesses | None = None
        self._group: RankGroup | None = None
        self._is_loading = False

    def load(self, progress: Progress) -> VideoLanguageModel:
        """Returns the model; raises ModelLoadError, if possible before starting a process."""
        plan = self._plan
        devices = tuple(parse_device(name) for name in plan.rank_devices)
        backend_for(devices)
        checkpoint = find_checkpoint(
            plan.model, progress=progress, check=partial(check_form, plan, devices[0])
        )
        _check_heads(checkpoint, len(devices))
        rendezvous, followers = self._start(checkpoint, devices)
        self._is_loading = True
        try:
            group = self._group = RankGroup(rendezvous, 0, devices)
            local = load_model(
                replace(
                    plan,
                    model=str(checkpoint.folder),
                    served_name=plan.served_name or checkpoint.name,
                ),
                progress=progress,
                shards=Shards(group),
            )
            followers.wait_ready()
        except HippoError:
            raise
        except Exception as error:
            # The likely cause is a lost follower, whose listener thread will soon set ``lost``.
            with contextlib.suppress(TimeoutError):
                raise self.lost.result(timeout=_SETTLE_SECONDS) from error
            _log.error("loading failed", exc_info=error)
            raise ModelLoadError(f"the ranks could not load together: {error}") from error
        finally:
            self._is_loading = False
        _log.info("layers are shared among %s", ", ".join(map(str, devices)))
        return ParallelModel(local, group, followers)

    def close(self) -> None:
        """Ends the followers and leaves the group; later calls have no effect."""
        with self._lock:
            followers = None if self._is_closed else self._followers
            self._is_closed = True
        if followers is None:
            return
        followers.stop()
        if self._group is not None and not self._is_loading:
            # Leaving waits for work on the CUDA device, which may wait for a lost rank.
            if not self.lost.done() or self._group.device.type == "cpu":
                self._group.close()
        followers.wait_ended()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(
        self, checkpoint: Checkpoint, devices: tuple[torch.device, ...]
    ) -> tuple[str, FollowerProcesses]:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the service is stopping")
            self._folder = tempfile.TemporaryDirectory(
                prefix="hippo-ranks-", ignore_cleanup_errors=True
            )
            rendezvous = str(Path(self._folder.name) / "store")
            plan = self._plan.for_followers(str(checkpoint.folder), tuple(map(str, devices)))
            self._followers = FollowerProcesses(plan, rendezvous, self.lost)
            return rendezvous, self._followers


def _check_heads(checkpoint: Checkpoint, size: int) -> None:
    """Raises ModelLoadError if ``size`` ranks cannot share the checkpoint's heads."""
    try:
        shape = shape_of(checkpoint.name, checkpoint.config)
    except InvalidRequestError as error:
        raise ModelLoadError(error.message) from error
    check_divisible(shape, size)
