"""Reads a model's shape from its configuration alone; standard library only."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hippo.catalog.public_models import PUBLIC_CONFIGS, TOWERS
from hippo.catalog.sizes import Experts, ModelShape
from hippo.catalog.states import StateShape
from hippo.errors import InvalidRequestError

# Bits of a weight in memory, scales included, in the publishers' quantised repositories.
_FORMS = {"-AWQ": 4.4, "-GPTQ-Int4": 4.2, "-GPTQ-Int8": 8.2}

INT8, INT4, INT4_WITH_ZEROS = 8.0, 4.25, 4.375
"""Bits of a weight, scales included, in the layout of hippo.models.quantized.packed."""


def find_shape(name: str, *, layer_bits: float | None = None) -> ModelShape:
    """Returns the shape of a public model, or of a folder with config.json.

    A public model may have the suffix of a quantised form ("-AWQ"). ``layer_bits`` is
    ModelShape.layer_bits; by default the bits of the form, of hippo's layout, or of a
    quantised folder's weight files. Raises InvalidRequestError for another name, for an unsupported
    architecture, and if a quantised folder that needs weight files has none.
    """
    form = next((form for form in _FORMS if name.endswith(form)), "")
    if (plain := name.removesuffix(form)) in PUBLIC_CONFIGS:
        bits = _FORMS.get(form) if layer_bits is None else layer_bits
        return replace(shape_of(name, PUBLIC_CONFIGS[plain]), layer_bits=bits)
    folder = Path(name).expanduser()
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequestError(
            f"{name!r} is neither a folder with config.json nor one of "
            f"{', '.join(PUBLIC_CONFIGS)} (or one of these with {', '.join(_FORMS)})"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None
    shape = shape_of(folder.resolve().name, config)
    bits = packed_bits(config) if layer_bits is None else layer_bits
    if layer_bits is None and (bits is not None or stays_quantised(config)):
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if not stored and bits is None:
            raise InvalidRequestError(
                f"{name} is quantised, and has no weight files to tell its size: give "
                "--weights-bits"
            )
        others = shape.num_parameters - shape.num_shared_parameters
        # A form of few bits may leave some layers in 16.
        bits = max(bits or 0.0, 8 * (stored - 2 * others) / shape.num_shared_parameters)
    return replace(shape, layer_bits=bits)


def quantization_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a config.json's settings of quantised weights; None: it has plain weights."""
    text = config.get("text_config") or {}
    settings: dict[str, Any] | None = (
        config.get("quantization_config") or text.get("quantization_config") or None
    )
    return settings


def stays_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a GPU that multiplies FP8 keeps a config.json's weights quantised in memory; AWQ and
    integers of compressed-tensors only where hippo's kernels multiply them."""
    settings = quantization_settings(config) or {}
    if settings.get("quant_method") not in ("awq", "compressed-tensors"):
        return bool(settings)
    kinds = {(each.get("type"), each.get("num_bits")) for each in _group_weights(settings)}
    return kinds == {("float", 8)} or packed_bits(config) is not None


def packed_bits(config: Mapping[str, Any], at_load: str | None = None) -> float | None:
    """Returns the bits of a weight of a config.json's layers in the layout that
    hippo.models.quantized.packed multiplies; None: its kernels lack the form or the sizes of the
    layers. ``at_load`` is the form to which plain weights are quantised at load."""
    bits = {None: _stored_bits(config), "int8": INT8, "nf4": INT4}[at_load]
    if bits is None:
        return None
    shape = shape_of("", config)
    keys = shape.num_kv_heads * shape.head_dim
    joined = shape.num_heads * shape.head_dim + 2 * keys
    has_rows = keys % 16 == joined % 32 == shape.hidden_size % 32 == 0
    return bits if has_rows and not any(width % 64 for width in column_counts(config)) else None


def _stored_bits(config: Mapping[str, Any]) -> float | None:
    """Returns packed_bits of a config.json's own form, whatever the sizes of its layers. Integers
    of compressed-tensors must be symmetric, in 4 bits with a scale for 64 columns or a multiple of
    it, or in 8 bits with a scale for each row."""
    settings = quantization_settings(config) or {}
    method = settings.get("quant_method")
    if method == "awq":
        return INT4_WITH_ZEROS if _is_packable(settings.get("group_size", 128)) else None
    if method == "bitsandbytes":
        return None if settings.get("load_in_8bit") else INT4
    # transformers makes layers for packed integers only if the checkpoint says that it has them.
    if method != "compressed-tensors" or settings.get("quantization_status") != "compressed":
        return None
    weights, *others = _group_weights(settings) or [{}]
    if others or weights.get("type", "int") != "int" or not weights.get("symmetric", True):
        return None
    kind = (settings.get("format"), weights.get("num_bits"), weights.get("strategy"))
    if kind == ("pack-quantized", 4, "group"):
        size = int(weights.get("group_size") or 0)
        is_ordered = weights.get("actorder") not in ("group", "dynamic")
        is_even = size > 0 and not any(width % size for width in column_counts(config))
        return INT4 if is_ordered and is_even and _is_packable(size) else None
    if kind == ("pack-quantized", 4, "channel"):
        return INT4
    return INT8 if kind == ("int-quantized", 8, "channel") else None


def _is_packable(group_size: int) -> bool:
    """Whether the kernels have scales for so many columns; -1: one scale for all columns."""
    return group_size == -1 or group_size % 64 == 0


def column_counts(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the numbers of columns of a layer's weights."""
    shape = shape_of("", config)
    counts = shape.hidden_size, shape.mlp_width, shape.num_heads * shape.head_dim
    states = shape.states
    return counts if states is None else (*counts, states.num_heads * states.value_dim)


def _group_weights(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns how each of compressed-tensors' groups of layers has its weights."""
    groups = (settings.get("config_groups") or {}).values()
    return [group.get("weights") or {} for group in groups]


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Reads a config.json; raises InvalidRequestError if it is unsupported or incomplete."""
    family = config.get("model_type")
    if family not in TOWERS:
        raise InvalidRequestError(
            f"{name} is of architecture {family!r}; supported: {', '.join(sorted(TOWERS))}"
        )
    try:
        return _shape(name, config)
    except KeyError as error:
        raise InvalidRequestError(f"the configuration of {name} lacks {error}") from None


def _shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    text = config.get("text_config") or config  # flat in older repositories
    width, num_layers = text["hidden_size"], text["num_hidden_layers"]
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = text.get("head_dim") or width // num_heads
    kind = text.get("model_type") or config["model_type"]
    # In older families the text model's setting counts, if there is one.
    places = (config, text) if kind.startswith(("qwen3_vl", "qwen3_5")) else (text, config)
    is_tied = next((d["tie_word_embeddings"] for d in places if "tie_word_embeddings" in d), False)
    states = find_states(text)
    is_gated = states is not None  # the queries of their models have gates
    attention = width * head_dim * ((2 + is_gated) * num_heads + 2 * num_kv_heads)
    experts = find_experts(text)
    num_dense = num_layers - (experts.num_layers if experts else 0)
    mlp = text["intermediate_size"] if num_dense else 0
    num_attending = num_layers - (states.num_layers if states else 0)
    products = num_attending * attention + 3 * width * num_dense * mlp
    if states:
        values = states.num_heads * states.value_dim
        columns = states.log_width + 2 * values  # in, gate and out
        products += states.num_layers * width * columns
    routers = 0
    if experts:
        each = 3 * width * experts.width
        products += experts.num_layers * experts.num_experts * each
        shared_width = text.get("shared_expert_intermediate_size") or 0
        products += experts.num_layers * 3 * width * shared_width
        routers = experts.num_layers * experts.num_experts * width
    embeddings = text["vocab_size"] * width * (1 if is_tied else 2)
    tower = TOWERS[config["model_type"]](config["vision_config"], width)
    return ModelShape(
        name=name,
        num_parameters=embeddings + products + routers + tower.num_parameters,
        num_shared_parameters=products,
        num_head_parameters=text["vocab_size"] * width,
        is_tied=is_tied,
        num_layers=num_layers,
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=mlp,
        tower=tower,
        experts=experts,
        states=states,
    )


def find_states(text: Mapping[str, Any]) -> StateShape | None:
    """Returns the states of a text model's configuration; None: all layers attend."""
    if "linear_num_value_heads" not in text:
        return None
    num_layers, every = text["num_hidden_layers"], text.get("full_attention_interval") or 4
    kinds = text.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention"
        for index in range(num_layers)
    ]
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    return StateShape(
        num_layers=kinds.count("linear_attention"),
        num_heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
        input_width=2 * keys * key_dim + values * value_dim,
        num_inputs=text["linear_conv_kernel_dim"] - 1,
    )


def find_experts(text: Mapping[str, Any]) -> Experts | None:
    """Returns the mixtures of experts of a text model's configuration; None: it has none.

    The number of experts has another name where transformers has saved the configuration.
    """
    count = text.get("num_experts") or text.get("num_local_experts")
    if not count:
        return None
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    layers = range(text["num_hidden_layers"])
    num_layers = sum((index + 1) % step == 0 and index not in dense for index in layers)
    chosen, width = text["num_experts_per_tok"], text["moe_intermediate_size"]
    return Experts(num_layers, count, chosen, width) if num_layers else None
