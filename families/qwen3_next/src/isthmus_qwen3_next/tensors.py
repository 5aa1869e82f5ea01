"""Every tensor of a published Qwen3-Next checkpoint: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig
from isthmus.decoder import layer_types

Shapes = dict[str, tuple[int, ...]]


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; `mtp` adds the block of the multi-token prediction layer."""
    hidden, vocab, dense = hf["hidden_size"], hf["vocab_size"], hf["mlp_only_layers"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(layer_types(hf)):
        mixer = (
            below("linear_attn", _delta_net(hf))
            if kind == "linear_attention"
            else below("self_attn", attention(hf))
        )
        sparse = i not in dense and (i + 1) % hf["decoder_sparse_step"] == 0
        feed_forward = experts(hf) if sparse else mlp(hf, hf["intermediate_size"])
        shapes |= below(f"model.layers.{i}", {**mixer, **below("mlp", feed_forward), **norms(hf)})
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    if mtp:
        layer = {**below("self_attn", attention(hf)), **below("mlp", experts(hf)), **norms(hf)}
        shapes |= {
            "mtp.fc.weight": (hidden, 2 * hidden),
            **below("mtp.layers.0", layer),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
        }
    return shapes


def below(prefix: str, shapes: Shapes) -> Shapes:
    """The same tensors with names below `prefix`."""
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def norms(hf: HFConfig) -> Shapes:
    """Of a layer, before the mixer and before the MLP."""
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hf["hidden_size"],))


def attention(hf: HFConfig) -> Shapes:
    """Of a full-attention layer."""
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
        "in_proj_qkvz.weight": (2 * k + 2 * v, hidden),
        "in_proj_ba.weight": (2 * value_heads, hidden),
        "norm.weight": (head,),
        "out_proj.weight": (hidden, v),
    }


def experts(hf: HFConfig) -> Shapes:
    """Of a layer with experts, one by one, and the shared one."""
    shapes: Shapes = {"gate.weight": (hf["num_experts"], hf["hidden_size"])}
    for e in range(hf["num_experts"]):
        shapes |= below(f"experts.{e}", mlp(hf, hf["moe_intermediate_size"]))
    shapes |= below("shared_expert", mlp(hf, hf["shared_expert_intermediate_size"]))
    return shapes | {"shared_expert_gate.weight": (1, hf["hidden_size"])}


def mlp(hf: HFConfig, rows: int) -> Shapes:
    """A gated MLP of `rows` intermediate rows."""
    up, down = (rows, hf["hidden_size"]), (hf["hidden_size"], rows)
    return {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}
