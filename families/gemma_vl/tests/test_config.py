"""config.json in the spellings of transformers 4 and 5, and what is refused."""

from typing import Any

import pytest

from isthmus.config import HFConfig
from isthmus_gemma_vl.config import megatron_config
from isthmus_gemma_vl.names import prefix
from isthmus_gemma_vl.tiny import PUBLISHED, tiny_config, vision_language

SLIDING, FULL = "sliding_attention", "full_attention"


def fields(config: dict[str, Any]) -> dict[str, Any]:
    return megatron_config(HFConfig(config), frozenset())


def rewritten(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it."""
    import transformers

    return transformers.Gemma3TextConfig.from_dict(dict(config)).to_dict()


@pytest.mark.parametrize("size", PUBLISHED)
def test_transformers_5_spells_the_same_model(size: str) -> None:
    config = rewritten(PUBLISHED[size])
    assert FULL in config["rope_parameters"]
    assert fields(config) == fields(PUBLISHED[size])


@pytest.mark.parametrize(
    ("size", "window", "factor", "scale"),
    [("270m", 512, None, 256), ("1b", 512, None, 256), ("4b", 1024, 8, 256), ("27b", 1024, 8, 168)],
)
def test_published_sizes_have_their_windows_ropes_and_scales(
    size: str, window: int, factor: int | None, scale: int
) -> None:
    found = fields(PUBLISHED[size])
    assert found["window_size"] == (window - 1, 0)
    assert found["window_attn_skip_freq"][:7] == [1, 1, 1, 1, 1, 0, 1]
    assert (found["rotary_base"], found["rope_local_base"]) == (1_000_000, 10_000)
    assert found["seq_len_interpolation_factor"] == factor
    # Megatron's softmax scale is the root of this over the head's size.
    assert found["mup_base_head_dim"] ** 0.5 / found["kv_channels"] == pytest.approx(scale**-0.5, rel=1e-12)


def test_a_models_logits_are_capped_and_a_vision_language_models_are_not() -> None:
    assert fields(tiny_config(final_logit_softcapping=30.0))["softcap"] == 30.0
    with pytest.raises(ValueError, match="its vision-language class does not"):
        fields(vision_language(tiny_config(final_logit_softcapping=30.0)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "Write rope_scaling.rope_type"),
        ({"head_dim": 31}, "head_dim=31, expected an even number"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 5.0}}}, "rope_local_base_freq"),
        ({"layer_types": [SLIDING] * 18}, "contradicts itself: sliding_window_pattern"),
        ({"layer_types": [SLIDING] * 3, "sliding_window_pattern": None}, "names 3 layers"),
        ({"pad_token_id": 262144}, "pad_token_id=262144, expected a token below vocab_size=262144"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),
    ],
    ids=str,
)
def test_what_megatron_does_not_compute_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fields(PUBLISHED["270m"] | changed)


def test_a_window_may_be_stated_where_no_layer_slides() -> None:
    assert fields(tiny_config(sliding_window_pattern=1))["window_size"] is None


@pytest.mark.parametrize("mark", ["boi_token_index", "eoi_token_id"])
def test_what_stands_around_an_image_is_none_of_its_tokens(mark: str) -> None:
    config = vision_language(tiny_config())
    config[mark.replace("_id", "_index")] = None
    with pytest.raises(ValueError, match=mark.removesuffix("_id").removesuffix("_index")):
        fields(config | {mark: config["image_token_index"]})


@pytest.mark.parametrize("before", ["", "model.", "model.language_model."])
def test_any_prefix_is_found(before: str) -> None:
    keys = frozenset({f"{before}embed_tokens.weight", "lm_head.weight", "unembed_tokens.weight"})
    assert prefix(HFConfig(tiny_config()), keys) == before
