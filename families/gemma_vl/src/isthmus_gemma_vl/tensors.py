"""Every tensor of a published Gemma 3: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig
from isthmus_gemma_vl.names import TEXT_ONLY, WITH_VISION, has_vision, text_config, vision_prefixes

Shapes = dict[str, tuple[int, ...]]

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; no Gemma 3 has a multi-token prediction layer."""
    root, prefix, hf = hf, WITH_VISION if has_vision(hf) else TEXT_ONLY, text_config(hf)
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for i in range(hf["num_hidden_layers"]):
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer(hf).items()}
    shapes |= {f"{prefix}norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    if has_vision(root):
        tower, before = vision_prefixes(frozenset())
        shapes |= {f"{tower}{name}": shape for name, shape in vision_tower(root).items()}
        shapes |= {f"{before}{name}": shape for name, shape in projector(root).items()}
    return shapes


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


def vision_tower(hf: HFConfig) -> Shapes:
    """Of SigLIP, without the pooling head that Gemma 3 does not use."""
    vision = hf.section("vision_config")
    hidden, rows, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    block = {
        **_linear("layer_norm1", hidden),
        **_linear("layer_norm2", hidden),
        **{key: s for name in "qkv" for key, s in _linear(f"self_attn.{name}_proj", hidden, hidden).items()},
        **_linear("self_attn.out_proj", hidden, hidden),
        **_linear("mlp.fc1", rows, hidden),
        **_linear("mlp.fc2", hidden, rows),
    }
    shapes = {
        **_linear("embeddings.patch_embedding", hidden, vision["num_channels"], patch, patch),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, hidden),
    }
    for i in range(vision["num_hidden_layers"]):
        shapes |= {f"encoder.layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes | _linear("post_layernorm", hidden)


def projector(hf: HFConfig) -> Shapes:
    """Of what makes features of the tower's output; its matrix is transposed, unlike that of a linear."""
    width = hf.section("vision_config")["hidden_size"]
    return {
        "mm_input_projection_weight": (width, text_config(hf)["hidden_size"]),
        "mm_soft_emb_norm.weight": (width,),
    }


def _linear(name: str, *shape: int) -> Shapes:
    """A weight and a bias of as many numbers as it has rows."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
