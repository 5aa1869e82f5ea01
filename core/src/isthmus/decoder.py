"""The fields that every decoder family shares, from config.json to Megatron.

One flat dict holds fields of GPTModelConfig and of its TransformerConfig. A value that Megatron cannot
compute with raises; where config.json is silent, transformers' own class supplies it (`HFConfig`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.config import HFConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `partial` is the rotated fraction of a head, `scaling` whatever else was given."""

    theta: float
    partial: float
    kind: str
    scaling: dict[str, Any]


type Stated = dict[str, tuple[str, Any]]
"""What a config states in one of several spellings: entry -> (where, value)."""


def state(stated: Stated, entry: str, where: str, value: Any) -> None:
    """Add what `where` says of `entry`, a None nothing. ValueError: another place says otherwise."""
    if value is None:
        return
    first, other = stated.setdefault(entry, (where, value))
    if other != value:
        raise ValueError(
            f"config.json contradicts itself: {first}={other!r}, {where}={value!r}. "
            "Keep the one the model was trained with"
        )


def rope(hf: HFConfig) -> Rope:
    """The rotary embedding, from `rope_theta`, `partial_rotary_factor`, `rope_scaling` or `rope_parameters`.

    ValueError: two spellings contradict each other, or the parameters differ by layer type. LookupError: the
    frequency base is null, for which transformers' class has no default.
    """
    stated: Stated = {}
    for section in ("rope_parameters", "rope_scaling"):
        for key, value in hf.get(section, {}).items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"config.json: {section}.{key} is set by layer type; this family has one rope"
                )
            state(stated, "rope_type" if key == "type" else key, f"{section}.{key}", value)
    for key in ("rope_theta", "partial_rotary_factor"):
        state(stated, key, key, hf.get(key))

    values = {entry: value for entry, (_, value) in stated.items()}
    if not {"rope_theta", "partial_rotary_factor"} <= values.keys():
        default = hf.default("rope_parameters")
        if values.setdefault("rope_theta", default["rope_theta"]) is None:
            raise LookupError("config.json: rope_theta is null; add the value used in training")
        values.setdefault("partial_rotary_factor", default.get("partial_rotary_factor", 1.0))
    return Rope(
        theta=values.pop("rope_theta"),
        partial=values.pop("partial_rotary_factor"),
        kind=values.pop("rope_type", "default"),
        scaling=values,
    )


def rope_fields(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Megatron's fields for unscaled rotary embedding. ValueError: scaled, or an odd count of dims."""
    if rope.kind != "default" or rope.scaling:
        raise ValueError(
            f"config.json: rope_type {rope.kind!r} with {rope.scaling} is not supported, only unscaled rope. "
            "Long-context scaling can be put back into config.json after the export"
        )
    dims = int(head_dim * rope.partial)  # rounded down, as both sides do
    if dims < 2 or dims % 2:
        raise ValueError(
            f"cannot rotate {rope.partial} of head_dim {head_dim}: {dims} dims, expected an even number"
        )
    theta = int(rope.theta) if float(rope.theta).is_integer() else rope.theta
    return {"position_embedding_type": "rope", "rotary_base": theta, "rotary_percent": float(rope.partial)}


def layer_types(hf: HFConfig) -> list[str]:
    """The kind of every layer, by `layer_types` or `full_attention_interval`. ValueError: they disagree."""
    layers = hf["num_hidden_layers"]
    listed, interval = hf.get("layer_types"), hf.get("full_attention_interval")
    types = listed
    if interval is not None:
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        if listed is not None and list(listed) != types:
            raise ValueError(
                f"config.json contradicts itself: full_attention_interval={interval} means {types}, "
                f"layer_types={listed}. Keep the one the model was trained with"
            )
    types = list(hf["layer_types"] if types is None else types)
    if len(types) != layers:
        raise ValueError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers={layers}")
    return types


def activation(hf: HFConfig, key: str = "hidden_act") -> "Callable[[Tensor], Tensor]":
    """The function that `key` names. ValueError: a name that none is known for."""
    from isthmus.activations import FUNCTIONS

    name = hf[key]
    if name not in FUNCTIONS:
        raise ValueError(f"config.json: {key}={name!r} is not supported (supported: {', '.join(FUNCTIONS)})")
    return FUNCTIONS[name]


def torch_dtype(hf: HFConfig) -> "torch.dtype | None":
    """The dtype that the file states as `dtype` or `torch_dtype`, None where it states none."""
    import torch

    name = hf.either("dtype", "torch_dtype")
    return None if name is None else getattr(torch, str(name).removeprefix("torch."))


def dtype_fields(dtype: "torch.dtype") -> dict[str, Any]:
    """Megatron's fields for a model whose parameters and pipeline messages have `dtype`."""
    import torch

    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }


def decoder_config(
    hf: HFConfig,
    position_fields: Mapping[str, Any] | None = None,
    ffn_hidden_size: int | None = None,
    activation_key: str = "hidden_act",
) -> dict[str, Any]:
    """Fields shared by all gated-MLP, RMSNorm, bias-free decoders.

    Args:
        activation_key: what the config calls its activation function.
        position_fields: Megatron's position fields, where they are not those of :func:`rope_fields`.
        ffn_hidden_size: rows of a dense MLP, where the config has no `intermediate_size`.
    """
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    groups = hf["num_key_value_heads"]
    if heads % groups:
        raise ValueError(
            f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}"
        )
    head_dim = hf.get("head_dim") or _class_head_dim(hf) or hidden // heads
    biases = {"attention_bias": hf["attention_bias"], "mlp_bias": hf.get("mlp_bias", False)}
    if any(biases.values()):
        raise ValueError(f"config.json: {biases} is not supported: no rule loads the biases of projections")
    if position_fields is None:
        position_fields = rope_fields(rope(hf), head_dim)
    dtype = torch_dtype(hf)
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": ffn_hidden_size or hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "gated_linear_unit": True,
        "activation_func": activation(hf, activation_key),
        "hidden_dropout": 0.0,  # no Hugging Face decoder here drops hidden states
        "attention_dropout": hf["attention_dropout"],
        "attention_softmax_in_fp32": True,
        "init_method_std": hf["initializer_range"],
        "vocab_size": hf["vocab_size"],
        # Padding rows enter Megatron's softmax: pad no further than tensor parallelism needs.
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "share_embeddings_and_output_weights": hf["tie_word_embeddings"],
        "pad": padding_token(hf),
        "seq_length": hf["max_position_embeddings"],
        **position_fields,
        "transformer_impl": "transformer_engine",
        "gradient_accumulation_fusion": False,  # changes no value, and needs a CUDA extension
        **({} if dtype is None else dtype_fields(dtype)),
    }


def tied_head(
    hf: HFConfig, text: HFConfig, keys: frozenset[str], heads: Sequence[str] = ("lm_head.weight",)
) -> bool:
    """Whether the head is the embedding, by a config, its language model's section and the tensor names.

    Hugging Face's vision-language class reads the config's own level, its language model the section. What
    one of them states goes for both, unless the section alone states another value than the class of the
    whole config has by default. Then only a tie counts, and only where the files have no head.

    Args:
        text: the section, or `hf` where there is none.
        heads: names of the head where it is in the files; the first as published.

    Raises:
        ValueError: the two levels disagree, or an untied head is not in the files.
    """
    key = "tie_word_embeddings"
    whole, nested = bool(hf[key]), text.get(key)  # a null is none to Hugging Face
    silent, absent = key not in hf, not keys.intersection(heads)
    if nested is not None and nested != whole and not (silent and nested and absent):
        raise ValueError(
            f"config.json contradicts itself: {key}={whole}{' by default' if silent else ''}, and"
            f" text_config.{key}={nested}. Hugging Face's vision-language class reads the first, its language"
            " model the second: make them equal"
        )
    tied = whole if nested is None else nested
    if not tied and keys and absent:
        raise ValueError(
            f"config.json says {key}=False, and the checkpoint has no {heads[0]}. Set it to true if the head"
            " is the embedding, or restore the missing file"
        )
    return tied


def padding_token(hf: HFConfig) -> int:
    """The token whose embedding Hugging Face does not train, -1 for none. ValueError: not in the vocabulary.

    A negative `pad_token_id` counts from the vocabulary's end, as nn.Embedding's `padding_idx` does.
    """
    stated, rows = hf.raw, hf["vocab_size"]
    hf.read.add("pad_token_id")
    pad = stated["pad_token_id"] if "pad_token_id" in stated else hf.class_attribute("pad_token_id")
    if pad is None:
        return -1
    if type(pad) is not int or not -rows <= pad < rows:
        raise ValueError(f"config.json: pad_token_id={pad!r}, expected a token below vocab_size={rows}")
    return pad % rows


def _class_head_dim(hf: HFConfig) -> int | None:
    """The class default of `head_dim`, None where the class divides the hidden size by the heads instead."""
    try:
        return hf.default("head_dim")
    except LookupError:
        return None


def embedding_prefix(keys: frozenset[str]) -> str:
    """What stands before `embed_tokens.weight` among the tensor names of a checkpoint: tools write several.

    ValueError: none, or two of them.
    """
    embedding = "embed_tokens.weight"
    found = sorted(key.removesuffix(embedding) for key in keys if f".{key}".endswith(f".{embedding}"))
    if len(found) != 1:
        raise ValueError(
            f"expected one *.{embedding} in the checkpoint, found {len(found)}: "
            f"{', '.join(f'{each}{embedding}' for each in found) or 'none'}"
        )
    return found[0]
