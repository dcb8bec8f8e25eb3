"""Times transformers' generate() on the same checkpoints, alone and with an assistant model.

It runs in a process pinned to the cores that it may use:
`python -m bench.answers.rivals --clips FOLDER --cores 1 --dtype float32 --out rivals.json`.
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

from bench.base.clips import ClipFile, read_clips
from bench.base.environment import ROOT


def main() -> None:
    """Times each rival on each clip and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.answers.rivals", description=__doc__)
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
    """Returns a record per clip: seconds by rival, tokens, and whether both outputs are equal."""
    from hippo.models.loading._torchvision import ensure_torchvision

    ensure_torchvision()
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(num_threads)

    model_class: Any = Qwen2_5_VLForConditionalGeneration
    processor_class: Any = AutoProcessor
    models = ROOT / "demo/models"
    target, draft = (
        model_class.from_pretrained(models / name, dtype=getattr(torch, dtype)).eval()
        for name in ("target", "draft")
    )
    # generate() needs embeddings of equal size to take an assistant with the same tokenizer.
    draft.resize_token_embeddings(target.get_input_embeddings().num_embeddings)
    processor = processor_class.from_pretrained(models / "target")
    records = []
    clips = read_clips(folder)[:num_clips]
    for number, chosen in enumerate([clips[0], *clips]):  # the first warms up
        outputs: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for name, assistant in (("generate()", None), ("assistant_model", draft)):
            begin = time.perf_counter()
            inputs = _inputs(processor, chosen)
            prompt_length = inputs["input_ids"].shape[1]
            with torch.inference_mode():
                output = target.generate(
                    **inputs, assistant_model=assistant, do_sample=False, max_new_tokens=256
                )
            seconds[name] = time.perf_counter() - begin
            outputs[name] = output[0, prompt_length:].tolist()
        if number > 0:
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


def _inputs(processor: Any, clip: ClipFile) -> Any:
    """Prepares a prompt with PyAV as the decoder and transformers' processor."""
    from demo.world.clips import read_mp4

    frames, rate = read_mp4(clip.path)
    content = [{"type": "video"}, {"type": "text", "text": clip.question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    metadata = {
        "fps": rate,
        "total_num_frames": len(frames),
        "duration": len(frames) / rate,
        "frames_indices": list(range(len(frames))),
    }
    inputs = processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=True,
        return_tensors="pt",
    )
    inputs.pop("video_metadata", None)
    return inputs


if __name__ == "__main__":
    main()
