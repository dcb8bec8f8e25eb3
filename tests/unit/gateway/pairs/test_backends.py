"""Which services a request gets, and what the gateway says of those it finds."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from gateway.common.errors import ModelNotFoundError
from gateway.pairs.watch import Watch
from hippo.errors import OverloadedError, UnavailableError
from hippo.rpc.client import TargetClient
from tests.support.models.toy_model import ToyModel
from tests.support.running.gateways import until_up, watching
from tests.support.running.services import (
    serving_draft,
    serving_target,
    toy_request,
    until,
    with_tokenizer,
)


def model_on(*device_uuids: str, name: str = "toy") -> ToyModel:
    model = with_tokenizer(ToyModel())
    model.info = dataclasses.replace(model.info, name=name, device_uuids=device_uuids)
    return model


@pytest.mark.parametrize(
    ("draft", "target", "shared"),
    [
        ("gpu-a", "gpu-a", "gpu-a"),
        ("gpu-b", "gpu-a gpu-b", "gpu-b"),
        ("gpu-a", "gpu-b", None),
        ("", "", None),  # on a CPU nothing is known
    ],
)
async def test_a_pair_that_shares_a_gpu_is_warned_about(
    draft: str, target: str, shared: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving_draft(model_on(*draft.split())) as (_, draft_client),
        serving_target(model_on(*target.split())) as (_, target_client),
        watching([target_client], [draft_client]) as backends,
    ):
        pair = backends.pair(None)
        found = await pair.wait_draft()
        assert pair.target.times(found).takes_turns == (shared is not None)
        assert not pair.target.times(None).takes_turns
    warned = [record.getMessage() for record in caplog.records if "one GPU" in record.getMessage()]
    assert len(warned) == (shared is not None)
    assert all(f"({shared})" in message for message in warned)


async def test_each_model_has_its_targets_and_one_draft_serves_them_all() -> None:
    async with (
        serving_draft(model_on()) as (_, draft),
        serving_target(model_on(name="small")) as (_, small),
        serving_target(model_on(name="large")) as (_, large),
        watching([small, large], [draft]) as backends,
    ):
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


@pytest.mark.parametrize("unknown", ["127.0.0.1:1", "dns+127.0.0.2:1"])
async def test_the_model_of_a_target_that_has_never_answered_may_be_any(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = Mock(side_effect=OSError(2, "nothing"))
    monkeypatch.setattr("gateway.pairs.discovery.addresses_of", looked_up)
    async with (
        serving_target(model_on(name="small")) as (_, small),
        watching([small, unknown], num_up=(1, 0)) as backends,
    ):
        assert backends.model("small").name == "small"
        with pytest.raises(UnavailableError, match=unknown.removeprefix("dns+")):
            backends.model("large")


async def test_an_unhealthy_target_is_left_out_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked at once, and not when its turn comes."""
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 3600.0)
    async with (
        serving_target(model_on()) as (_, one),
        serving_target(model_on()) as (_, other),
        watching([one, other]) as backends,
    ):
        pair = backends.pair(None)
        pair.target.report_failure()
        assert backends.pair(None).target.address != pair.target.address
        await until_up(backends, 2)  # it was well all the time


async def test_a_tokenizer_that_cannot_be_read_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = Exception("data did not match any variant of untagged enum ModelWrapper")
    tokenizer = Mock(from_buffer=Mock(side_effect=error))
    monkeypatch.setattr("gateway.pairs.targets.Tokenizer", tokenizer)
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 0.01)
    async with (
        serving_target(model_on(name="newer")) as (_, client),
        watching([client], num_up=(0, 0)) as backends,
    ):
        await until(lambda: tokenizer.from_buffer.call_count > 2)
        with pytest.raises(UnavailableError, match=r"cannot read the tokenizer of newer at .*"):
            backends.pair(None)
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 1 and "untagged enum ModelWrapper" in told[0]
        tokenizer.from_buffer.side_effect = Tokenizer.from_buffer  # as after an upgrade
        await until_up(backends, 1)


async def test_a_service_that_answers_what_nobody_foresaw_is_watched_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 0.01)
    async with (
        serving_draft(model_on()) as (_, client),
        watching(["127.0.0.1:1"], [client], num_up=(0, 1)) as backends,
    ):
        (draft,) = backends.drafts
        with monkeypatch.context() as patched:
            patched.setattr(draft.client, "get_model", Mock(side_effect=KeyError("surprise")))
            draft.report_failure()
            await until(lambda: "surprise" in draft.problem)
        (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert told.exc_info is not None
        await until_up(backends, 0, 1)


async def test_swapped_addresses_are_told() -> None:
    async with (
        serving_draft(model_on()) as (_, draft),
        serving_target(model_on()) as (_, target),
        watching([draft], [target], num_up=(0, 0)) as backends,
    ):
        watches: list[Watch[Any]] = [*backends.targets, *backends.drafts]
        await until(lambda: all("is down" in each.problem for each in watches))
        for watch, noun in zip(watches, ("target", "draft"), strict=True):
            assert watch.problem.startswith(
                f"the {noun} service at {watch.address} is down, loading or draining: the server "
                f"there is no {noun} service"
            )


def _identity(pki: Path) -> dict[str, Any]:
    return {"tls_cert": str(pki / "service.pem"), "tls_key": str(pki / "service.key")}


def _trust(pki: Path) -> dict[str, Any]:
    return {"services_tls": True, "services_tls_ca": str(pki / "ca.pem")}


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_target_with_tls_where_the_gateway_has_none_and_the_reverse(
    has_key: bool, pki: Path
) -> None:
    service, gateway = ({}, _trust(pki)) if not has_key else (_identity(pki), {})
    async with (
        serving_target(model_on(), **service) as (_, client),
        watching([client], num_up=(0, 0), **gateway) as backends,
    ):
        (target,) = backends.targets
        await until(lambda: "is down" in target.problem)
        assert "is down, loading or draining: UNAVAILABLE: " in target.problem
        assert has_key or "handshake failed" in target.problem


async def test_without_any_target_each_ones_problem_is_told() -> None:
    async with watching(["127.0.0.1:1", "127.0.0.1:2"], num_up=(0, 0)) as backends:
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1 .*; .*127.0.0.1:2 "):
            backends.pair(None)


async def test_a_service_found_by_name_must_have_the_names_certificate(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_target(model_on(), **_identity(pki)) as (_, client):
        port = client.address.rpartition(":")[2]
        monkeypatch.setattr("gateway.pairs.discovery.addresses_of", lambda _: [f"127.0.0.1:{port}"])
        for name, is_trusted in (("one.example", True), ("other.example", False)):
            address, num_up = f"dns+{name}:{port}", (int(is_trusted), 0)
            async with watching([address], num_up=num_up, **_trust(pki)) as backends:
                await until(lambda: bool(backends.targets))
                (target,) = backends.targets
                await until(lambda: is_trusted or "is down" in target.problem)  # noqa: B023
                assert is_trusted or "Hostname Verification" in target.problem


async def test_a_draft_that_serves_and_does_not_fit_counts_as_up_and_not_as_a_draft() -> None:
    """By which a client of /ready knows that waiting does not help."""
    misfit = model_on()
    misfit.info = dataclasses.replace(misfit.info, num_token_ids=misfit.info.num_token_ids + 1)
    async with (
        serving_draft(misfit) as (_, draft_client),
        serving_target(model_on()) as (_, target_client),
        watching([target_client], [draft_client]) as backends,
    ):
        assert not backends.has_draft
        assert "they must be equal" in (backends.draft_problem() or "")


async def test_measurements_with_a_draft_that_is_gone_are_forgotten() -> None:
    async with watching(["127.0.0.1:1"], ["127.0.0.1:2"], num_up=(0, 0)) as backends:
        (target,), (draft,) = backends.targets, backends.drafts
        kept = target.times(draft)
        target.match_drafts()
        assert target.times(draft) is kept
        backends.drafts.clear()
        target.match_drafts()
        assert target.times(draft) is not kept
    await draft.close()


async def test_recent_answers_say_when_a_refused_client_should_come_back() -> None:
    async with watching(["127.0.0.1:1"], num_up=(0, 0)) as backends:
        (target,) = backends.targets
        assert target.answer_s == OverloadedError.retry_after_s
        for seconds, mean in ((20.0, 20.0), (1000.0, 60.0)):
            for _ in range(100):
                target.note_answer(seconds)
            assert target.answer_s == pytest.approx(mean, rel=0.01)


async def test_a_target_that_was_closed_while_a_request_waited_elsewhere_is_unavailable() -> None:
    async with serving_target(model_on()) as (_, client):
        gone = TargetClient(client.address)
        await gone.close()
        with pytest.raises(UnavailableError, match="is not used any more"):
            async with gone.verify(toy_request()):
                pass
