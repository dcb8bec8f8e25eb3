"""Real services on port 0 around any model, and a relay between a draft and a target."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hippo.engine.media_cache import Decoder
from hippo.models.interface.base import VideoLanguageModel
from hippo.rpc.client import DraftClient, DraftStream, TargetClient, TargetStream
from hippo.service.backend import Backend
from hippo.service.service import EngineService
from hippo.speculation.coordinator import Action, Coordinator, ToTarget
from hippo.speculation.policies import make_policy
from hippo.types import (
    Block,
    ChatMessage,
    FramePlan,
    Hold,
    Media,
    MediaKind,
    MediaPart,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    TextPart,
    Verdict,
)
from services.draft import servicer as draft_servicer
from services.draft.config import DraftSettings
from services.target import servicer as target_servicer
from services.target.config import TargetSettings
from tests.support.models.toy_model import NUM_TOKEN_IDS, ToyDecoder, ToyModel

ClientT = TypeVar("ClientT", DraftClient, TargetClient)

POLICIES = ("off", "serial", "vpsd", "adaptive", "optimistic", "conservative")


def backend_of(service: EngineService) -> Backend:
    assert service.backend is not None
    return service.backend


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread or process brings about; the test's timeout ends it."""
    while not condition():
        await asyncio.sleep(0.005)


async def until_free(service: EngineService) -> None:
    """Waits until every slot is free."""
    await until(lambda: backend_of(service).slots.num_used == 0)


def build_draft(**changes: Any) -> EngineService:
    return draft_servicer.build_service(DraftSettings(model="toy", **changes))


def build_target(max_waiting: int = 4, **changes: Any) -> EngineService:
    settings = TargetSettings(model="toy", max_queue=max_waiting, **changes)
    return target_servicer.build_service(settings)


def with_tokenizer(model: ToyModel) -> ToyModel:
    """The gateway reads what the services say of their tokenizer."""
    words = {f"w{number}": number for number in range(NUM_TOKEN_IDS)}
    tokenizer_json = Tokenizer(WordLevel(words, unk_token="w0")).to_str().encode()
    model.info = dataclasses.replace(model.info, tokenizer_json=tokenizer_json)
    return model


async def no_files() -> tuple[Media, ...]:
    """Stands for the gateway's copying of files, where no media are files."""
    raise AssertionError("no service was given a path")


@asynccontextmanager
async def _serving(
    service: EngineService,
    make_client: Callable[[str], ClientT],
    model: VideoLanguageModel,
    decoder: Decoder | None,
) -> AsyncIterator[tuple[EngineService, ClientT]]:
    client = make_client(f"127.0.0.1:{await service.start('127.0.0.1', 0)}")
    try:
        await service.serve_model(model, decoder or ToyDecoder())
        yield service, client
    finally:
        await client.close()
        await service.stop()


def serving_draft(
    model: VideoLanguageModel, decoder: Decoder | None = None, **changes: Any
) -> AbstractAsyncContextManager[tuple[EngineService, DraftClient]]:
    """``changes`` are of the service's settings."""
    return _serving(build_draft(**changes), DraftClient, model, decoder)


def serving_target(
    model: VideoLanguageModel, decoder: Decoder | None = None, **changes: Any
) -> AbstractAsyncContextManager[tuple[EngineService, TargetClient]]:
    """``changes`` are of the service's settings, or ``max_waiting``."""
    return _serving(build_target(**changes), TargetClient, model, decoder)


@asynccontextmanager
async def serving_pair(
    target: VideoLanguageModel, draft: VideoLanguageModel, *, max_waiting: int = 4
) -> AsyncIterator[tuple[TargetClient, DraftClient]]:
    async with (
        serving_target(target, max_waiting=max_waiting) as (_, target_client),
        serving_draft(draft) as (_, draft_client),
    ):
        yield target_client, draft_client


def toy_request(text: str = "what happens?", **changes: Any) -> OpenRequest:
    """A question about a toy video of four frames: 16 visual tokens."""
    values: dict[str, Any] = {
        "request_id": "test",
        "messages": (ChatMessage("user", (MediaPart(0), TextPart(text))),),
        "media": (Media(MediaKind.VIDEO, b"toy:4"),),
        "sampling": SamplingParams(),
        "frame_plan": FramePlan(),
        "pruning": Pruning(PruningStrategy.UNIFORM, 0.5),
        "max_tokens": 60,
        "end_token_ids": (1,),
    }
    return OpenRequest(**(values | changes))


def text_request(**changes: Any) -> OpenRequest:
    """A request without media, which any model can answer."""
    messages = (ChatMessage("user", (TextPart("hello"),)),)
    return toy_request(**({"media": (), "messages": messages} | changes))


@asynccontextmanager
async def ready_client(make_client: Callable[[str], ClientT], port: int) -> AsyncIterator[ClientT]:
    """A client of a service in another process, which may be loading its model."""
    client = make_client(f"127.0.0.1:{port}")
    try:
        while await client.health_problem():  # the test's timeout ends it
            await asyncio.sleep(0.05)
        yield client
    finally:
        await client.close()


@dataclass
class Answer:
    """What a relayed sequence came to."""

    token_ids: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    selection: Selection | None = None

    def add(self, message: Any) -> None:
        """Notes what the target has sent."""
        if isinstance(message, Verdict):
            self.verdicts.append(message)
            self.token_ids += message.token_ids
        elif isinstance(message, Selection):
            self.selection = message


async def target_only(client: TargetClient, request: OpenRequest) -> Answer:
    """The answer without a draft."""
    answer = Answer()
    async with client.verify(request) as stream:
        async for message in stream:
            answer.add(message)
    return answer


async def relay(
    draft_client: DraftClient, target_client: TargetClient, request: OpenRequest, policy: str
) -> Answer:
    """The gateway's part, bare: both streams, and a coordinator between them."""
    coordinator = Coordinator(make_policy(policy, gamma=4, max_draft_tokens=8))
    coordinator.on_draft_ready()  # waited for from the start: small models are over at once
    request = dataclasses.replace(request, pace=coordinator.pace)
    answer = Answer()

    async def act(actions: list[Action], draft: DraftStream, target: TargetStream) -> None:
        for action in actions:
            to: Any = target if isinstance(action, ToTarget) else draft
            await to.send_message(action.message)

    async def pump_blocks(draft: DraftStream, target: TargetStream) -> None:
        async for message in draft:
            if isinstance(message, Block):
                answer.blocks.append(message)
                await act(coordinator.on_block(message, perf_counter_ns()), draft, target)

    async with draft_client.draft(request) as draft, target_client.verify(request) as target:
        pump = asyncio.create_task(pump_blocks(draft, target))
        try:
            async for message in target:
                answer.add(message)
                if isinstance(message, Hold | Selection):
                    await draft.send_message(message)
                elif isinstance(message, Verdict):
                    await act(coordinator.on_verdict(message, perf_counter_ns()), draft, target)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
    return answer
