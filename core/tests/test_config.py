"""Reading and rewriting config.json, against transformers' own reading of the same file."""

import json
import subprocess
import sys

import pytest
import torch

from isthmus.config import HFConfig
from isthmus.config_text import write_config
from isthmus.decoder import (
    activation,
    decoder_config,
    dtype_fields,
    layer_types,
    padding_token,
    rope,
    torch_dtype,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "float16",
}


def transformers_config(raw):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))


def test_a_stated_value_is_read_without_importing_transformers():
    code = (
        "import sys; from isthmus.config import HFConfig\n"
        "assert HFConfig({'hidden_size': 8})['hidden_size'] == 8\n"
        "assert not {'transformers', 'torch', 'megatron'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_absent_or_null_value_is_that_of_transformers_class():
    raw = {"model_type": "llama", "num_key_value_heads": None}
    hf, theirs = HFConfig(raw), transformers_config(raw)
    assert hf["rms_norm_eps"] == theirs.rms_norm_eps
    assert hf["num_key_value_heads"] == theirs.num_key_value_heads
    assert hf.defaulted == {"rms_norm_eps": 1e-6, "num_key_value_heads": 32}
    assert hf.get("num_key_value_heads") is None


def test_a_default_that_depends_on_other_fields_follows_them():
    raw = {"model_type": "qwen3_next", "num_hidden_layers": 6, "full_attention_interval": 3}
    assert HFConfig(raw)["layer_types"] == transformers_config(raw).layer_types


def test_a_field_that_neither_side_knows_is_a_lookup_error():
    with pytest.raises(LookupError, match=r"linear_conv_kernel_dim.*LlamaConfig"):
        HFConfig({"model_type": "llama"})["linear_conv_kernel_dim"]


def test_an_unknown_model_type_has_no_defaults():
    with pytest.raises(LookupError, match="'llama9'"):
        HFConfig({"model_type": "llama9"})["hidden_size"]
    with pytest.raises(LookupError, match="model_type is None"):
        HFConfig({})["hidden_size"]


def test_a_value_that_transformers_refuses_is_reported_as_such():
    with pytest.raises(ValueError, match=r"LlamaConfig refuses.*pretraining_tp"):
        HFConfig({"model_type": "llama", "pretraining_tp": "64"})["vocab_size"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}'])
def test_text_that_is_not_one_clear_object_is_refused(text):
    with pytest.raises(ValueError, match=r"config\.json"):
        HFConfig.from_text(text)


def test_every_unread_key_is_named_with_its_value_in_one_error():
    hf = HFConfig(
        {**LLAMA, "logit_scale": 0.5, "text_config": {"hidden_size": 8, "window": 7}, "empty": None}
    )
    decoder_config(hf)
    hf.section("text_config")["hidden_size"]
    with pytest.raises(ValueError, match="2 keys") as error:
        hf.check_all_understood()
    assert "logit_scale = 0.5" in str(error.value)
    assert "text_config.window = 7" in str(error.value)
    assert "empty" not in str(error.value)
    hf.check_all_understood(inert={"logit_scale", "window"})


def test_a_section_nobody_opened_is_unread():
    with pytest.raises(ValueError, match="vision_config"):
        HFConfig({"model_type": "x", "vision_config": {"depth": 2}}).check_all_understood()


def test_a_section_takes_defaults_from_its_own_class():
    hf = HFConfig({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "hidden_size": 32}})
    text = hf.section("text_config")
    assert text["hidden_size"] == 32
    assert text["linear_conv_kernel_dim"] == 4
    assert text is hf.section("text_config")
    with pytest.raises(LookupError, match="audio_config"):
        hf.section("audio_config")


ROPES = {
    "v4": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "v5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "both": {
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "partial_rotary_factor": 0.5,
    },
    "theta by default": {"partial_rotary_factor": 0.5},
    "partial by default": {"rope_theta": 1e6},
    "all by default": {},
    "v4 scaling": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "v5 scaling": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("spelling", ROPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_rope_is_what_transformers_resolves(model_type, spelling):
    raw = {"model_type": model_type, **ROPES[spelling]}
    ours, theirs = rope(HFConfig(raw)), transformers_config(raw).rope_parameters
    assert ours.theta == theirs["rope_theta"]
    assert ours.partial == theirs.get("partial_rotary_factor", 1.0)
    assert ours.kind == theirs["rope_type"]
    assert ours.scaling == ({"factor": 2.0} if "scaling" in spelling else {})


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
    ],
)
def test_rope_spellings_that_disagree_are_named(fields):
    with pytest.raises(ValueError, match=r"contradicts itself: .*, .*"):
        rope(HFConfig({"model_type": "llama", **fields}))


def test_rope_by_layer_type_is_refused():
    with pytest.raises(ValueError, match=r"rope_parameters\.full_attention"):
        rope(HFConfig({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.2}, "3 dims"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu_10"}, "gelu_10.*supported: silu"),
        ({"torch_dtype": "float99"}, "float99"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16', torch_dtype='float16'"),
    ],
)
def test_what_megatron_would_not_compute_is_refused_with_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(HFConfig({**LLAMA, **change}))


def test_layer_types_and_their_interval_may_be_given_together_if_they_agree():
    raw = {"num_hidden_layers": 4, "full_attention_interval": 2}
    types = ["linear_attention", "full_attention"] * 2
    assert layer_types(HFConfig(raw)) == layer_types(HFConfig({**raw, "layer_types": types})) == types
    with pytest.raises(ValueError, match="full_attention_interval=2"):
        layer_types(HFConfig({**raw, "layer_types": types[::-1]}))
    with pytest.raises(ValueError, match="3 layers, num_hidden_layers=4"):
        layer_types(HFConfig({"num_hidden_layers": 4, "layer_types": types[:3]}))


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_are_those_of_transformers(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 101)
    assert torch.equal(activation(HFConfig({"hidden_act": name}))(x), ACT2FN[name](x))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_in_both_spellings(key):
    assert torch_dtype(HFConfig({key: "bfloat16"})) is torch.bfloat16
    assert torch_dtype(HFConfig({key: "torch.float32"})) is torch.float32
    assert torch_dtype(HFConfig({})) is None


def test_a_stated_dtype_becomes_the_models_and_an_absent_one_is_left_open():
    fields = decoder_config(HFConfig(LLAMA))
    assert fields.items() >= dtype_fields(torch.float16).items()
    assert fields["fp16"]
    assert not fields["bf16"]
    assert "params_dtype" not in decoder_config(
        HFConfig({k: v for k, v in LLAMA.items() if k != "torch_dtype"})
    )


@pytest.mark.parametrize("pad", [None, 0, 127, -1, -128])
def test_the_padding_token_is_that_of_torchs_embedding(pad):
    expected = torch.nn.Embedding(128, 8, pad).padding_idx
    found = padding_token(HFConfig({"model_type": "gemma3_text", "vocab_size": 128, "pad_token_id": pad}))
    assert found == (-1 if expected is None else expected)


def test_a_padding_token_that_is_not_stated_is_that_of_transformers_class():
    for model_type, pad in (("gemma3_text", 0), ("qwen3_next", -1), ("of no class", -1)):
        assert padding_token(HFConfig({"model_type": model_type, "vocab_size": 128})) == pad
    for model_type, pad in (("gemma3", 0), ("qwen3_5", -1)):
        raw = {"model_type": model_type, "pad_token_id": 5, "text_config": {"vocab_size": 128}}
        assert padding_token(HFConfig(raw).section("text_config")) == pad


@pytest.mark.parametrize("pad", [128, -129, True, "0", 1.0])
def test_a_padding_token_outside_the_vocabulary_is_refused(pad):
    with pytest.raises(ValueError, match=f"pad_token_id={pad!r}, expected a token below vocab_size=128"):
        padding_token(HFConfig({"model_type": "llama", "vocab_size": 128, "pad_token_id": pad}))


def test_decoder_fields_are_what_transformers_resolves():
    fields, theirs = decoder_config(HFConfig(LLAMA)), transformers_config(LLAMA)
    assert fields["kv_channels"] == theirs.head_dim == 16
    assert fields["num_query_groups"] == theirs.num_key_value_heads
    assert fields["layernorm_epsilon"] == theirs.rms_norm_eps
    assert fields["init_method_std"] == theirs.initializer_range
    assert fields["attention_dropout"] == theirs.attention_dropout
    assert fields["share_embeddings_and_output_weights"] is theirs.tie_word_embeddings
    assert fields["seq_length"] == theirs.max_position_embeddings
    assert fields["rotary_base"] == theirs.rope_parameters["rope_theta"]


SOURCE = """{
    "architectures": ["A", "B"],
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "quantization_config": {"dtype": "int8"},
    "text_config": {
        "dtype":"bfloat16",
        "num_nextn_predict_layers": 1
    },
    "name": "caf\\u00e9"
}
"""


def test_unchanged_values_leave_the_text_as_it_is():
    same = {
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "text_config.num_nextn_predict_layers": 1,
        "name": "caf\u00e9",
    }
    assert write_config(SOURCE, same) == SOURCE
    assert write_config(SOURCE, {}) == SOURCE


def test_a_change_lands_in_the_sources_spelling_at_every_level_that_states_it():
    expected = SOURCE.replace('"bfloat16"', '"float32"')
    assert write_config(SOURCE, {"torch_dtype": "float32"}) == expected
    assert write_config(SOURCE, {"dtype": "float32"}) == expected


def test_a_dotted_change_lands_there_only():
    changed = write_config(SOURCE, {"text_config.torch_dtype": "float32"})
    assert changed == SOURCE.replace('"dtype":"bfloat16"', '"dtype":"float32"')
    with pytest.raises(LookupError, match="audio_config"):
        write_config(SOURCE, {"audio_config.dtype": "float32"})


def test_what_is_not_stated_stays_so_where_only_stated_fields_are_to_change():
    changes = {"torch_dtype": "float32", "extra": 1, "text_config.extra": 1}
    assert write_config(SOURCE, changes, only_stated=True) == SOURCE.replace('"bfloat16"', '"float32"')


def test_a_new_field_goes_to_the_end_with_the_sources_indentation():
    changed = write_config(SOURCE, {"extra": [1, 2], "text_config.tie_word_embeddings": True})
    assert '\n    "extra": [\n        1,\n        2\n    ]\n}\n' in changed
    assert '\n        "num_nextn_predict_layers": 1,\n        "tie_word_embeddings": true\n    }' in changed


@pytest.mark.parametrize("text", ['{"a": 1}', "{}", '{"a": {"b": {}}, "c": [{"a": 2}]}'])
def test_text_on_one_line_stays_on_one_line(text):
    changed = write_config(text, {"a": {"x": 1}, "new": False})
    assert "\n" not in changed
    assert json.loads(changed) == json.loads(text) | {"a": {"x": 1}, "new": False}
