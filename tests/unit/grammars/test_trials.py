"""What a client's grammar may cost, and that nobody else waits for it."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
from llguidance import grammar_from

from hippo.base.worker_process import ForkedWorker, Message, WorkerDiedError
from hippo.errors import InvalidRequestError, OverloadedError, UnavailableError
from hippo.grammars import trials as trials_module
from hippo.grammars.trials import GrammarTrials
from tests.support.running.info import small_model_info

_numbers = itertools.count()
MINUTES = grammar_from("json", '{"type": "integer", "multipleOf": 7999983}')


def _easy() -> str:
    """A grammar whose result is not known."""
    return grammar_from("json", f'{{"type": "object", "required": ["{next(_numbers)}"]}}')


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials()
    yield trials
    trials.close()


async def test_the_result_of_a_grammar_is_known_for_a_while(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Mock(side_effect=trials._try)
    monkeypatch.setattr(trials, "_try", attempt)
    monkeypatch.setattr(trials_module, "_MAX_KNOWN", 2)
    first, second, wrong = (grammar_from("regex", text) for text in ("first", "second", "("))
    for grammar in (first, second, first, wrong, first, wrong, second):
        with contextlib.suppress(InvalidRequestError):
            assert await trials.check(grammar, "f") is trials._quick
    assert [call.args[0] for call in attempt.mock_calls] == [first, second, wrong, second]
    assert len(trials._known) == 2


async def test_a_wrong_grammar_is_told_by_its_field(trials: GrammarTrials) -> None:
    wrong = grammar_from("json", '{"type": "foo"}')
    with pytest.raises(InvalidRequestError, match=r"^guided_json cannot be used: .*foo") as caught:
        await trials.check(wrong, "guided_json")
    assert caught.value.param == "guided_json"


async def test_costly_grammars_are_refused_while_those_of_others_go_on(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first costs minutes when compiled, the other ten seconds before that, as a check of the
    schema."""
    monkeypatch.setattr(trials_module, "MAX_CPU_S", 0.3)
    patterns = ",".join(f'"^x{i}(a|b)*a(a|b){{9}}$": {{}}' for i in range(600))
    slow = grammar_from("json", f'{{"type": "object", "patternProperties": {{{patterns}}}}}')
    costly = [asyncio.create_task(trials.check(grammar, "f")) for grammar in (MINUTES, slow) * 2]
    for _ in range(5):
        await trials.check(_easy(), "g")
    assert not all(task.done() for task in costly)
    for task in costly[2:]:  # these wait in a queue
        task.cancel()
    with pytest.raises(InvalidRequestError, match=r"^f cannot be used: compiling .* 1 s of CPU"):
        await costly[0]
    with pytest.raises(InvalidRequestError, match="128 MiB of memory; simplify it"):
        await costly[1]


async def test_a_grammar_of_too_much_memory_is_refused(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUICK_CPU_S", "MAX_CPU_S"):
        monkeypatch.setattr(trials_module, name, 60.0)
    monkeypatch.setattr(trials_module, "MAX_MEMORY_BYTES", 8 << 20)
    large = grammar_from("json", '{"type": "integer", "multipleOf": 7999993}')
    with pytest.raises(InvalidRequestError, match="MiB of memory") as caught:
        await trials.check(large, "guided_json")
    assert caught.value.param == "guided_json"


async def test_a_process_that_was_killed_is_replaced(trials: GrammarTrials) -> None:
    await trials.check(_easy(), "f")
    first = trials.worker_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await trials.check(_easy(), "f")
    assert trials.worker_pid != first


async def test_a_process_whose_children_die_is_replaced(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trials.check(_easy(), "f")
    first, wait_ready = trials.worker_pid, ForkedWorker.wait_ready

    def fail_once(child: ForkedWorker) -> Message:
        if trials.worker_pid == first:
            raise WorkerDiedError
        return wait_ready(child)

    monkeypatch.setattr(ForkedWorker, "wait_ready", fail_once)
    await trials.check(_easy(), "f")
    assert trials.worker_pid != first


async def test_a_machine_too_busy_to_tell_is_no_fault_of_the_grammar(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trials.check(_easy(), "f")
    monkeypatch.setattr(trials_module, "_MAX_WALL_S", 0.2)
    assert trials.worker_pid is not None
    os.kill(trials.worker_pid, signal.SIGSTOP)
    try:
        with pytest.raises(OverloadedError, match="too busy"):
            await trials.check(_easy(), "f")
    finally:
        os.kill(trials.worker_pid, signal.SIGCONT)


async def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_grammar() -> None:
    trials = GrammarTrials(replace(small_model_info(), tokenizer_json=b"{}"))
    with pytest.raises(UnavailableError, match="does not start"):
        await trials.check(_easy(), "f")
    trials.close()


async def test_nothing_starts_after_the_end() -> None:
    trials = GrammarTrials()
    await trials.check(_easy(), "f")
    trials.close()
    assert trials.worker_pid is None
    with pytest.raises((UnavailableError, RuntimeError)):
        await trials.check(_easy(), "f")
