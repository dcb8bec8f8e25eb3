"""The draft in training computes what the draft in serving computes, for each family."""

from pathlib import Path

import pytest
import torch

from hippo.lab.distill.answers import TargetAnswer
from hippo.lab.distill.batches import ExampleBatch
from hippo.lab.distill.examples import DraftExample, example_of
from hippo.lab.distill.student import Student, agreements, distillation_loss, new_student
from hippo.models.interface.base import Prompt, VideoLanguageModel
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from tests.support.models.reference import assert_close, clip, prefill, prepare, step, user
from tests.unit.models.conftest import Held

ANSWER = tuple(range(7, 19))
TURN = user(0, "what is in the thing?")


def answer(kept: torch.Tensor | None = None, tokens: tuple[int, ...] = ANSWER) -> TargetAnswer:
    return TargetAnswer(
        id="1",
        token_ids=tokens,
        top=tuple(((token, -0.1), (token + 1, -3.0)) for token in tokens),
        kept=None if kept is None else tuple(kept.tolist()),
        num_prompt_tokens=0,
        num_visual_tokens=0,
        prompt_hash="",
        max_visual_tokens=0,
    )


def example(
    model: VideoLanguageModel, prompt: Prompt, kept: torch.Tensor | None, *tokens: int
) -> DraftExample:
    features = model.embed_visual(prompt)
    assert features is not None
    return example_of(prompt, features, kept, answer(kept, tokens or ANSWER))


def served(model: VideoLanguageModel, prompt: Prompt, kept: torch.Tensor | None) -> torch.Tensor:
    """The serving draft's logits of each token of the answer."""
    first = prefill(model, 0, prompt, kept)
    return torch.cat((first[None], model.forward(step(0, 0, *ANSWER[:-1]))))


def logits_of(student: Student, *examples: DraftExample) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = student(ExampleBatch.of(examples))
    return found


def test_logits_are_those_of_transformers_and_with_dropped_tokens_those_of_serving(
    held: Held,
) -> None:
    model, student = held.model, new_student(held.folder, torch.float32, lora_rank=None)
    prompt = prepare(model, TURN, clip())
    whole = example(model, prompt, None)
    num_ids = model.info.num_token_ids
    inputs = held.reference.inputs(TURN, [clip()])
    reference = held.reference.forward(inputs, ANSWER[:-1])[-len(ANSWER) :, :num_ids]
    assert_close(logits_of(student, whole), reference)
    kept = torch.arange(1, len(prompt.visual_indices), 7)
    pruned = example(model, prompt, kept)
    assert_close(logits_of(student, pruned), served(model, prompt, kept))
    # Side by side, with padding behind the shorter one.
    assert_close(
        logits_of(student, pruned, whole),
        torch.cat((logits_of(student, pruned), logits_of(student, whole))),
    )


def test_merged_adapters_are_served_as_they_were_trained(held: Held, tmp_path: Path) -> None:
    torch.manual_seed(0)
    student = new_student(held.folder, torch.float32, lora_rank=4)
    assert all("lora_" in name for name in student.trained)
    prompt = prepare(held.model, TURN, clip())
    kept = torch.arange(0, len(prompt.visual_indices), 5)
    pruned = example(held.model, prompt, kept)
    before = logits_of(student, pruned)
    optimizer = torch.optim.AdamW(student.trained.values(), lr=0.02)
    batch = ExampleBatch.of([pruned])
    for _ in range(4):
        loss = distillation_loss(student(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    after = logits_of(student, pruned)
    assert float((after - before).abs().max()) > 0.1
    student.save_checkpoint(tmp_path / "out", find_checkpoint(str(held.folder), progress=no_news))
    for path in held.folder.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    plan = LoadPlan(str(tmp_path / "out"), dtype="float32", max_context_length=512)
    assert_close(served(load_model(plan), prompt, kept), after)


# All kinds of layers: Qwen2's, and Qwen3's with experts and features behind the first ones.
@pytest.mark.parametrize("held", ["qwen2_5_vl", "qwen3_vl_moe"], indirect=True)
def test_gradient_checkpointing_changes_no_gradient(held: Held) -> None:
    prompt = prepare(held.model, TURN, clip())
    batch = ExampleBatch.of([example(held.model, prompt, torch.tensor([0, 5]))])
    student = new_student(held.folder, torch.float32, lora_rank=None).train()
    found = []
    for is_checkpointed in (False, True):
        student.zero_grad()
        if is_checkpointed:
            student.language_model.activation_checkpointing_enable()
        distillation_loss(student(batch), batch).backward()  # type: ignore[no-untyped-call]
        found.append({name: weight.grad for name, weight in student.trained.items()})
    assert not any("visual" in name or "vision" in name for name in found[0])
    for name, gradient in found[0].items():
        other = found[1][name]
        assert (gradient is None) == (other is None)
        if gradient is not None and other is not None:
            assert_close(other, gradient)


@pytest.mark.parametrize("held", ["qwen2_5_vl"], indirect=True)
def test_traces_mark_the_tokens_that_the_draft_proposes(held: Held) -> None:
    student = new_student(held.folder, torch.float32, lora_rank=None)
    prompt = prepare(held.model, TURN, clip())
    short, long = example(held.model, prompt, None, 5, 6), example(held.model, prompt, None)
    batch = ExampleBatch.of([short, long])
    logits = torch.zeros(2 + len(ANSWER), student(batch).shape[1])
    logits[0, 5] = logits[1, 7] = logits[2, ANSWER[0]] = 1.0
    traces = agreements(logits, batch)
    assert traces == ["10", "1" + "0" * (len(ANSWER) - 1)]


def no_news(stage: str, share: float) -> None:
    """No progress is shown."""


@pytest.mark.parametrize("k", [1, 2])
def test_the_loss_is_least_at_the_targets_distribution(k: int) -> None:
    top = torch.tensor([[0.7, 0.3]]).log()[:, :k]
    none = torch.zeros(1, 1)
    likeliest = torch.tensor([[0, 1]])[:, :k]
    batch = ExampleBatch(none, none, none, none, none, torch.tensor([0]), likeliest, top)
    own = torch.tensor([[0.76, 0.24, 1e-9]]).log()  # the token itself counts 0.3 besides
    least = float(distillation_loss(own, batch))
    for other in ([0.5, 0.5, 1e-9], [0.3, 0.1, 0.6]):
        assert float(distillation_loss(torch.tensor([other]).log(), batch)) > least
