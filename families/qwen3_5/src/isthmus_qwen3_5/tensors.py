"""Every tensor of a published Qwen3.5 language model: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig
from isthmus.decoder import layer_types
from isthmus_qwen3_5.names import TEXT_ONLY, WITH_VISION, has_vision, text_config

Shapes = dict[str, tuple[int, ...]]


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; `mtp` adds the block of the multi-token prediction layer."""
    prefix = WITH_VISION if has_vision(hf) else TEXT_ONLY
    hf = text_config(hf)
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    mlp = _experts(hf) if "num_experts" in hf else _mlp(hf, hf["intermediate_size"])
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(layer_types(hf)):
        linear = kind == "linear_attention"
        mixer = _below("linear_attn", _delta_net(hf)) if linear else _below("self_attn", _attention(hf))
        shapes |= _below(f"{prefix}layers.{i}", {**mixer, **_below("mlp", mlp), **_norms(hf)})
    shapes |= {f"{prefix}norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    if mtp:
        layer = {**_below("self_attn", _attention(hf)), **_below("mlp", mlp), **_norms(hf)}
        shapes |= {
            "mtp.fc.weight": (hidden, 2 * hidden),
            **_below("mtp.layers.0", layer),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
        }
    return shapes


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _norms(hf: HFConfig) -> Shapes:
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hf["hidden_size"],))


def _attention(hf: HFConfig) -> Shapes:
    hidden, head = hf["hidden_size"], hf["head_dim"]
    q, kv = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    return {
        "q_proj.weight": (2 * q, hidden),  # of each head, query and output gate
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "o_proj.weight": (hidden, q),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
    }


def _delta_net(hf: HFConfig) -> Shapes:
    hidden, value_heads, head = hf["hidden_size"], hf["linear_num_value_heads"], hf["linear_value_head_dim"]
    k, v = hf["linear_num_key_heads"] * hf["linear_key_head_dim"], value_heads * head
    return {
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "conv1d.weight": (2 * k + v, 1, hf["linear_conv_kernel_dim"]),
        "in_proj_qkv.weight": (2 * k + v, hidden),
        "in_proj_z.weight": (v, hidden),
        "in_proj_b.weight": (value_heads, hidden),
        "in_proj_a.weight": (value_heads, hidden),
        "norm.weight": (head,),
        "out_proj.weight": (hidden, v),
    }


def _experts(hf: HFConfig) -> Shapes:
    shapes: Shapes = {"gate.weight": (hf["num_experts"], hf["hidden_size"])}
    for e in range(hf["num_experts"]):
        shapes |= _below(f"experts.{e}", _mlp(hf, hf["moe_intermediate_size"]))
    shapes |= _below("shared_expert", _mlp(hf, hf["shared_expert_intermediate_size"]))
    return shapes | {"shared_expert_gate.weight": (1, hf["hidden_size"])}


def _mlp(hf: HFConfig, rows: int) -> Shapes:
    up, down = (rows, hf["hidden_size"]), (hf["hidden_size"], rows)
    return {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}
