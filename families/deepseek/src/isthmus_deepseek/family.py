"""The registrations of DeepSeek: what the entry points `isthmus.families` name."""

from dataclasses import replace

from isthmus.family import Family
from isthmus_deepseek import v4
from isthmus_deepseek.bridge import weights
from isthmus_deepseek.config import megatron_config
from isthmus_deepseek.layout import hosted, problems
from isthmus_deepseek.tiny import TINY_V2, TINY_V3, TINY_V32

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    model_config=megatron_config,
    weights=weights,
    axes=frozenset({"tp", "sp", "pp", "vp", "ep", "etp", "cp", "dp"}),
    config_class="isthmus_deepseek.model_config:DeepseekModelConfig",
    problems=problems,
    hosted=hosted,
    tiny=TINY_V2,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    tiny=TINY_V3,
    mtp_reference="isthmus_deepseek.reference:multi_token_prediction",
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    config_class="isthmus_deepseek.model_config:DeepseekV32ModelConfig",
    tiny=TINY_V32,
    mtp_reference=None,
)
DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    model_config=v4.refuse,
    weights=v4.refuse,
    axes=frozenset(),
    config_class=DEEPSEEK_V3.config_class,
)
