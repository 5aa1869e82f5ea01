"""Qwen3-Next's config.json in Megatron's fields, against transformers' reading and Megatron's own classes."""

import dataclasses
import json

import pytest
import torch

from isthmus.config import HFConfig
from isthmus.launch import run
from isthmus.tiny import v5_spelling
from isthmus_qwen3_next.config import INERT, megatron_config, overruled
from isthmus_qwen3_next.tiny import PUBLISHED, VARIANTS, tiny_config

TINY = tiny_config()
V5 = v5_spelling(TINY)
MTP = frozenset({"lm_head.weight", "mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"})


def fields_of(raw, keys=MTP):
    return megatron_config(HFConfig(raw), keys)


def transformers_config(raw):
    from transformers import AutoConfig

    raw = json.loads(json.dumps(raw))
    return AutoConfig.for_model(**raw)


def test_the_published_config_needs_no_default_and_gives_its_own_sizes():
    hf = HFConfig(PUBLISHED)
    fields = megatron_config(hf, MTP)
    assert hf.defaulted == {}
    assert fields["num_layers"] == 48
    assert fields["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert fields["moe_layer_freq"] == [1] * 48
    assert (fields["rotary_base"], fields["rotary_percent"]) == (10_000_000, 0.25)
    assert (fields["num_moe_experts"], fields["moe_router_topk"]) == (512, 10)
    assert fields["params_dtype"] is torch.bfloat16
    assert fields["seq_length"] == 262144


@pytest.mark.parametrize("raw", [PUBLISHED, TINY], ids=["published", "tiny"])
def test_both_spellings_give_the_same_fields(raw):
    again = v5_spelling(raw)
    assert (
        not {"rope_theta", "torch_dtype", "full_attention_interval", "partial_rotary_factor"} & again.keys()
    )
    assert fields_of(again) == fields_of(raw)


def test_what_transformers_saves_reads_back_as_the_same_fields(tmp_path):
    transformers_config(TINY).save_pretrained(tmp_path)
    saved = HFConfig.from_text((tmp_path / "config.json").read_text())
    assert megatron_config(saved, MTP) == fields_of(TINY)
    assert fields_of(transformers_config(TINY).to_dict()) == fields_of(TINY)


@pytest.mark.parametrize("raw", [TINY, V5, {"model_type": "qwen3_next"}], ids=["v4", "v5", "all by default"])
def test_fields_are_what_transformers_resolves(raw):
    fields, theirs = fields_of(raw), transformers_config(raw)
    same = {
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "ffn_hidden_size": theirs.intermediate_size,
        "num_attention_heads": theirs.num_attention_heads,
        "num_query_groups": theirs.num_key_value_heads,
        "kv_channels": theirs.head_dim,
        "layernorm_epsilon": theirs.rms_norm_eps,
        "vocab_size": theirs.vocab_size,
        "seq_length": theirs.max_position_embeddings,
        "attention_dropout": theirs.attention_dropout,
        "init_method_std": theirs.initializer_range,
        "share_embeddings_and_output_weights": theirs.tie_word_embeddings,
        "rotary_base": theirs.rope_parameters["rope_theta"],
        "rotary_percent": theirs.rope_parameters["partial_rotary_factor"],
        "linear_attention_freq": [int(kind == "linear_attention") for kind in theirs.layer_types],
        "linear_conv_kernel_dim": theirs.linear_conv_kernel_dim,
        "linear_key_head_dim": theirs.linear_key_head_dim,
        "linear_value_head_dim": theirs.linear_value_head_dim,
        "linear_num_key_heads": theirs.linear_num_key_heads,
        "linear_num_value_heads": theirs.linear_num_value_heads,
        "num_moe_experts": theirs.num_experts,
        "moe_router_topk": theirs.num_experts_per_tok,
        "moe_ffn_hidden_size": theirs.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": theirs.shared_expert_intermediate_size,
        "moe_aux_loss_coeff": theirs.router_aux_loss_coef,
        "moe_router_pre_softmax": not theirs.norm_topk_prob,
    }
    assert {name: fields[name] for name in same} == same


# For every field of transformers' class, another value that changes the model or its training.
CHANGES = {
    "vocab_size": 176,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.01,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "rope_parameters": {"rope_theta": 1e4},
    "attention_bias": True,
    "attention_dropout": 0.1,
    "head_dim": 64,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
    "mlp_only_layers": [0],
    "layer_types": ["full_attention"] * 4,
    # and the v4 spellings, which are no fields of the class
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "torch_dtype": "float32",
}
# Of these, the ones refused, with what the error must show.
REFUSED = {
    "hidden_act": "hidden_act='gelu'",
    "rope_parameters": "rope_parameters.rope_theta=10000.0",
    "attention_bias": "attention_bias.*True",
    "layer_types": "layer_types=",
    "rope_scaling": "'yarn'.*4.0",
}
# Fields of the class that do not change logits: ids are data, and the rest says what is returned or cached.
NO_CHANGE = {"use_cache", "bos_token_id", "eos_token_id", "output_router_logits"}


@pytest.mark.parametrize("key", CHANGES)
def test_changing_a_field_changes_megatrons_fields_or_is_refused(key):
    changed = {**TINY, key: CHANGES[key]}
    if key in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[key]):
            fields_of(changed)
    else:
        assert fields_of(changed) != fields_of(TINY)


def test_every_field_of_transformers_class_is_accounted_for():
    from transformers import PreTrainedConfig, Qwen3NextConfig

    own = {field.name for field in dataclasses.fields(Qwen3NextConfig)}
    own -= {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert own - CHANGES.keys() == NO_CHANGE
    assert CHANGES.keys() - own <= TINY.keys()


@pytest.mark.parametrize("key", sorted(NO_CHANGE | INERT))
def test_fields_that_do_not_change_logits_change_no_megatron_field(key):
    assert fields_of({**TINY, key: 1}) == fields_of(TINY)


def test_unknown_keys_are_one_error_that_names_them_all():
    with pytest.raises(ValueError, match="2 keys") as error:
        fields_of({**TINY, "attn_scale": 2.0, "use_bidirectional_attention": True})
    assert "attn_scale = 2.0" in str(error.value)
    assert "use_bidirectional_attention = True" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta=10000.0, rope_theta=10000000"),
        ({"dtype": "float32"}, "dtype='float32', torch_dtype='bfloat16'"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention_interval=4"),
    ],
)
def test_contradicting_spellings_are_refused(change, message):
    with pytest.raises(ValueError, match="contradicts itself") as error:
        fields_of({**TINY, **change})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 2]}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
        ({"num_experts": 0}, [0, 0, 0, 0]),
    ],
)
def test_the_layers_with_experts_are_those_transformers_builds(change, sparse):
    from transformers import AutoModelForCausalLM

    raw = {**TINY, **change}
    assert fields_of(raw, frozenset({"lm_head.weight"}))["moe_layer_freq"] == sparse
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(raw))
    assert [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers] == sparse


def route(logits, fields):
    """Megatron's routing: probabilities and choices, (tokens, experts) each."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function(
        logits,
        fields["moe_router_topk"],
        use_pre_softmax=fields["moe_router_pre_softmax"],
        score_function=fields["moe_router_score_function"],
    )


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_weights_are_those_of_transformers_router(renormalise):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

    raw = {**TINY, "norm_topk_prob": renormalise}
    router = Qwen3NextTopKRouter(transformers_config(raw)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    router.weight.normal_(generator=generator)
    logits, weights, chosen = router(torch.randn(32, 64, generator=generator))
    ((probabilities, routed),) = run(1, route, logits, fields_of(raw))
    assert torch.equal(routed, torch.zeros_like(routed).scatter(1, chosen, True))
    torch.testing.assert_close(probabilities, torch.zeros_like(logits).scatter(1, chosen, weights))


def test_a_router_that_megatron_does_not_have_is_refused():
    with pytest.raises(ValueError, match="num_experts_per_tok=1"):
        fields_of({**TINY, "num_experts_per_tok": 1})
    assert fields_of({**TINY, "num_experts_per_tok": 1, "norm_topk_prob": False})["moe_router_pre_softmax"]


def test_mtp_is_built_when_the_checkpoint_has_it():
    assert fields_of(TINY, MTP)["mtp_num_layers"] == 1
    assert fields_of(TINY, frozenset({"lm_head.weight"}))["mtp_num_layers"] is None
    assert fields_of(TINY, frozenset())["mtp_num_layers"] is None


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_stated_mtp_count_counts_without_a_checkpoint_and_yields_to_one(key):
    assert fields_of({**TINY, key: 1}, frozenset())["mtp_num_layers"] == 1
    assert fields_of({**TINY, key: 1}, frozenset({"lm_head.weight"}))["mtp_num_layers"] is None
    with pytest.raises(ValueError, match="states 2 MTP layers, the checkpoint has 1"):
        fields_of({**TINY, key: 2}, MTP)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_stated_mtp_count_of_which_there_is_no_tensor_is_reported(key):
    stated = HFConfig({**TINY, key: 1})
    assert overruled(stated, {"lm_head.weight": (160, 64)}) == {key: 0}
    assert overruled(stated, dict.fromkeys(MTP, (1,))) == {}
    assert overruled(HFConfig(TINY), {"lm_head.weight": (160, 64)}) == {}


def test_an_mtp_layer_that_megatron_would_build_otherwise_is_refused():
    with pytest.raises(ValueError, match="2 MTP layers"):
        fields_of(TINY, MTP | {"mtp.layers.1.mlp.experts.0.up_proj.weight"})
    with pytest.raises(ValueError, match="last decoder layer"):
        fields_of({**TINY, "mlp_only_layers": [3]}, MTP)
    with pytest.raises(ValueError, match="last decoder layer"):
        fields_of(TINY, frozenset({"lm_head.weight", "mtp.layers.0.mlp.up_proj.weight"}))


def test_an_untied_checkpoint_without_a_head_is_refused():
    with pytest.raises(ValueError, match=r"tie_word_embeddings=False.*no lm_head"):
        fields_of(TINY, MTP - {"lm_head.weight"})
    assert fields_of(VARIANTS["tied"].config, MTP - {"lm_head.weight"})["share_embeddings_and_output_weights"]


@pytest.mark.parametrize("change", [{"layer_types": ["mamba"] * 4}, {"linear_num_value_heads": 6}])
def test_layers_that_the_family_does_not_have_are_refused(change):
    raw = {key: value for key, value in TINY.items() if key != "full_attention_interval"}
    with pytest.raises(ValueError, match=next(iter(change))):
        fields_of({**raw, **change})


def changed_by_megatron(names):
    """Fields that Megatron's classes alter, of each variant: {variant: {field: their value}}."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus.hosting.model_config import HostedModelConfig

    changed = {}
    inner = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in names:
        fields = fields_of(VARIANTS[name].config)
        transformer = TransformerConfig(**{key: value for key, value in fields.items() if key in inner})
        outer = {key: value for key, value in fields.items() if key not in inner}
        config = HostedModelConfig(transformer=transformer, **outer)
        config.finalize()
        assert config.experimental_attention_variant is None
        changed[name] = {key: getattr(config, key) for key in fields if getattr(config, key) != fields[key]}
    return changed


def test_megatrons_classes_take_every_variants_fields_as_they_are():
    (changed,) = run(1, changed_by_megatron, list(VARIANTS))
    assert changed == {name: {} for name in VARIANTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_tiny_and_loads_in_transformers(name):
    config = transformers_config(VARIANTS[name].config)
    assert config.hidden_size <= 128
    assert config.layer_types[3] == "full_attention"
    assert config.hidden_act == PUBLISHED["hidden_act"]
    assert config.rope_parameters["rope_theta"] == PUBLISHED["rope_theta"]
    assert config.rope_parameters["partial_rotary_factor"] == PUBLISHED["partial_rotary_factor"]
