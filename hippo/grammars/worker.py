"""The process that tries grammars: for each one it forks a child, which compiles it and ends.

    parent -> process   the tokenizer, once; then a socket for each grammar
    child -> parent     that it has begun
    parent -> child     the grammar, and its limits
    child -> parent     an error, or that there is none; nothing if the child was killed

The kernel ends a child that exceeds its time or memory. As the tokenizer is read before the fork,
a child costs some milliseconds. The process has no thread but the first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

from llguidance import LLTokenizer

from hippo.base.worker_process import (
    Message,
    fork_children,
    give_way,
    ignore_signals,
    limit_memory,
    receive_message,
    send_message,
)
from hippo.grammars.limits import error_of, new_matcher


def try_grammar(tokenizer: LLTokenizer, grammar: str) -> Message:
    """Compiles a grammar and computes its first mask; returns the reply."""
    matcher = new_matcher(tokenizer, grammar)
    if error := error_of(matcher):
        return {"error": error}
    matcher.compute_bitmask()
    if error := error_of(matcher):
        return {"error": f"it cannot begin: {error}"}
    return {}


def run_child(channel: socket.socket, tokenizer: LLTokenizer) -> None:
    """Tries the grammar that ``channel`` gives within its limits."""
    send_message(channel, {})  # ready
    if (received := receive_message(channel)) is None:
        return
    request, _ = received
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(request["max_memory_bytes"])
    with open(os.devnull, "w") as nowhere:  # the client's error, so not for the operator's log
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    send_message(channel, try_grammar(tokenizer, request["grammar"]))


def main() -> None:
    """Serves a socket, whose descriptor is the first argument."""
    ignore_signals()
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel, contextlib.suppress(ConnectionError):
        received = receive_message(channel)
        if received is None:
            return
        tokenizer = LLTokenizer(**received[0])
        give_way()
        send_message(channel, {})  # ready
        fork_children(channel, lambda own: run_child(own, tokenizer))


if __name__ == "__main__":
    main()
