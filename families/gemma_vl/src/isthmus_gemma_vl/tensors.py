"""Every tensor of a published Gemma 3 language model: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig
from isthmus_gemma_vl.names import TEXT_ONLY, WITH_VISION, has_vision, text_config

Shapes = dict[str, tuple[int, ...]]

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; no Gemma 3 has a multi-token prediction layer."""
    prefix, hf = WITH_VISION if has_vision(hf) else TEXT_ONLY, text_config(hf)
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for i in range(hf["num_hidden_layers"]):
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer(hf).items()}
    return shapes | {f"{prefix}norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def layer(hf: HFConfig) -> Shapes:
    """Of one layer: sliding and full ones are alike."""
    hidden, rows, head = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    q, kv = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (rows, hidden),
        "mlp.up_proj.weight": (rows, hidden),
        "mlp.down_proj.weight": (hidden, rows),
        **{f"{name}_layernorm.weight": (hidden,) for name in NORMS},
    }
