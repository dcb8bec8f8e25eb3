"""What the transport costs: block to verdict through a real target service and a free model.

``python -m bench.rpc_round`` starts the service in a process of its own, sends it a block, waits
for the verdict, and so on; prints microseconds a round. The model's forward costs nothing, so a
round is two messages over gRPC, the engine's bookkeeping and the sampler's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import torch

from hippo import event_loop
from hippo.models.base import AttentionTap, DecodedMedia, FeatureCache, Prompt, StepPlan
from hippo.rpc.client import TargetClient
from hippo.types import (
    Block,
    ChatMessage,
    FramePlan,
    Media,
    ModelInfo,
    OpenRequest,
    Pace,
    PromptInfo,
    Pruning,
    SamplingParams,
    Selection,
    StepLimits,
    TextPart,
    Verdict,
)

_TOKEN_ID = 3
_NUM_TOKEN_IDS = 512
_NUM_DRAFTED = 4
_MAX_CONTEXT = 1 << 20


class FreeModel:
    """Always proposes the same token, at no cost."""

    def __init__(self) -> None:
        self.info = ModelInfo(
            name="free",
            family="free",
            device="cpu",
            dtype="float32",
            tokenizer_hash=b"",
            tokenizer_json=b"",
            num_token_ids=_NUM_TOKEN_IDS,
            end_token_ids=(),
            max_context_length=_MAX_CONTEXT,
            num_slots=1,
            num_parameters=0,
        )
        self._logits = torch.zeros(64, _NUM_TOKEN_IDS)
        self._logits[:, _TOKEN_ID] = 1.0

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def joins_tails(self) -> bool:
        return False

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        nothing = torch.empty(0, dtype=torch.int64)
        ids = torch.tensor([_TOKEN_ID])
        return Prompt(ids, ids[None], 1, nothing, (), nothing, b"")

    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        return None

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Iterator[torch.Tensor | None]:
        yield self._logits[0]

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        pass

    def forward(self, plan: StepPlan) -> torch.Tensor:
        return self._logits[: plan.num_rows]


class _NoDecoder:
    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        raise AssertionError("the request has no media")


async def _serve() -> None:
    from services.target.config import TargetSettings
    from services.target.servicer import build_service

    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    service = build_service(TargetSettings(model="free"))
    port = await service.start("127.0.0.1", 0)
    await service.serve_model(FreeModel(), _NoDecoder())
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await stopping.wait()
    await service.stop()


async def _measure(port: int, num_rounds: int) -> tuple[list[float], list[Verdict]]:
    limits = StepLimits(_NUM_DRAFTED, _NUM_DRAFTED, wait_ns=10**12)
    request = OpenRequest(
        request_id="bench",
        messages=(ChatMessage("user", (TextPart("go"),)),),
        media=(),
        sampling=SamplingParams(),
        frame_plan=FramePlan(),
        pruning=Pruning(),
        max_tokens=_MAX_CONTEXT - 1,
        end_token_ids=(),
        pace=Pace(limits, limits, max_ahead=64, block_size=_NUM_DRAFTED),
    )
    client = TargetClient(f"127.0.0.1:{port}")
    rounds: list[float] = []
    verdicts: list[Verdict] = []
    began_ns = 0
    async with client.verify(request) as stream:
        async for message in stream:
            if isinstance(message, PromptInfo | Selection):
                continue
            verdicts.append(message)
            if len(verdicts) > 1:
                rounds.append((perf_counter_ns() - began_ns) / 1e3)
            if len(rounds) == num_rounds:
                break
            start_index = message.start_index + len(message.token_ids)
            began_ns = perf_counter_ns()
            await stream.send(Block(message.epoch, start_index, (_TOKEN_ID,) * _NUM_DRAFTED))
    await client.close()
    return rounds, verdicts[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--cores", default="", help="two cores, client,service: such as 0,1")
    parser.add_argument("--switch-interval", type=float, help="of the service's interpreter, in s")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve:
        if arguments.switch_interval is not None:
            sys.setswitchinterval(arguments.switch_interval)
        event_loop.run(_serve())
        return
    command = [sys.executable, "-m", "bench.rpc_round", "--serve"]
    if arguments.switch_interval is not None:
        command += ["--switch-interval", str(arguments.switch_interval)]
    if arguments.cores:
        client_core, service_core = arguments.cores.split(",")
        os.sched_setaffinity(0, {int(client_core)})
        command = ["taskset", "-c", service_core, *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        rounds, verdicts = event_loop.run(_measure(port, arguments.rounds))
        child.terminate()
    rounds = rounds[len(rounds) // 10 :]
    deciles = statistics.quantiles(rounds, n=10)
    forward_us = statistics.median(v.timing.forward_ns / 1e3 for v in verdicts)
    sys.stdout.write(
        f"{len(rounds)} rounds: median {statistics.median(rounds):.0f} us, "
        f"10 % {deciles[0]:.0f}, 90 % {deciles[8]:.0f}; of it {forward_us:.0f} us in the forward "
        "(sampling alone)\n"
    )


if __name__ == "__main__":
    main()
