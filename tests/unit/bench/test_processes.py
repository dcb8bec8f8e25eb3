"""Which processes are of a session."""

from __future__ import annotations

import subprocess
import sys

from bench.processes import session_processes

_PARENT_AND_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""


def test_a_session_has_its_leader_and_what_that_started_and_nothing_once_they_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT_AND_CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        child_pid = int(leader.stdout.readline())
        found = {int(path.name) for path in session_processes(leader.pid)}
        assert found == {leader.pid, child_pid}
        leader.communicate("\n")
    assert list(session_processes(leader.pid)) == []
