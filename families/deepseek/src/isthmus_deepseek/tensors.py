"""Every tensor of a DeepSeek checkpoint in the published layout: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig

Shapes = dict[str, tuple[int, ...]]


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; `mtp` adds the prediction layer, where the config has one."""
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    layers = hf["num_hidden_layers"]
    for i in range(layers):
        mlp = _experts(hf) if i >= hf["first_k_dense_replace"] else _mlp(hf, hf["intermediate_size"])
        shapes |= _below(f"model.layers.{i}", _layer(hf, mlp))
    if mtp and hf.get("num_nextn_predict_layers") and hf.model_type != "deepseek_v32":
        copy = (vocab, hidden)
        shapes |= _below(
            f"model.layers.{layers}",
            {
                "embed_tokens.weight": copy,
                "enorm.weight": (hidden,),
                "hnorm.weight": (hidden,),
                "eh_proj.weight": (hidden, 2 * hidden),
                **_layer(hf, _experts(hf)),
                "shared_head.norm.weight": (hidden,),
                "shared_head.head.weight": copy,
            },
        )
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _layer(hf: HFConfig, mlp: Shapes) -> Shapes:
    norms = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hf["hidden_size"],))
    return {**_below("self_attn", _attention(hf)), **_below("mlp", mlp), **norms}


def _attention(hf: HFConfig) -> Shapes:
    hidden, heads, q_rank, kv_rank = (
        hf[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rotated, value = (hf[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query = heads * (nope + rotated)
    return {
        **(
            {"q_proj.weight": (query, hidden)}
            if q_rank is None
            else {
                "q_a_proj.weight": (q_rank, hidden),
                "q_a_layernorm.weight": (q_rank,),
                "q_b_proj.weight": (query, q_rank),
            }
        ),
        "kv_a_proj_with_mqa.weight": (kv_rank + rotated, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "o_proj.weight": (hidden, heads * value),
        **(_below("indexer", _indexer(hf)) if hf.model_type == "deepseek_v32" else {}),
    }


def _indexer(hf: HFConfig) -> Shapes:
    heads, size = hf["index_n_heads"], hf["index_head_dim"]
    return {
        "wq_b.weight": (heads * size, hf["q_lora_rank"]),
        "wk.weight": (size, hf["hidden_size"]),
        "k_norm.weight": (size,),
        "k_norm.bias": (size,),
        "weights_proj.weight": (heads, hf["hidden_size"]),
    }


def _experts(hf: HFConfig) -> Shapes:
    experts, width = hf["n_routed_experts"], hf["moe_intermediate_size"]
    shapes: Shapes = {"gate.weight": (experts, hf["hidden_size"])}
    if hf.model_type != "deepseek_v2":
        shapes["gate.e_score_correction_bias"] = (experts,)
    for e in range(experts):
        shapes |= _below(f"experts.{e}", _mlp(hf, width))
    return shapes | _below("shared_experts", _mlp(hf, width * hf["n_shared_experts"]))


def _mlp(hf: HFConfig, rows: int) -> Shapes:
    up, down = (rows, hf["hidden_size"]), (hf["hidden_size"], rows)
    return {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}
