"""Small things that the demo tests share."""

from typing import TYPE_CHECKING

import pytest

from demo.training import tokenizer
from demo.training.batches import Encoder
from hippo.models.loading._torchvision import ensure_torchvision
from tests.support.devices.threads import one_thread as one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ensure_torchvision()  # test modules import transformers' processors


@pytest.fixture(scope="session")
def trained() -> "PreTrainedTokenizerBase":
    """A tokenizer trained on a few scenes."""
    return tokenizer.train_tokenizer(num_scenes=40)


@pytest.fixture(scope="session")
def encoder(trained: "PreTrainedTokenizerBase") -> Encoder:
    """Its encoder."""
    return Encoder(trained, tokenizer.special_ids(trained))
