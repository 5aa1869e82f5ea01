"""The registration of Qwen3.5: what the entry points `isthmus.families` name."""

from isthmus.family import Family
from isthmus_qwen3_5.bridge import weights
from isthmus_qwen3_5.config import megatron_config, overruled
from isthmus_qwen3_5.layout import problems
from isthmus_qwen3_5.tiny import TINY

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    model_config=megatron_config,
    weights=weights,
    overruled=overruled,
    axes=frozenset({"tp", "sp", "pp", "vp", "ep", "etp", "cp", "dp"}),
    config_class="isthmus_qwen3_5.model_config:Qwen35ModelConfig",
    problems=problems,
    tiny=TINY,
    sample="isthmus_qwen3_5.samples:sample",
    mtp_reference="isthmus_qwen3_5.reference:multi_token_prediction",
)
