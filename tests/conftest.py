"""Fixtures that tests of several parts share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def target_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint in the target's role."""
    from tests.support.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("target") / "tiny-target")


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: agrees with it on some tokens; a larger vocabulary size."""
    from tests.support.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("draft") / "tiny-draft"
    return write_checkpoint(folder, noise=0.05, vocab_size=320)
