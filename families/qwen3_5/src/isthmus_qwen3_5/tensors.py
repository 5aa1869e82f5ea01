"""Every tensor of a published Qwen3.5 language model: its name and shape, from config.json alone.

Written down apart from the weight map, as the releases have it, so that each can be checked against the
other.
"""

from isthmus.config import HFConfig
from isthmus.decoder import layer_types
from isthmus_qwen3_5.names import TEXT_ONLY, VISION, WITH_VISION, has_experts, has_vision, text_config
from isthmus_qwen3_next.tensors import Shapes, attention, below, experts, mlp, norms


def tensors(hf: HFConfig, mtp: bool = True) -> Shapes:
    """Name to shape, in layer order; `mtp` adds the block of the multi-token prediction layer."""
    prefix = WITH_VISION if has_vision(hf) else TEXT_ONLY
    root, sparse, hf = hf, has_experts(hf), text_config(hf)
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    feed_forward = experts(hf) if sparse else mlp(hf, hf["intermediate_size"])
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(layer_types(hf)):
        linear = kind == "linear_attention"
        mixer = below("linear_attn", _delta_net(hf)) if linear else below("self_attn", attention(hf))
        shapes |= below(f"{prefix}layers.{i}", {**mixer, **below("mlp", feed_forward), **norms(hf)})
    shapes |= {f"{prefix}norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    if prefix == WITH_VISION:
        shapes |= below(VISION[0], vision_tower(root))
    if mtp:
        layer = {**below("self_attn", attention(hf)), **below("mlp", feed_forward), **norms(hf)}
        shapes |= {
            "mtp.fc.weight": (hidden, 2 * hidden),
            **below("mtp.layers.0", layer),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
        }
    return shapes


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


def vision_tower(hf: HFConfig) -> Shapes:
    """Of the vision tower of a config that has one."""
    vision = hf.section("vision_config")
    hidden, rows, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    block = {
        **_linear("norm1", hidden),
        **_linear("norm2", hidden),
        **_linear("attn.qkv", 3 * hidden, hidden),
        **_linear("attn.proj", hidden, hidden),
        **_linear("mlp.linear_fc1", rows, hidden),
        **_linear("mlp.linear_fc2", hidden, rows),
    }
    shapes = {
        **_linear(
            "patch_embed.proj", hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch
        ),
        "pos_embed.weight": (vision["num_position_embeddings"], hidden),
    }
    for i in range(vision["depth"]):
        shapes |= below(f"blocks.{i}", block)
    return {
        **shapes,
        **_linear("merger.norm", hidden),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", vision["out_hidden_size"], merged),
    }


def _linear(name: str, *shape: int) -> Shapes:
    """A weight and a bias of as many numbers as it has rows."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
