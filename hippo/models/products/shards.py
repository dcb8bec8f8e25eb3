"""One rank's part of a text model, by a tensor-parallel plan that transformers carries out.

The plan splits each layer's heads and the width of its MLP: query, key, value, gate and up
projections by their outputs, output and down projections by their inputs. The partial results of
output and down projections are summed over ranks. Every rank has the whole embedding and norms, and
computes the logits of its share of the token ids.

    rank 0   q k v (heads 0 .. n/2)    o  --+            gate up (first half)    down  --+
    rank 1   q k v (heads n/2 .. n)    o  --+-- sum      gate up (second half)   down  --+-- sum
"""

import importlib
from importlib.metadata import version
from typing import Any

import torch

from hippo.catalog.sizes import CHUNK_ROWS, ModelShape
from hippo.errors import ModelLoadError
from hippo.models.products.group import RankGroup
from hippo.models.products.linear import Linear, MakeLinear, aligned_rows

_LAYER = "model.language_model.layers.*."
_PLAN = {
    # Replicated: the embedding is a plain look-up, and Shards.gathered splits the head.
    "lm_head": "replicate",
    "model.language_model.embed_tokens": "replicate",
    **{f"{_LAYER}self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"{_LAYER}mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    f"{_LAYER}self_attn.o_proj": "rowwise",
    f"{_LAYER}mlp.down_proj": "rowwise",
}


def check_divisible(shape: ModelShape, size: int) -> None:
    """Raises ModelLoadError if ``size`` ranks cannot share heads and MLP equally, and for experts:
    transformers cuts their weights as they are stored, transposed, along the wrong dimension."""
    if shape.experts is not None:
        raise ModelLoadError(
            f"--tensor-parallel {size}: {shape.name} has a mixture of experts, which runs on one "
            "device only: leave --tensor-parallel out"
        )
    for noun, count in (
        ("key-value heads", shape.num_kv_heads),
        ("attention heads", shape.num_heads),
        ("MLP columns", shape.mlp_width),
    ):
        if count % size:
            possible = [n for n in range(2, shape.num_kv_heads + 1) if shape.can_divide(n)]
            advice = f"possible: {', '.join(map(str, possible))}" if possible else "use 1"
            raise ModelLoadError(
                f"--tensor-parallel {size}: {shape.name} has {count} {noun}, which cannot be "
                f"shared equally among {size} devices; {advice}"
            )


class Shards:
    """Loads this rank's part of the weights, and makes its linear layers."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def least(self, number: int) -> int:
        """Returns the minimum of all ranks' numbers; a collective."""
        own = torch.tensor([[number]], device=self.group.device)
        return int(self.group.concatenate(own).min())

    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Runs each kind of collective, because a backend allocates the buffers of one at its first
        use; rows of a step and of a prefill have buffers of their own."""
        self.least(0)
        for num_rows in (1, CHUNK_ROWS):
            rows = torch.zeros(num_rows, width, device=self.group.device, dtype=dtype)
            self.group.sum(rows)
            self.group.broadcast(rows)

    def loading_options(self) -> dict[str, Any]:
        """Returns arguments of from_pretrained; raises ModelLoadError for an old transformers."""
        try:
            config = importlib.import_module("transformers.distributed").DistributedConfig(
                tp_size=self.group.size,
                tp_plan=dict(_PLAN),
            )
        except (ImportError, AttributeError, TypeError) as error:
            raise ModelLoadError(
                f"--tensor-parallel needs a newer transformers than {version('transformers')}"
            ) from error
        return {"distributed_config": config}

    def unwrap(self, model: Any) -> None:
        """Replaces the text model's distributed weights by this rank's parts of them.

        Afterwards the modules only store weights; ``summed`` adds up the partial results. Raises
        ModelLoadError if weights outside the text model were split.
        """
        from torch.distributed.tensor import DTensor

        text_model = model.model.language_model
        inside = {id(module) for module in text_model.modules()}
        for path, module in model.named_modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, DTensor):
                    if id(module) not in inside:
                        raise ModelLoadError(f"tensor parallelism would split {path}.{name}")
                    local = torch.nn.Parameter(weight.to_local(), requires_grad=False)
                    module._parameters[name] = local

    def summed(self, make_linear: MakeLinear) -> MakeLinear:
        """Returns a maker of linear layers with split inputs, which sum the ranks' results."""

        def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            assert bias is None, "each rank would add the bias"
            product = make_linear(weight)
            return lambda x: self.group.sum(product(x))

        return make

    def gathered(self, make_linear: MakeLinear) -> MakeLinear:
        """Returns a maker of linear layers from whole weights, with outputs split over ranks."""

        def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            assert bias is None, "a head has none"
            num_outputs, group = weight.shape[0], self.group
            share = aligned_rows(-(-num_outputs // group.size))
            own = weight.new_zeros(share, weight.shape[1])  # a copy, so that the rest can be freed
            rows = weight[group.rank * share : (group.rank + 1) * share]
            own[: rows.shape[0]] = rows
            product = make_linear(own)
            return lambda x: group.concatenate(product(x).contiguous())[:, :num_outputs]

        return make
