"""A client that sends what it likes, as raw bytes, and counts what comes back."""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hippo.client.requests import new_salt

MB = 1_000_000
CHAT = "/v1/chat/completions"
ADDRESS = "127.0.0.2"  # other than that of ordinary clients, whose connections may be counted
PAUSE_S = 0.1  # after each reply: what is tried is the weight of requests, not their number
_FIRST_OUTCOME_S = 30.0
AGAIN_S = 1.0  # until a connection that the server closed is opened again


@dataclass(frozen=True, slots=True)
class Aim:
    """Who is attacked how, and with which keys."""

    attack: str
    host: str
    port: int
    key: str
    victims_key: str
    services: Mapping[str, str]  # host:port of the draft and the target


@dataclass(slots=True)
class Attacker:
    """Sends things to the gateway and counts what comes back."""

    aim: Aim
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # what a server must not let happen

    async def run(self, workers: Iterable[Coroutine[Any, Any, None]]) -> dict[str, Any]:
        """Runs them until the standard input ends; returns what they got."""
        before_s = time.process_time()
        tasks = [asyncio.create_task(worker) for worker in workers]
        ended = asyncio.create_task(self._until_the_end())
        await asyncio.wait((*tasks, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for ending in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ending, Exception):
                raise ending
        cpu_s = time.process_time() - before_s
        return {"outcomes": self.outcomes, "broken": sorted(set(self.broken)), "cpu_s": cpu_s}

    async def _until_the_end(self) -> None:
        """As it may have had no processor time, it waits for an outcome, too."""
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_OUTCOME_S):
                while not self.outcomes:
                    await asyncio.sleep(PAUSE_S)

    async def keep_posting(self, path: str, *bodies: bytes, **options: Any) -> None:
        """Posts one body after the other, again and again."""
        for body in itertools.cycle(bodies):
            await self.post(path, body, **options)
            await asyncio.sleep(PAUSE_S)

    async def keep_asking(self, *bodies: bytes, **options: Any) -> None:
        """Asks one chat completion after the other, each with a new salt: no cache helps."""
        for body in itertools.cycle(bodies):
            salted = b'%b, "cache_salt": "%b"}' % (body[:-1], new_salt().encode())
            await self.post(CHAT, salted, **options)
            await asyncio.sleep(PAUSE_S)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        key: str | None = None,
        leaves_after_s: float | None = None,
        kind: str = "application/json",
        **headers: str,
    ) -> bytes:
        """Returns the whole reply; b"" if there is none."""
        lines = {"connection": "close", "content-type": kind, **headers}
        head = self.head(path, len(body), key=key, **lines)
        reader, writer = await self._connect()
        reading = asyncio.create_task(_reply(reader))  # which may come before all is sent
        outcome = "unanswered at the end"
        try:
            await _send(writer, itertools.chain((head,), _pieces(body)))
            if leaves_after_s is not None:
                await asyncio.sleep(leaves_after_s)
                outcome = "left"
                return b""
            reply = await reading
            outcome = status_of(reply)
            return reply
        finally:
            self.outcomes[outcome] += 1
            reading.cancel()
            writer.transport.abort()

    def head(self, path: str, num_bytes: int, *, key: str | None = None, **headers: str) -> bytes:
        """The head of a POST with a body of so many bytes; with key "" without one."""
        key = self.aim.key if key is None else key
        own = {"authorization": f"Bearer {key}"} if key else {}
        length = str(num_bytes)
        return head_of(
            "POST", path, {**own, "host": self.aim.host, "content-length": length, **headers}
        )

    async def keep_open(self, opening: Sequence[bytes], *, then: bytes = b"") -> None:
        """Sends ``opening`` and then the bytes of ``then``, one a second; waits until the server
        closes the connection, and begins again."""
        while True:
            reader, writer = await self._connect()
            self.outcomes["opened"] += 1
            sending = asyncio.create_task(_send_slowly(writer, opening, then))
            try:
                while data := await reader.read(MB):
                    if data.startswith(b"HTTP/"):
                        self.outcomes[status_of(data)] += 1
                self.outcomes["closed"] += 1
            except OSError:
                self.outcomes["cut off"] += 1
            finally:
                sending.cancel()
                writer.transport.abort()
            await asyncio.sleep(AGAIN_S)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    self.aim.host, self.aim.port, local_addr=(ADDRESS, 0)
                )
            except OSError:
                self.outcomes["not connected"] += 1
                await asyncio.sleep(AGAIN_S)
                continue
            # What was written is with the kernel when it was drained, and is sent in any case.
            writer.transport.set_write_buffer_limits(0)
            return reader, writer


def head_of(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Request line and headers."""
    lines = (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def _pieces(body: bytes) -> Iterable[bytes]:
    return (body[start : start + MB] for start in range(0, len(body), MB))


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    """Ends early if the server takes no more."""
    with suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()


async def _send_slowly(writer: asyncio.StreamWriter, opening: Iterable[bytes], then: bytes) -> None:
    await _send(writer, opening)
    for place in range(len(then)):
        await asyncio.sleep(1.0)
        writer.write(then[place : place + 1])


async def _reply(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the connection ends, or the first line if it breaks off."""
    line = b""
    with suppress(OSError):
        line = await reader.readline()
        return line + await reader.read()
    return line


def status_of(reply: bytes) -> str:
    """The status of a reply, or that there is none."""
    return reply.split(b" ", 2)[1].decode() if reply.startswith(b"HTTP/1.1 ") else "no reply"
