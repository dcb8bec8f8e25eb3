"""Which tests may be left out where every test is to run: with HIPPO_NO_SKIPS=1 any other skip is a
failure."""

import os
import re

import pytest

_VARIABLE = "HIPPO_NO_SKIPS"
# What a machine of CI can lack, as the reason of the skip says it.
_ALLOWED = (
    "needs a CUDA device",
    "no Docker engine answers",
    "docker compose is not installed",  # but the older docker-compose is
    r"the base image \S+ cannot be had",
    r"no image of \w+ can be had",
    r"node is v\d\S+; the example is for 20 and later",  # Debian's
)
_PATTERN = re.compile("|".join(_ALLOWED))


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes the report of a skip a failure if HIPPO_NO_SKIPS is 1, but for the reasons above."""
    if os.environ.get(_VARIABLE) != "1" or not report.skipped or hasattr(report, "wasxfail"):
        return
    where = report.longrepr
    reason = (where[2] if isinstance(where, tuple) else str(where)).removeprefix("Skipped: ")
    if not _PATTERN.fullmatch(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped, though {_VARIABLE}=1: {reason}"
