"""Agreement traces of the bundled target on the bench's clips: ``python -m
bench.drafts.agreement``.

The draft is teacher-forced along the target's answers to the prompts of ``python -m bench``;
`hippo simulate --traces` replays the traces. They depend on the models and the dtypes, not on the
machine's speed. Printed are the agreement, and of the wrong tokens the share of which the draft's
second choice is right (``_SECOND_RIGHT`` of the simulator); for greedy answers, also the share
after which the draft goes on with the target's next token nevertheless (``_FIT``), and at a
temperature, the agreement at each sharpness of the draft's choices. The file has one line of JSON
per clip; a run that was interrupted continues.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from tokenizers import Tokenizer

from bench.base.clips import ClipFile, Kind, held_out_clips
from bench.base.environment import ROOT
from bench.base.options import parser_of
from bench.drafts.traces import MAX_TOKENS, target_output
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from demo.world.clips import read_facts
from hippo.cli.stack import BUNDLED_PAIR
from hippo.client.tables import progress_bar
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
from hippo.speculation.sharpness import SHARPNESSES, SharpnessByTemperature
from hippo.types import (
    ChatMessage,
    FramePlan,
    MediaPart,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)

AGREEMENT = ROOT / "bench/out/agreement.jsonl"
_RATIOS = {"short": 0.0, "long": 0.9}  # as in `python -m bench`
_SHARPER = tuple(f"sharpness {sharpness:g}" for sharpness in SHARPNESSES[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a line for each clip, dtype and kind of prompt."""
    parser = parser_of("bench.drafts.agreement", __doc__)
    parser.add_argument("--draft-model", default=BUNDLED, help=HELP)
    parser.add_argument("--kinds", default="short", help="short, long (default: short)")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--num-clips", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=AGREEMENT)
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = {_key(line) for line in read_agreement(args.out)} if args.out.exists() else set()
    console = Console()
    torch.set_num_threads(1)
    for dtype in args.dtypes.split(","):
        target = load_model(LoadPlan(str(BUNDLED_PAIR / "target"), dtype=dtype))
        for kind in args.kinds.split(","):
            with tempfile.TemporaryDirectory() as folder, progress_bar(console) as progress:
                clips = held_out_clips(
                    Path(folder) / "clips", kind=cast(Kind, kind), num_clips=args.num_clips
                )
                answers = [facts.answer for facts in read_facts(Path(folder) / "clips")]
                model = find_draft(args.draft_model, Path(folder), cast(Kind, kind))
                draft = load_model(LoadPlan(model, auto_is_half=True))  # as the draft service does
                todo = list(zip(clips, answers, strict=True))
                tracked = progress.track(todo, description=f"{kind}, {dtype}")
                for number, (clip, answer) in enumerate(tracked):
                    line = {"draft": args.draft_model, "kind": kind, "dtype": dtype}
                    line |= {"draft_dtype": draft.info.dtype, "temperature": args.temperature}
                    line |= {"clip": clip.path.name}
                    if _key(line) in known:
                        continue
                    params = SamplingParams(temperature=args.temperature, seed=number)
                    line |= agreement(target, draft, clip, answer, params, ratio=_RATIOS[kind])
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    marks: dict[tuple[str, ...], dict[str, str]] = {}
    for line in read_agreement(args.out):
        sums = marks.setdefault(_key(line)[:-1], {})
        for name in ("agrees", "seconds", "fits", *_SHARPER):
            sums[name] = sums.get(name, "") + line.get(name, "")
    for key, sums in marks.items():
        shares = {name: found.count("1") / len(found) for name, found in sums.items() if found}
        said = f"{' '.join(key)}: {shares['agrees']:.1%}"
        for name in _SHARPER:
            said += f", {name} {shares[name]:.1%}" if name in shares else ""
        if "seconds" in shares:
            said += f"; of wrong tokens {shares['seconds']:.0%} are the second choice"
        if "fits" in shares:
            said += f"; {shares['fits']:.0%} of broken runs fit on"
        console.print(said, soft_wrap=True)
    console.print(f"written to {args.out}")


def read_agreement(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file that ``main`` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def agreement(
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    clip: ClipFile,
    answer: str,
    params: SamplingParams,
    *,
    ratio: float,
) -> dict[str, Any]:
    """Returns the trace of one clip and the lengths of both prompts.

    ``agrees`` has "1" for each token of the target's answer (its end token included) that a draft
    without sharpening proposes there, else "0". ``answer`` is the true answer; it only saves time.
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
        sharpness=SharpnessByTemperature().at(params.temperature),
    )  # fmt: skip
    chosen = proposer.choose_for_rows(torch.cat(rows), (), output[:-1])
    proposals = unpack_proposals(chosen.tolist(), len(output))
    said = [proposal.token_id for proposal in proposals]  # not sharpened yet
    _, *sharper = zip(*(proposal.choices or (0,) for proposal in proposals), strict=True)
    num_dropped = 0 if kept is None else num_visual - int(kept.shape[0])
    return {
        "num_prompt_tokens": prompt.length,
        "num_draft_prompt_tokens": prompt.length - num_dropped,
        "agrees": _marks(said, output),
        "seconds": "".join(
            "01"[proposal.second_id == right]
            for proposal, right in zip(proposals, output, strict=True)
            if proposal.token_id != right
        ),
        "fits": "" if sharper else _broken_runs_that_fit(draft, output, said),
        **{name: _marks(ids, output) for name, ids in zip(_SHARPER, sharper, strict=False)},
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


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    temperature = f"T={line.get('temperature', 0.0):g}"
    names = ("draft", "kind", "dtype", "draft_dtype")
    return (*(str(line[name]) for name in names), temperature, line["clip"])


if __name__ == "__main__":
    main()
