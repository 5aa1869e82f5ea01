"""Weight rules of Qwen3-Next's decoder, for every family that is made of the same blocks.

`hf` is the text model's section of config.json, `prefix` what the checkpoint puts before the decoder's names
("model."), `model` anything with the fields of the Megatron model config.
"""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import (
    Atomic,
    Ignored,
    Rule,
    atomic,
    column,
    embeddings,
    fuse,
    hosted,
    ignore,
    passthrough,
    per,
    row,
    same,
    scope,
    stacked_swiglu,
    swiglu,
)
from isthmus_qwen3_next import heads
from isthmus_qwen3_next.config import MTP_COUNTS
from isthmus_qwen3_next.heads import IN_PROJECTIONS, InProjections

_WITHOUT_MTP = passthrough(
    "mtp.*", because="the model was built without its MTP block (mtp_num_layers=None)", counted_by=MTP_COUNTS
)


def decoder(
    hf: HFConfig,
    keys: frozenset[str],
    model: Any,
    prefix: str = "model.",
    in_projections: InProjections = IN_PROJECTIONS,
) -> list[Rule | Ignored | Atomic]:
    """All rules of a checkpoint with tensor names `keys`: embeddings, layers, head and MTP block."""
    layers = range(len(model.linear_attention_freq))
    linear = [i for i in layers if model.linear_attention_freq[i]]
    full = [i for i in layers if not model.linear_attention_freq[i]]
    sparse = [i for i in layers if model.moe_layer_freq[i]]
    dense = [i for i in layers if not model.moe_layer_freq[i]]
    delta_net, attention = _native_delta_net(model, in_projections), _attention(hf)
    if getattr(model, "delta_net", "hosted") == "hosted":
        split = heads.delta_net(model, in_projections)
        delta_net = hosted("self_attention.linear_attn", "linear_attn", split=split, model=model)
    if getattr(model, "attention", "megatron") == "hosted":
        split = heads.attention(model)
        attention = hosted("self_attention.self_attn", "self_attn", split=split, model=model)
    megatron, layer = "decoder.layers.{i}", f"{prefix}layers.{{i}}"
    experts = _moe(hf, f"{prefix}layers.", keys) if sparse else []
    mlp = swiglu("mlp", "mlp", hf["intermediate_size"]) if dense else []
    return [
        *embeddings(hf, keys, prefix, getattr(model, "share_embeddings_and_output_weights", None)),
        same("decoder.final_layernorm.weight", f"{prefix}norm.weight"),
        *scope(megatron, layer, _norms(), i=layers),
        *scope(megatron, layer, attention, i=full),
        *scope(megatron, layer, delta_net, i=linear),
        *scope(megatron, layer, experts, i=sparse),
        *scope(megatron, layer, mlp, i=dense),
        ignore(f"{layer}.self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
        *(_mtp(hf, keys, bool(model.moe_layer_freq[-1])) if model.mtp_num_layers else [_WITHOUT_MTP]),
        # Engines make one linear of each; Megatron's own modules do too, hosted ones do not.
        atomic(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
        atomic(*(f"linear_attn.{name}" for name in in_projections.parts)),
    ]


def _norms() -> list[Rule]:
    return [
        same("input_layernorm.weight", "input_layernorm.weight"),
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]


def _attention(hf: HFConfig) -> list[Rule]:
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    q, kv = heads * hf["head_dim"], groups * hf["head_dim"]
    q_k_v = {
        "self_attn.q_proj.weight": per(heads, "q gate"),
        "self_attn.k_proj.weight": "k",
        "self_attn.v_proj.weight": "v",
    }
    return [
        fuse("self_attention.linear_qkv.weight", q_k_v, per(groups, "q gate k v"), q=q, gate=q, k=kv, v=kv),
        same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ]


def _native_delta_net(model: Any, in_projections: InProjections) -> list[Rule]:
    rows = heads.in_projection_rows(model)
    q_k_v = {part: rows[part] for part in ("q", "k", "v")}
    grouped = in_projections.grouped(model.linear_num_key_heads)
    rules = [
        fuse("in_proj.weight", grouped, "q k v z b a", **rows),
        fuse("conv1d.weight", {"conv1d.weight": "q k v"}, "q k v", **q_k_v),
        column("A_log", "A_log"),
        column("dt_bias", "dt_bias"),
        same("out_norm.weight", "norm.weight"),
        row("out_proj.weight", "out_proj.weight"),
    ]
    return scope("self_attention", "linear_attn", rules)


def _moe(hf: HFConfig, prefix: str, keys: frozenset[str]) -> list[Rule]:
    """Experts as the checkpoint has them: one by one, as published, or stacked as transformers holds them."""
    stacked = any(key.startswith(prefix) and key.endswith(".mlp.experts.gate_up_proj") for key in keys)
    expert, stack, rows = "mlp.experts.{e}", "mlp.experts", hf["moe_intermediate_size"]
    experts = stacked_swiglu(expert, stack, rows) if stacked else swiglu(expert, expert, rows)
    return [
        same("mlp.router.weight", "mlp.gate.weight"),
        *scope("", "", experts, e=range(hf["num_experts"])),
        *swiglu("mlp.shared_experts", "mlp.shared_expert", hf["shared_expert_intermediate_size"]),
        same("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ]


def _mtp(hf: HFConfig, keys: frozenset[str], sparse: bool) -> list[Rule]:
    mlp = _moe(hf, "mtp.", keys) if sparse else swiglu("mlp", "mlp", hf["intermediate_size"])
    return [
        same("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        same("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        column("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
        same("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight"),
        *scope("mtp.layers.0.layer", "mtp.layers.0", [*_norms(), *_attention(hf), *mlp]),
    ]
