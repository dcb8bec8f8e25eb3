"""POST /v1/chat/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.answer import report
from gateway.answer.account import count_completion, describe_answer
from gateway.answer.choices import Choices
from gateway.answer.completion import Completion
from gateway.answer.drafting import CopyFiles
from gateway.answer.events import EventLog
from gateway.answer.plan import SpeculationPlan
from gateway.answer.report import AnswerRecord, Timeline
from gateway.api import media_fields, sse, structured, translate
from gateway.api.openapi import CHAT_ANSWERED
from gateway.api.schemas import ChatCompletionRequest
from gateway.api.state import GatewayState, State
from gateway.common.budget import Holding
from gateway.common.errors import describe_error
from gateway.common.keys import Admission, Allowance
from gateway.media.reader import CopiedFiles
from gateway.pairs.targets import Pair
from hippo.base.tasks import cancel_all
from hippo.errors import (
    DeadlineError,
    HippoError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from hippo.metrics import vllm
from hippo.types import MediaKind, ModelInfo, OpenRequest, TextPart

router = APIRouter(prefix="/v1", tags=["chat"])

_LAST_WORD_S = 1.0
_SERVICES_GRACE_S = 1.0  # after the limit the services end a sequence, in case the gateway hangs


@router.post("/chat/completions", response_model=None, responses={200: CHAT_ANSWERED})
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, state: State
) -> Response:
    """Answers a conversation about videos, images or neither."""
    return ChatResponse(body, request, state)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is sent to the services, and to which pairs it is offered, in order."""

    request: OpenRequest
    plan: SpeculationPlan
    info: ModelInfo
    pairs: list[Pair]
    is_calibration: bool


class ChatResponse(Response):
    """Computes the answer while sending it.

    An error before the first byte is raised, and becomes an error status; a later error becomes the
    stream's last event. The answer ends early when the client disconnects, when the time limit is
    over, or when a stopping server has waited long enough.
    """

    def __init__(self, body: ChatCompletionRequest, request: Request, state: GatewayState) -> None:
        super().__init__()
        self._body = body
        self._state = state
        self._request_id: str = request.state.request_id
        self._received_ns: int = request.state.received_ns
        # Both are None if the server needs no API keys.
        self._allowance: Allowance | None = request.state.key
        self._admission: Admission | None = request.state.admission
        self._owner = None if self._allowance is None else self._allowance.name
        self._holding: Holding = request.state.body.holding
        self._client: str = request.state.body.client
        self._writer = sse.AnswerWriter(body)
        self._has_begun = False  # the status was or is being sent
        self._is_sent = False
        self._is_charged = False
        self._ending: HippoError | None = None  # why the answer was ended early

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._until_left(receive))
        work = asyncio.create_task(self._answer(scope, receive, send))
        stopping = asyncio.create_task(self._state.patience_is_over.wait())
        limit_s = self._state.settings.request_timeout_s
        try:
            await asyncio.wait(
                (work, leaving, stopping),
                timeout=report.seconds_left(limit_s, self._received_ns),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            is_over = work.done()
            if stopping.done():
                self._ending = UnavailableError(
                    "the server is stopping; it did not wait for the end of this answer"
                )
            elif not leaving.done():
                self._ending = DeadlineError(
                    f"the request took longer than {limit_s:g} s, this server's limit"
                )
            await cancel_all((work, leaving, stopping))
        if is_over:
            work.result()
        elif self._ending is not None and not self._has_begun:
            raise self._ending

    async def _until_left(self, receive: Receive) -> None:
        """Returns when the client disconnects before the whole answer was sent."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._is_sent:  # uvicorn sends http.disconnect also after a complete answer
            await asyncio.Event().wait()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = translate.num_choices(self._body, self._state.settings)
        if self._admission is not None:
            self._admission.add_choices(count)
        urls = [url for _, _, url, _ in media_fields.media_parts(self._body)]
        with self._state.uploads.keeping(urls):
            try:
                planned = await self._plan()
                async with self._opened(planned, count) as choices:
                    if self._body.stream:
                        await self._send_stream(choices, send)
                    else:
                        await choices.wait_begun()
                        answer = JSONResponse(await self._writer.whole(choices))
                        self._charge(choices)
                        self._has_begun = True
                        await answer(scope, receive, send)
                    self._is_sent = True
            except InvalidRequestError as error:
                raise translate.in_clients_words(error, self._body) from None

    async def _plan(self) -> _Planned:
        body, state = self._body, self._state
        settings, backends = state.settings, state.backends
        plan = translate.speculation_plan(body.speculative, settings)
        info = backends.model(body.model)
        request = translate.open_request(
            body,
            request_id=self._request_id,
            plan=plan,
            info=info,
            settings=settings,
            owner=self._owner,
            client=self._client,
            grammar=await structured.checked_grammar(body, state.trials),
        )
        texts = [each.thought for each in request.messages]
        parts = [part for each in request.messages for part in each.content]
        texts += [part.text for part in parts if isinstance(part, TextPart)]
        text_limit = backends.pair(info.name).target.text_limit
        texts = [text for text in texts if text]
        num_text_tokens = await text_limit.count_tokens(texts, state.text_threads)
        sources = media_fields.media_sources(body, info, self._owner)
        media = await state.media.read_media(sources, self._holding, owner=self._owner)
        key = b""
        if backends.has_choice:
            salt = request.cache_salt
            key = await asyncio.to_thread(media_fields.affinity_key, body, salt, media)
        pairs = backends.pairs(info.name, key)
        for each in pairs:
            structured.check_support(body, each.target.info or info)
            translate.template_values(body, each.target.info or info)  # all know the names
        pair = pairs[0]
        can_calibrate = plan.is_default and plan.wants_draft and pair.draft is not None
        is_calibration = can_calibrate and pair.target.baseline.is_due(request.max_tokens)
        if is_calibration:
            plan = replace(plan, policy_name="off")  # the answer is the same
            request = replace(request, pruning=translate.NO_PRUNING)
        dirs = pair.media_dirs(wants_draft=plan.wants_draft)
        media = await state.media.copy_files(media, self._holding, dirs)
        request = replace(request, media=media)
        if any(item.kind is MediaKind.VIDEO for item in media):
            request = media_fields.with_visual_limit(
                request, num_text_tokens, info, ceiling=settings.max_visual_tokens
            )
        return _Planned(request, plan, info, pairs, is_calibration)

    @contextlib.asynccontextmanager
    async def _opened(self, planned: _Planned, count: int) -> AsyncIterator[Choices]:
        """Opens the streams of all choices, closes them at the end of the block, whatever ends it,
        and accounts for the answer."""
        counted = self._state.metrics.model(planned.info.name)
        in_bytes = CopiedFiles(self._state.media, planned.request.media, self._holding)
        news = asyncio.Event()
        choices = Choices(
            [self._completion(planned, index, news, in_bytes.read) for index in range(count)],
            news=news,
            waiting=counted[vllm.NUM_REQUESTS_WAITING],
            running=counted[vllm.NUM_REQUESTS_RUNNING],
        )
        try:
            async with choices:
                yield choices
        except HippoError as error:
            choices.mark_failed(error)
            if isinstance(error, OverloadedError):
                error.retry_after_s = planned.pairs[0].target.answer_s
            raise
        finally:
            if self._ending is not None:
                choices.mark_failed(self._ending)
            self._account(choices, planned)

    def _completion(
        self, planned: _Planned, index: int, news: asyncio.Event, copy_files: CopyFiles
    ) -> Completion:
        body, settings = self._body, self._state.settings
        target, limit_s = planned.pairs[0].target, settings.request_timeout_s
        sampling = replace(planned.request.sampling, choice_index=index)
        return Completion(
            replace(planned.request, sampling=sampling),
            plan=planned.plan,
            pairs=planned.pairs,
            stops=body.stop,
            draft_stall_s=settings.draft_stall_s,
            timeout_s=limit_s + _SERVICES_GRACE_S if limit_s else None,
            record=AnswerRecord(
                policy=planned.plan.policy_name,
                received_ns=self._received_ns,
                opened_ns=time.monotonic_ns(),
                is_calibration=planned.is_calibration,
                timeline=Timeline() if body.return_timeline else None,
                events=(
                    EventLog(target.token_bytes, self._received_ns, news.set)
                    if body.return_events
                    else None
                ),
            ),
            news=news,
            copy_files=copy_files,
        )

    def _account(self, choices: Choices, planned: _Planned) -> None:
        self._charge(choices)
        describe_answer(self._writer.head, planned.request, choices)
        metrics = self._state.metrics
        for completion in choices.completions:
            count_completion(
                completion.record,
                planned.request,
                metrics=metrics,
                model=metrics.model(planned.info.name),
                target=completion.pair.target,
            )

    def _charge(self, choices: Choices) -> None:
        """Charges the key once, before the last byte: the client may then ask again at once."""
        if self._allowance is not None and not self._is_charged:
            self._is_charged = True
            self._allowance.charge_visual_tokens(choices.num_visual_tokens)

    async def _send_stream(self, choices: Choices, send: Send) -> None:
        """Starts the stream when the prompt was read, so that a bad prompt gets an error status,
        or after the first silence, with comments that keep the connection open."""
        idle_s = self._state.settings.stream_keepalive_s or None

        async def send_bytes(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        has_begun = await choices.wait_begun(idle_s)
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        try:
            while not has_begun:
                await send_bytes(sse.KEEPALIVE)
                has_begun = await choices.wait_begun(idle_s)
            async for chunk in self._writer.chunks(choices, idle_s):
                await send_bytes(chunk)
        except HippoError as error:
            choices.mark_failed(error)
            if isinstance(error, InvalidRequestError):
                error = translate.in_clients_words(error, self._body)
            await send_bytes(sse.event(describe_error(error)), more=False)
            return
        except asyncio.CancelledError:
            if self._ending is not None:
                # Bounded, because the client may not be reading.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORD_S):
                        await send_bytes(sse.event(describe_error(self._ending)), more=False)
            raise
        self._charge(choices)
        await send_bytes(self._writer.end_stream(choices), more=False)
