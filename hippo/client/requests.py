"""Questions, and requests with the fields that a server takes."""

import base64
import json
import mimetypes
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hippo.client.server import Connection
from hippo.errors import InvalidRequestError

VIDEO_SUFFIXES = tuple(".mp4 .mkv .webm .avi .mov .m4v .3gp .mpg .mpeg .ts".split())
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
REMOTE = ("http://", "https://", "data:", "file://")
"""Beginnings of URLs, which are sent as they are."""

_PROBE_TOKENS = 8
_SALT = "cache_salt"


def new_salt() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Question:
    """Messages to answer; the seed matters at temperatures above 0."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    seed: int = 0


class UploadId(str):
    """The id of a video that the gateway has already."""


def question_about(text: str, *media: str, name: str = "", seed: int = 0) -> Question:
    """Returns a question about local files (sent in the request), URLs (fetched by the server) or
    uploads.

    Its name is ``name`` or else ``text``. Raises InvalidRequestError for an unreadable file.
    """
    content = [*map(_media_part, media), {"type": "text", "text": text}]
    return Question(name or text, [{"role": "user", "content": content}], seed)


def _media_part(video: str) -> dict[str, Any]:
    """Returns a video or image as a content part of a message."""
    suffix = Path(video).suffix.lower()
    kind = "image" if suffix in IMAGE_SUFFIXES else "video"
    url = video
    if not video.startswith(REMOTE) and not isinstance(video, UploadId):
        try:
            data = Path(video).expanduser().read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{video} cannot be read: {error.strerror}") from None
        media_type = mimetypes.guess_type(video)[0] or ""
        if not media_type.startswith(kind + "/"):
            media_type = "video/mp4" if kind == "video" else "image/jpeg"
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@dataclass(frozen=True, slots=True)
class Request:
    """A serialised request body without its cache salt."""

    unsalted: bytes
    has_salt: bool

    def body(self, salt: str | None = None) -> bytes:
        """Returns the bytes to send. A server that takes salts reuses cached data only of
        requests with the same ``salt``; the default is a new salt."""
        if not self.has_salt:
            return self.unsalted
        return self.unsalted[:-1] + f', "{_SALT}": "{salt or new_salt()}"}}'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """The parameters that all requests share, and the fields that the server takes.

    ``optional`` are fields that some servers refuse. Only a hippo gateway (``is_hippo``) gets a
    `speculative` object and is asked for token ids.
    """

    model: str
    max_tokens: int = 256
    temperature: float = 0.0
    optional: tuple[str, ...] = ("stream_options", "seed", _SALT)
    budget_name: str = "max_tokens"  # some OpenAI models take only max_completion_tokens
    is_hippo: bool = False
    further: Mapping[str, Any] = field(default_factory=dict)  # fields of every request

    def request(self, question: Question, speculative: Mapping[str, Any] | None = None) -> Request:
        """Returns a streaming chat completion request; only hippo gets ``speculative``."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            self.budget_name: self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            **self.further,
        }
        if "stream_options" in self.optional:
            body["stream_options"] = {"include_usage": True}
        if "seed" in self.optional:
            body["seed"] = question.seed
        if self.is_hippo:
            body["return_token_ids"] = True
            body["speculative"] = dict(speculative or {})
        return Request(json.dumps(body).encode(), _SALT in self.optional)


def probe(connection: Connection, question: Question, form: RequestForm) -> RequestForm:
    """Asks for a few tokens to find the fields that the server takes; returns the form with them.

    ``is_hippo`` is set if the answer has a hippo gateway's figures. Raises HippoError if the
    server refuses the question itself.
    """
    while True:
        short = replace(form, max_tokens=min(_PROBE_TOKENS, form.max_tokens))
        try:
            answer = connection.ask(short.request(question).body())
            return replace(form, is_hippo="timings_ms" in answer.figures)
        except InvalidRequestError as error:
            if "max_completion_tokens" in error.message and form.budget_name == "max_tokens":
                form = replace(form, budget_name="max_completion_tokens")
                continue
            named = {name for name in form.optional if name in error.message}
            named = named or {_SALT}.intersection(form.optional)  # what fewest servers know
            if not named:
                raise
            kept = tuple(name for name in form.optional if name not in named)
            form = replace(form, optional=kept)
