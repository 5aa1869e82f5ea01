"""Tiny Gemma 3: the fields of the releases with fewer and smaller parts, in the same proportions."""

from typing import Any

from isthmus.tiny import Tiny, Variant
from isthmus_gemma_vl.tensors import tensors

# What the releases share. Not copies of released files: sizes are those of the model cards.
COMMON: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
SMALL = COMMON | {
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}
LARGE = COMMON | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262208}
# Spelling of transformers 4, as published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "270m": SMALL | {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
    "1b": SMALL | {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
    "4b": LARGE
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
    },
    "12b": LARGE
    | {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "27b": LARGE
    | {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}

# What shrinks. Kept: heads together wider than the hidden state, MQA or two query heads to a key head, both
# ropes. Of four layers one is full; the window is shorter than the tests' sequences.
SHRUNK = {
    "head_dim": 32,
    "hidden_size": 96,
    "intermediate_size": 288,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "sliding_window_pattern": 4,
    "vocab_size": 160,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small config.json with one key/value head, like the 270M and 1B; `overrides` are fields of it."""
    return SMALL | SHRUNK | {"query_pre_attn_scalar": 32} | overrides


def tiny_gqa_config(**overrides: Any) -> dict[str, Any]:
    """A small config.json of grouped queries, scaled rope and softmax scale, like the 27B."""
    return LARGE | SHRUNK | {"num_key_value_heads": 2, "query_pre_attn_scalar": 42} | overrides


# Of the 4B to the 27B.
VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
# An image is 9 tokens of four patches each, longer than the window: which its own tokens leave, too.
SHRUNK_VISION = {
    "hidden_size": 32,
    "image_size": 24,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
}
SHRUNK_TOKENS = {"boi_token_index": 157, "eoi_token_index": 158, "image_token_index": 159}


def vision_language(text: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """The small config.json of a release with a vision tower that has this language model."""
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 9,
        "model_type": "gemma3",
        "text_config": inner | {"sliding_window": 6},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
        "vision_config": VISION | SHRUNK_VISION,
        **SHRUNK_TOKENS,
        **overrides,
    }


VARIANTS = {
    "default": Variant(
        tiny_config(),
        "one key/value head, with fewer and smaller parts than the 270M",
        mtp=False,
        head=False,
        reloaded=True,
    ),
    "gqa": Variant(
        tiny_gqa_config(),
        "grouped queries, scaled rope and softmax scale, as in the 27B",
        mtp=False,
        head=False,
        reloaded=True,
    ),
    "with_head": Variant(tiny_config(), "the head is the embedding, repeated in the files", mtp=False),
    "untied": Variant(
        tiny_gqa_config(tie_word_embeddings=False), "a head of its own", mtp=False, reloaded=True
    ),
    "odd_vocab": Variant(
        tiny_config(vocab_size=151),
        "151 vocabulary rows, which no tensor-parallel size divides",
        mtp=False,
        head=False,
    ),
    "vision": Variant(
        vision_language(tiny_gqa_config()),
        "with a vision tower of two layers, as the 4B to 27B have one",
        mtp=False,
        head=False,
        reloaded=True,
    ),
    "vision_untied": Variant(
        vision_language(tiny_gqa_config(tie_word_embeddings=False)),
        "with a vision tower, and a head of its own",
        mtp=False,
        reloaded=True,
    ),
}

# Zero-centred norms around 0. Embeddings are multiplied by 9.8, the square root of the hidden size.
VALUES = {
    "*vision_tower.*norm*.weight": (1.0, 0.1),
    "*embed_tokens.weight": (0.0, 0.1),
    # As in a trained model, a layer adds little to what it was given: else each multiplies the rounding of
    # those before, and two bfloat16 models differ as much as either does from float32.
    "*.post_attention_layernorm.weight": (-0.8, 0.1),
    "*.post_feedforward_layernorm.weight": (-0.8, 0.1),
    "*norm.weight": (0.0, 0.2),
}

TINY = Tiny(VARIANTS, tensors, VALUES)
