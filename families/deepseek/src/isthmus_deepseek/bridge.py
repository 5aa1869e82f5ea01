"""Every tensor of a DeepSeek checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import (
    Atomic,
    Rule,
    WeightMap,
    atomic,
    column,
    embeddings,
    hosted,
    ignore,
    passthrough,
    row,
    same,
    scope,
    stacked_swiglu,
    swiglu,
)
from isthmus_deepseek.config import MTP_COUNTS, mtp_layers
from isthmus_deepseek.heads import is_hosted, latent_attention, sparse_attention


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    layers, dense = range(hf["num_hidden_layers"]), min(hf["first_k_dense_replace"], hf["num_hidden_layers"])
    decoder, layer = "decoder.layers.{i}", "model.layers.{i}"
    attention = scope("self_attention", "self_attn", _attention(hf))
    if is_hosted(model):
        indexed = hf.model_type == "deepseek_v32"
        split = sparse_attention(model) if indexed else latent_attention(model)
        attention = hosted("self_attention.self_attn", "self_attn", split=split, model=model)
    stacked = any(key.endswith(".mlp.experts.gate_up_proj") for key in keys)
    mtp = f"model.layers.{len(layers)}" if model.mtp_num_layers else None
    return WeightMap(
        [
            *embeddings(
                hf,
                keys,
                copies=(f"{mtp}.embed_tokens.weight",) if mtp else (),
                head_copies=(f"{mtp}.shared_head.head.weight",) if mtp else (),
            ),
            same("decoder.final_layernorm.weight", "model.norm.weight"),
            *scope(decoder, layer, [*_norms(), *attention], i=layers),
            *scope(decoder, layer, swiglu("mlp", "mlp", hf["intermediate_size"]), i=layers[:dense]),
            *scope(decoder, layer, _moe(hf, stacked), i=layers[dense:]),
            ignore("model.layers.{i}.self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
            *(_mtp(hf, mtp, stacked) if mtp else _without_mtp(mtp_layers(hf, keys))),
            *_fused_by_engines(hf),
        ]
    )


def _fused_by_engines(hf: HFConfig) -> list[Atomic]:
    """What vLLM and SGLang make one linear of, and Megatron holds apart."""
    if hf["q_lora_rank"] is None:
        return []
    latents = atomic("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    indexer = atomic("self_attn.indexer.wk.weight", "self_attn.indexer.weights_proj.weight")
    return [latents, indexer]


def _without_mtp(numbers: list[int]) -> list[Any]:
    because = "the model was built without its MTP layer (mtp_num_layers=None)"
    return [passthrough(f"model.layers.{number}.*", because, counted_by=MTP_COUNTS) for number in numbers]


def _norms() -> list[Rule]:
    return [
        same("input_layernorm.weight", "input_layernorm.weight"),
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]


def _attention(hf: HFConfig) -> list[Rule]:
    """Latent attention: what makes the latents is whole on every rank, heads are divided."""
    direct = [column("linear_q_proj.weight", "q_proj.weight")]
    latent = [
        same("linear_q_down_proj.weight", "q_a_proj.weight"),
        same("q_layernorm.weight", "q_a_layernorm.weight"),
        column("linear_q_up_proj.weight", "q_b_proj.weight"),
    ]
    return [
        *(direct if hf["q_lora_rank"] is None else latent),
        same("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"),
        same("kv_layernorm.weight", "kv_a_layernorm.weight"),
        column("linear_kv_up_proj.weight", "kv_b_proj.weight"),
        *(_indexer() if hf.model_type == "deepseek_v32" else []),
        row("linear_proj.weight", "o_proj.weight"),
    ]


def _indexer() -> list[Rule]:
    """Megatron's own indexer, whole on every rank."""
    linears = [
        same(f"core_attention.indexer.linear_{name}.weight", f"indexer.{name}.weight")
        for name in ("wq_b", "wk", "weights_proj")
    ]
    norm = [
        same(f"core_attention.indexer.k_norm.{part}", f"indexer.k_norm.{part}") for part in ("weight", "bias")
    ]
    return [*linears, *norm]


def _moe(hf: HFConfig, stacked: bool) -> list[Rule]:
    """Experts as the checkpoint has them: one by one, as releases do, or stacked, as transformers does."""
    expert, stack, rows = "mlp.experts.{e}", "mlp.experts", hf["moe_intermediate_size"]
    experts = stacked_swiglu(expert, stack, rows) if stacked else swiglu(expert, expert, rows)
    bias = same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")
    return [
        same("mlp.router.weight", "mlp.gate.weight"),
        *([] if hf.model_type == "deepseek_v2" else [bias]),
        *scope("", "", experts, e=range(hf["n_routed_experts"])),
        *swiglu("mlp.shared_experts", "mlp.shared_experts", rows * hf["n_shared_experts"]),
    ]


def _mtp(hf: HFConfig, layer: str, stacked: bool) -> list[Rule]:
    """The prediction layer, which the files hold as one more decoder layer."""
    attention = scope("self_attention", "self_attn", _attention(hf))
    block, rules = "mtp.layers.0", [*_norms(), *attention, *_moe(hf, stacked)]
    return [
        same(f"{block}.enorm.weight", f"{layer}.enorm.weight"),
        same(f"{block}.hnorm.weight", f"{layer}.hnorm.weight"),
        column(f"{block}.eh_proj.weight", f"{layer}.eh_proj.weight"),
        same(f"{block}.final_layernorm.weight", f"{layer}.shared_head.norm.weight"),
        *scope(f"{block}.layer", layer, rules),
    ]
