"""How latent attention divides by heads: read by the weight map, and by the hosted module that runs it.

`config` is anything with Megatron's fields of these names.
"""

from typing import Any

from isthmus.weights import COLUMNS, ROWS, SHARED, Heads


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
