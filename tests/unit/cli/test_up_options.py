"""What the options of ``hippo up`` come to."""

import argparse
import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from hippo.cli import up
from hippo.cli.processes import Child, StackError
from hippo.cli.stack import Stack
from hippo.cli.up import add_stack_arguments, next_pause_s, stack_options


def _parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser, port=8000)
    return parser.parse_args(given)


def _stack(*given: str, **changes: Any) -> Stack:
    options = replace(stack_options(_parsed(*given)), **changes)
    return Stack(options, lambda name, line: None)


def _value(stack: Stack, name: str, flag: str) -> str:
    """What a process is given behind a flag."""
    arguments = stack._arguments(name)
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        ((), "float32", "auto"),
        (("--dtype", "bfloat16"), "bfloat16", "auto"),
        (("--dtype", "bfloat16", "--draft-dtype", "float32"), "bfloat16", "float32"),
        (("--target-device", "cuda:0"), "auto", "auto"),
        (("--dtype", "bfloat16", "--draft-device", "cuda:1"), "bfloat16", "bfloat16"),
    ],
)
def test_a_draft_has_the_targets_dtype_unless_it_is_on_a_cpu(
    given: tuple[str, ...], target: str, draft: str
) -> None:
    with _stack(*given) as stack:
        assert [_value(stack, name, "--dtype") for name in ("target", "draft")] == [target, draft]


def test_the_services_open_the_directories_of_requests_and_uploads(tmp_path: Path) -> None:
    flag = "--allowed-local-media-path"
    with _stack(flag, f"{tmp_path},/usr") as stack:
        uploads = _value(stack, "gateway", "--upload-dir")
        assert Path(uploads).is_dir()
        assert _value(stack, "gateway", flag) == f"{tmp_path},/usr"
        for name in ("target", "draft"):
            assert _value(stack, name, flag) == f"{uploads},{tmp_path},/usr"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("box.example", "http://box.example:8000"),
    ],
)
def test_only_the_gateway_listens_on_the_given_address(host: str, url: str) -> None:
    with _stack(host=host, target_port=1, draft_port=2) as stack:
        hosts = [_value(stack, name, "--host") for name in ("draft", "target", "gateway")]
        assert hosts == ["127.0.0.1", "127.0.0.1", host]
        assert _value(stack, "gateway", "--target") == "127.0.0.1:1"
        assert _value(stack, "gateway", "--draft") == "127.0.0.1:2"
        assert stack.url == url


@pytest.mark.parametrize(
    ("flags", "variable", "least_s"),
    [
        ((), None, 30),
        (("--shutdown-grace-s", "120"), "60", 120),
        (("--gamma=4", "--shutdown-grace-s=0"), None, 0),
        (("--gamma=4",), "60", 60),
    ],
)
def test_the_gateway_is_not_killed_while_it_lets_answers_finish(
    flags: tuple[str, ...], variable: str | None, least_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("HIPPO_GATEWAY_SHUTDOWN_GRACE_S", variable)
    with _stack(gateway_args=flags) as stack:
        assert stack._gateway_grace_s == least_s + 10


def test_a_draft_that_does_not_fit_ends_the_wait() -> None:
    ready = {"draft": "unavailable", "draft_problem": "why", "num_drafts": {"up": 0, "all": 1}}

    def problem(**changes: Any) -> str | None:
        response = httpx.Response(200, json=ready | changes)
        transport = httpx.MockTransport(lambda request: response)
        with httpx.Client(transport=transport) as client:
            return stack._readiness_problem(client)

    with _stack() as stack:
        assert problem() == "why"
        assert problem(draft="ready") is None
        with pytest.raises(StackError, match="why"):
            problem(num_drafts={"up": 1, "all": 1})


def test_a_draft_that_keeps_ending_is_started_ever_later() -> None:
    pauses = [0.0]
    for _ in range(8):
        pauses.append(next_pause_s(pauses[-1], 5.0))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert next_pause_s(60.0, 61.0) == 1


@pytest.mark.parametrize(
    ("given", "has_gpu", "is_told"),
    [
        ((), True, True),
        ((), False, False),
        (("--target-device", "cpu"), True, False),
        (("--draft-device", "cuda:0"), True, False),
        (("--target-arg=--tensor-parallel-devices=cuda:0,cuda:1",), True, False),
    ],
)
def test_gpus_that_nobody_asked_for_are_told(
    given: tuple[str, ...], has_gpu: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_GPU_NODES", ("/dev/null" if has_gpu else "/dev/none",))
    monkeypatch.setenv("PATH", "/nowhere")
    said = io.StringIO()
    up.warn_of_unused_gpus(_parsed(*given), Console(file=said))
    assert ("--target-device cuda:0 --draft-device cuda:1" in said.getvalue()) == is_told


def test_a_childs_environment_is_the_parents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIPPO_SAID", "there")
    (tmp_path / "saying.py").write_text("import os\nprint(os.environ['HIPPO_SAID'])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    printed: list[str] = []
    child = Child("saying", lambda name, line: printed.append(line))
    child.start("saying", ())
    assert child.wait(30)
    assert printed == ["there"]


def test_children_share_the_parents_session_but_not_its_group() -> None:
    child = Child("draft", lambda name, line: None)
    child.start("http.server", ["0"])
    assert os.getsid(child.pid) == os.getsid(0)  # one share of the processor with the others
    assert os.getpgid(child.pid) == child.pid  # a terminal's Ctrl-C does not reach it
    child.send_signal(signal.SIGKILL)
    assert child.wait(20)
