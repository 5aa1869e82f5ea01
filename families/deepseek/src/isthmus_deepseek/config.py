"""DeepSeek's config.json in Megatron's fields: the arithmetic of the model, nothing of a training run."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import decoder_config, tied_head
from isthmus_deepseek.groups import BEST, differs
from isthmus_deepseek.latent import LATENT_NORM_EPS, latent_attention, rotary

# Training's own: how ranks were laid out, and a balancing loss that is none of the model's function; and what
# transformers writes although other fields decide it.
INERT = frozenset(
    {"ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "output_router_logits"}
    | {"head_dim", "qk_head_dim"}
)

# The released spelling of the number of prediction layers, and transformers' own.
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")

INDEXER_NORM_EPS = 1e-6  # in Hugging Face's module, whatever `rms_norm_eps` is

# Which transformers takes to be null, too, where the file has null.
NEEDED = (
    *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("routed_scaling_factor", "num_key_value_heads"),
)


def megatron_config(hf: HFConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Fields of GPTModelConfig and MLATransformerConfig that compute what Hugging Face's DeepSeek computes.

    Args:
        keys: tensor names of the checkpoint; empty where only the config is known.

    Raises:
        ValueError: the config contradicts itself or the checkpoint, has keys nobody understands, or asks for
            arithmetic that Megatron does not have.
    """
    if absent := [name for name in NEEDED if hf[name] is None]:
        raise ValueError(f"config.json: no {', '.join(absent)}. Add the values used in training")
    fields = decoder_config(hf, rotary(hf))
    fields["share_embeddings_and_output_weights"] = tied_head(hf, hf, keys)
    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    sparse = [int(i >= dense) for i in range(layers)]
    if (step := hf.get("moe_layer_freq", 1)) != 1:
        raise ValueError(
            f"config.json: moe_layer_freq={step}, expected 1: Hugging Face's model ignores it and has experts"
            " in every layer from first_k_dense_replace on"
        )
    fields |= latent_attention(hf)
    if any(sparse):
        fields |= {"moe_layer_freq": sparse, **_moe(hf)}
    if hf.model_type == "deepseek_v32":
        fields |= _indexer(hf, layers, dense)
    fields["mtp_num_layers"] = _mtp_layers(hf, keys, layers)
    if fields["mtp_num_layers"]:
        _check_mtp(fields, sparse)
    hf.check_all_understood(INERT)
    return fields


def _moe(hf: HFConfig) -> dict[str, Any]:
    """Experts and their router. V2: softmax, its top k as they are. V3: sigmoid and a bias for the choice,
    the chosen scores divided by their sum. Both times `routed_scaling_factor`, both with shared experts.

    The balancing of training (a loss, an update of the bias) is not the model's function, so it is off.
    """
    sigmoid = hf.model_type != "deepseek_v2"
    score, method = ("sigmoid", "noaux_tc") if sigmoid else ("softmax", hf["topk_method"])
    known = {
        "scoring_func": ("sigmoid" if sigmoid else "softmax",),
        "topk_method": ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy"),
    }
    for name, values in known.items():
        if (value := hf.get(name, values[0])) not in values:
            raise ValueError(f"config.json: {name}={value!r}, expected {' or '.join(map(repr, values))}")
    topk, experts = hf["num_experts_per_tok"], hf["n_routed_experts"]
    if not topk or not 0 < topk <= experts:
        raise ValueError(
            f"config.json: cannot choose num_experts_per_tok={topk} of n_routed_experts={experts}"
        )
    if hf["norm_topk_prob"] is not sigmoid:
        raise ValueError(
            f"config.json: norm_topk_prob={hf['norm_topk_prob']}, expected {sigmoid}: "
            + (
                "Megatron's sigmoid router always divides the chosen scores by their sum"
                if sigmoid
                else "Hugging Face's DeepSeek-V2 ignores it and never divides by the sum"
            )
        )
    if sigmoid and topk == 1:
        raise ValueError(
            "config.json: num_experts_per_tok=1 weighs each expert by 1, and Megatron's sigmoid router by its"
            " score"
        )
    width = hf["moe_intermediate_size"]
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * hf["n_shared_experts"],
        "moe_router_score_function": score,
        "moe_router_pre_softmax": not sigmoid,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_bias_update_rate": 0.0,
        **_groups(hf, limited=method != "greedy"),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_fusion": False,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _groups(hf: HFConfig, *, limited: bool) -> dict[str, int]:
    """The choice of groups before that of experts; nothing where every group is always chosen."""
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    experts, topk = hf["n_routed_experts"], hf["num_experts_per_tok"]
    if not limited or groups == 1 or chosen == groups:
        return {}
    if experts % groups or not 0 < chosen < groups:
        raise ValueError(
            f"config.json: cannot choose topk_group={chosen} of n_group={groups} groups of"
            f" n_routed_experts={experts}"
        )
    if topk > chosen * experts // groups:
        raise ValueError(
            f"config.json: num_experts_per_tok={topk} is more than topk_group={chosen} groups of"
            f" {experts // groups} experts hold"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _indexer(hf: HFConfig, layers: int, dense: int) -> dict[str, Any]:
    """V3.2's choice of keys, in the fields of Megatron's sparse attention, as Hugging Face's module has it.

    That does without the rotation (Hadamard) which the release applies to both sides of a product.
    """
    listed = {
        "layer_types": ["indexed_attention"] * layers,
        "mlp_layer_types": ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense),
    }
    for name, expected in listed.items():
        if (found := hf.get(name)) is not None and list(found) != expected:
            raise ValueError(f"config.json: {name}={found}, expected {expected}")
    if hf.get("indexer_rope_interleave"):
        raise ValueError(
            "config.json: indexer_rope_interleave=True is not supported: Hugging Face's DeepSeek-V3.2 rotates"
            " the indexer's rows in halves"
        )
    if hf["q_lora_rank"] is None:
        raise ValueError("config.json: q_lora_rank is null, and the indexer takes the latent of queries")
    return {
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": INDEXER_NORM_EPS,
    }


def overruled(hf: HFConfig, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The stated number of prediction layers as 0, where the checkpoint has no tensor of one."""
    return {} if mtp_layers(hf, frozenset(shapes)) else {name: 0 for name in MTP_COUNTS if hf.get(name)}


def mtp_layers(hf: HFConfig, keys: frozenset[str]) -> list[int]:
    """Numbers of the prediction layers among the checkpoint's layers: those behind the decoder's own."""
    found = {int(match[1]) for key in keys if (match := re.match(r"model\.layers\.(\d+)\.", key))}
    return sorted(number for number in found if number >= hf["num_hidden_layers"])


def _mtp_layers(hf: HFConfig, keys: frozenset[str], layers: int) -> int | None:
    """Prediction layers: as many as the checkpoint has, or as stated where there is no checkpoint.

    Of V3.2 none is built: neither Hugging Face nor Megatron has its attention in a prediction layer.
    """
    stated = hf.either(*MTP_COUNTS)
    found = mtp_layers(hf, keys)
    count = len(found) if keys else stated or 0
    if found and found != [*range(layers, layers + len(found))]:
        raise ValueError(f"the checkpoint has layers {found} behind the decoder's {layers}: some are missing")
    if count and stated is not None and stated != count:
        raise ValueError(f"config.json states {stated} MTP layers, the checkpoint has {count}")
    if count > 1:
        raise ValueError(f"{count} MTP layers are not supported, only one")
    return count or None if hf.model_type != "deepseek_v32" else None


def _check_mtp(fields: dict[str, Any], sparse: list[int]) -> None:
    """ValueError where Megatron would build the prediction layer otherwise than the decoder's last."""
    reasons = []
    if not sparse[-1]:
        reasons.append("the MTP layer has experts and the last decoder layer has none")
    if fields["q_lora_rank"] is None:
        reasons.append("Megatron's MTP layer would norm what q_proj takes (q_lora_rank is null)")
    if fields["layernorm_epsilon"] != LATENT_NORM_EPS:
        eps = fields["layernorm_epsilon"]
        reasons.append(f"rms_norm_eps={eps}, which Megatron's MTP layer takes for the latents too")
    if differs(SimpleNamespace(**fields)):
        reasons.append(
            f"groups of experts scored by {BEST[fields['moe_router_score_function']]} of their scores, by"
            f" Megatron's MTP layer by {fields['moe_router_topk'] // fields['moe_router_group_topk']}"
        )
    if reasons:
        raise ValueError("this prediction layer is not supported: " + "; ".join(reasons))
