"""What one client with a key of its own can do to a server: ``python -m tests.soak.attacks JSON``.

A process of its own, so that its processor time is its own and no other client's thread waits for
it.
"""

import asyncio
import base64
import functools
import io
import itertools
import json
import os
import resource
import struct
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import grpc
import numpy as np
from grpc_reflection.v1alpha import reflection, reflection_pb2
from PIL import Image

from hippo.rpc.options import NO_PROXY
from tests.fuzz.corpus import encode, picture
from tests.soak.attacker import AGAIN_S, CHAT, MB, PAUSE_S, Aim, Attacker, head_of, status_of

_SPACES = b" " * MB  # JSON may have any number of spaces
_NUM_CONNECTIONS = 400
_NICE = 19  # the processor time that nobody else wants: the services have two cores
_JSON = {"content-type": "application/json"}
_MAX_OWN_SHARE = 0.5  # cached share of another key's prompt; a template's share is below

Workers = Iterable[Coroutine[Any, Any, None]]
Attack = Callable[[Attacker], Workers]


ATTACKS: dict[str, Attack] = {}
"""By name; each makes its payloads and returns what runs at once, as its docstring says."""


def _attack(make: Attack) -> Attack:
    ATTACKS[make.__name__.replace("_", "-")] = make
    return make


def chat(content: Any, **fields: Any) -> bytes:
    """The body of a request for a few tokens."""
    turn = {"role": "user", "content": content}
    return json.dumps({"model": "hippo", "messages": [turn], "max_tokens": 8, **fields}).encode()


def _about(kind: str, *files: bytes) -> bytes:
    def part(data: bytes) -> dict[str, Any]:
        url = f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}

    return chat([*map(part, files), {"type": "text", "text": "What is this?"}])


@_attack
def tokenize(at: Attacker) -> Workers:
    """/tokenize with 4 MB of text: of words, and of one word."""
    texts = (b"word " * (4 * MB // 5), b"a" * (4 * MB))
    bodies = [b'{"prompt": "%b"}' % text for text in texts]
    return [at.keep_posting("/tokenize", *bodies) for _ in range(2)]


@_attack
def long_chats(at: Attacker) -> Workers:
    """Chats of 8 MB of text whose client leaves at once, and of 12 MB whose client stays."""
    left, stayed = (chat("word " * (size * MB // 5)) for size in (8, 12))
    return [at.keep_asking(left, leaves_after_s=0.0), at.keep_asking(stayed)]


@_attack
def grammars(at: Attacker) -> Workers:
    """A large multipleOf, 900 optional properties, and regular expressions that explode."""
    properties = {f"property_{number}": {"type": "string"} for number in range(900)}
    schemas = (
        {"type": "integer", "multipleOf": 7_999_983},
        {"type": "object", "properties": properties, "additionalProperties": False},
    )
    regexes = ("(a?){900}a{900}", "(.*a.{14})+", "([a-z]{1,60}[0-9]{1,60}){1,60}")
    bodies = [chat("Say it.", guided_json=schema) for schema in schemas]
    bodies += [chat("Say it.", guided_regex=regex) for regex in regexes]
    return [at.keep_asking(*bodies), at.keep_asking(*reversed(bodies))]


def _attack_of_one(work: Callable[[Attacker], Coroutine[Any, Any, None]]) -> None:
    """Of an attack with a single worker."""
    _attack(functools.wraps(work)(lambda at: [work(at)]))


@_attack_of_one
async def many_grammars(at: Attacker) -> None:
    """A new grammar of 100 properties with each request."""
    while True:
        properties = {uuid.uuid4().hex: {"type": "string"} for _ in range(100)}
        schema = {"type": "object", "properties": properties}
        await at.post(CHAT, chat("Say it.", guided_json=schema))
        await asyncio.sleep(PAUSE_S)


@_attack
def unfinished_bodies(at: Attacker) -> Workers:
    """16 bodies of 100 MB that stop a byte before their end."""
    pieces = [at.head(CHAT, 100 * MB, **_JSON), *[_SPACES] * 99, _SPACES[:-1]]
    return [at.keep_open(pieces) for _ in range(16)]


@_attack
def slow_bodies(at: Attacker) -> Workers:
    """Bodies that come a byte a second."""
    opening = [at.head(CHAT, MB, **_JSON)]
    return [at.keep_open(opening, then=_SPACES) for _ in range(_NUM_CONNECTIONS)]


@_attack
def many_objects(at: Attacker) -> Workers:
    """A body of 40 MB whose metadata is a list of empty objects."""
    body = chat("Hello")[:-1] + b', "metadata": [' + b"{}, " * (10 * MB - 1) + b"{}]}"
    return [at.keep_asking(body)]


@_attack
def many_urls(at: Attacker) -> Workers:
    """A request with 100,000 data: URLs of small images."""
    pixel = picture("PNG", width=1, height=1)
    return [at.keep_asking(_about("image", *[pixel] * 100_000))]


@_attack
def gif(at: Attacker) -> Workers:
    """A GIF of 69 kB: 3,000 frames of one pixel, each on a canvas of 7,600 x 4,300."""
    head = b"GIF89a" + struct.pack("<HHBBB", 7600, 4300, 0x80, 0, 0) + bytes((0, 0, 0, 255, 9, 9))
    control = b"\x21\xf9\x04\x00" + struct.pack("<HBB", 10, 0, 0)  # a tenth of a second
    one_pixel = control + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return [at.keep_asking(_about("video", head + 3000 * one_pixel + b"\x3b"))]


@_attack
def png(at: Attacker) -> Workers:
    """PNGs of 16,000 x 16,000 pixels, and of as many as are allowed."""
    files = []
    for width, height, mode in ((16_000, 16_000, "1"), (7680, 4320, "RGB")):
        file = io.BytesIO()
        Image.new(mode, (width, height)).save(file, "PNG", compress_level=1)
        files.append(file.getvalue())
    return [at.keep_asking(*(_about("image", data) for data in files)) for _ in range(2)]


@_attack
def long_gop(at: Attacker) -> Workers:
    """A video of 3840 x 2160 with a single key frame."""
    black = np.zeros((2160, 3840, 3), np.uint8)
    options = {"preset": "ultrafast", "g": "9999", "bf": "0"}
    size: dict[str, Any] = {"num_frames": 150, "fps": 15, "width": 3840, "height": 2160}
    video = encode("mp4", "libx264", paint=lambda *_: black, options=options, **size)
    return [at.keep_asking(_about("video", video)) for _ in range(2)]


@_attack
def many_items(at: Attacker) -> Workers:
    """Requests with 400 images or 40 videos."""
    images = [picture("JPEG", width=200 + number, height=200) for number in range(400)]
    videos = [encode("mp4", "libx264", width=2 * number + 200) for number in range(40)]
    return [at.keep_asking(_about("image", *images), _about("video", *videos)) for _ in range(2)]


@_attack_of_one
async def cache_probe(at: Attacker) -> None:
    """Asks exactly what another key has just asked, for the number of cached tokens."""
    while True:
        secret = f"{uuid.uuid4().hex} {'is a secret that nobody else knows, ' * 6}"
        body = chat(secret, max_tokens=1)
        await at.post(CHAT, body, key=at.aim.victims_key)
        reply = await at.post(CHAT, body)
        if status_of(reply) == "200":
            answer = json.loads(reply[reply.index(b"{") : reply.rindex(b"}") + 1])
            found = _cached(answer)
            at.outcomes[f"{found} tokens of the victim's cached"] += 1
            if found > _MAX_OWN_SHARE * answer["usage"]["prompt_tokens"]:
                at.broken.append("an answer tells what another key has asked")
        await asyncio.sleep(PAUSE_S)


def _cached(answer: Mapping[str, Any]) -> int:
    """The most cached tokens that any of an answer's fields tells."""
    usage = answer["usage"].get("prompt_tokens_details") or {}
    services = answer.get("hippo", {}).get("num_cached_tokens") or {}
    return max(int(each or 0) for each in (usage.get("cached_tokens"), *services.values()))


@_attack
def silent_connections(at: Attacker) -> Workers:
    """400 connections that send nothing."""
    return [at.keep_open(()) for _ in range(_NUM_CONNECTIONS)]


@_attack
def slow_heads(at: Attacker) -> Workers:
    """400 heads that come a byte a second."""
    head = head_of("GET", "/health", {"host": at.aim.host, "x-filler": "a" * 4000})
    return [at.keep_open((), then=head) for _ in range(_NUM_CONNECTIONS)]


@_attack
def idle_connections(at: Attacker) -> Workers:
    """400 connections that are kept alive after a request."""
    opening = [head_of("GET", "/health", {"host": at.aim.host})]
    return [at.keep_open(opening) for _ in range(_NUM_CONNECTIONS)]


@_attack_of_one
async def foreign_pages(at: Attacker) -> None:
    """Requests as a foreign web page makes them: its Host and Origin, and no key."""
    page: dict[str, Any] = {"host": "evil.example", "origin": "https://evil.example"}
    for path, body in itertools.cycle(((CHAT, chat("Hello")), ("/tokenize", b'{"prompt": "a"}'))):
        if status_of(await at.post(path, body, key="", kind="text/plain", **page)) == "200":
            at.broken.append(f"a foreign page may ask {path}")
        await asyncio.sleep(PAUSE_S)


@_attack
def grpc_streams(at: Attacker) -> Workers:
    """400 streams to each service, where its port is open, that send no first message."""
    methods = {"draft": "/hippo.v1.DraftService/Draft", "target": "/hippo.v1.TargetService/Verify"}
    return [_keep_streams(at, address, methods[name]) for name, address in at.aim.services.items()]


async def _keep_streams(at: Attacker, address: str, method: str) -> None:
    async with grpc.aio.insecure_channel(address, options=[NO_PROXY]) as channel:
        open_one = channel.stream_stream(method, bytes, bytes)

        async def keep() -> None:
            while True:
                at.outcomes["opened"] += 1
                at.outcomes[(await open_one(None).code()).name] += 1
                await asyncio.sleep(AGAIN_S)

        await asyncio.gather(*(keep() for _ in range(_NUM_CONNECTIONS)))


@_attack
def grpc_reflection(at: Attacker) -> Workers:
    """Asks the services, where their ports are open, for their descriptions."""
    return [_reflect(at, address) for address in at.aim.services.values()]


async def _reflect(at: Attacker, address: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(address, options=[NO_PROXY]) as channel:
        ask = channel.stream_stream(
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", bytes, bytes
        )
        while True:
            call = ask(iter([request.SerializeToString()]))
            num_replies = 0
            try:
                async for _ in call:
                    num_replies += 1
            except grpc.aio.AioRpcError:
                pass
            at.outcomes["described" if num_replies else (await call.code()).name] += 1
            await asyncio.sleep(PAUSE_S)


@_attack
def forms(at: Attacker) -> Workers:
    """Forms with a wrong or a long boundary, with an endless head, and of boundaries alone."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
    bodies = (
        (b"--c" + head[3:] + b"\r\n" + b"\r\n--c" * MB, "b"),
        (b"--" + 8 * MB * b"b", "b" * 4000),
        (head + b"x: " + b"a" * (8 * MB), "b"),
        (b"--b\r\n\r\n" * MB, "b"),
    )
    kind = "multipart/form-data; boundary="
    return [at.keep_posting("/v1/videos", body, kind=kind + boundary) for body, boundary in bodies]


@_attack
def small_uploads(at: Attacker) -> Workers:
    """Uploads of one byte, as many as the server takes."""
    return [at.keep_posting("/v1/videos", _form(1), kind=_FORM) for _ in range(8)]


@_attack
def large_uploads(at: Attacker) -> Workers:
    """Uploads of 64 MB, as many as the server takes."""
    return [at.keep_posting("/v1/videos", _form(64 * MB), kind=_FORM)]


_FORM = "multipart/form-data; boundary=b"


def _form(num_bytes: int) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + bytes(num_bytes) + b"\r\n--b--\r\n"


@_attack
def special_tokens(at: Attacker) -> Workers:
    """Texts of the model's special tokens, with and without an image."""
    names = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
    image = _about("image", picture("PNG", width=64, height=64))
    bodies = [chat(name * 100) for name in names]
    bodies += [image.replace(b"What is this?", name.encode() * 20) for name in names]
    return [at.keep_asking(*bodies)]


def main() -> None:
    """Makes its payloads, prints a line, attacks until its input ends, and prints what it got."""
    os.nice(_NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    at = Attacker(Aim(**json.loads(sys.argv[1])))
    workers = list(ATTACKS[at.aim.attack](at))
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(asyncio.run(at.run(workers))) + "\n")


if __name__ == "__main__":
    main()
