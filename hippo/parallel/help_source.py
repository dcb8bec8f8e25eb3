"""Loading a model with a prefill helper, and ending the helper's process."""

import logging
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hippo.catalog.sizes import USED_SHARE
from hippo.errors import HippoError, ModelLoadError, UnavailableError
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Progress, find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import check_form, load_model, load_parts
from hippo.models.loading.memory import available_bytes
from hippo.models.loading.placement import parse_device
from hippo.models.loading.pretrained import Pretrained
from hippo.parallel.followers import FollowerProcesses
from hippo.parallel.help import LayerShape, Setup
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper import layer_shape
from hippo.parallel.helper_link import HelperLink
from hippo.parallel.link import Link
from hippo.pruning.select import default_score_layers

_log = logging.getLogger(__name__)


class HelpedSource:
    """Loads a model in this process, and its first layers in a helper's process.

    ``lost`` is not set by the end of the helper: the model then reads prompts alone.
    """

    def __init__(
        self,
        plan: LoadPlan,
        helper: LoadPlan,
        *,
        num_layers: int | None = None,
        score_layers: int | None = None,
    ) -> None:
        """``helper`` is the plan of the helper (LoadPlan.for_helper), which runs the first
        ``num_layers`` layers. None: half of them, and at least the layers that score visual tokens
        (``score_layers``; None: by default), so that the choice for the draft is made when the
        helper is done; fewer if the memory of the helper's device is too small."""
        self.lost: Future[HippoError] = Future()
        self._plan, self._helper_plan = plan, helper
        self._num_layers, self._score_layers = num_layers, score_layers
        self._lock = threading.Lock()
        self._is_closed = False
        self._folder = tempfile.TemporaryDirectory(
            prefix="hippo-helper-", ignore_cleanup_errors=True
        )
        self._processes: FollowerProcesses | None = None
        self._link: HelperLink | None = None

    def load(self, progress: Progress) -> VideoLanguageModel:
        """Returns the model, when its helper is ready or cannot start; raises HippoError."""
        device, other = parse_device(self._plan.device), parse_device(self._helper_plan.device)
        if device.type != other.type:
            raise ModelLoadError(
                f"the prefill helper is to run on {other}, and the model on {device}: both need to "
                "be GPUs, or both the CPU"
            )
        checkpoint = find_checkpoint(
            self._plan.model, progress=progress, check=partial(check_form, self._plan, device)
        )
        served_name = self._plan.served_name or checkpoint.name
        plan = replace(self._plan, model=str(checkpoint.folder), served_name=served_name)
        try:
            check_form(replace(plan, first_layers=1), device, checkpoint)
        except ModelLoadError as error:
            if self._num_layers is not None:
                raise
            _log.info("prompts are read without a helper: %s", error)
            return load_model(plan, progress=progress)
        processes = self._start()
        loaded, family = load_parts(plan, progress=progress)
        model = HelpedModel(loaded, family)
        helper_plan = replace(
            self._helper_plan,
            model=plan.model,
            dtype=model.info.dtype,
            max_context_length=model.info.max_context_length,
            first_layers=self._choose_layers(loaded, other),
        )
        try:
            model.helper = self._connect(helper_plan, processes, layer_shape(loaded))
        except (HippoError, RuntimeError, OSError) as error:
            if self._is_closed:
                raise
            _log.error("prompts are read without a helper: %s", error)
            processes.stop()
        progress("loading", 1.0)
        return model

    def _choose_layers(self, loaded: Pretrained, device: torch.device) -> int:
        """Returns the number of the helper's layers; raises ModelLoadError for all layers."""
        shape, num_all = loaded.shape, loaded.shape.num_layers
        if self._num_layers is not None:
            if self._num_layers >= num_all:
                raise ModelLoadError(
                    f"--prefill-helper-layers is {self._num_layers}, but {loaded.info.name} has "
                    f"{num_all} layers, of which the last stays with the target: give at most "
                    f"{num_all - 1}"
                )
            return self._num_layers
        wanted = max(num_all // 2, self._score_layers or default_score_layers(num_all))
        free, context = available_bytes(device), loaded.info.max_context_length
        bytes_each = loaded.model.get_input_embeddings().weight.element_size()

        def fits(num_layers: int) -> bool:
            part = shape.first_layers(num_layers)
            cache = part.cache_bytes(context, bytes_each=loaded.cache.dtype.itemsize)
            return part.weight_bytes(bytes_each=bytes_each) + cache <= USED_SHARE * free

        return next(filter(fits, range(min(wanted, num_all - 1), 0, -1)), 1)

    def close(self) -> None:
        """Ends the helper; later calls have no effect."""
        with self._lock:
            processes = None if self._is_closed else self._processes
            self._is_closed = True
        if processes is not None:
            processes.stop()
            processes.wait_ended()
            if self._link is not None:
                self._link.close()
        self._folder.cleanup()

    def _start(self) -> FollowerProcesses:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the service is stopping")
            plan = replace(self._helper_plan, first_layers=1)  # until their number is known
            self._processes = FollowerProcesses(plan, self._rendezvous, Future())
            return self._processes

    @property
    def _rendezvous(self) -> str:
        return str(Path(self._folder.name) / "store")

    def _connect(
        self, plan: LoadPlan, processes: FollowerProcesses, shape: LayerShape
    ) -> HelperLink:
        """Returns the link to the helper when it is ready."""
        assert plan.first_layers is not None
        processes.send_command(Setup(plan))
        processes.wait_ready()
        link = Link(self._rendezvous, 0)
        self._link = HelperLink(
            link,
            replace(shape, num_layers=plan.first_layers),
            processes.send_command,
            processes.give_up,
        )
        processes.lost.add_done_callback(partial(_note_end, self._link))
        _log.info("a prefill helper on %s runs the first %d layers", plan.device, plan.first_layers)
        return self._link


def _note_end(helper: HelperLink, ended: Future[HippoError]) -> None:
    helper.is_lost = True
    _log.error("%s; prompts are read without it from now on", ended.result().message)
