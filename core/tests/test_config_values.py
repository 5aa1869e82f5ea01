"""What the fields of config.json may hold: one error for all that hold something else."""

import json
import math
from typing import Any

import pytest

from isthmus.config import HFConfig
from isthmus.config_values import KINDS, kind_of
from isthmus.json_text import MAX_DEPTH, parse_json

# Field -> values that it may have, values that it may not.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "num_hidden_layers": ([1, 48], [0, -1, 4.0, "4", [4], True, 10**9, 10**400]),
    "hidden_size": ([64], [0, -64, 64.0, "64", [64], {"a": 64}, False]),
    "num_key_value_heads": ([2], [0, 2.0, "2", True]),
    "linear_num_key_heads": ([4], [0, "4"]),
    "head_dim": ([32], [0, -32, 32.0]),
    "full_attention_interval": ([4], [0, -4, [4]]),
    "num_experts": ([0, 8], [-1, 8.0, "8", [8], True]),
    "moe_intermediate_size": ([0, 32], [-1, "32"]),
    "rms_norm_eps": ([1e-6, 1], [0, -1, "1e-6", [1e-6], math.nan, math.inf]),
    "rope_theta": ([1e4, 10000], [0, -5, "10000", [1e4], 10**400]),
    "partial_rotary_factor": ([0.25, 1], [0, 2, -0.5, "0.25", math.nan]),
    "initializer_range": ([0, 0.02], [-1, "x", [0.02]]),
    "attention_dropout": ([0, 0.0, 0.5], ["x", 1.0, 2.0, -0.1, [0.0]]),
    "tie_word_embeddings": ([True, False], [0, 1, "true", []]),
    "hidden_act": (["silu"], [5, ["silu"], {"a": "silu"}]),
    "layer_types": ([["full_attention"], []], [5, "full_attention", [5], {"0": "full_attention"}]),
    "mlp_only_layers": ([[], [0, 2]], [1, "1", [-1], [0.5], [[1]]]),
    "rope_scaling": ([{}, {"rope_type": "linear"}], ["linear", 2.0, [2.0], {"rope_theta": "x"}]),
    "rope_parameters": ([{"rope_theta": 1e4}], [5, {"rope_theta": 0}, {"partial_rotary_factor": 2}]),
    "torch_dtype": (
        ["bfloat16", "torch.float32"],
        ["float8_e4m3fn", "float64", "x", 16, ["float16"]],
    ),
    "logit_scale": ([0.5, "anything", [1]], [math.nan, math.inf]),  # of no kind
}


@pytest.mark.parametrize("field", VALUES)
def test_a_field_takes_the_values_of_its_kind_and_no_others(field: str) -> None:
    good, bad = VALUES[field]
    for value in [*good, None]:
        assert HFConfig({field: value}).get(field) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"config\.json: {field}\S*=.*, expected "):
            HFConfig({field: value})


def test_every_wrong_value_is_in_one_error_with_its_path() -> None:
    raw = {
        "hidden_size": [64],
        "rope_scaling": {"rope_theta": "x"},
        "tie_word_embeddings": 1,
        "vocab_size": 8,
    }
    with pytest.raises(ValueError, match="values that its fields cannot have") as error:
        HFConfig(raw)
    assert str(error.value).splitlines()[1:] == [
        "  hidden_size=[64], expected a whole number, 1 or more",
        "  rope_scaling.rope_theta='x', expected a number above 0",
        "  tie_word_embeddings=1, expected true or false",
    ]


def test_a_section_is_checked_when_it_is_opened() -> None:
    hf = HFConfig({"text_config": {"hidden_size": "64"}})
    with pytest.raises(ValueError, match=r"text_config\.hidden_size='64', expected"):
        hf.section("text_config")


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(ValueError, match="hidden_size=") as error:
        HFConfig({"hidden_size": list(range(10_000))})
    assert len(str(error.value)) < 200


def test_no_pattern_hides_behind_another() -> None:
    names = {field: kind_of(field) for field in VALUES}
    assert names["num_hidden_layers"] is not names["num_key_value_heads"] is not names["num_experts"]
    assert len(set(KINDS.values())) >= 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "'b' given more than once"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": [-Infinity]}', "-Infinity is no number"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested more than 100 deep"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 100_000 + "]" * 100_000, "nested more than 100 deep"),
        ('{"a": ' + "1" * 5000 + "}", "integer string conversion"),
        (b'{"a": "\xff"}', "can't decode byte"),
    ],
)
def test_json_that_is_not_one_clear_value_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_json_that_is_clear_is_what_the_standard_library_reads() -> None:
    text = '{"a": [1, 2.5, {"b": null, "a": true}], "c": "\\u00e9", "d": ' + "[" * 98 + "]" * 98 + "}"
    assert parse_json(text) == json.loads(text)
