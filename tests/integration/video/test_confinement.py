"""What a worker cannot do, tried in a process that is confined as it is, and seen at a real one."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hippo.media.limits import DecodeLimits
from hippo.types import FramePlan
from hippo.video.decoder import MediaDecoder
from tests.support.clips import video

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines the worker")
_MAX_BYTES = 64 << 20

# Prints what confines it, and what becomes of each attempt.
TRIAL = """
import ctypes, json, os, socket, subprocess, sys, threading
from hippo.video.confinement import confine

FOLDER, MAX_BYTES = sys.argv[1], int(sys.argv[2])
here = FOLDER + "/here"

def thread():
    started = threading.Thread(target=int)
    started.start()
    started.join()

def clone(flags):
    if ctypes.CDLL(None, use_errno=True).syscall(CLONE, flags, 0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    raise SystemExit  # a second process

CLONE = {"x86_64": 56}.get(os.uname().machine, 220)
ATTEMPTS = {
    "read a file": lambda: open(here),
    "read one of the kernel's": lambda: open("/proc/self/status"),
    "list a folder": lambda: os.listdir(FOLDER),
    "write a file": lambda: open(FOLDER + "/new", "w"),
    "make a folder": lambda: os.mkdir(FOLDER + "/new"),
    "rename a file": lambda: os.rename(here, FOLDER + "/new"),
    "remove a file": lambda: os.unlink(here),
    "open a socket": lambda: socket.socket(),
    "open a local socket": lambda: socket.socket(socket.AF_UNIX),
    "open one for datagrams": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "fork": lambda: os._exit(9) if os.fork() == 0 else None,
    "clone": lambda: clone(17),
    "become a program": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 9"]),
    "run a program": lambda: subprocess.run(["/bin/sh", "-c", "exit 9"]),
    "send its parent a signal": lambda: os.kill(os.getppid(), 0),
    "start a thread": thread,
    "map a shared file": lambda: os.ftruncate(os.memfd_create("x"), MAX_BYTES),
    "map one that is too large": lambda: os.ftruncate(os.memfd_create("x"), MAX_BYTES + 1),
    "allocate too much": lambda: bytearray(2 * MAX_BYTES),
    "open many descriptors": lambda: [os.dup(0) for _ in range(16)],
}

open(here, "w").close()
found, results = confine(MAX_BYTES), {}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        results[name] = "done"
    except Exception as error:
        results[name] = type(error).__name__
print(json.dumps([found, results]))
"""
ALLOWED = {"start a thread": "done", "map a shared file": "done"}
LIMITED = {
    "map one that is too large": "OSError",
    "allocate too much": "MemoryError",
    "open many descriptors": "OSError",
}
OF_LANDLOCK_ALONE = {
    "make a folder",
    "rename a file",
    "remove a file",
    "send its parent a signal",  # of version 6
}


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    folder = tmp_path_factory.mktemp("confined")
    result = subprocess.run(
        [sys.executable, "-c", TRIAL, str(folder), str(_MAX_BYTES)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    found, results = json.loads(result.stdout)
    assert [each.name for each in folder.iterdir()] == ["here"] or "landlock" not in found
    return found, results


def test_what_the_worker_needs_is_left(trial: tuple[list[str], dict[str, str]]) -> None:
    _, results = trial
    assert results.items() >= (ALLOWED | LIMITED).items()


def test_files_sockets_processes_and_programs_are_refused(
    trial: tuple[list[str], dict[str, str]],
) -> None:
    found, results = trial
    if "seccomp" not in found:
        pytest.skip("this kernel has no seccomp")
    refused = {name for name, result in results.items() if result == "PermissionError"}
    assert refused | OF_LANDLOCK_ALONE == results.keys() - ALLOWED.keys() - LIMITED.keys()


def test_landlock_guards_what_has_a_name(trial: tuple[list[str], dict[str, str]]) -> None:
    found, results = trial
    if "landlock" not in found:
        pytest.skip("this kernel has no Landlock")
    for name in OF_LANDLOCK_ALONE - {"send its parent a signal"}:
        assert results[name] == "PermissionError"


async def test_a_worker_at_work_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    async with MediaDecoder(DecodeLimits(max_memory_bytes=_MAX_BYTES)) as decoder:
        await decoder.decode(video(), FramePlan())
        process = psutil.Process(decoder.worker_pids[0])
        expected = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"}
        assert all(name in expected or name.startswith("PYTHON") for name in process.environ())
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "\nNoNewPrivs:\t1\n" in status and "\nSeccomp:\t2\n" in status
        for limit, value in (
            (resource.RLIMIT_NOFILE, 16),
            (resource.RLIMIT_FSIZE, _MAX_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            assert process.rlimit(limit) == (value, value)
        assert 4 <= process.num_fds() <= 6  # none is left of the item
        assert os.readlink(f"/proc/{process.pid}/fd/0") == os.devnull
