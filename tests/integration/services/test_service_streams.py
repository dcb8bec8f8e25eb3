"""Draft and target services over gRPC, around a toy model: answers, selections, failures."""

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import grpc
import pytest

from hippo.errors import ContextLengthError, HippoError, InvalidRequestError
from hippo.models.interface.base import StepPlan
from hippo.speculation.policies import vpsd_pace
from hippo.types import (
    Block,
    ChatMessage,
    FinishReason,
    Hold,
    Media,
    MediaKind,
    OpenRequest,
    Pace,
    PromptInfo,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    StepLimits,
    TextPart,
    Timing,
    Verdict,
)
from hippo.v1 import target_pb2_grpc
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.services import (
    POLICIES,
    backend_of,
    relay,
    serving_draft,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
    with_tokenizer,
)

SAMPLED = SamplingParams(temperature=0.8, seed=7, presence_penalty=0.5, repetition_penalty=1.2)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_relayed_answer_equals_the_target_only_one_and_a_default_limit_changes_no_token(
    policy: str, sampling: SamplingParams
) -> None:
    context = 29 + 31  # the prompt, and what is left
    asked = toy_request(sampling=sampling, end_token_ids=(), max_tokens=31)
    open_ended = dataclasses.replace(asked, max_tokens=50, is_max_tokens_default=True)
    target = ToyModel(max_context_length=context)
    draft = ToyModel(max_context_length=context, noise=0.4)
    async with (
        serving_target(target) as (target_service, target_client),
        serving_draft(draft) as (draft_service, draft_client),
    ):
        expected = await target_only(target_client, asked)
        alone = await target_only(target_client, open_ended)
        relayed = await relay(draft_client, target_client, open_ended, policy)
        with pytest.raises(ContextLengthError, match="max_tokens is 50"):
            await target_only(target_client, dataclasses.replace(asked, max_tokens=50))
        await until_free(target_service)
        await until_free(draft_service)

    assert len(expected.token_ids) == 31
    assert alone.token_ids == relayed.token_ids == expected.token_ids
    assert alone.verdicts[-1].finish_reason is FinishReason.LENGTH
    assert relayed.verdicts[-1].finish_reason is FinishReason.LENGTH
    if policy != "adaptive":  # which may find that a toy draft is not worth its while
        assert (len(relayed.verdicts) == len(alone.verdicts)) == (policy == "off")
        assert bool(relayed.blocks) == (policy != "off")
    assert all(block.start_index + len(block.token_ids) < 31 for block in relayed.blocks)
    assert target.threads == draft.threads == {"device"}


async def test_the_target_tells_prompt_selection_and_verdicts_with_their_times() -> None:
    request = toy_request(max_tokens=5, end_token_ids=())
    async with serving_target(ToyModel()) as (_, client):
        async with client.verify(request) as stream:
            messages = [message async for message in stream]

    prompt, selection, *verdicts = messages
    num_rows = 16 + len("what happens?")
    assert isinstance(prompt, PromptInfo) and prompt.preprocess_ns > 0
    assert (prompt.num_prompt_tokens, prompt.num_visual_tokens) == (num_rows, 16)
    assert isinstance(selection, Selection)
    assert (len(selection.kept_indices), selection.num_visual_tokens) == (8, 16)
    told = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    assert [verdict.start_index for verdict in told] == [0, 1, 2, 3, 4]
    assert told[-1].finish_reason is FinishReason.LENGTH
    first, last = told[0].timing, told[-1].timing
    assert (first.num_rows, last.num_rows, last.context_length) == (num_rows, 1, num_rows + 3)
    assert first.forward_ns > 0 and last.forward_ns > 0


async def test_a_draft_on_hold_sees_nothing_before_the_selection() -> None:
    draft = ToyModel()
    async with serving_draft(draft) as (_, client):
        num_before = draft.num_embedded
        draft.on_embed = lambda _: time.sleep(0.1)  # the hold comes in time
        async with client.draft(toy_request(end_token_ids=(), pace=vpsd_pace(5))) as stream:
            await stream.send_message(Hold())
            assert isinstance(await anext(stream), PromptInfo)
            await asyncio.sleep(0.3)
            assert draft.num_embedded == num_before
            await stream.send_message(Selection(tuple(range(16)), 16))
            assert [type(await anext(stream)) for _ in range(2)] == [Timing, Block]
    assert draft.num_embedded == num_before + 1


@pytest.mark.parametrize(
    ("pruning", "num_kept"),
    [
        (Pruning(PruningStrategy.NONE), None),
        (Pruning(PruningStrategy.UNIFORM, 0.75), 4),
        (Pruning(PruningStrategy.RANDOM, 0.5, seed=3), 8),
        (Pruning(PruningStrategy.BLIND), 0),
    ],
)
async def test_the_draft_prefills_on_the_selected_visual_tokens(
    pruning: Pruning, num_kept: int | None
) -> None:
    draft = ToyModel()
    request = toy_request(pruning=pruning, max_tokens=8)
    async with serving_pair(ToyModel(), draft) as (target_client, draft_client):
        draft.kept.clear()
        await relay(draft_client, target_client, request, "vpsd")

    assert draft.kept == [num_kept]


@pytest.mark.parametrize("wait_ns", [10**15, 2**64 - 1])
async def test_a_sequence_that_waits_for_its_draft_does_not_hold_up_another(wait_ns: int) -> None:
    patient = StepLimits(4, 4, wait_ns)
    waiting_request = toy_request(pace=Pace(patient, patient, 8, 4), end_token_ids=())
    async with serving_target(ToyModel()) as (_, client):
        async with client.verify(waiting_request) as waiting:
            async for message in waiting:
                if isinstance(message, Verdict):
                    break
            other = await target_only(client, toy_request(end_token_ids=()))
            assert len(other.token_ids) == 60

            await waiting.send_message(Pace())
            verdict = await anext(waiting)
            assert isinstance(verdict, Verdict)
            assert verdict.start_index == 1
            assert verdict.timing.wait_ns > 0


async def test_a_failing_sequence_ends_alone() -> None:
    patient = StepLimits(4, 4, wait_ns=10**15)
    model = ToyModel(num_slots=3)
    async with serving_target(model) as (service, client):
        slots: list[int] = []
        bad, good = (
            toy_request(text, pace=Pace(patient, patient, 8, 4), end_token_ids=())
            for text in ("bad", "good")
        )
        expected = await target_only(client, dataclasses.replace(good, pace=Pace()))
        async with contextlib.AsyncExitStack() as streams:
            model.on_piece = lambda slot: None if slot in slots else slots.append(slot)
            opened = []
            for request in (bad, good):  # one after the other: the first slot is the bad one's
                stream = await streams.enter_async_context(client.verify(request))
                while not isinstance(await anext(stream), Verdict):
                    pass
                opened.append(stream)
            doomed, lives = opened
            model.on_piece = lambda slot: None
            gate = Gate()
            failed: list[StepPlan] = []

            def fail_on_bad(plan: StepPlan) -> None:
                if len(plan.sequences) == 1 and plan.sequences[0].slot not in slots:
                    gate(plan)
                elif any(rows.slot == slots[0] and rows.start_index for rows in plan.sequences):
                    failed.append(plan)
                    raise RuntimeError("a kernel failed")

            # A third sequence holds the device until both are ready for the same forward.
            model.on_forward = fail_on_bad
            third = asyncio.create_task(target_only(client, toy_request("third", max_tokens=3)))
            await until(gate.has_arrived.is_set)
            engine = backend_of(service).engine
            for sequence in list(engine._sequences)[:2]:
                engine.post_message(sequence, Pace())
            gate.open()

            with pytest.raises(HippoError, match="failed inside the service"):
                async for _ in doomed:
                    pass
            tokens = [i async for v in lives if isinstance(v, Verdict) for i in v.token_ids]
            await third
        assert tokens == expected.token_ids[1:]
        assert max(len(plan.sequences) for plan in failed) > 1, "the forward was not shared"
        await until_free(service)
        assert backend_of(service).engine.counters.num_failed == 1
        assert await client.health_problem() is None


async def test_a_failing_device_ends_all_sequences_and_the_service_stops_serving() -> None:
    model = ToyModel()
    async with serving_target(model) as (service, client):

        def fail(_: StepPlan) -> None:
            raise RuntimeError("the device is lost")

        model.on_forward = fail
        with pytest.raises(HippoError):
            await target_only(client, toy_request(end_token_ids=()))

        await until_free(service)
        while await client.health_problem() is None:
            await asyncio.sleep(0.01)
        with pytest.raises(HippoError, match="device has failed"):
            await target_only(client, toy_request())


async def test_a_request_above_the_message_limit_is_invalid_and_one_at_the_limit_arrives() -> None:
    async with serving_target(ToyModel(), max_message_mib=2) as (_, client):
        for num_mib, reason in ((19, "larger than max"), (2, "not a toy video")):
            request = toy_request(media=(Media(MediaKind.VIDEO, bytes(num_mib << 20)),))
            with pytest.raises(InvalidRequestError, match=reason):
                await target_only(client, request)


async def test_blocks_sent_after_the_end_are_ignored() -> None:
    async with serving_target(ToyModel()) as (_, client):
        async with client.verify(toy_request(max_tokens=2, end_token_ids=())) as stream:
            async for _ in stream:
                pass
            await stream.send_message(Block(0, 2, (3,)))


async def test_streams_that_send_nothing_are_bounded_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hippo.service.streams._OPEN_S", 0.5)
    monkeypatch.setattr("hippo.service.streams._MOST_UNOPENED", 2)
    async with serving_target(ToyModel()) as (service, client):
        async with grpc.aio.insecure_channel(client.address) as channel:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            calls = [stub.Verify() for _ in range(3)]
            codes = [await asyncio.wait_for(call.code(), 30) for call in calls]
        # A stream that sends something at once is never the oldest that has sent nothing.
        exceeded, exhausted = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
        assert sorted(codes, key=str) == sorted((exceeded, exceeded, exhausted), key=str)
        await until(lambda: service.num_streams == 0)
        assert await target_only(client, toy_request())


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized() -> None:
    model = with_tokenizer(ToyModel())

    def prepared(*_: object) -> None:
        raise AssertionError("the prompt is made")

    request = toy_request(messages=(ChatMessage("user", (TextPart("w1 " * 100_000),)),))
    async with serving_target(model) as (_, client):
        model.prepare_prompt = prepared  # type: ignore[assignment,method-assign]
        with pytest.raises(ContextLengthError, match="characters; the context of"):
            await target_only(client, request)


NUM_SEQUENCES = 8
MIXED = ("adaptive", "vpsd", "serial", "off", "optimistic", "adaptive", "conservative", "vpsd")


def requests() -> list[OpenRequest]:
    """Prompts and answers of different lengths, every second one sampled."""
    return [
        toy_request(
            "what happens" + " next" * number + "?",
            max_tokens=20 + 9 * number,
            sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(NUM_SEQUENCES)
    ]


@pytest.mark.parametrize(
    ("policies", "noise"),
    [(("adaptive",) * NUM_SEQUENCES, 0.3), (MIXED, 0.0), (MIXED, 0.3), (MIXED, 3.0)],
)
async def test_sequences_of_all_lengths_together_equal_each_alone(
    policies: tuple[str, ...], noise: float
) -> None:
    model = ToyModel(num_slots=NUM_SEQUENCES)
    # A moment, in which the other sequences get ready for the next forward.
    model.on_forward = lambda plan: time.sleep(0.001)
    draft = ToyModel(num_slots=NUM_SEQUENCES, noise=noise)
    async with serving_pair(model, draft) as (target_client, draft_client):
        alone = [(await target_only(target_client, one)).token_ids for one in requests()]
        model.plans.clear()
        together = await asyncio.gather(
            *(
                relay(draft_client, target_client, one, policy)
                for one, policy in zip(requests(), policies, strict=True)
            )
        )

    assert [answer.token_ids for answer in together] == alone
    assert max(len(plan.sequences) for plan in model.plans) > 1, "no forward was shared"


async def test_a_verdict_says_what_its_forward_was_shared_with() -> None:
    model = ToyModel(num_slots=NUM_SEQUENCES)
    async with serving_target(model) as (_, client):
        model.plans.clear()  # those that warmed it up
        answers = await asyncio.gather(*(target_only(client, one) for one in requests()))

    timings = [verdict.timing for answer in answers for verdict in answer.verdicts[1:]]
    assert all(1 <= timing.num_rows <= timing.num_batch_rows for timing in timings)
    assert {(timing.num_sequences, timing.num_batch_rows) for timing in timings} == {
        (len(plan.sequences), plan.num_rows) for plan in model.plans
    }
