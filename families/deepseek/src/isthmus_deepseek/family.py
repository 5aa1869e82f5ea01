"""The registration of DeepSeek: what the entry points `isthmus.families` name."""

from isthmus.family import Family
from isthmus_deepseek import v4
from isthmus_deepseek.bridge import weights
from isthmus_deepseek.config import megatron_config, overruled
from isthmus_deepseek.layout import hosted, problems
from isthmus_deepseek.tiny import TINY

KIMI = (
    "Kimi-K2 is DeepSeek-V3's architecture, under a name that transformers has no classes for."
    ' In config.json, write "model_type": "deepseek_v3"'
)

FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32"),
    refused={"deepseek_v4": v4.REASON, "kimi_k2": KIMI},
    model_config=megatron_config,
    weights=weights,
    overruled=overruled,
    axes=frozenset({"tp", "sp", "pp", "vp", "ep", "etp", "cp", "dp"}),
    config_class="isthmus_deepseek.model_config:DeepseekModelConfig",
    problems=problems,
    hosted=hosted,
    tiny=TINY,
    mtp_reference="isthmus_deepseek.reference:multi_token_prediction",
)
