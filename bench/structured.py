"""Measures what structured output costs: ``python -m bench.structured [--pair float32]``.

Without ``--pair``: the time of masks with a vocabulary of 150,000 ids, along a text of each
grammar, as a verification of several draft tokens computes them. With ``--pair``: the bundled pair
without a grammar and with one that allows every text, so that the tokens are the same; and with a
JSON schema.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llguidance import LLTokenizer, grammar_from
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.answers.runs import FORM, bundled_pair, questions_about, running_stack
from bench.base.clips import held_out_clips
from bench.base.options import parser_of
from bench.base.tables import wide_console, wide_table
from hippo.client.server import Server
from hippo.engine.grammars import GrammarCompiler
from hippo.sampling.masks import mask_logits
from hippo.types import FramePlan, ModelInfo, OpenRequest, Pruning, SamplingParams

NUM_IDS = 150_000
NUM_DRAFT = 7  # draft tokens of a forward
_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "color": {"enum": ["red", "green", "blue", "yellow", "other"]},
        "count": {"type": "integer", "minimum": 1},
    },
    "required": ["name", "color", "count"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "caption": {"type": "string"},
        "objects": {"type": "array", "items": _OBJECT},
        "is_indoors": {"type": "boolean"},
    },
    "required": ["caption", "objects", "is_indoors"],
    "additionalProperties": False,
}
_OBJECTS = [
    {"name": f"a small toy car number {i}", "color": "red", "count": i} for i in range(1, 9)
]
TEXT = json.dumps(
    {
        "caption": "A child plays with toy cars on a carpet. Then a dog walks in, and the child "
        "laughs and hides the cars behind its back.",
        "objects": _OBJECTS,
        "is_indoors": True,
    }
)
CASES = {
    "JSON by a schema": ("json", json.dumps(SCHEMA), TEXT),
    "any JSON object": ("json", '{"type": "object"}', TEXT),
    "regular expression": ("regex", r"[A-Z][a-z ,]+( \d+)?\.", "A child plays with toy cars 12."),
    "any text": ("regex", r"(.|\n)*", TEXT),
}
_FIRST = "regex", "a", "a"  # starts the process of trials


def main() -> None:
    """Measures and prints a table."""
    parser = parser_of("bench.structured", __doc__)
    parser.add_argument("--pair", choices=("float32", "bfloat16"), help="dtype of the bundled pair")
    parser.add_argument("--num-clips", type=int, default=10)
    args = parser.parse_args()
    console = wide_console()
    if args.pair is None:
        _measure_masks(console)
    else:
        _measure_pair(console, args.pair, args.num_clips)


def large_tokenizer(num_ids: int) -> ModelInfo:
    """Returns a model's description with a byte-level tokenizer of random words, with and without a
    space before them, numbers and marks; the last id is the end token."""
    chance = random.Random(0)
    names = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    syllables = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")]
    while len(names) < num_ids - 1:
        word = "".join(chance.choices(syllables, k=chance.randint(1, 4)))
        word = chance.choice((word, word.title(), word + chance.choice('.,":}]'), f'"{word}'))
        names[chance.choice(("Ġ", "Ġ", "")) + word] = None
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>", special=True)])
    return ModelInfo(
        name="large", family="", device="cpu", dtype="", tokenizer_hash=b"",
        tokenizer_json=core.to_str().encode(), num_token_ids=num_ids,
        end_token_ids=(num_ids - 1,), max_context_length=0, num_slots=0, num_parameters=0,
    )  # fmt: skip


def _measure_masks(console: Console) -> None:
    torch.set_num_threads(1)
    info = large_tokenizer(NUM_IDS)
    compiler, seconds = _timed(lambda: GrammarCompiler(info))
    reader = LLTokenizer(info.tokenizer_json.decode(), n_vocab=NUM_IDS)
    _case(_FIRST, compiler, reader)
    rows = [[name, *_case(case, compiler, reader)] for name, case in CASES.items()]
    compiler.close()
    columns = ("grammar", "tokens", "compile ms", "mask µs, median", "95 %", "most")
    console.print(wide_table(f"{NUM_IDS:,} ids, {NUM_DRAFT} draft tokens a forward", columns, rows))
    console.print(f"the tokenizer is read in {seconds:.2f} s, once at the start of a service")
    logits = torch.randn(NUM_DRAFT + 1, NUM_IDS)
    allowed = logits > 1.0
    times = [_timed(lambda: mask_logits(logits, allowed))[1] for _ in range(20)]
    each_us = statistics.median(times) / (NUM_DRAFT + 1) * 1e6
    console.print(f"applied to a row of logits on this CPU: {each_us:.0f} µs")


def _case(case: tuple[str, str, str], compiler: GrammarCompiler, reader: LLTokenizer) -> list[str]:
    kind, grammar, text = case
    sampling = SamplingParams(grammar=grammar_from(kind, grammar))  # type: ignore[arg-type]
    request = OpenRequest(
        request_id="", messages=(), media=(), sampling=sampling, frame_plan=FramePlan(),
        pruning=Pruning(), max_tokens=1, end_token_ids=(NUM_IDS - 1,),
    )  # fmt: skip
    masks, compile_s = _timed(lambda: asyncio.run(compiler.compile_request(request)))
    ids = reader.greedy_tokenize(text)
    each_us = []
    for start in range(0, len(ids), NUM_DRAFT + 1):
        draft = ids[start : start + NUM_DRAFT]

        def forward(start: int = start, draft: Sequence[int] = draft) -> None:
            masks.start(ids[:start], draft)
            masks.take()
            masks.check(draft, draft)

        each_us.append(_timed(forward)[1] / (len(draft) + 1) * 1e6)
    each_us.sort()
    late = each_us[int(0.95 * (len(each_us) - 1))]
    shown = (statistics.median(each_us), late, each_us[-1])
    return [str(len(ids)), f"{compile_s * 1e3:.1f}", *(f"{us:.0f}" for us in shown)]


def _measure_pair(console: Console, dtype: str, num_clips: int) -> None:
    named = {"name": "scene", "schema": SCHEMA}
    forms: dict[str, dict[str, Any]] = {
        "none": {},
        "any text": {"guided_regex": r"(.|\n)*"},
        "schema": {"response_format": {"type": "json_schema", "json_schema": named}},
    }
    found: dict[tuple[str, str], list[float]] = {}
    answers: dict[tuple[str, int], set[str]] = {}
    with tempfile.TemporaryDirectory() as folder, running_stack(bundled_pair(dtype)) as stack:
        clips = held_out_clips(Path(folder), kind="short", num_clips=num_clips)
        with closing(Server(stack.url).connect()) as connection:
            for number, question in enumerate(questions_about(clips)):
                for form, further in forms.items():
                    for policy in ("off", "adaptive"):
                        request = replace(FORM, further=further).request(
                            question, {"policy": policy}
                        )
                        answer = connection.ask(request.body())
                        ms = answer.decode_s_per_token * 1e3
                        found.setdefault((form, policy), []).append(ms)
                        key = (form if form == "schema" else "", number)
                        answers.setdefault(key, set()).add(answer.text)
    rows = []
    for form in forms:
        alone, pair = (statistics.mean(found[form, policy]) for policy in ("off", "adaptive"))
        rows.append([form, f"{alone:.2f}", f"{pair:.2f}", f"{alone / pair:.2f}"])
    columns = ("grammar", "target-only, ms/token", "adaptive, ms/token", "decode ×")
    console.print(wide_table(f"bundled pair, {dtype}, {num_clips} clips, T=0", columns, rows))
    num_equal = sum(len(texts) == 1 for texts in answers.values())
    console.print(f"{num_equal} of {len(answers)} sets of answers are equal")


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began_s


if __name__ == "__main__":
    main()
