"""The registration of Qwen3-Next: what the entry point `isthmus.families` names."""

from isthmus.family import Family
from isthmus_qwen3_next.bridge import weights
from isthmus_qwen3_next.config import megatron_config, overruled
from isthmus_qwen3_next.layout import problems
from isthmus_qwen3_next.tiny import TINY

FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    model_config=megatron_config,
    weights=weights,
    overruled=overruled,
    axes=frozenset({"tp", "sp", "pp", "vp", "ep", "etp", "cp", "dp"}),
    config_class="isthmus_qwen3_next.model_config:Qwen3NextModelConfig",
    problems=problems,
    tiny=TINY,
    mtp_reference="isthmus_qwen3_next.reference:multi_token_prediction",
)
