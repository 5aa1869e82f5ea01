"""Gemma 3's config.json in Megatron's fields: the language model's arithmetic, and the vision tower."""

from math import isqrt
from typing import Any

from isthmus.config import HFConfig
from isthmus.config_values import raise_any
from isthmus.decoder import decoder_config, tied_head
from isthmus.hosting.vision_config import tower_problems
from isthmus_gemma_vl.names import HEADS, has_vision, image_token, text_config
from isthmus_gemma_vl.ropes import FULL, SLIDING, ropes

# transformers 4 wrote the pattern of the layers that it lists; hybrid caches are of generation.
INERT = frozenset({"_sliding_window_pattern", "cache_implementation"})
PATTERN = "sliding_window_pattern"
SIGLIP = "siglip_vision_model"
# Of a vision-language model: what surrounds its features, which no forward pass looks for, a pooling head
# that no Gemma 3 uses, what a training from scratch begins with, and padding, which the text config states.
VISION_INERT = frozenset(
    {
        *("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"),
        *("vision_use_head", "initializer_range", "pad_token_id"),
    }
)
# Of a vision tower, as transformers' class has them.
VISION_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "attention_dropout"),
)


def megatron_config(hf: HFConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Fields of GPTModelConfig and TransformerConfig that compute what Hugging Face's Gemma 3 does.

    Args:
        keys: tensor names of the checkpoint; empty where only the config is known.

    Raises:
        ValueError: the config contradicts itself or the checkpoint, has keys nobody understands, or asks for
            arithmetic that Megatron does not have.
    """
    text = text_config(hf)
    if (head_dim := text["head_dim"]) % 2:
        raise ValueError(
            f"config.json: head_dim={head_dim}, expected an even number, half of it to be rotated"
        )
    rotary = ropes(text)
    fields = decoder_config(text, {"position_embedding_type": "rope"}, activation_key="hidden_activation")
    kinds = layer_kinds(text)
    _refuse(text)
    fields |= {
        "share_embeddings_and_output_weights": tied_head(hf, text, keys, HEADS),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "rotary_base": _whole(rotary.full),
        "rotary_percent": 1.0,
        "seq_len_interpolation_factor": _whole(rotary.factor),
        "rope_local_base": rotary.sliding,
        "softcap": _softcap(hf, text),
        **_window(text, kinds),
        # Megatron's own way to scale embeddings and softmax; widths stay what they are. sqrt(base) / head_dim
        # is then query_pre_attn_scalar ** -0.5.
        "use_mup": True,
        "mup_base_head_dim": head_dim**2 / text["query_pre_attn_scalar"],
        "part": "text",
    }
    if has_vision(hf):
        fields |= {"part": "all", "vision": _vision(hf)}
    hf.check_all_understood(INERT | VISION_INERT if has_vision(hf) else INERT)
    return fields


def _vision(hf: HFConfig) -> dict[str, Any]:
    """What the tower is built of, and where its features go.

    ValueError: a tower that no SigLIP is, or patches that do not make the tokens of an image. LookupError:
    these are null, for which transformers' class has no default.
    """
    section, tokens = hf.section("vision_config"), hf["mm_tokens_per_image"]
    if tokens is None:
        raise LookupError("config.json: mm_tokens_per_image is null; add the tokens of an image")
    raise_any(tower_problems(section, (SIGLIP,), "num_attention_heads"))
    config = {name: section[name] for name in VISION_FIELDS}
    size, patch, side = config["image_size"], config["patch_size"], isqrt(tokens)
    if side**2 != tokens or size % patch or size // patch % side:
        raise ValueError(
            f"config.json: mm_tokens_per_image={tokens}, vision_config.image_size={size} and"
            f" patch_size={patch} do not fit: the tokens of an image are a square, each of a square of whole"
            " patches"
        )
    image, marks = image_token(hf), {}
    for mark in ("boi_token", "eoi_token"):
        marks[f"{mark}_index"] = hf.either(f"{mark}_index", f"{mark}_id")
    if same := [name for name, token in marks.items() if token == image]:
        raise ValueError(
            f"config.json: {' and '.join(same)} is {image}, as image_token_index is: what stands around an"
            " image is none of its tokens"
        )
    return {"config": config, "tokens_per_image": tokens, "image_token": image}


def layer_kinds(text: HFConfig) -> list[str]:
    """The kind of every layer, by `layer_types` or `sliding_window_pattern`. ValueError: they disagree."""
    layers, listed, every = text["num_hidden_layers"], text.get("layer_types"), text.get(PATTERN)
    kinds = listed
    if every is not None or listed is None:
        every = every or 6  # of every Gemma 3, and what Hugging Face's class takes
        kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    if listed is not None and list(listed) != kinds:
        raise ValueError(
            f"config.json contradicts itself: {PATTERN}={every} means {kinds}, layer_types={listed}. Keep the"
            " one the model was trained with"
        )
    if len(kinds) != layers:
        raise ValueError(f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers={layers}")
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(f"config.json: layer_types has {unknown}, expected {SLIDING} or {FULL}")
    return list(kinds)


def _window(text: HFConfig, kinds: list[str]) -> dict[str, Any]:
    """A sliding layer sees `sliding_window` tokens, itself among them; Megatron counts those before it."""
    window = text["sliding_window"]  # stated also where no layer slides
    if SLIDING not in kinds:
        return {"window_size": None, "window_attn_skip_freq": None}
    if window is None:
        raise LookupError("config.json: sliding_window is null, and there are sliding layers; add its tokens")
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(kind == SLIDING) for kind in kinds],
    }


def _refuse(text: HFConfig) -> None:
    """ValueError where the config asks for what Megatron's attention does not compute."""
    wrong = [
        f"{key}={value}: {why}"
        for key, why in (
            ("attn_logit_softcapping", "no attention of Megatron caps its logits, nor does Hugging Face's"),
            ("use_bidirectional_attention", "Megatron trains decoders on causal attention"),
        )
        if (value := text.get(key))
    ]
    if wrong:
        raise ValueError("config.json: not supported:\n  " + "\n  ".join(wrong))


def _softcap(hf: HFConfig, text: HFConfig) -> float | None:
    """What caps the logits, None for nothing. ValueError: not positive, or with a vision tower."""
    cap = text.get("final_logit_softcapping")
    if cap is not None and not cap > 0:
        raise ValueError(f"config.json: final_logit_softcapping={cap!r}, expected a positive number or null")
    if cap is not None and has_vision(hf):
        raise ValueError(
            f"config.json: text_config.final_logit_softcapping={cap}: Hugging Face's language model caps its"
            " logits, its vision-language class does not. Set it to null if the model was trained without"
        )
    return cap


def _whole(value: float | None) -> float | int | None:
    """As an integer where it is one: Megatron's arguments have no others for these."""
    return int(value) if value is not None and float(value).is_integer() else value
