"""The file of a form, however its body is cut into pieces; POST /tokenize for a client that does
not wait; events as clients parse them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import HTTPException, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from gateway.api.routes.tokenize import TokenizeRequest, tokenize
from gateway.api.routes.videos import FormFile
from gateway.api.sse import event
from hippo.errors import InvalidRequestError

DATA = b"\r\n--not the boundary\r\n" * 9


def _form(**files: bytes) -> tuple[str, bytes]:
    request = httpx.Request(
        "POST",
        "http://a/",
        data={"purpose": "vision"},
        files={name: (f"{name}.mp4", data, "video/mp4") for name, data in files.items()},
    )
    return request.headers["content-type"], request.read()


async def _pieces(body: Iterable[bytes], error: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece
    if error is not None:
        raise error


async def _read(content_type: str, body: AsyncIterator[bytes]) -> tuple[str, bytes]:
    form = FormFile(content_type, body)
    name, data = await form.read_head(), b""
    while piece := await form.read_piece():
        data += piece
    return name, data


@settings(deadline=None)
@given(st.integers(1, 400))
async def test_the_file_is_read_from_pieces_of_any_size(size: int) -> None:
    content_type, body = _form(other=b"another", file=DATA, more=b"yet another")
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    assert await _read(content_type, _pieces(cut)) == ("file.mp4", DATA)


async def test_a_form_without_the_file_or_of_another_type_is_refused() -> None:
    content_type, body = _form(other=b"another")
    with pytest.raises(InvalidRequestError, match="no file in the field 'file'"):
        await _read(content_type, _pieces([body]))
    for wrong in ("", "application/json", "multipart/form-data"):
        with pytest.raises(InvalidRequestError, match="expected multipart/form-data"):
            FormFile(wrong, _pieces([body]))
    with pytest.raises(InvalidRequestError, match="malformed"):
        await _read(content_type, _pieces([b"no boundary"]))
    with pytest.raises(InvalidRequestError, match="more than 64 parts"):
        await _read("multipart/form-data; boundary=b", _pieces([b"--b\r\n\r\n" * 200]))
    for boundary in ("x" * 2000, "\xe9"):
        with pytest.raises(InvalidRequestError, match=r"boundary|malformed|cut off"):
            await _read(f"multipart/form-data; boundary={boundary}", _pieces([body]))


@pytest.mark.parametrize("error", [None, ClientDisconnect()])
async def test_a_form_that_breaks_off_is_refused(error: Exception | None) -> None:
    content_type, body = _form(file=DATA)
    for end in (0, 20, len(body) - 8):
        with pytest.raises(InvalidRequestError):
            await _read(content_type, _pieces([body[:end]], error))


async def test_the_work_for_a_client_that_leaves_ends() -> None:
    has_begun, has_ended = asyncio.Event(), False

    async def leaves() -> Any:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def count_tokens(*_texts: Any, **_options: Any) -> None:
        nonlocal has_ended
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended = True

    target = SimpleNamespace(text_limit=SimpleNamespace(count_tokens=count_tokens))
    state: Any = SimpleNamespace(
        backends=SimpleNamespace(
            model=lambda _name: SimpleNamespace(name="m", max_context_length=512),
            pair=lambda _name: SimpleNamespace(target=target),
        ),
        text_threads=None,
    )
    request = Request({"type": "http"}, receive=leaves)
    with pytest.raises(HTTPException) as refused:
        await asyncio.wait_for(tokenize(TokenizeRequest(prompt="a"), request, state), 30)
    assert refused.value.status_code == 499 and has_ended


@pytest.mark.parametrize("text", ["plain", 'a "quote" \\ {brace}', "line\nbreak", "日本 \u2028 🦛"])
def test_an_event_carries_any_text(text: str) -> None:
    data = event({"content": text}).decode()
    assert len(data.splitlines()) == 2  # whatever a client takes for an end of line
    assert json.loads(data.removeprefix("data: ")) == {"content": text}
