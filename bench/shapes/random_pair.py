"""Pairs with the published shapes of Qwen2.5-VL and random weights, and acceptance by choice.

A random model would say anything, and a random draft would never be right. So the last layer's MLP
holds a table: one neuron for each id of the table answers only to that id's embedding, and adds
the embedding of the next id to the residual stream, where it outweighs everything else. The next
token is therefore a function of the last one: target and draft both walk along a cycle of words.
Along each cycle the draft's table agrees with the target's at a chosen share of the ids, of every
hundred ids exactly. The chat template appends the question's last letter to the prompt, and each
cycle begins at another letter: "... a" has the first share, "... b" the second.

Everything else is random, and the computation has the published shapes: all layers, the
vision tower and the whole head run. Weights are made, and written shard by shard; on a GPU if there
is one. A target can be stored quantised, as the hub's repositories are.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.models.checkpoints import CHAT_TEMPLATE
from tests.support.models.hub_forms import hub_name, write_qwen_files
from tests.support.models.quantized import FORMS, add_config, quantise

LETTERS = "abcdefgh"
_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% set last = messages[-1]['content'] %}"
    "{{ (last if last is string else last[-1]['text'])[-1] }}{% endif %}",
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = ["re:visual.*", "lm_head"]  # by compressed-tensors, for towers of any depth
_WINDOW = 100  # ids of a cycle in which the share is exact
_SPREAD = 0.02  # standard deviation of embeddings, as in published models
_OTHERS = 0.3  # most that all layers add, as a share of the embedding's size
_GATE = 8.0  # input of the neuron of the id at hand; of the others it is near 0
_NEXT = 4.0  # what the table adds, in embedding's sizes


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """The next id of each of ``ids``; both int64 ``[num_ids]``."""

    ids: torch.Tensor
    next_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PairForm:
    """Which models to write; ``shares`` are shares of tokens on which draft and target agree.

    ``target_form`` is a key of tests.support.models.quantized.FORMS, or None for plain weights.
    ``target_layers`` and ``draft_layers`` set another depth. Without ``is_published_size`` the
    models are small counterparts, for tests.
    """

    target: str
    draft: str
    shares: tuple[float, ...] = (0.9,)
    target_form: str | None = None
    target_layers: int | None = None
    draft_layers: int | None = None
    is_published_size: bool = True


def write_pair(
    folder: Path,
    form: PairForm,
    *,
    progress: Callable[[str], None] = lambda line: None,
    roles: Sequence[str] = ("target", "draft"),
) -> tuple[Path, Path]:
    """Writes the models of ``roles`` into ``folder``, in place of what is there; returns the
    folders of target and draft."""
    models = {"target": (form.target, form.target_layers), "draft": (form.draft, form.draft_layers)}
    sizes = []
    with tempfile.TemporaryDirectory() as scratch:
        for role, (name, num_layers) in models.items():
            path = (folder if role in roles else Path(scratch)) / role
            shutil.rmtree(path, ignore_errors=True)
            tokenizer = write_qwen_files(
                path,
                name,
                num_layers=num_layers,
                chat_template=_TEMPLATE,
                is_published_size=form.is_published_size,
            )
            sizes.append(int(_config(path)["intermediate_size"]))
    tables = answer_tables(tokenizer.get_vocab(), min(sizes), form.shares)
    for seed, ((role, (name, _)), table) in enumerate(zip(models.items(), tables, strict=True)):
        if role in roles:
            form_of = form.target_form if role == "target" else None
            for part in _write_weights(folder / role, table, seed, form_of):
                progress(f"wrote {role} ({name}): {part}")
    return folder / "target", folder / "draft"


def answer_tables(
    vocabulary: Mapping[str, int], most_ids: int, shares: Sequence[float]
) -> tuple[AnswerTable, AnswerTable]:
    """Returns the tables of target and draft, with a cycle for each share."""
    letters = LETTERS[: len(shares)]
    words = [number for token, number in vocabulary.items() if token.startswith("Ġw")]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(words), generator=generator)[: most_ids - len(letters)]
    chosen = torch.tensor(sorted(words))[order]
    ids, of_target, of_draft = [], [], []
    for letter, share, part in zip(letters, shares, chosen.chunk(len(shares)), strict=True):
        cycle = torch.cat((torch.tensor([vocabulary[letter]]), part))
        following = cycle.roll(-1)
        wrong = torch.zeros_like(cycle, dtype=torch.bool)
        for window in torch.split(torch.arange(len(cycle)), _WINDOW):
            count = round((1 - share) * len(window))
            wrong[window[torch.randperm(len(window), generator=generator)[:count]]] = True
        ids.append(cycle)
        of_target.append(following)
        of_draft.append(torch.where(wrong, following.roll(len(cycle) // 2), following))
    all_ids = torch.cat(ids)
    return AnswerTable(all_ids, torch.cat(of_target)), AnswerTable(all_ids, torch.cat(of_draft))


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _write_weights(folder: Path, table: AnswerTable, seed: int, form: str | None) -> Iterator[str]:
    """Writes a file for each layer and for each part outside layers, and yields its name."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    shapes = {
        hub_name(key, "qwen2_5_vl"): weight.shape
        for key, weight in model.state_dict().items()
        if not (config.tie_word_embeddings and key == "lm_head.weight")
    }
    if form is not None:
        settings = FORMS[form][1]
        add_config(folder, settings | ({"ignore": _IGNORED} if "ignore" in settings else {}))
    weights = _RandomWeights(shapes, config.text_config, table, seed)
    files: dict[str, str] = {}
    for number, (part, names) in enumerate(groupby(shapes, _part_of), 1):
        file = f"model-{number:05}.safetensors"
        shard = {name: weights.make(name) for name in names}
        if form is not None:
            shard, _ = quantise(shard, form, device=weights.device, has_plain=False)
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
        yield part
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # cached blocks count as used memory
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _part_of(name: str) -> str:
    pieces = name.split(".")
    return " ".join(pieces[1:3]) if pieces[1] in ("layers", "blocks") else pieces[0]


class _RandomWeights:
    """Makes each weight in bfloat16 by its name on the hub, on a GPU if there is one."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], text: Any, table: AnswerTable, seed: int
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._shapes = shapes
        self._num_layers: int = text.num_hidden_layers
        self._table = table
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._embedding = self._normal(shapes[_EMBEDDING], _SPREAD)

    def make(self, name: str) -> torch.Tensor:
        """Returns the weight of this name, on the CPU."""
        shape = self._shapes[name]
        if name in (_EMBEDDING, _HEAD):
            return self._embedding.to("cpu", copy=True)
        if len(shape) == 1:  # a norm's weight or a bias
            return torch.full(shape, float("norm" in name or "ln_q" in name), dtype=torch.bfloat16)
        factor = shape[1:].numel() ** -0.5
        if name.startswith("model.layers.") and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            factor *= _OTHERS * _SPREAD / (2 * self._num_layers)
        weight = self._normal(shape, factor)
        if name.startswith(f"model.layers.{self._num_layers - 1}.mlp."):
            self._put_table(name, weight)
        return weight.cpu()

    def _normal(self, shape: torch.Size, size: float) -> torch.Tensor:
        """Returns random numbers of this root mean square."""
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return weight.normal_(0.0, size, generator=self._generator)

    def _put_table(self, name: str, weight: torch.Tensor) -> None:
        """Makes the first neurons of the last MLP answer to the table's ids.

        The MLP's input has a mean square of 1, so that the product of an id's own embedding of
        width w with it is about w * _SPREAD. SiLU leaves _GATE as it is, nearly.
        """
        count, width = len(self._table.ids), self._embedding.shape[1]
        ids, next_ids = self._table.ids.to(self.device), self._table.next_ids.to(self.device)
        if name.endswith("down_proj.weight"):
            weight[:, :count] = self._embedding[next_ids].T * (_NEXT / _GATE**2)
        else:
            weight[:count] = self._embedding[ids] * (_GATE / (width * _SPREAD))
