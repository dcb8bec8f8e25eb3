"""Rivals on the same checkpoints: transformers' generate(), alone and with an assistant model.

Run in a process of its own, pinned to the cores it may use:
`python -m bench.rivals --clips FOLDER --cores 1 --dtype float32 --out rivals.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Times each rival on each clip and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.rivals", description=__doc__)
    parser.add_argument("--clips", type=Path, required=True, help="folder written by the benchmark")
    parser.add_argument("--cores", default="1", help="CPU cores to run on, such as 1 or 0,1")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-clips", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cores = {int(core) for core in args.cores.split(",")}
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    records = time_rivals(args.clips, args.dtype, args.num_clips, len(cores))
    args.out.write_text(json.dumps(records, indent=1), encoding="utf-8")
    for name in records[0]["seconds"]:
        mean = statistics.fmean(record["seconds"][name] for record in records)
        sys.stdout.write(f"{name:24} {1e3 * mean:8.0f} ms a clip, request to last token\n")


def time_rivals(folder: Path, dtype: str, num_clips: int, num_threads: int) -> list[dict[str, Any]]:
    """One record a clip: seconds by rival, tokens, and whether both gave the same ids."""
    from hippo.models._torchvision import ensure_torchvision

    ensure_torchvision()
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from bench.clips import read_clips

    torch.set_num_threads(num_threads)

    model_class: Any = Qwen2_5_VLForConditionalGeneration
    processor_class: Any = AutoProcessor
    models = ROOT / "demo/models"
    target, draft = (
        model_class.from_pretrained(models / name, dtype=getattr(torch, dtype)).eval()
        for name in ("target", "draft")
    )
    processor = processor_class.from_pretrained(models / "target")
    records = []
    for number, clip in enumerate([None, *read_clips(folder)[:num_clips]]):
        warm = clip is None
        chosen = read_clips(folder)[0] if clip is None else clip
        outputs: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for name, assistant in (("generate()", None), ("assistant_model", draft)):
            begin = time.perf_counter()
            inputs = processor.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "video", "path": str(chosen.path)},
                            {"type": "text", "text": chosen.question},
                        ],
                    }
                ],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            prompt_length = inputs["input_ids"].shape[1]
            with torch.inference_mode():
                output = target.generate(
                    **inputs, assistant_model=assistant, do_sample=False, max_new_tokens=256
                )
            seconds[name] = time.perf_counter() - begin
            outputs[name] = output[0, prompt_length:].tolist()
        if not warm:
            records.append(
                {
                    "clip": chosen.path.name,
                    "seconds": seconds,
                    "num_tokens": len(outputs["generate()"]),
                    "is_equal": outputs["generate()"] == outputs["assistant_model"],
                    "number": number,
                }
            )
    return records


if __name__ == "__main__":
    main()
