"""Mutated media through the decoder: no death or stall of its worker may be more than an error."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hippo.errors import MediaError
from hippo.media.limits import DecodeLimits
from hippo.types import Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode, seeds
from tests.fuzz.findings import Findings
from tests.fuzz.media_worker import PLAN, make_input, read_corpus

LIMITS = DecodeLimits(
    max_frames=16,
    max_pixels=256 * 256,
    max_duration_s=600.0,
    max_stored_frames=2000,
    timeout_s=5.0,
    max_memory_bytes=192 << 20,
)
_START_TIMEOUT_S = 60.0


async def fuzz_media(num_inputs: int, findings: Findings, advance: Callable[[], None]) -> None:
    """Decodes ``num_inputs`` mutated files in disposable processes.

    A file that ends or stalls its process is decoded again by the service's own decoder: it must
    become a MediaError, and a good file after it must be decoded.
    """
    good = Media(MediaKind.VIDEO, encode("mp4", "libx264"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (kind, _, data) in enumerate(seeds()):
            (folder / f"{number:03}.{kind.value}").write_bytes(data)
        corpus = read_corpus(folder)
        findings.figures["corpus files"] = len(corpus)
        number = 0
        async with MediaDecoder(LIMITS) as decoder:
            while number < num_inputs:
                end, why = await _run_worker(folder, number, num_inputs, findings, advance)
                if why and end < num_inputs:
                    kind, data = make_input(corpus, findings.seed, end)
                    outcome = await _by_service(decoder, Media(kind, data), good)
                    if outcome is None:
                        findings.fail(end, f"{why}, and the service does not make an error of it")
                        outcome = "not handled"
                    findings.count(f"{why}; the service says: {outcome}")
                    advance()
                    end += 1
                number = end
            if await _by_service(decoder, good, good) != "decoded":
                findings.fail(num_inputs, "a good file is refused afterwards")


async def _run_worker(
    folder: Path, start: int, end: int, findings: Findings, advance: Callable[[], None]
) -> tuple[int, str]:
    """Which input comes next, and what happened to the worker at it, if something did."""
    limits = json.dumps(dataclasses.asdict(LIMITS))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz.media_worker"),
        *(str(findings.seed), str(start), str(end), str(folder), limits),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    number, why = start, ""
    try:
        while number < end:
            timeout_s = _START_TIMEOUT_S if number == start else 4 * LIMITS.timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    line = await process.stdout.readline()
            except TimeoutError:
                return number, "the decoder takes too long"
            if not line:
                break
            reply = json.loads(line)
            if "wrong" in reply:
                findings.fail(number, f"a wrong reply: {reply['wrong']}")
            if "unexpected" in reply:
                findings.fail(number, "an error that was not foreseen", trace=reply["unexpected"])
            findings.count(_outcome(reply))
            if number % 1000 == 999:
                _note_memory(process.pid, findings)
            advance()
            number += 1
            if "is_out_of_memory" in reply:
                return number, ""
        else:
            return end, ""
        code = await process.wait()
        why = f"the decoder dies of signal {-code}" if code < 0 else "the decoder's process ends"
        return number, why
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _by_service(decoder: MediaDecoder, media: Media, good: Media) -> str | None:
    """The error that the service makes of it, "decoded", or None: it has none, or is broken."""
    try:
        await decoder.decode(media, PLAN)
        outcome = "decoded"
    except MediaError as error:
        outcome = _shape(error.message)
    except Exception:
        return None
    try:
        await decoder.decode(good, PLAN)
    except Exception:
        return None
    return outcome


def _outcome(reply: dict[str, Any]) -> str:
    if "shape" in reply:
        return "decoded"
    if "is_out_of_memory" in reply:
        return "out of memory"
    return _shape(reply.get("error", "wrong reply"))


def _shape(message: str) -> str:
    """A message without what differs from file to file."""
    return re.sub(r"'[^']*'|\d[\d,.]*", "_", re.split(r"[:;(]", message)[0]).strip()[:60]


def _note_memory(pid: int, findings: Findings) -> None:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    peak = int(found[1]) / 1024 if found else 0.0
    name = "MiB at most in a worker"
    findings.figures[name] = max(findings.figures.get(name, 0.0), peak)
