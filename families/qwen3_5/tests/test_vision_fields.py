"""A vision-language config.json that says what Qwen3.5's vision tower cannot be is refused by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from isthmus.config import HFConfig
from isthmus_qwen3_5.config import megatron_config
from isthmus_qwen3_5.tiny import tiny_config, tiny_moe_config, vision_language
from isthmus_qwen3_5.vision_fields import FIELDS, TOKENS

type Change = Callable[[dict[str, Any]], Any]


def tower(**fields: Any) -> Change:
    return lambda raw: raw["vision_config"].update(fields)


def top(**fields: Any) -> Change:
    return lambda raw: raw.update(fields)


def without(*names: str) -> Change:
    return lambda raw: [raw.pop(name) for name in names]


def rope(**fields: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        text = raw["text_config"]
        text["rope_parameters"] = text["rope_parameters"] | fields

    return change


def section_missing(raw: dict[str, Any]) -> None:
    rope()(raw)
    del raw["text_config"]["rope_parameters"]["mrope_section"]


def text(**fields: Any) -> Change:
    return lambda raw: raw["text_config"].update(fields)


WRONG: list[tuple[Change, str]] = [
    (top(video_token_id=150), "image_token_id=150 and video_token_id=150, expected a token for each"),
    (top(vision_start_token_id=150), "image_token_id=150 and vision_start_token_id=150, expected a token"),
    (top(image_token_id=160), "image_token_id=160, expected a token below text_config.vocab_size=160"),
    (top(vision_end_token_id=900), "vision_end_token_id=900, expected a token below text_config.vocab"),
    (without("video_token_id"), r"video_token_id=248057 \(by default\), expected a token below"),
    (top(image_token_id=-1), "image_token_id=-1, expected a whole number"),
    (top(image_token_id="150"), "image_token_id='150', expected a whole number"),
    (rope(mrope_section=[2, 1, 2]), r"mrope_section=\[2, 1, 2\], expected three .* the 4 rotary freq"),
    (rope(mrope_section=[2, 2]), r"mrope_section=\[2, 2\], expected three numbers"),
    (rope(mrope_section=4), "rope_parameters.mrope_section=4, expected a list of whole numbers"),
    (section_missing, r"mrope_section=\[11, 11, 10\], expected three numbers .* the 4 rotary"),
    (rope(mrope_interleaved=False), "mrope_interleaved=false, Hugging Face's Qwen3.5 interleaves"),
    (rope(mrope_interleaved="yes"), "mrope_interleaved='yes', expected true or false"),
    (text(mamba_ssm_dtype="float12"), "mamba_ssm_dtype='float12', expected one of float32"),
    (tower(num_heads=3), "vision_config.hidden_size=32, expected a multiple of vision_config.num_heads=3"),
    (tower(num_heads=16), "make heads of 2, expected a multiple of 4"),
    (tower(model_type="siglip"), "model_type='siglip', expected 'qwen3_5_vision' or 'qwen3_5'"),
    (tower(hidden_act="swiglu2"), "vision_config.hidden_act='swiglu2', expected one of gelu, "),
    (tower(out_hidden_size=65), "out_hidden_size=65, expected text_config.hidden_size=64"),
    (tower(deepstack_visual_indexes=[5]), r"deepstack_visual_indexes=\[5\], no Qwen3.5 has any"),
    (tower(rope_parameters={"rope_type": "default"}), "rope_parameters={'rope_type': 'default'}, expected"),
    (tower(rope_parameters={"factor": 2}), "rope_parameters={'factor': 2}, expected rope_type 'axial' and"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=range(len(WRONG)))
def test_what_no_tower_can_be_is_refused_by_name(change: Change, message: str) -> None:
    raw = vision_language(tiny_config())
    megatron_config(HFConfig(raw), frozenset())
    raw = vision_language(tiny_config())
    change(raw)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        megatron_config(HFConfig(raw), frozenset())


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_no_value_of_another_kind(name: str) -> None:
    values = [[[]], {"a": []}, True, math.nan]
    values += ["2", 0, -2, 2.0] if name not in ("hidden_act", "initializer_range", "rope_parameters") else []
    for value in values:
        raw = vision_language(tiny_config(), {name: value})
        with pytest.raises(ValueError, match=rf"vision_config\.{name}\S*=.*, expected "):
            megatron_config(HFConfig(raw), frozenset())


def test_all_that_is_wrong_is_in_one_error() -> None:
    raw = vision_language(tiny_config(), {"num_heads": 3, "model_type": "x"}, image_token_id=149)
    rope(mrope_section=[9, 9, 9])(raw)
    with pytest.raises(ValueError, match="values that its fields cannot have") as error:
        megatron_config(HFConfig(raw), frozenset())
    found = [line.split("=")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert found == [
        "vision_config.model_type",
        "vision_config.hidden_size",
        "image_token_id",
        "mrope_section",
    ]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_vision"])
def test_a_tower_may_be_called_as_older_files_call_it(name: str) -> None:
    raw = vision_language(tiny_config(), {"model_type": name})
    assert megatron_config(HFConfig(raw), frozenset())["part"] == "all"


@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_a_released_size_is_taken_without_what_has_a_default(make: Callable[..., Any]) -> None:
    raw = vision_language(make(vocab_size=248320))
    without(*TOKENS)(raw)
    found = megatron_config(HFConfig(raw), frozenset())["vision"]
    assert (found["image_token_id"], found["video_token_id"]) == (248056, 248057)
