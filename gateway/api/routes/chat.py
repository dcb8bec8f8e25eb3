"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.answer import account, report, spans
from gateway.answer.choices import Choices
from gateway.answer.completion import Completion
from gateway.answer.events import EventLog
from gateway.answer.plan import SpeculationPlan
from gateway.answer.report import AnswerRecord, Timeline
from gateway.answer.text import Piece, join_pieces
from gateway.api import media_fields, speculation, sse, structured, translate
from gateway.api.openapi import CHAT_ANSWERED, answers
from gateway.api.schemas import ChatCompletionRequest, StreamOptions
from gateway.api.state import GatewayState, State
from gateway.common.budget import Holding
from gateway.common.errors import describe_error, request_took_too_long, server_is_stopping
from gateway.common.keys import Admission, Allowance
from gateway.media.reader import CopiedFiles
from gateway.pairs.targets import Pair
from hippo.base.tasks import cancel_all
from hippo.errors import HippoError, InvalidRequestError, MediaError, OverloadedError
from hippo.metrics import vllm
from hippo.types import Media, MediaKind, ModelInfo, OpenRequest, Pruning, PruningStrategy

router = APIRouter(prefix="/v1", tags=["chat"])

_LAST_WORD_S = 1.0
_SERVICES_GRACE_S = 1.0  # after the limit the services end a sequence, in case the gateway hangs
_NO_PRUNING = Pruning(PruningStrategy.NONE)


@router.post(
    "/chat/completions",
    response_model=None,
    responses=answers(400, 403, 404, 408, 409, 413, 429, 500, 503, 504, ok=CHAT_ANSWERED),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, state: State
) -> Response:
    """Answers a conversation about videos, images or neither."""
    return ChatResponse(body, request, state)


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
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }
        self._has_begun = False  # the status was or is being sent
        self._is_sent = False
        self._is_charged = False
        self._ending: HippoError | None = None  # why the answer was ended early

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._until_left(receive))
        work = asyncio.create_task(self._answer_within_limits(scope, receive, send))
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
                self._ending = server_is_stopping()
            elif not leaving.done():
                self._ending = request_took_too_long(limit_s)
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

    async def _answer_within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = translate.num_choices(self._body, self._state.settings)
        if self._admission is not None:
            self._admission.add_choices(count)
        urls = [url for _, _, url, _ in media_fields.media_parts(self._body)]
        with self._state.uploads.keeping(urls):
            await self._answer(count, scope, receive, send)

    async def _answer(self, count: int, scope: Scope, receive: Receive, send: Send) -> None:
        body, state = self._body, self._state
        settings, backends = state.settings, state.backends
        plan = speculation.speculation_plan(body.speculative, settings)
        info = backends.model(body.model)
        num_text_tokens = await backends.pair(info.name).target.text_limit.count_tokens(
            media_fields.texts(body), state.text_threads
        )
        request = translate.open_request(
            body,
            request_id=self._request_id,
            # Without a draft, the target need not score visual tokens.
            pruning=plan.pruning if plan.wants_draft and settings.draft else _NO_PRUNING,
            info=info,
            settings=settings,
            owner=self._owner,
            client=self._client,
            grammar=await structured.checked_grammar(body, state.trials),
            without_guesses=not plan.guesses,
        )
        media = await self._read_media(info)
        pairs = backends.pairs(info.name, await self._affinity_key(request.cache_salt, media))
        pair = pairs[0]
        for each in pairs:
            structured.check_support(body, each.target.info or info)
        calibration = pair.target.calibration
        can_calibrate = plan.is_default and plan.wants_draft and pair.draft is not None
        is_calibration = can_calibrate and calibration.is_due(request.max_tokens)
        if is_calibration:
            plan = replace(plan, policy_name="off")  # the answer is the same
            request = replace(request, pruning=_NO_PRUNING)
        dirs = pair.media_dirs(wants_draft=plan.wants_draft)
        request = replace(request, media=await self._copy_files(media, dirs))
        if any(item.kind is MediaKind.VIDEO for item in media):
            request = media_fields.with_visual_limit(
                request, num_text_tokens, info, ceiling=settings.max_visual_tokens
            )
        in_bytes = CopiedFiles(state.media, request.media, self._holding)
        counted = state.metrics.model(info.name)
        news = asyncio.Event()
        choices = Choices(
            [
                self._completion(
                    one, plan, pairs, is_calibration=is_calibration, news=news, in_bytes=in_bytes
                )
                for one in translate.choice_requests(request, count)
            ],
            news=news,
            waiting=counted[vllm.NUM_REQUESTS_WAITING],
            running=counted[vllm.NUM_REQUESTS_RUNNING],
        )
        try:
            async with choices:
                if body.stream:
                    await self._send_stream(choices, send)
                else:
                    await choices.wait_begun()
                    answer = JSONResponse(await self._collect(choices))
                    self._charge(choices)
                    self._has_begun = True
                    await answer(scope, receive, send)
                self._is_sent = True
        except HippoError as error:
            choices.mark_failed(error)
            if isinstance(error, OverloadedError):
                error.retry_after_s = pair.target.answer_s
            raise self._for_client(error) from None
        finally:
            if self._ending is not None:
                choices.mark_failed(self._ending)
            self._charge(choices)
            spans.describe_answer(self._head, request, choices)
            for completion in choices.completions:
                record, target = completion.record, completion.pair.target
                account.count_completion(
                    record,
                    request,
                    metrics=state.metrics,
                    model=counted,
                    target=target.address,
                    baseline=target.baseline,
                )
                if record.finish_reason is not None:
                    target.note_answer(record.served_s)
                if record.policy != "off" and record.num_completion_tokens > 1:
                    target.calibration.note_context_length(record.mean_context_length)

    def _charge(self, choices: Choices) -> None:
        """Charges the key once, before the last byte: the client may then ask again at once."""
        if self._allowance is not None and not self._is_charged:
            self._is_charged = True
            self._allowance.charge_visual_tokens(choices.num_visual_tokens)

    def _completion(
        self,
        request: OpenRequest,
        plan: SpeculationPlan,
        pairs: Sequence[Pair],
        *,
        is_calibration: bool,
        news: asyncio.Event,
        in_bytes: CopiedFiles,
    ) -> Completion:
        body, settings = self._body, self._state.settings
        limit_s = settings.request_timeout_s
        return Completion(
            request,
            plan=plan,
            pairs=pairs,
            stops=body.stop,
            draft_stall_s=settings.draft_stall_s,
            timeout_s=limit_s + _SERVICES_GRACE_S if limit_s else None,
            record=AnswerRecord(
                policy=plan.policy_name,
                received_ns=self._received_ns,
                opened_ns=time.monotonic_ns(),
                is_calibration=is_calibration,
                timeline=Timeline() if body.return_timeline else None,
                events=(
                    EventLog(pairs[0].target.token_bytes, self._received_ns, news.set)
                    if body.return_events
                    else None
                ),
            ),
            news=news,
            copy_files=in_bytes.read,
        )

    async def _collect(self, choices: Choices) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in choices.completions]
        async for index, piece in choices.pieces():
            if piece is not None:
                pieces[index].append(piece)
        made = []
        for index, (completion, parts) in enumerate(zip(choices.completions, pieces, strict=True)):
            answer = join_pieces(parts)
            choice = sse.choice_json(
                index,
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}},
                logprobs=answer.logprobs if self._body.logprobs else None,
                finish_reason=completion.finish_reason,
                token_ids=self._token_ids(completion),
            )
            made.append(choice | (completion.reports if len(pieces) > 1 else {}))
        return {
            **self._head,
            "object": "chat.completion",
            "choices": made,
            "usage": choices.usage,
            **choices.completions[0].reports,
        }

    async def _read_media(self, info: ModelInfo) -> tuple[Media, ...]:
        sources = media_fields.media_sources(self._body, info, self._owner)
        return await self._state.media.read_media(sources, self._holding, owner=self._owner)

    async def _copy_files(
        self, media: Sequence[Media], open_dirs: Sequence[Sequence[str]]
    ) -> tuple[Media, ...]:
        try:
            return await self._state.media.copy_files(media, self._holding, open_dirs)
        except MediaError as error:
            raise self._for_client(error) from None

    async def _affinity_key(self, salt: str, media: Sequence[Media]) -> bytes:
        if not self._state.backends.has_choice:
            return b""
        return await asyncio.to_thread(media_fields.affinity_key, self._body, salt, media)

    async def _send_stream(self, choices: Choices, send: Send) -> None:
        """Starts the stream when the prompt was read, so that a bad prompt gets an error status,
        or after the first silence, with comments that keep the connection open."""
        options = self._body.stream_options or StreamOptions()
        idle_s = self._state.settings.stream_keepalive_s or None
        writer = sse.ChunkWriter(self._head, include_usage=options.include_usage)

        def usage() -> dict[str, Any] | None:
            return choices.usage if options.continuous_usage_stats else None

        async def send_bytes(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        has_begun = await choices.wait_begun(idle_s)
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        try:
            while not has_begun:
                await send_bytes(sse.KEEPALIVE)
                has_begun = await choices.wait_begun(idle_s)
            for index in range(len(choices.completions)):
                delta = {"role": "assistant", "content": ""}
                await send_bytes(writer.chunk(index, delta, usage=usage()))
            async for index, piece in choices.pieces(idle_s):
                chunk = sse.KEEPALIVE
                if piece is None:
                    completion = choices.completions[index]
                    chunk = writer.chunk(
                        index,
                        {},
                        finish_reason=completion.finish_reason,
                        token_ids=self._token_ids(completion),
                        usage=usage(),
                        reports=completion.reports,
                    )
                elif piece:
                    chunk = writer.chunk(
                        index,
                        {"content": piece.text} if piece.text or piece.logprobs else {},
                        logprobs=piece.logprobs or None,
                        usage=usage(),
                        events=piece.events,
                    )
                await send_bytes(chunk)
        except HippoError as error:
            choices.mark_failed(error)
            await send_bytes(sse.event(describe_error(self._for_client(error))), more=False)
            return
        except asyncio.CancelledError:
            if self._ending is not None:
                # Bounded, because the client may not be reading.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORD_S):
                        await send_bytes(sse.event(describe_error(self._ending)), more=False)
            raise
        self._charge(choices)
        metrics = report.client_metrics(choices.records[0])
        await send_bytes(writer.end_stream(usage=choices.usage, metrics=metrics), more=False)

    def _for_client(self, error: HippoError) -> HippoError:
        if isinstance(error, InvalidRequestError):
            return translate.in_clients_words(error, self._body)
        return error

    def _token_ids(self, completion: Completion) -> list[int] | None:
        return completion.token_ids if self._body.return_token_ids else None
