"""Every tensor of a Qwen3-Next checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import (
    Heads,
    Rule,
    WeightMap,
    column,
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
    vocabulary,
)
from isthmus_qwen3_next import heads
from isthmus_qwen3_next.config import MTP_COUNTS


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    linear = [i for i, kind in enumerate(model.linear_attention_freq) if kind]
    full = [i for i, kind in enumerate(model.linear_attention_freq) if not kind]
    sparse = [i for i, kind in enumerate(model.moe_layer_freq) if kind]
    dense = [i for i, kind in enumerate(model.moe_layer_freq) if not kind]
    delta_net, attention = _native_delta_net(hf), _attention(hf)
    if getattr(model, "delta_net", "hosted") == "hosted":
        delta_net = _hosted("linear_attn", heads.delta_net(model), model)
    if getattr(model, "attention", "megatron") == "hosted":
        attention = _hosted("self_attn", heads.attention(model), model)
    decoder, layer = "decoder.layers.{i}", "model.layers.{i}"
    return WeightMap(
        [
            *_embeddings(hf, keys),
            same("decoder.final_layernorm.weight", "model.norm.weight"),
            *scope(decoder, layer, _norms(), i=range(len(model.linear_attention_freq))),
            *scope(decoder, layer, attention, i=full),
            *scope(decoder, layer, delta_net, i=linear),
            *scope(decoder, layer, _moe(hf, "model.layers.", keys), i=sparse),
            *scope(decoder, layer, swiglu("mlp", "mlp", hf["intermediate_size"]), i=dense),
            ignore("model.layers.{i}.self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
            *(_mtp(hf, keys, bool(model.moe_layer_freq[-1])) if model.mtp_num_layers else [_WITHOUT_MTP]),
        ]
    )


_WITHOUT_MTP = passthrough(
    "mtp.*", because="the model was built without its MTP block (mtp_num_layers=None)", counted_by=MTP_COUNTS
)


def _embeddings(hf: HFConfig, keys: frozenset[str]) -> list[Rule]:
    rows, embedding = hf["vocab_size"], "model.embed_tokens.weight"
    if not hf["tie_word_embeddings"]:
        return [
            vocabulary("embedding.word_embeddings.weight", embedding, rows),
            vocabulary("output_layer.weight", "lm_head.weight", rows),
        ]
    repeated = ("lm_head.weight",) if "lm_head.weight" in keys else ()
    return [
        vocabulary("embedding.word_embeddings.weight", embedding, rows, also=repeated),
        vocabulary("output_layer.weight", embedding, rows, exported=False),  # the last stage's own copy
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


def _hosted(name: str, division: Heads, model: Any) -> list[Rule]:
    """HF's module `name`, its heads divided over tensor-parallel ranks or whole on each."""
    megatron = f"self_attention.{name}"
    if getattr(model, "hosted_mode", "heads") == "replicated":
        return hosted(megatron, name, division.parameters)
    return hosted(megatron, name, split=division, tp=getattr(model, "tensor_model_parallel_size", 1))


def _native_delta_net(hf: HFConfig) -> list[Rule]:
    key_heads, value_heads = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    k, v = key_heads * hf["linear_key_head_dim"], value_heads * hf["linear_value_head_dim"]
    in_proj = {
        "in_proj_qkvz.weight": per(key_heads, "q k v z"),
        "in_proj_ba.weight": per(key_heads, "b a"),
    }
    heads = {"q": k, "k": k, "v": v, "z": v, "b": value_heads, "a": value_heads}
    rules = [
        fuse("in_proj.weight", in_proj, "q k v z b a", **heads),
        fuse("conv1d.weight", {"conv1d.weight": "q k v"}, "q k v", q=k, k=k, v=v),
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
