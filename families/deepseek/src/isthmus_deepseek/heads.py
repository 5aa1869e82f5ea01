"""How latent attention divides by heads: read by the weight map, and by the hosted module that runs it.

`config` is anything with Megatron's fields of these names.
"""

from dataclasses import replace
from typing import Any

from isthmus.weights import COLUMNS, ROWS, SHARED, Heads

INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def usual_attention(config: Any) -> str:
    """Whose attention a model has where nothing is chosen: DeepSeek-V3.2's is Hugging Face's own."""
    return "megatron" if getattr(config, "dsa_indexer_topk", None) is None else "hosted"


def is_hosted(config: Any) -> bool:
    """Whether the attention is Hugging Face's; `config` may have `attention`, which chooses."""
    return (getattr(config, "attention", None) or usual_attention(config)) == "hosted"


def latent_attention(config: Any) -> Heads:
    """HF's latent attention: what makes the latents is shared by all heads."""
    queries = (
        {"q_proj.weight": ROWS}
        if config.q_lora_rank is None
        else {"q_a_proj.weight": SHARED, "q_a_layernorm.weight": SHARED, "q_b_proj.weight": ROWS}
    )
    return Heads(
        counts={"num_attention_heads": config.num_attention_heads},
        parameters={
            **queries,
            "kv_a_proj_with_mqa.weight": SHARED,
            "kv_a_layernorm.weight": SHARED,
            "kv_b_proj.weight": ROWS,
            "o_proj.weight": COLUMNS,
        },
    )


def sparse_attention(config: Any) -> Heads:
    """DeepSeek-V3.2's: the indexer, which chooses keys for all heads, is whole on every rank."""
    latent = latent_attention(config)
    indexer = {f"indexer.{name}": SHARED for name in INDEXER}
    return replace(latent, parameters={**latent.parameters, **indexer})
