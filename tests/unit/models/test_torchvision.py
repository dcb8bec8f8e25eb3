"""torchvision is importable after ensure_torchvision, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys


def test_processors_can_be_imported_in_a_new_process() -> None:
    script = (
        "from hippo.models._torchvision import ensure_torchvision\n"
        "ensure_torchvision()\n"
        "ensure_torchvision()\n"
        "import gc; gc.collect()\n"
        "from torchvision.transforms.v2 import functional\n"
        "from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
