"""Weight rules of a Gemma 3 decoder layer: data, and nothing of a rank or a process group."""

from isthmus.config import HFConfig
from isthmus.weights import Rule, fuse, per, row, same, swiglu


def layer(text: HFConfig) -> list[Rule]:
    """The rules of one layer: attention and MLP, each between two norms."""
    return [
        same("input_layernorm.weight", "input_layernorm.weight"),
        *attention(text),
        same("self_attention.post_layernorm.weight", "post_attention_layernorm.weight"),
        same("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
        *swiglu("mlp", "mlp", text["intermediate_size"]),
        same("mlp.post_layernorm.weight", "post_feedforward_layernorm.weight"),
    ]


def attention(text: HFConfig) -> list[Rule]:
    """Query heads grouped with the key/value head that they share, norms of queries and keys."""
    groups, head = text["num_key_value_heads"], text["head_dim"]
    q, kv = text["num_attention_heads"] * head, groups * head
    q_k_v = {
        "self_attn.q_proj.weight": "q",
        "self_attn.k_proj.weight": "k",
        "self_attn.v_proj.weight": "v",
    }
    return [
        fuse("self_attention.linear_qkv.weight", q_k_v, per(groups, "q k v"), q=q, k=kv, v=kv),
        same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ]
