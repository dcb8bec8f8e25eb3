"""Small things that the demo tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from demo import tokenizer
from demo.batches import Encoder
from hippo.models._torchvision import ensure_torchvision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ensure_torchvision()  # test modules import transformers' processors


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are no faster with more threads, which wait for each other on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained() -> PreTrainedTokenizerBase:
    """A tokenizer trained on a few scenes."""
    return tokenizer.train_tokenizer(num_scenes=40)


@pytest.fixture(scope="session")
def encoder(trained: PreTrainedTokenizerBase) -> Encoder:
    """Its encoder."""
    return Encoder(trained, tokenizer.special_ids(trained))
