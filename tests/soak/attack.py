"""Carries out an attack: ``python -m tests.soak.attack JSON``.

A process of its own, so that its processor time is its own and no other client's thread waits for
it. It makes its payloads, prints a line, attacks until its input ends, and prints what it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from typing import Any

from tests.soak.attacker import PAUSE_S, Aim, Attacker
from tests.soak.attacks import ATTACKS

_FIRST_OUTCOME_S = 30.0
_NICE = 19  # the processor time that nobody else wants: the services have two cores


async def _until_the_end(at: Attacker) -> None:
    """Waits until the input ends; and, as it may have had no processor time, for an outcome."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_OUTCOME_S):
            while not at.outcomes:
                await asyncio.sleep(PAUSE_S)


async def _run(aim: Aim) -> dict[str, Any]:
    at = Attacker(aim)
    workers = list(ATTACKS[aim.attack](at))
    before_s = time.process_time()
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    tasks = [asyncio.create_task(worker) for worker in workers]
    ended = asyncio.create_task(_until_the_end(at))
    await asyncio.wait((*tasks, ended), return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for ending in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ending, Exception):
            raise ending
    return {
        "outcomes": dict(at.outcomes),
        "broken": sorted(set(at.broken)),
        "cpu_s": time.process_time() - before_s,
    }


def main() -> None:
    """Attacks until its input ends."""
    os.nice(_NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    result = asyncio.run(_run(Aim(**json.loads(sys.argv[1]))))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
