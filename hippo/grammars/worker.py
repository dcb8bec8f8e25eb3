"""The process that tries grammars: for each one it forks a child, which compiles it and ends.

    parent -> process   the tokenizer, once; then a socket for each grammar
    child -> parent     its process id: it has begun
    parent -> child     the grammar, and its limits
    child -> parent     an error, perhaps empty; nothing if the child was killed

The kernel ends a child that exceeds its time or memory. As the tokenizer is read before the fork,
a child costs some milliseconds. The process has no thread but the first.
"""

import os
import resource
import signal
import socket
import sys
from functools import partial

from llguidance import LLTokenizer

from hippo.base.worker_process import limit_memory, receive_message, send_message, serve_forks
from hippo.grammars.limits import error_of, new_matcher


def try_grammar(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compiles a grammar and computes its first mask; returns the error, or an empty string."""
    matcher = new_matcher(tokenizer, grammar)
    if error := error_of(matcher):
        return error
    matcher.compute_bitmask()
    error = error_of(matcher)
    return error and f"it cannot begin: {error}"


def run_child(tokenizer: LLTokenizer, channel: socket.socket) -> None:
    send_message(channel, {"pid": os.getpid()})  # ready
    if (received := receive_message(channel)) is None:
        return
    request, _ = received
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(request["max_memory_bytes"])
    with open(os.devnull, "w") as nowhere:  # the client's error, so not for the operator's log
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    send_message(channel, {"error": try_grammar(tokenizer, request["grammar"])})


if __name__ == "__main__":
    serve_forks(lambda options: partial(run_child, LLTokenizer(**options)))
