"""The decoder layers of one text model, with rotary embedding, final norm and head."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hippo.models.attention.parts import AttentionPlan
from hippo.models.attention.states import LayerStates
from hippo.models.products.kernels import make_norm
from hippo.models.products.linear import Linear, MakeLinear, aligned_rows, is_plain
from hippo.models.runners.delta import DeltaLayer
from hippo.models.runners.layers import AttentionLayer

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards


class DecoderStack:
    """The decoder layers of one text model, with rotary embedding, final norm and head.

    The constructor empties the model's own projections after copying their weights, so that memory
    holds the weights once. With ``shards`` the layers hold this rank's part of the weights.
    ``groups`` is the number of query heads that share a key-value head; ``scaling`` is the factor
    of query-key products in attention. Layers of attention and layers with a state are counted
    apart: ``cache_layers`` has each layer's number among those of its kind, which is its number in
    the KV cache or among the states.
    """

    def __init__(
        self,
        text_model: Any,
        head: Any,
        num_token_ids: int,
        make_linear: MakeLinear,
        shards: "Shards | None" = None,
    ) -> None:
        config = text_model.config
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self._rotary_module = text_model.rotary_emb
        size = 1 if shards is None else shards.group.size
        heads = config.num_attention_heads // size, config.num_key_value_heads // size
        make_output = make_linear if shards is None else shards.summed(make_linear)
        make_head = make_linear if shards is None else shards.gathered(make_linear)
        rotated = 2 * text_model.rotary_emb.inv_freq.shape[0]
        with torch.inference_mode():
            self._layers: list[AttentionLayer | DeltaLayer] = [
                AttentionLayer(layer, heads, make_linear, make_output, num_rotated=rotated)
                if hasattr(layer, "self_attn")
                else DeltaLayer(layer, make_linear, make_output)
                for layer in text_model.layers
            ]
            self._norm = make_norm(text_model.norm)
            self._head: Linear = head
            if is_plain(head):
                self._head = make_head(head.weight[: aligned_rows(num_token_ids)])
        self.num_token_ids = num_token_ids
        kinds = [isinstance(layer, AttentionLayer) for layer in self._layers]
        self.cache_layers = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
        self.first_attention = kinds.index(True)
        self.scaling: float = text_model.layers[self.first_attention].self_attn.scaling

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def num_attending(self, num_layers: int) -> int:
        """Returns how many of the first ``num_layers`` layers attend."""
        return sum(isinstance(layer, AttentionLayer) for layer in self._layers[:num_layers])

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns unit complex numbers ``[rows, 1, num_rotated / 2]`` of ``positions`` (int64
        ``[num_axes, rows]``), by the model's own rotary module, which combines the axes."""
        reference = torch.empty(0, dtype=torch.float32, device=positions.device)
        batched = positions if positions.shape[0] == 1 else positions[:, None]
        cosines, sines = self._rotary_module(reference, batched)
        half = cosines.shape[-1] // 2  # the two halves are equal
        return torch.complex(cosines[0, :, None, :half], sines[0, :, None, :half])

    def run(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        step: AttentionPlan,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Runs layers ``first_layer:last_layer`` on ``hidden`` ``[rows, hidden_size]``. The result
        has the same shape, or is the last row only if ``step.wants_last_row``, which is allowed for
        a single layer. ``rotary`` holds the rotary factors of the rows."""
        for index in range(first_layer, last_layer):
            hidden = self._layers[index](hidden, rotary, step, self.cache_layers[index])
        return hidden

    def copy_states(
        self, states: Sequence[LayerStates], source: int, slot: int, num_rows: int
    ) -> None:
        """Copies to ``slot`` the states that ``source`` keeps of its first ``num_rows`` rows, the
        last of them the state behind these rows."""
        for layer, index in zip(self._layers, self.cache_layers, strict=True):
            if isinstance(layer, DeltaLayer):
                layer.copy_state(states[index], source, slot, num_rows)

    def drop_head(self) -> None:
        """Frees norm and head; ``logits`` cannot be called any more."""
        del self._norm, self._head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies final norm and head: float32 ``[rows, num_token_ids]``."""
        return self._head(self._norm(hidden))[:, : self.num_token_ids].float()
