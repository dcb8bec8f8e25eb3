"""Loading a model with a prefill helper, and ending the helper's process."""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from hippo.base.worker_process import shared_file
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
from hippo.parallel.help import Setup
from hippo.parallel.help_memory import HelpMemory, layer_shape
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper_link import HelperLink
from hippo.pruning.select import default_score_layers

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # as `hippo up` has them for a draft


class HelpedSource:
    """Loads a model in this process, and its first layers in a helper's process.

    ``lost`` is not set by the end of the helper: the model reads prompts alone until the helper has
    been started again.
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
        self._is_closing = threading.Event()
        self._file = shared_file(0)  # in memory, shared with each process of the helper
        self._processes: FollowerProcesses | None = None
        self._restarting: threading.Thread | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._began_s = 0.0  # when the present process was ready

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
        shape = layer_shape(loaded, helper_plan.first_layers)
        num_rows = loaded.cache.shape.capacity
        try:
            with self._lock:
                if self._is_closing.is_set():
                    raise UnavailableError("the service is stopping")
                memory = HelpMemory(shape, num_rows, self._file, loaded.cache.device)
            link = HelperLink(memory, shape.num_layers)
            self._connect(processes, link, Setup(helper_plan, num_rows))
        except (HippoError, OSError) as error:
            if self._is_closing.is_set():
                raise
            _log.error("prompts are read without a helper: %s", error)
            processes.stop()
        else:
            model.helper = link
            _log.info("a prefill helper on %s runs the first %d layers", other, shape.num_layers)
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
            if self._is_closing.is_set():
                return
            self._is_closing.set()
            processes = self._processes
        if processes is not None:
            processes.stop()
            processes.wait_ended()
        if self._restarting is not None:
            self._restarting.join()
        os.close(self._file)

    def _start(self) -> FollowerProcesses:
        with self._lock:
            if self._is_closing.is_set():
                raise UnavailableError("the service is stopping")
            plan = replace(self._helper_plan, first_layers=1)  # until their number is known
            self._processes = FollowerProcesses(plan, "", Future(), memory=self._file)
            return self._processes

    def _connect(self, processes: FollowerProcesses, link: HelperLink, setup: Setup) -> None:
        """Waits until a helper's process is ready, and uses it; raises HippoError."""
        processes.on_news = link.add_news
        processes.send_command(setup)
        processes.wait_ready()
        link.use(processes.send_command)
        self._began_s = time.monotonic()
        processes.lost.add_done_callback(partial(self._note_end, processes, link, setup))

    def _note_end(
        self,
        processes: FollowerProcesses,
        link: HelperLink,
        setup: Setup,
        ended: "Future[HippoError]",
    ) -> None:
        link.lose()
        if time.monotonic() - self._began_s > _LONGEST_PAUSE_S:
            self._pause_s = _FIRST_PAUSE_S
        _log.error("%s; until it runs again, prompts are read without it", ended.result().message)
        self._restarting = threading.Thread(
            target=self._restart, args=(processes, link, setup), name="helper", daemon=True
        )
        self._restarting.start()

    def _restart(self, processes: FollowerProcesses, link: HelperLink, setup: Setup) -> None:
        """Starts the helper again. The pauses grow, so a helper that always fails costs little."""
        while True:
            processes.stop()
            processes.wait_ended()
            if self._is_closing.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            try:
                processes = self._start()
                self._connect(processes, link, setup)
            except HippoError as error:
                if not self._is_closing.is_set():
                    _log.warning("the prefill helper could not start: %s", error.message)
            else:
                _log.info("the prefill helper runs again")
                return
