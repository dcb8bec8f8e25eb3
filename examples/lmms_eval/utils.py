"""What clips.yaml calls."""

import os
from typing import Any


def doc_to_visual(doc: dict[str, Any]) -> list[str]:
    """Returns the path of the video, which is in the working folder."""
    return [os.path.abspath(doc["video"])]


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Returns 1 if the answer is the right one."""
    return {"right": float(results[0].strip() == doc["answer"])}
