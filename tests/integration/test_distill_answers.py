"""The target's answers through its service, and the draft's inputs that are made of them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from hippo.base.local_files import LocalFiles
from hippo.lab.distill.answers import TOP_LOGPROBS, AnswerFile, ask_target
from hippo.lab.distill.examples import DraftExample, write_examples
from hippo.lab.distill.questions import TargetQuestion
from hippo.video.decoder import MediaDecoder
from tests.e2e.support import write_clip
from tests.support.models.pairs import Pair
from tests.support.running.services import serving_target


async def test_answers_and_inputs_are_those_of_serving(pair: Pair, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4")
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    first = TargetQuestion(id="a", video=clip, prompt="what is it?", ratio=0.9)
    questions = [
        first,
        replace(first, id="whole", ratio=0.0),
        replace(first, id="sampled", temperature=1.0, seed=5),
        replace(first, id="broken", video=broken),
    ]
    file = AnswerFile(tmp_path / "answers.jsonl")
    told: list[None] = []

    async def ask() -> dict[str, str]:
        async with (
            MediaDecoder(files=LocalFiles([tmp_path])) as decoder,
            serving_target(pair.target, decoder, allowed_local_media_path=(str(tmp_path),)) as (
                _,
                client,
            ),
        ):
            decoder.frame_limits = pair.target.frame_limits
            return await ask_target(
                client.address,
                questions,
                file,
                max_tokens=6,
                min_visual_tokens=0,
                on_answer=lambda: told.append(None),
            )

    refused = await ask()
    assert list(refused) == ["broken"] and len(told) == 4
    assert set(file.answers) == {"a", "whole", "sampled"}
    greedy, whole = file.answers["a"], file.answers["whole"]
    assert greedy.token_ids == whole.token_ids and len(greedy.token_ids) <= 6
    assert [each[0][0] for each in greedy.top] == list(greedy.token_ids)
    assert {len(each) for each in greedy.top} == {TOP_LOGPROBS}
    assert whole.kept is None and greedy.kept is not None
    assert len(greedy.kept) < greedy.num_visual_tokens / 5
    del told[:]
    assert list(await ask()) == ["broken"] and len(told) == 1  # the others are not asked again
    assert AnswerFile(tmp_path / "answers.jsonl").answers == file.answers

    files = {name: tmp_path / f"{name}.safetensors" for name in ("a", "whole")}
    wanted = [(files[each.id], each, file.answers[each.id]) for each in questions[:2]]
    await asyncio.to_thread(write_examples, pair.draft, wanted, lambda: None)
    pruned, full = (DraftExample.load(path) for path in files.values())
    count = len(greedy.token_ids)
    assert pruned.input_ids.shape[0] == greedy.num_draft_prompt_tokens + count - 1
    assert full.input_ids.shape[0] == whole.num_prompt_tokens + count - 1
    assert pruned.answer_ids.tolist() == list(greedy.token_ids)
    assert pruned.visual_rows.shape[0] < full.visual_rows.shape[0]
    places = torch.searchsorted(full.positions[0], pruned.positions[0])
    assert torch.equal(full.positions[0][places], pruned.positions[0])
