"""What the options of ``hippo up`` come to."""

from __future__ import annotations

import argparse

import pytest

from hippo.cli.up import add_stack_arguments, stack_options
from services.draft.config import DraftSettings
from services.target.config import TargetSettings


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        ((), "float32", "auto"),
        (("--dtype", "bfloat16"), "bfloat16", "auto"),
        (("--dtype", "bfloat16", "--draft-dtype", "float32"), "bfloat16", "float32"),
        (("--target-device", "cuda:0"), "auto", "auto"),
        (("--dtype", "bfloat16", "--draft-device", "cuda:1"), "bfloat16", "bfloat16"),
    ],
)
def test_a_draft_has_the_targets_dtype_unless_it_is_on_a_cpu(
    given: tuple[str, ...], target: str, draft: str
) -> None:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser, port=0)
    options = stack_options(parser.parse_args(given))
    assert (options.dtype, options.dtype_of_draft) == (target, draft)


def test_auto_is_half_precision_for_a_draft_alone() -> None:
    assert DraftSettings(model="a").auto_is_half
    assert not TargetSettings(model="a").auto_is_half
