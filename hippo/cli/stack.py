"""Draft, target and gateway as child processes on this machine."""

import argparse
import itertools
import json
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from hippo.cli.processes import Child, StackError
from hippo.errors import InvalidRequestError

_HIPPO = Path(__file__).resolve().parents[1]
_CHECKOUT = _HIPPO.parent / "demo"
# The checkout's demo/, else the folder where setup.py installs its models and clips.
BUNDLED = _CHECKOUT if (_CHECKOUT / "models").is_dir() else _HIPPO / "bundled"
BUNDLED_PAIR = BUNDLED / "models"
BUNDLED_CLIPS = BUNDLED / "clips"
_MODULES = {"draft": "services.draft", "target": "services.target", "gateway": "gateway"}
_POLL_S = 0.05
_SHARED_MEMORY = "/dev/shm"
_SERVICES_HOST = "127.0.0.1"  # draft and target ask for no key, so nobody else may reach them
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # from this machine
_SERVICES_GRACE_S = 15.0  # without the gateway they have nothing to finish
_CLOSING_S = 10.0  # more than the gateway needs after its --shutdown-grace-s


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """How to start the services. Port 0 takes a free port; ``*_args`` are further flags."""

    target_model: str
    draft_model: str
    served_name: str = "hippo"
    target_device: str = "cpu"
    draft_device: str = "cpu"
    dtype: str = "auto"
    draft_dtype: str | None = None  # None: auto on a CPU, else as dtype
    target_quantization: str | None = None
    draft_quantization: str | None = None
    max_context_length: int | None = None  # both models'; None: as the memory allows
    target_core: int | None = None
    draft_core: int | None = None  # core of draft, gateway and prefill helper
    prefill_helper_layers: str = "0"  # of the target that a helper on the draft's device runs
    host: str = "127.0.0.1"  # the gateway's; the services listen on the loopback interface
    port: int = 8000
    target_port: int = 0
    draft_port: int = 0
    allowed_local_media_path: str = ""  # directories, separated by commas, for all three
    target_args: Sequence[str] = ()
    draft_args: Sequence[str] = ()
    gateway_args: Sequence[str] = ()

    @property
    def dtype_of_draft(self) -> str:
        """The --dtype of the draft service."""
        on_cpu = self.draft_device.startswith("cpu")
        return self.draft_dtype or ("auto" if on_cpu else self.dtype)


def bundled_clips() -> list[tuple[str, str]]:
    """Returns (path, question) of each bundled clip.

    Raises InvalidRequestError if no clips are installed.
    """
    facts = BUNDLED_CLIPS / "facts.json"
    if not facts.is_file():
        raise InvalidRequestError(f"there are no bundled clips in {BUNDLED_CLIPS}; give a --video")
    entries = json.loads(facts.read_text(encoding="utf-8"))
    return [(str(BUNDLED_CLIPS / entry["file"]), entry["question"]) for entry in entries]


def default_cores(target_device: str, draft_device: str) -> tuple[int | None, int | None]:
    """Returns the cores of target and draft, or (None, None) to pin nothing.

    Cores are pinned if both models run on a CPU and two cores are available.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if target_device == draft_device == "cpu" and len(cores) >= 2:
        return cores[1], cores[0]
    return None, None


class Stack:
    """Draft, target and gateway as processes; leaving the ``with`` block stops them.

    Threads call ``on_line(name, line)`` for each line of output.
    """

    def __init__(self, options: StackOptions, on_line: Callable[[str, str], None]) -> None:
        self._options = options
        self._gateway_grace_s = _shutdown_grace_s(options.gateway_args) + _CLOSING_S
        self._folder = tempfile.TemporaryDirectory(prefix="hippo-")
        self._frames = (
            tempfile.TemporaryDirectory(prefix="hippo-frames-", dir=_SHARED_MEMORY)
            if os.access(_SHARED_MEMORY, os.W_OK)
            else None
        )
        self._children = {name: Child(name, on_line) for name in _MODULES}
        self._uploads = Path(self._folder.name) / "uploads"
        self._uploads.mkdir()
        self._ports = {
            "draft": options.draft_port,
            "target": options.target_port,
            "gateway": options.port,
        }

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The gateway's address on this machine."""
        host = _REACHED_AT.get(self._options.host, self._options.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._ports['gateway']}"

    def port(self, name: str) -> int:
        """Returns the port of "draft", "target" or "gateway" after its start."""
        return self._ports[name]

    def address(self, name: str) -> str:
        """Returns where "draft" or "target" listens, as host:port."""
        return f"{_SERVICES_HOST}:{self.port(name)}"

    def child(self, name: str) -> Child:
        """Returns the process of "draft", "target" or "gateway"."""
        return self._children[name]

    def start(self) -> None:
        """Starts all three and waits until they listen; the models load afterwards.

        Raises StackError if a model is missing, a port is taken or a process ends.
        """
        self._check_options()
        self.start_service("draft", wait=False)
        self.start_service("target", wait=False)
        self._await_port("draft")
        self._await_port("target")
        self.start_service("gateway")

    def start_service(self, name: str, *, wait: bool = True) -> None:
        """Starts a process; a process that has ended restarts on its previous port."""
        self._port_file(name).unlink(missing_ok=True)
        self._children[name].start(_MODULES[name], self._arguments(name))
        if wait:
            self._await_port(name)

    def wait_ready(
        self,
        timeout_s: float = math.inf,
        *,
        on_wait: Callable[[str], None] = lambda waiting_for: None,
    ) -> None:
        """Waits until the gateway reports target and draft as ready.

        Calls ``on_wait`` with the reason for waiting, such as a download that takes hours. Raises
        StackError when a process ends, when draft and target do not fit together, or after
        ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                self.check_running()
                problem = self._readiness_problem(client)
                if problem is None:
                    return
                on_wait(problem)
                if time.monotonic() > deadline:
                    raise StackError(f"not ready after {timeout_s:g} s: {problem}")
                time.sleep(4 * _POLL_S)

    def check_running(self, *names: str) -> None:
        """Raises ProcessEndedError if a process, or one of those in ``names``, has ended."""
        for name in names or self._children:
            self._children[name].check_running()

    def stop(self) -> None:
        """Stops all processes: the gateway first, so that its answers can finish.

        The gateway is killed if it does not end soon after its own --shutdown-grace-s, draft and
        target if they do not end within 15 s.
        """
        for names, grace_s in (
            (("gateway",), self._gateway_grace_s),
            (("draft", "target"), _SERVICES_GRACE_S),
        ):
            for name in names:
                self._children[name].send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            for name in names:
                child = self._children[name]
                if not child.wait(max(deadline - time.monotonic(), 0.01)):
                    child.send_signal(signal.SIGCONT)
                    child.send_signal(signal.SIGKILL)
                    child.wait(5.0)
        self._folder.cleanup()
        if self._frames is not None:
            self._frames.cleanup()

    def _arguments(self, name: str) -> list[str]:
        options, paths = self._options, self._options.allowed_local_media_path
        flags: dict[str, object] = {
            "host": self._host(name),
            "port": self._ports[name],
            "port-file": self._port_file(name),
            "cpu-core": options.target_core if name == "target" else options.draft_core,
        }
        if name == "gateway":
            flags |= {
                "draft": self.address("draft"),
                "target": self.address("target"),
                "upload-dir": self._uploads,
                "allowed-local-media-path": paths,
                "page-samples": BUNDLED_CLIPS,
            }
        else:
            is_target = name == "target"
            flags |= {
                "model": getattr(options, f"{name}_model"),
                "device": getattr(options, f"{name}_device"),
                "dtype": options.dtype if is_target else options.dtype_of_draft,
                "quantization": getattr(options, f"{name}_quantization"),
                "served-name": options.served_name + ("" if is_target else "-draft"),
                "max-context-length": options.max_context_length,
                "shared-frames-dir": self._frames and self._frames.name,
                "allowed-local-media-path": f"{self._uploads},{paths}",
            }
            if is_target and options.prefill_helper_layers != "0":
                flags |= {
                    "prefill-helper-layers": options.prefill_helper_layers,
                    "prefill-helper-device": options.draft_device,
                    "prefill-helper-core": options.draft_core,
                }
        given = [(f"--{flag}", str(value)) for flag, value in flags.items() if value is not None]
        return [*itertools.chain(*given), *getattr(options, f"{name}_args")]

    def _host(self, name: str) -> str:
        return self._options.host if name == "gateway" else _SERVICES_HOST

    def _port_file(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.port"

    def _await_port(self, name: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        path = self._port_file(name)
        while not path.exists():
            self._children[name].check_running()
            if time.monotonic() > deadline:
                raise StackError(f"the {name} process did not listen within {timeout_s:g} s")
            time.sleep(_POLL_S)
        self._ports[name] = int(path.read_text())

    def _readiness_problem(self, client: httpx.Client) -> str | None:
        """Returns why the pair is not ready, or None. Raises StackError if it never will be."""
        try:
            response = client.get(f"{self.url}/ready")
            body = response.json()
        except (httpx.HTTPError, ValueError) as error:
            return f"the gateway: {error}"
        if response.status_code != 200:
            return str(body["error"]["message"])
        if body["draft"] == "ready":
            return None
        problem = str(body["draft_problem"])
        # It serves and is not used, because it does not fit the target; or it cannot be talked to.
        if body["num_drafts"]["up"] or "protocol version" in problem:
            raise StackError(problem)
        return problem

    def _check_options(self) -> None:
        for role, model in (
            ("target", self._options.target_model),
            ("draft", self._options.draft_model),
        ):
            looks_local = model.startswith(("/", ".", "~")) or model.count("/") != 1
            if looks_local and not (Path(model).expanduser() / "config.json").is_file():
                raise StackError(
                    f"there is no {role} model at {model}: expected a checkpoint folder (with "
                    f"config.json) or a name on the Hugging Face hub; choose with --{role}-model"
                )
        for name, port in self._ports.items():
            host = self._host(name)
            if port and _is_taken(host, port):
                flag = "--port" if name == "gateway" else f"--{name}-port"
                raise StackError(
                    f"port {port} of {host} is taken; choose another one for the "
                    f"{name} with {flag} (0: any free one)"
                )


def _shutdown_grace_s(gateway_args: Sequence[str]) -> float:
    """Returns the seconds that the gateway gives running answers after SIGTERM."""
    parser = argparse.ArgumentParser(add_help=False)
    default = os.environ.get("HIPPO_GATEWAY_SHUTDOWN_GRACE_S", "30")
    parser.add_argument("--shutdown-grace-s", type=float, default=default)
    return float(parser.parse_known_args(gateway_args)[0].shutdown_grace_s)


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
