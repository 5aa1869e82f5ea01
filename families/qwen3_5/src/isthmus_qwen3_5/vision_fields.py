"""What config.json says of Qwen3.5's vision tower: what it is built of, and where its features go."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.config_values import raise_any
from isthmus.decoder import rope
from isthmus.hosting.vision_config import tower_problems

# As transformers' class has them.
FIELDS = (
    *("depth", "hidden_size", "hidden_act", "intermediate_size", "num_heads", "in_channels", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size", "out_hidden_size", "num_position_embeddings"),
    *("initializer_range", "rope_parameters"),
)
# Placeholders of features, and what stands around them.
PLACES = ("image_token_id", "video_token_id")
TOKENS = (*PLACES, "vision_start_token_id", "vision_end_token_id")
MROPE_SECTION = (11, 11, 10)  # where config.json has none: transformers' own


def vision_fields(hf: HFConfig, text: HFConfig) -> dict[str, Any]:
    """`VisionModelConfig.vision` of a config that has a tower; `text` is its language model.

    ValueError, with all that is wrong: a tower that transformers does not have, features of another size than
    the tokens', placeholders that are no tokens or the same, sections that are not the rotated part.
    """
    section, scaling = hf.section("vision_config"), rope(text).scaling
    mrope = list(scaling.get("mrope_section", MROPE_SECTION))
    raise_any(
        [
            *tower_problems(section, (f"{hf.model_type}_vision", hf.model_type), "num_heads"),
            *_tower(section, text),
            *_tokens(hf, text["vocab_size"]),
            *_sections(mrope, scaling.get("mrope_interleaved", True), text),
        ]
    )
    return {
        "model_type": hf.model_type,
        "config": {name: section[name] for name in FIELDS},
        "mrope_section": mrope,
        **{name: hf[name] for name in PLACES},
    }


def _tower(section: HFConfig, text: HFConfig) -> list[str]:
    found, hidden, heads = [], section["hidden_size"], section["num_heads"]
    if layers := section.get("deepstack_visual_indexes"):
        found.append(f"vision_config.deepstack_visual_indexes={layers}, no Qwen3.5 has any")
    if (out := section["out_hidden_size"]) != text["hidden_size"]:
        found.append(
            f"vision_config.out_hidden_size={out}, expected text_config.hidden_size={text['hidden_size']}:"
            " features stand in the place of embeddings"
        )
    if hidden % heads == 0 and hidden // heads % 4:
        found.append(
            f"vision_config.hidden_size={hidden} and num_heads={heads} make heads of {hidden // heads},"
            " expected a multiple of 4: half of a head rotates by height, half by width"
        )
    rotary = section["rope_parameters"]
    if rotary.get("rope_type", "axial") != "axial" or rotary.keys() - {"rope_type", "rope_theta"}:
        found.append(f"vision_config.rope_parameters={rotary}, expected rope_type 'axial' and a rope_theta")
    return found


def _tokens(hf: HFConfig, vocabulary: int) -> list[str]:
    tokens = {name: hf[name] for name in TOKENS}
    stated = {
        name: f"{name}={token}{' (by default)' if name in hf.defaulted else ''}"
        for name, token in tokens.items()
    }
    found = [
        f"{stated[name]}, expected a token below text_config.vocab_size={vocabulary}"
        for name, token in tokens.items()
        if token >= vocabulary
    ]
    for token in dict.fromkeys(tokens.values()):
        same = [stated[name] for name, other in tokens.items() if other == token]
        if len(same) > 1:
            found.append(f"{' and '.join(same)}, expected a token for each")
    return found


def _sections(mrope: list[int], interleaved: bool, text: HFConfig) -> list[str]:
    """Of mrope: how many of the rotary frequencies are of time, height and width."""
    found, frequencies = [], int(text["head_dim"] * rope(text).partial) // 2
    if not interleaved:
        found.append("mrope_interleaved=false, Hugging Face's Qwen3.5 interleaves")
    if len(mrope) != 3 or sum(mrope) != frequencies:
        found.append(
            f"mrope_section={mrope}, expected three numbers for time, height and width, together the"
            f" {frequencies} rotary frequencies (half of the rotated part of head_dim={text['head_dim']})"
        )
    return found
