"""Fixtures that tests of several parts share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

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


@pytest.fixture(scope="session")
def target_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint in the target's role."""
    from tests.support.models.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("target") / "tiny-target")


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: agrees with it on some tokens; a larger vocabulary size."""
    from tests.support.models.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("draft") / "tiny-draft"
    return write_checkpoint(folder, noise=0.05, vocab_size=320)


@pytest.fixture(scope="session")
def llava_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random LLaVA-OneVision checkpoint in the target's role."""
    from tests.support.models.llava import write_llava_checkpoint

    return write_llava_checkpoint(tmp_path_factory.mktemp("llava") / "tiny-llava-target")


@pytest.fixture(scope="session")
def llava_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise: agrees with it on some tokens; a larger vocabulary size."""
    from tests.support.models.llava import write_llava_checkpoint

    folder = tmp_path_factory.mktemp("llava-draft") / "tiny-llava-draft"
    return write_llava_checkpoint(folder, noise=0.02, vocab_size=320)


@pytest.fixture(scope="session")
def internvl_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random InternVL checkpoint in the target's role."""
    from tests.support.models.families import write_family

    return write_family(tmp_path_factory.mktemp("internvl") / "tiny-internvl-target", "internvl")


@pytest.fixture(scope="session")
def internvl_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise: agrees with it on some tokens; a larger vocabulary size."""
    from tests.support.models.families import write_family

    folder = tmp_path_factory.mktemp("internvl-draft") / "tiny-internvl-draft"
    return write_family(folder, "internvl", noise=0.02, vocab_size=320)


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3-VL checkpoint in the target's role."""
    from tests.support.models.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("qwen3") / "tiny-qwen3-target"
    return write_checkpoint(folder, family="qwen3_vl")


@pytest.fixture(scope="session")
def qwen3_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise: agrees with it on some tokens; a larger vocabulary size."""
    from tests.support.models.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("qwen3-draft") / "tiny-qwen3-draft"
    return write_checkpoint(folder, family="qwen3_vl", noise=0.02, vocab_size=320)


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
