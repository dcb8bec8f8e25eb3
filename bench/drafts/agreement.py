"""Agreement traces of the bundled target on the bench's clips: ``python -m
bench.drafts.agreement``.

The draft is teacher-forced along the target's answers to the prompts of ``python -m bench``;
`hippo simulate --traces` replays the traces. They depend on the models and the dtypes, not on the
machine's speed. Printed are the agreement, and of the wrong tokens the share of which the draft's
second choice is right (``_SECOND_RIGHT`` of the simulator); for greedy answers, also the share
after which the draft goes on with the target's next token nevertheless (``_FIT``), and at a
temperature, the agreement at each sharpness of the draft's choices. The file has one line of JSON
per clip. With ``--choices`` a line also has the answer (``output``), for each of its tokens the
draft's three likeliest with their chances (``top``), and what the draft says behind each wrong
first choice (``broken``), at the sharpness that was best for the clips before; `python -m
bench.predicted.trees` replays these.
"""

import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from bench.base.clips import ClipFile, held_out_clips
from bench.base.options import add_out, names, parser_of
from bench.drafts.choices import broken_runs, choices_of
from bench.drafts.teacher import MAX_TOKENS, target_output
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from demo.world.clips import read_facts
from hippo.cli.stack import BUNDLED_PAIR
from hippo.client.tables import tracked
from hippo.lab.commands.scoring import decode
from hippo.models.interface.base import (
    AttentionTap,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
    prunable_embeddings,
)
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.pruning.select import VisualScores, default_score_layers, select_tokens
from hippo.sampling.sampler import TokenSampler, unpack_proposals
from hippo.speculation.sharpness import SHARPNESSES, Sharpness
from hippo.types import (
    ChatMessage,
    FramePlan,
    MediaPart,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)

_RATIOS = {"short": 0.0, "long": 0.9}  # as in `python -m bench`
_SHARPER = tuple(f"sharpness {sharpness:g}" for sharpness in SHARPNESSES[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a line for each clip, dtype and kind of prompt."""
    parser = parser_of("bench.drafts.agreement", __doc__)
    parser.add_argument("--draft-model", default=BUNDLED, help=HELP)
    parser.add_argument("--kinds", type=names, default=["short"], help="short, long")
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16", "float16"])
    parser.add_argument("--num-clips", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--choices", action="store_true", help="record three choices a token")
    add_out(parser, "agreement.jsonl")
    args = parser.parse_args(argv)
    console = Console()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, args.out.open("w", encoding="utf-8") as file:
        for dtype, kind in product(args.dtypes, args.kinds):
            target = load_model(LoadPlan(str(BUNDLED_PAIR / "target"), dtype=dtype))
            model = find_draft(args.draft_model, Path(folder) / dtype, kind)
            draft = load_model(LoadPlan(model, auto_is_half=True))  # as the draft service does
            clips = held_out_clips(Path(folder) / kind, kind=kind, num_clips=args.num_clips)
            answers = [facts.answer for facts in read_facts(Path(folder) / kind)]
            facts = {"draft": args.draft_model, "kind": kind, "dtype": dtype}
            facts |= {"draft_dtype": draft.info.dtype, "temperature": args.temperature}
            lines, best = [], Sharpness()
            todo = tracked(clips, console, title=f"{kind}, {dtype}", total=len(clips))
            for number, (clip, answer) in enumerate(zip(todo, answers, strict=True)):
                params = SamplingParams(temperature=args.temperature, seed=number)
                found = agreement(
                    target, draft, clip, answer, params, ratio=_RATIOS[kind],
                    best=best, has_choices=args.choices,
                )  # fmt: skip
                lines.append({**facts, "clip": clip.path.name, **found})
                file.write(json.dumps(lines[-1]) + "\n")
            console.print(f"{kind}, {dtype}: {_described(lines)}", soft_wrap=True)
    console.print(f"written to {args.out}")


def _described(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence on the shares of the marks of all clips."""
    marks = {
        name: "".join(line.get(name, "") for line in lines)
        for name in ("agrees", *_SHARPER, "seconds", "fits")
    }
    shares = {name: found.count("1") / len(found) for name, found in marks.items() if found}
    said = f"{shares['agrees']:.1%}"
    for name in _SHARPER:
        said += f", {name} {shares[name]:.1%}" if name in shares else ""
    if "seconds" in shares:
        said += f"; of wrong tokens {shares['seconds']:.0%} are the second choice"
    if "fits" in shares:
        said += f"; {shares['fits']:.0%} of broken runs fit on"
    return said


@torch.inference_mode()
def agreement(
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    clip: ClipFile,
    answer: str,
    params: SamplingParams,
    *,
    ratio: float,
    best: Sharpness,
    has_choices: bool = False,
) -> dict[str, Any]:
    """Returns the trace of one clip and the lengths of both prompts.

    ``agrees`` has "1" for each token of the target's answer (its end token included) that a draft
    without sharpening proposes there, else "0". ``answer`` is the true answer; it only saves time.
    ``best`` learns from the clip after its choices are recorded.
    """
    media = [decode(clip.path.read_bytes(), FramePlan())]
    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(clip.question))
    message = ChatMessage("user", parts if clip.is_video_first else parts[::-1])
    prompt = target.prepare_prompt([message], media, FramePlan())
    visual = target.embed_visual(prompt)
    tap = AttentionTap(default_score_layers(target.num_layers)) if ratio else None
    *_, logits = target.prefill(0, prompt, visual, None, tap)
    assert logits is not None
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    guess = tokenizer.encode(answer, add_special_tokens=False).ids
    sampler = TokenSampler(params, (), logits.shape[-1])
    first_id = int(sampler.choose_for_rows(logits[None], (), ()))
    output = target_output(target, first_id, guess, max_tokens=MAX_TOKENS, sampler=sampler)
    num_visual, kept = int(prompt.visual_indices.shape[0]), None
    if tap is not None and visual is not None:
        scores = VisualScores(tap.scores, prunable_embeddings(target, prompt, visual))
        pruning = Pruning(PruningStrategy.HOLISTIC, ratio)
        kept = select_tokens(pruning, prompt.visual_grids, num_visual, scores)
    draft_prompt = draft.prepare_prompt([message], media, FramePlan())
    *_, logits = draft.prefill(0, draft_prompt, draft.embed_visual(draft_prompt), kept)
    assert logits is not None
    rows = [logits[None]]  # [1 or the rest, num_token_ids]
    if len(output) > 1:
        rows.append(draft.forward(StepPlan((SequenceRows(0, 0, output[:-1]),))))
    proposer = TokenSampler(
        params, (), target.info.num_token_ids, proposes=True,
        sharpness=Sharpness() if params.temperature > 0.0 else None,
    )  # fmt: skip
    chosen = proposer.choose_for_rows(torch.cat(rows), (), output[:-1])
    proposals = unpack_proposals(chosen.tolist(), len(output))
    said = [proposal.token_id for proposal in proposals]  # not sharpened yet
    _, *sharper = zip(*(proposal.choices or (0,) for proposal in proposals), strict=True)
    num_dropped = 0 if kept is None else num_visual - int(kept.shape[0])
    recorded: dict[str, Any] = {}
    fits = "" if sharper else _broken_runs_that_fit(draft, output, said)
    if has_choices:
        sharpness = SHARPNESSES[best.place]
        top = choices_of(torch.cat(rows), params, 0, sharpness)
        broken = broken_runs(draft, output, top, params, sharpness)
        recorded = {"output": output, "top": top, "broken": broken}
    for proposal, right in zip(proposals, output, strict=True):
        best.observe_choices(proposal.choices, right)
    return {
        "num_prompt_tokens": prompt.length,
        "num_draft_prompt_tokens": prompt.length - num_dropped,
        "agrees": _marks(said, output),
        "seconds": "".join(
            "01"[proposal.second_id == right]
            for proposal, right in zip(proposals, output, strict=True)
            if proposal.token_id != right
        ),
        "fits": fits,
        **{name: _marks(ids, output) for name, ids in zip(_SHARPER, sharper, strict=False)},
        **recorded,
    }


def _marks(said: Sequence[int], output: Sequence[int]) -> str:
    return "".join("01"[a == b] for a, b in zip(said, output, strict=True))


def _broken_runs_that_fit(
    draft: VideoLanguageModel, output: Sequence[int], said: Sequence[int]
) -> str:
    """Returns a "1" for each wrong token after which the draft's next token is the target's at that
    index, else "0"; of wrong tokens that a token follows. The draft has read ``output``."""
    marks = ""
    for index in range(len(output) - 1):
        if said[index] != output[index]:
            # The wrong token's row is overwritten with each next one, and read by no other row.
            step = StepPlan((SequenceRows(0, index, (said[index],)),))
            marks += "01"[int(draft.forward(step).argmax(-1)[-1]) == output[index + 1]]
            draft.forward(StepPlan((SequenceRows(0, index, (output[index],)),)))
    return marks


if __name__ == "__main__":
    main()
