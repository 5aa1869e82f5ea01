"""Qwen3-Next's config.json in Megatron's fields: the arithmetic of the model, nothing of a training run."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import decoder_config, layer_types, tied_head

# Qwen2's sliding window, which releases carry along and Hugging Face's Qwen3-Next never reads; and the two
# fields of Hugging Face's own auxiliary loss (see `moe_fields`).
INERT = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "output_router_logits"})

# Field names that tools write for the number of prediction layers. The files decide, these are compared.
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def megatron_config(hf: HFConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Fields of GPTModelConfig and TransformerConfig that compute what Hugging Face's Qwen3-Next computes.

    `experimental_attention_variant` stays None: the family's layer spec places the delta nets.

    Args:
        keys: tensor names of the checkpoint; empty where only the config is known.

    Raises:
        ValueError: the config contradicts itself or the checkpoint, has keys nobody understands, or asks for
            arithmetic that Megatron does not have.
    """
    fields = decoder_config(hf)
    sparse = _sparse_layers(hf)
    check_silu(hf)
    fields |= {
        "share_embeddings_and_output_weights": tied_head(hf, hf, keys),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        **delta_net_fields(hf),
        "moe_layer_freq": sparse,
        **moe_fields(hf, hf["norm_topk_prob"], used=any(sparse)),
        "mtp_num_layers": mtp_layers(hf, keys, sparse),
    }
    hf.check_all_understood(INERT)
    return fields


def overruled(hf: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Fields in which the tensors of a checkpoint overrule its config.json."""
    return without_mtp(hf, shapes)


def without_mtp(hf: HFConfig, names: Collection[str], path: str = "") -> dict[str, int]:
    """0 for the stated numbers of prediction layers where no tensor is of one; `path` is before their names.

    transformers saves no MTP block, and says that there is one.
    """
    if any(name.startswith("mtp.") for name in names):
        return {}
    return {f"{path}{count}": 0 for count in MTP_COUNTS if hf.get(count)}


def check_silu(hf: HFConfig) -> None:
    """ValueError where the activation is one that the delta net does not have."""
    if hf["hidden_act"] not in ("silu", "swish"):
        raise ValueError(
            f"config.json: hidden_act={hf['hidden_act']!r}, expected 'silu': the delta net's convolution "
            "kernels and output gate have nothing else"
        )


def delta_net_fields(hf: HFConfig) -> dict[str, Any]:
    kinds = {"linear_attention": 1, "full_attention": 0}
    types = layer_types(hf)
    if unknown := sorted(set(types) - kinds.keys()):
        raise ValueError(f"config.json: layer_types has {unknown}, expected {' or '.join(kinds)}")
    key_heads, value_heads = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads={value_heads} is not a multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    return {
        "linear_attention_freq": [kinds[kind] for kind in types],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "linear_key_head_dim": hf["linear_key_head_dim"],
        "linear_value_head_dim": hf["linear_value_head_dim"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }


def _sparse_layers(hf: HFConfig) -> list[int]:
    """1 for every layer with experts, 0 for every dense one, by Hugging Face's rule."""
    dense, step, experts = set(hf["mlp_only_layers"]), hf["decoder_sparse_step"], hf["num_experts"]
    layers = range(hf["num_hidden_layers"])
    if beyond := sorted(dense.difference(layers)):
        raise ValueError(
            f"config.json: mlp_only_layers has {beyond}, num_hidden_layers={len(layers)} makes the last one"
            f" {layers[-1]}"
        )
    return [int(i not in dense and experts > 0 and (i + 1) % step == 0) for i in layers]


def moe_fields(hf: HFConfig, renormalise: bool, used: bool = True) -> dict[str, Any]:
    """Softmax over all experts in fp32, its top k, renormalised if so; a gated shared expert.

    Nothing where no layer has experts, though the fields are there.

    Renormalised top-k probabilities are the softmax of the top-k logits: Megatron's router without
    `pre_softmax`. With it they stay as they are: `norm_topk_prob=False`. For k = 1 the renormalised weight is
    constantly 1, and Megatron refuses it.

    Hugging Face balances experts by a term in its loss, only under `output_router_logits`, by a formula (one
    product of averages over all layers) that is none of Megatron's. The model's function has no such term, so
    balancing is off; the coefficient is there for a run that turns on `moe_router_load_balancing_type`.
    """
    topk = hf["num_experts_per_tok"]
    if used and not 0 < topk <= hf["num_experts"]:
        raise ValueError(
            f"config.json: cannot choose num_experts_per_tok={topk} of num_experts={hf['num_experts']}"
        )
    if used and topk == 1 and renormalise:
        raise ValueError(
            "config.json: num_experts_per_tok=1 with norm_topk_prob=True weighs each expert by 1 and leaves "
            "the router without a gradient; Megatron has no such router"
        )
    fields = {
        "num_moe_experts": hf["num_experts"],
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not renormalise,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": hf["router_aux_loss_coef"],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    return fields if used else {}


def mtp_layers(hf: HFConfig, keys: frozenset[str], sparse: list[int]) -> int | None:
    """Prediction layers: as many as the checkpoint has, or as stated where there is no checkpoint."""
    stated = hf.either(*MTP_COUNTS)
    found = {int(match[1]) for key in keys if (match := re.match(r"mtp\.layers\.(\d+)\.", key))}
    if not found and any(key.startswith("mtp.") for key in keys):
        raise ValueError(
            "the checkpoint has mtp.* tensors and none of mtp.layers.*: its MTP block is not whole"
        )
    count = len(found) if keys else stated or 0
    if count and stated is not None and stated != count:
        raise ValueError(f"config.json states {stated} MTP layers, the checkpoint has {count}")
    if count > 1:
        raise ValueError(
            f"{count} MTP layers share one mtp.fc, Megatron's have one each: only one layer is supported"
        )
    if not count:
        return None
    experts = (
        any(".mlp.experts." in key for key in keys if key.startswith("mtp.")) if keys else bool(sparse[-1])
    )
    if experts != bool(sparse[-1]):
        raise ValueError(
            f"the MTP layer {'has' if experts else 'has no'} experts and the last decoder layer "
            f"{'has' if sparse[-1] else 'has none'}: Megatron builds the one like the other"
        )
    return count
