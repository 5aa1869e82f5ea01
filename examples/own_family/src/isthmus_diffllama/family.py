"""DiffLlama: its config, its weights and a tiny one, as data. The entry point `isthmus.families` names it."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import decoder_config
from isthmus.family import Family
from isthmus.tiny import Tiny, Variant
from isthmus.weights import (
    COLUMNS,
    SHARED,
    Heads,
    WeightMap,
    embeddings,
    hosted,
    rows_by_parts,
    same,
    scope,
    swiglu,
)


def model_config(hf: HFConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Megatron's fields for config.json: a Llama's."""
    fields = decoder_config(hf)
    hf.check_all_understood({"lambda_std_dev"})  # of initial values; anything else unread is an error
    return fields


def heads(config: Any) -> Heads:
    """How HF's attention divides: head i of the first half is paired with head i of the second."""
    q, kv = (
        count * config.kv_channels // 2 for count in (config.num_attention_heads, config.num_query_groups)
    )
    return Heads(
        counts={
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_query_groups,
        },
        parameters={
            "q_proj.weight": rows_by_parts(first=q, second=q),
            "k_proj.weight": rows_by_parts(first=kv, second=kv),
            "v_proj.weight": rows_by_parts(first=kv, second=kv),
            "o_proj.weight": COLUMNS,
            **dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), SHARED),
        },
        together=2,
    )


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """Every tensor of a checkpoint, Megatron's name first."""
    layer = [
        same("input_layernorm.weight", "input_layernorm.weight"),
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *hosted("self_attention.self_attn", "self_attn", split=heads(model), model=model),
        *swiglu("mlp", "mlp", hf["intermediate_size"]),
    ]
    return WeightMap(
        [
            *embeddings(hf, keys),
            *scope("decoder.layers.{i}", "model.layers.{i}", layer, i=range(hf["num_hidden_layers"])),
            same("decoder.final_layernorm.weight", "model.norm.weight"),
        ]
    )


CONFIG = {
    "architectures": ["DiffLlamaForCausalLM"],
    "model_type": "diffllama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 160,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

FAMILY = Family(
    name="diffllama",
    model_types=("diffllama",),
    model_config=model_config,
    weights=weights,
    config_class="isthmus_diffllama.megatron:DiffLlamaModelConfig",
    hosted=heads,
    axes=frozenset({"tp", "sp", "pp", "vp", "cp", "dp"}),
    tiny=Tiny(
        {
            "default": Variant(CONFIG, mtp=False, reloaded=True),
            "tied": Variant(CONFIG | {"tie_word_embeddings": True}, mtp=False, head=False, reloaded=True),
        }
    ),
)
