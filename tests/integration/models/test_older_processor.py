"""The bundled pair is served in every dtype by a process without AVX-512."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from tests.support.devices.older_processor import NUM_TOKENS
from tests.support.models.processors import SWITCHES


@pytest.mark.timeout(300)  # it loads eight models
def test_every_dtype_is_served_without_avx_512() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.devices.older_processor"],
        env=os.environ | SWITCHES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    if platform.machine() == "x86_64":  # elsewhere the switches do nothing
        assert not report["says_bfloat16"] and not report["packs_bfloat16"]
    half = "float16" if report["packs_half"] else "float32"
    plain = "bfloat16" if report["packs_bfloat16"] else "float32"
    answers = report["answers"]
    assert report["auto"] == [plain, half if half == "float16" else plain]
    for dtype, answer in answers.items():
        assert answer["dtypes"] == [dtype, dtype]
        assert len(answer["alone"]) == NUM_TOKENS
        assert len(answer["together"]) == NUM_TOKENS
        if dtype != "bfloat16":
            assert answer["together"] == answer["alone"], dtype
