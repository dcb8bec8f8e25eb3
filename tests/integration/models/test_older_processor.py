"""The bundled pair is served in every dtype by a process without AVX-512."""

import os
import subprocess
import sys

import pytest

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
