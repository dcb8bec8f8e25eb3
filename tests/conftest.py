"""Fixtures that tests of several parts share."""

import functools
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.running.zygote import Zygote
from tests.support.skips import refuse_skip

# Tables are as wide as the terminal: what a test reads from one must not be cut off by it.
os.environ["COLUMNS"] = "160"

# The same examples in every run, so that a run is red by a change alone; no example has a time.
# `make nightly` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("same")

# A shell's background job starts with SIGINT ignored, and so would every process that a test starts
# and then ends with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip that the machine of CI does not explain is a failure there."""
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file."""
    report = yield
    refuse_skip(report)
    return report


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Leaves out of later garbage collections what is there, above all imported modules: each load
    of a model does a collection, and with them it takes half a second."""
    gc.collect()
    gc.freeze()


def _checkpoint(name: str, family: str = "qwen2_5_vl", **noise: Any) -> Any:
    """A fixture with a small random checkpoint; a draft has the target's weights with noise, with
    which it agrees on some tokens, and a larger vocabulary size."""

    @pytest.fixture(scope="session")
    def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
        from tests.support.models.families import write_family

        return write_family(tmp_path_factory.mktemp("checkpoint") / f"tiny-{name}", family, **noise)

    return checkpoint


target_checkpoint = _checkpoint("target")
draft_checkpoint = _checkpoint("draft", noise=0.05, vocab_size=320)
llava_checkpoint = _checkpoint("llava-target", "llava_onevision")
llava_draft_checkpoint = _checkpoint("llava-draft", "llava_onevision", noise=0.02, vocab_size=320)
internvl_checkpoint = _checkpoint("internvl-target", "internvl")
internvl_draft_checkpoint = _checkpoint("internvl-draft", "internvl", noise=0.02, vocab_size=320)
qwen3_checkpoint = _checkpoint("qwen3-target", "qwen3_vl")
qwen3_draft_checkpoint = _checkpoint("qwen3-draft", "qwen3_vl", noise=0.02, vocab_size=320)


@pytest.fixture(scope="session")
def start_zygote() -> Iterator[Callable[[], Zygote]]:
    """Starts, at its first call, the process that services are forked from."""
    started = functools.cache(Zygote)
    yield started
    if started.cache_info().currsize:
        started().close()


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate for 127.0.0.1 and one.example that it signed."""
    folder = tmp_path_factory.mktemp("pki")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority"
        " -keyout ca.key -out ca.pem",
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=service"
        " -keyout service.key -out service.csr",
        "x509 -req -in service.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
        " -extfile names -out service.pem",
    ):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:one.example\n")
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder
