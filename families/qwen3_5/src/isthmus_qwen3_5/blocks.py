"""Qwen3.5's blocks as transformers names them and checkpoints store them; else they are Qwen3-Next's.

The releases with experts have a modeling file of their own, with the same delta net and attention.
"""

from isthmus_qwen3_next.classes import Classes
from isthmus_qwen3_next.heads import InProjections

DENSE = Classes("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5", "Text")
MOE = Classes("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5Moe", "Text")

IN_PROJECTIONS = InProjections(
    {
        "in_proj_qkv.weight": "q k v",
        "in_proj_z.weight": "z",
        "in_proj_b.weight": "b",
        "in_proj_a.weight": "a",
    },
    by_key_head=False,
)

# Of models with a vision tower, by model_type: transformers' modeling file, and how its classes begin.
MODELING = {
    "qwen3_5": (DENSE.modeling, "Qwen3_5"),
    "qwen3_5_moe": (MOE.modeling, "Qwen3_5Moe"),
}
