"""Which services a request gets, and what the gateway says of those it finds."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.answer.completion import Completion
from gateway.answer.plan import SpeculationPlan
from gateway.answer.report import AnswerRecord
from gateway.common.config import GatewaySettings
from gateway.common.errors import ModelNotFoundError
from gateway.pairs.backends import Backends
from gateway.pairs.targets import Pair
from gateway.pairs.watch import Watch
from hippo.errors import (
    OverloadedError,
    UnavailableError,
)
from hippo.models.interface.base import StepPlan
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo, Pruning
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.services import (
    backend_of,
    no_files,
    serving_draft,
    serving_target,
    toy_request,
    until,
    with_tokenizer,
)


def _model_on(*device_uuids: str, name: str = "toy") -> ToyModel:
    model = ToyModel()
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    model._info = dataclasses.replace(
        model.info,
        name=name,
        tokenizer_json=tokenizer.to_str().encode(),
        device_uuids=device_uuids,
    )
    return model


def _backends(targets: Sequence[TargetClient], drafts: Sequence[DraftClient] = ()) -> Backends:
    return Backends(
        GatewaySettings(
            target=tuple(client.address for client in targets) or ("127.0.0.1:1",),
            draft=tuple(client.address for client in drafts),
        )
    )


async def _until_up(backends: Backends, num_targets: int, num_drafts: int = 0) -> None:
    async with asyncio.timeout(30):
        while (backends.num_targets_up, backends.num_drafts_up) != (num_targets, num_drafts):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("draft", "target", "shared"),
    [
        (("gpu-a",), ("gpu-a",), "gpu-a"),
        (("gpu-b",), ("gpu-a", "gpu-b"), "gpu-b"),
        (("gpu-a",), ("gpu-b",), None),
        ((), (), None),  # on a CPU nothing is known
    ],
)
async def test_a_pair_that_shares_a_gpu_is_warned_about(
    draft: tuple[str, ...],
    target: tuple[str, ...],
    shared: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving_draft(_model_on(*draft)) as (_, draft_client),
        serving_target(_model_on(*target)) as (_, target_client),
    ):
        backends = _backends([target_client], [draft_client])
        with caplog.at_level(logging.WARNING, "gateway.pairs.backends"):
            await backends.start()
            await _until_up(backends, 1, 1)
            pair = backends.pair(None)
            found = await asyncio.wait_for(pair.wait_draft(), 30)
            assert pair.target.times(found).takes_turns == (shared is not None)
            assert not pair.target.times(None).takes_turns
            await backends.close()
    warned = [record.getMessage() for record in caplog.records if "one GPU" in record.getMessage()]
    assert len(warned) == (shared is not None)
    assert all(f"({shared})" in message for message in warned)


async def test_each_model_has_its_targets_and_one_draft_serves_them_all() -> None:
    async with (
        serving_draft(_model_on()) as (_, draft),
        serving_target(_model_on(name="small")) as (_, small),
        serving_target(_model_on(name="large")) as (_, large),
    ):
        backends = _backends([small, large], [draft])
        await backends.start()
        await _until_up(backends, 2, 1)
        assert [info.name for info in backends.models] == ["small", "large"]
        for client, name in ((small, "small"), (large, "large")):
            pair = backends.pair(name)
            assert pair.target.address == client.address
            assert pair.draft is not None and pair.draft.address == draft.address
        with pytest.raises(ModelNotFoundError, match=r"'small', 'large' is served"):
            backends.pair("other")
        backends.pair("large").target.report_failure()
        with pytest.raises(UnavailableError, match=f"{large.address} has just failed"):
            backends.pair("large")
        with pytest.raises(ModelNotFoundError, match="'small' is served"):
            backends.pair("other")
        await backends.close()


@pytest.mark.parametrize("unknown", ["127.0.0.1:1", "dns+127.0.0.2:1"])
async def test_the_model_of_a_target_that_has_never_answered_may_be_any(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gateway.pairs.discovery.addresses_of", Mock(side_effect=OSError(2, "nothing"))
    )
    async with serving_target(_model_on(name="small")) as (_, small):
        backends = Backends(GatewaySettings(target=(small.address, unknown)))
        await backends.start()
        await _until_up(backends, 1)
        assert backends.model("small").name == "small"
        with pytest.raises(UnavailableError, match=unknown.removeprefix("dns+")):
            backends.model("large")
        await backends.close()


async def test_an_unhealthy_target_is_left_out_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked at once, and not when its turn comes."""
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 3600.0)
    async with (
        serving_target(_model_on()) as (_, one),
        serving_target(_model_on()) as (_, other),
    ):
        backends = _backends([one, other])
        await backends.start()
        await _until_up(backends, 2)
        pair = backends.pair(None)
        pair.target.report_failure()
        assert backends.pair(None).target.address != pair.target.address
        await _until_up(backends, 2)  # it was well all the time
        await backends.close()


class _TokenizerOfNow:
    """Reads what it is given only when it is ``new``, as tokenizers does after an upgrade."""

    is_new = False
    num_asked = 0

    @classmethod
    def from_buffer(cls, data: bytes) -> Tokenizer:
        cls.num_asked += 1
        if not cls.is_new:
            raise Exception("data did not match any variant of untagged enum ModelWrapper")
        return Tokenizer.from_buffer(data)


async def test_a_tokenizer_that_cannot_be_read_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.pairs.targets.Tokenizer", _TokenizerOfNow)
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 0.01)
    async with serving_target(_model_on(name="newer")) as (_, client):
        backends = _backends([client])
        await backends.start()
        await until(lambda: _TokenizerOfNow.num_asked > 2)
        with pytest.raises(UnavailableError, match=r"cannot read the tokenizer of newer at .*"):
            backends.pair(None)
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 1 and "untagged enum ModelWrapper" in told[0]
        _TokenizerOfNow.is_new = True
        await _until_up(backends, 1)
        await backends.close()


async def test_a_service_that_answers_what_nobody_foresaw_is_watched_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 0.01)
    async with serving_draft(_model_on()) as (_, client):
        backends = _backends([], [client])
        (draft,) = backends.drafts

        async def ask() -> ModelInfo:
            raise KeyError("surprise")

        with monkeypatch.context() as patched:
            patched.setattr(draft.client, "get_model", ask)
            await backends.start()
            await until(lambda: "surprise" in draft.problem)
        (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert told.exc_info is not None
        await _until_up(backends, 0, 1)
        await backends.close()


async def test_swapped_addresses_are_told() -> None:
    async with serving_draft(_model_on()) as (_, draft), serving_target(_model_on()) as (_, target):
        backends = Backends(GatewaySettings(target=(draft.address,), draft=(target.address,)))
        await backends.start()
        watches: list[Watch[Any]] = [*backends.targets, *backends.drafts]
        for watch, noun in zip(watches, ("target", "draft"), strict=True):
            await until(lambda: "is down" in watch.problem)  # noqa: B023
            assert watch.problem.startswith(
                f"the {noun} service at {watch.address} is down, loading or draining: the server "
                f"there is no {noun} service"
            )
        await backends.close()


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_target_with_tls_where_the_gateway_has_none_and_the_reverse(
    has_key: bool, pki: Path
) -> None:
    files = {name: str(pki / f"service.{end}") for name, end in (("cert", "pem"), ("key", "key"))}
    tls: dict[str, Any] = {f"tls_{name}": path for name, path in files.items()} if has_key else {}
    trust: dict[str, Any] = {"services_tls": True, "services_tls_ca": str(pki / "ca.pem")}
    async with serving_target(_model_on(), **tls) as (_, client):
        backends = Backends(GatewaySettings(target=(client.address,), **({} if has_key else trust)))
        await backends.start()
        (target,) = backends.targets
        await until(lambda: "is down" in target.problem)
        assert "is down, loading or draining: UNAVAILABLE: " in target.problem
        assert has_key or "handshake failed" in target.problem
        await backends.close()


async def test_without_any_target_each_ones_problem_is_told() -> None:
    backends = _backends([TargetClient("127.0.0.1:1"), TargetClient("127.0.0.1:2")])
    with pytest.raises(UnavailableError, match=r"127.0.0.1:1 .*; .*127.0.0.1:2 "):
        backends.pair(None)
    await backends.close()


async def test_a_draft_on_the_targets_host_is_preferred_while_it_has_a_slot() -> None:
    async with (
        serving_target(_model_on()) as (_, target),
        serving_draft(_model_on()) as (_, near),
        serving_draft(_model_on()) as (_, far),
    ):
        address = far.address.replace("127.0.0.1", "localhost")
        backends = _backends([target], [DraftClient(address), near])
        await backends.start()
        await _until_up(backends, 1, 2)
        keys = [str(number).encode() for number in range(20)]
        (pair,) = backends.pairs(None, b"")
        chosen = {Pair(pair.target, key).draft for key in keys}
        assert [each.address for each in chosen if each is not None] == [near.address]
        (own,) = chosen
        assert own is not None
        own.report_refusal()
        assert {Pair(pair.target, key).draft for key in keys}.isdisjoint(chosen)
        await backends.close()


async def test_a_service_found_by_name_must_have_the_names_certificate(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: str(pki / f"service.{end}") for name, end in (("cert", "pem"), ("key", "key"))}
    tls: dict[str, Any] = {f"tls_{name}": path for name, path in files.items()}
    ca = str(pki / "ca.pem")
    async with serving_target(_model_on(), **tls) as (_, client):
        port = client.address.rpartition(":")[2]
        monkeypatch.setattr("gateway.pairs.discovery.addresses_of", lambda _: [f"127.0.0.1:{port}"])
        for name, is_trusted in (("one.example", True), ("other.example", False)):
            backends = Backends(
                GatewaySettings(
                    target=(f"dns+{name}:{port}",), services_tls=True, services_tls_ca=ca
                )
            )
            await backends.start()
            await until(lambda: bool(backends.targets))  # noqa: B023
            (target,) = backends.targets
            await until(lambda: target.info is not None or "is down" in target.problem)  # noqa: B023
            assert (target.info is not None) is is_trusted
            assert is_trusted or "Hostname Verification" in target.problem
            await backends.close()


def _completion(pairs: Sequence[Pair]) -> Completion:
    return Completion(
        toy_request(),
        plan=SpeculationPlan("serial", 4, 4, Pruning()),
        pairs=pairs,
        stops=(),
        draft_stall_s=5,
        timeout_s=None,
        record=AnswerRecord(policy="serial", received_ns=time.monotonic_ns()),
        news=asyncio.Event(),
        copy_files=no_files,
    )


async def test_a_request_that_goes_on_to_the_next_target_takes_the_draft_there() -> None:
    """The first target is full with another gateway's sequence."""
    full, slow = with_tokenizer(ToyModel(num_slots=1)), with_tokenizer(ToyModel())
    freed = threading.Event()

    def hang(_: StepPlan) -> None:
        assert freed.wait(60)

    async with (
        serving_target(full) as (_, first),
        serving_draft(with_tokenizer(ToyModel())) as (_, firsts_draft),
        serving_target(slow) as (_, second),
        serving_draft(with_tokenizer(ToyModel())) as (seconds_draft, seconds_client),
    ):
        full.on_forward = hang
        slow.on_forward = lambda plan: time.sleep(0.005)
        here = [each.address.replace("127.0.0.1", "localhost") for each in (second, seconds_client)]
        backends = _backends([first, TargetClient(here[0])], [firsts_draft, DraftClient(here[1])])
        await backends.start()
        await _until_up(backends, 2, 2)
        keys = (str(number).encode() for number in itertools.count())
        offers = (backends.pairs(None, key) for key in keys)
        completion = _completion(
            next(each for each in offers if each[0].target.address == first.address)
        )
        try:
            async with first.verify(toy_request()) as stream:
                await anext(stream)  # the prompt was read, so the slot is taken
                async with completion:
                    await until(lambda: completion.is_over)
                    assert completion.error is None
        finally:
            freed.set()
        assert completion.pair.target.address == here[0]
        assert backend_of(seconds_draft).engine.counters.num_opened == 1
        assert completion.record.draft_losses == [] and completion.record.draft_problem is None
        assert completion.record.stats.num_blocks > 0
        await backends.close()


@pytest.mark.parametrize("broken", ["target", "draft"])
async def test_a_service_that_breaks_a_stream_is_left_out_at_once(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when its health is looked at for the next time."""
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 3600.0)
    model, gate = with_tokenizer(ToyModel()), Gate()
    async with (
        serving_target(model) as (target, target_client),
        serving_draft(with_tokenizer(ToyModel())) as (draft, draft_client),
    ):
        backends = _backends([target_client], [draft_client])
        await backends.start()
        await _until_up(backends, 1, 1)
        model.on_forward = gate
        completion = _completion([backends.pair(None)])
        try:
            async with completion:
                await until(gate.has_arrived.is_set)
                await until(lambda: completion.record.stats.num_blocks > 0)
                await {"target": target, "draft": draft}[broken].rpc.stop()
                if broken == "target":
                    await until(lambda: completion.is_over)
                    assert isinstance(completion.error, UnavailableError)
                    with pytest.raises(UnavailableError):
                        backends.pair(None)
                else:
                    await until(lambda: bool(completion.record.draft_losses))
                    await _until_up(backends, 1, 0)
                    gate.open()
                    await until(lambda: completion.is_over)
                    assert completion.error is None
        finally:
            gate.open()
        await backends.close()


def _wait_until(condition: Callable[[], bool]) -> None:
    """Holds a device thread."""
    while not condition():
        time.sleep(0.005)


async def test_a_sequence_in_the_targets_queue_leaves_the_drafts_slots_to_running_ones() -> None:
    model, gate = with_tokenizer(ToyModel(num_slots=1)), Gate()

    async with (
        serving_target(model) as (target, client),
        serving_draft(with_tokenizer(ToyModel(num_slots=2))) as (draft, draft_client),
    ):
        backends = _backends([client], [draft_client])
        await backends.start()
        await _until_up(backends, 1, 1)
        pairs = [backends.pair(None)]
        first, second = _completion(pairs), _completion(pairs)
        opened = backend_of(draft).engine.counters

        num_before = len(model.reused)  # prefills, of the warm-up

        def num_begun() -> int:
            return len(model.reused) - num_before

        def prefill(_: int) -> None:
            """A sequence has its draft from the beginning."""
            _wait_until(lambda: opened.num_opened == num_begun())

        def step(plan: StepPlan) -> None:
            gate(plan)
            running = (first, second)[num_begun() - 1]
            _wait_until(lambda: running.record.stats.num_blocks > 0)

        model.on_piece, model.on_forward = prefill, step
        async with first:
            await until(gate.has_arrived.is_set)
            async with second:
                await until(lambda: backend_of(target).slots.num_waiting == 1)
                await asyncio.sleep(0.1)
                assert opened.num_opened == 1
                gate.open()
                await until(lambda: first.is_over and second.is_over)
        for completion in (first, second):
            assert completion.error is None and completion.record.draft_losses == []
            assert completion.record.num_draft_recoveries == 0
            assert completion.record.stats.num_blocks > 0
        await backends.close()


async def test_a_draft_whose_name_has_no_address_is_a_problem_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "gateway.pairs.discovery.addresses_of", Mock(side_effect=OSError(2, "nothing"))
    )
    async with serving_target(_model_on()) as (_, client):
        backends = Backends(GatewaySettings(target=(client.address,), draft=("dns+drafts:1",)))
        await backends.start()
        await _until_up(backends, 1)
        await until(lambda: "drafts:1 has no address: nothing" in (backends.draft_problem() or ""))
        await backends.close()
    alone = _backends([client])
    assert alone.targets[0].draft_problem == "no draft service is configured"
    await alone.close()


async def test_a_draft_that_serves_and_does_not_fit_counts_as_up_and_not_as_a_draft() -> None:
    """By which a client of /ready knows that waiting does not help."""
    misfit = _model_on()
    misfit._info = dataclasses.replace(misfit.info, num_token_ids=misfit.info.num_token_ids + 1)
    async with (
        serving_draft(misfit) as (_, draft_client),
        serving_target(_model_on()) as (_, target_client),
    ):
        backends = _backends([target_client], [draft_client])
        await backends.start()
        await _until_up(backends, 1, 1)
        assert not backends.has_draft
        assert "they must be equal" in (backends.draft_problem() or "")
        await backends.close()


async def test_measurements_with_a_draft_that_is_gone_are_forgotten() -> None:
    backends = _backends([TargetClient("127.0.0.1:1")], [DraftClient("127.0.0.1:2")])
    (target,), (draft,) = backends.targets, backends.drafts
    kept = target.times(draft)
    target.match_drafts()
    assert target.times(draft) is kept
    backends.drafts.clear()
    target.match_drafts()
    assert target.times(draft) is not kept
    await asyncio.gather(draft.close(), backends.close())


async def test_recent_answers_say_when_a_refused_client_should_come_back() -> None:
    backends = _backends([TargetClient("127.0.0.1:1")])
    (target,) = backends.targets
    assert target.answer_s == OverloadedError.retry_after_s
    for seconds, mean in ((20.0, 20.0), (1000.0, 60.0)):
        for _ in range(100):
            target.note_answer(seconds)
        assert target.answer_s == pytest.approx(mean, rel=0.01)
    await backends.close()


async def test_a_target_that_was_closed_while_a_request_waited_elsewhere_is_unavailable() -> None:
    async with serving_target(_model_on()) as (_, client):
        gone = TargetClient(client.address)
        await gone.close()
        with pytest.raises(UnavailableError, match="is not used any more"):
            async with gone.verify(toy_request()):
                pass
