"""config.json of DeepSeek's releases in Megatron's fields, and what is refused."""

import math
from typing import Any

import pytest
import torch

from isthmus.config import HFConfig
from isthmus.testing.ranks import run
from isthmus_deepseek.config import megatron_config, overruled
from isthmus_deepseek.tiny import V2, V2_LITE, V3, V32, tiny_v2, tiny_v3, tiny_v32

NONE = frozenset[str]()
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 8}


def fields(config: dict[str, Any], keys: frozenset[str] = NONE) -> dict[str, Any]:
    return megatron_config(HFConfig(config), keys)


def test_deepseek_v3_in_the_published_layout() -> None:
    found = fields(V3)
    expected = {
        "num_layers": 61,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "mtp_num_layers": 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_deepseek_v2_in_the_published_layout() -> None:
    found = fields(V2)
    assert found["moe_router_score_function"] == "softmax"
    assert found["moe_router_pre_softmax"]
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"]) == (8, 3)
    assert found["moe_router_topk_scaling_factor"] == 16
    assert found["moe_shared_expert_intermediate_size"] == 2 * 1536
    assert not found["moe_router_enable_expert_bias"]
    assert found["mtp_num_layers"] is None


def test_deepseek_v2_lite_has_no_latent_of_queries_and_no_groups() -> None:
    found = fields(V2_LITE)
    assert found["q_lora_rank"] is None
    assert "moe_router_num_groups" not in found


SCALINGS: list[dict[str, float]] = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 0.8, "mscale_all_dim": 0.5},
    {"mscale": 0.8},
    {"mscale_all_dim": 0.8},
    {},
    {"attention_factor": 1.3},
    {"attention_factor": 1.3, "mscale_all_dim": 0.4},
    {"factor": 1.0},
]


def test_yarn_scales_rows_and_softmax_as_transformers_does() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    expected, found = [], []
    for scaling in SCALINGS:
        longest = 8 * int(scaling.get("factor", 40))
        config = tiny_v3(rope_scaling=YARN | scaling, max_position_embeddings=longest)
        hf = DeepseekV3Config.from_dict(dict(config))
        with torch.device("meta"):
            softmax = DeepseekV3Attention(hf, 0).scaling
        expected += [DeepseekV3RotaryEmbedding(hf).attention_scaling, softmax * math.sqrt(24)]
        megatron = fields(config)
        found.append([megatron[name] for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")])
    (factors,) = run(1, megatron_factors, found)
    assert factors == pytest.approx(expected, rel=1e-12)


def megatron_factors(scalings: list[list[float]]) -> list[float]:
    """What Megatron multiplies rotated rows and the softmax by, one after the other."""
    from megatron.core.models.common.embeddings import _yarn_get_mscale
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor,
    )

    return [
        number
        for factor, mscale, every in scalings
        for number in (
            _yarn_get_concentration_factor(factor, mscale, every),
            _yarn_get_mscale(factor, every) ** 2,
        )
    ]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (tiny_v3(rope_interleave=False), "rope_interleave"),
        (tiny_v3(num_key_value_heads=2), "num_key_value_heads"),
        (tiny_v3(scoring_func="softmax"), "scoring_func"),
        (tiny_v3(topk_method="greedy"), "topk_method"),
        (tiny_v3(norm_topk_prob=False), "norm_topk_prob"),
        (tiny_v3(num_experts_per_tok=17), "num_experts_per_tok"),
        (tiny_v3(num_experts_per_tok=9), "num_experts_per_tok=9 is more than"),
        (tiny_v3(n_group=3), "n_group=3"),
        (tiny_v3(num_nextn_predict_layers=2), "MTP layers"),
        (tiny_v3(q_lora_rank=None), "q_lora_rank is null"),
        (tiny_v3(rms_norm_eps=1e-5), "rms_norm_eps=1e-05"),
        (tiny_v3(moe_layer_freq=2), "moe_layer_freq"),
        (tiny_v3(rope_scaling=YARN | {"truncate": False}), "truncate"),
        (tiny_v3(rope_scaling={"type": "yarn", "factor": 4}), "original_max_position_embeddings"),
        (tiny_v3(rope_scaling=YARN | {"surprise": 1}), "yarn's surprise"),
        (tiny_v3(rope_scaling={"type": "linear", "factor": 4}), "linear"),
        (tiny_v3(surprise=1), "surprise"),
        (tiny_v32(indexer_rope_interleave=True), "indexer_rope_interleave"),
        (tiny_v32(layer_types=["full_attention"] * 4), "layer_types"),
        (tiny_v2(norm_topk_prob=True), "norm_topk_prob=True"),
        (tiny_v2(topk_method="noaux_tc"), "topk_method='noaux_tc'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_would_compute_otherwise_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fields(config)


def test_the_files_decide_whether_there_is_a_prediction_layer() -> None:
    decoder = frozenset({"lm_head.weight", *(f"model.layers.{i}.input_layernorm.weight" for i in range(4))})
    assert fields(tiny_v3(), decoder)["mtp_num_layers"] is None
    assert overruled(HFConfig(tiny_v3()), dict.fromkeys(decoder)) == {"num_nextn_predict_layers": 0}
    whole = decoder | {"model.layers.4.enorm.weight"}
    assert fields(tiny_v3(), whole)["mtp_num_layers"] == 1
    assert overruled(HFConfig(tiny_v3()), dict.fromkeys(whole)) == {}
    with pytest.raises(ValueError, match="0 MTP layers, the checkpoint has 1"):
        fields(tiny_v3(num_nextn_predict_layers=0), decoder | {"model.layers.4.enorm.weight"})
    with pytest.raises(ValueError, match="some are missing"):
        fields(tiny_v3(), decoder | {"model.layers.5.enorm.weight"})


def test_v32s_prediction_layer_is_copied() -> None:
    from types import SimpleNamespace

    from isthmus_deepseek.bridge import weights

    keys = frozenset({"lm_head.weight", "model.layers.61.enorm.weight"})
    found = fields(V32, keys)
    assert found["mtp_num_layers"] is None
    coverage = weights(HFConfig(V32), keys, SimpleNamespace(**found)).cover(keys)
    assert list(coverage.passed_through) == ["model.layers.61.enorm.weight"]
    assert coverage.counts == {"num_nextn_predict_layers", "num_mtp_layers"}


@pytest.mark.parametrize("config", [tiny_v2(), tiny_v3(), tiny_v32()], ids=["v2", "v3", "v32"])
def test_transformers_spelling_means_the_same(config: dict[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    written = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    old, new = fields(config), fields(written)
    assert {name: (old[name], new[name]) for name in old if old[name] != new[name]} == {}
