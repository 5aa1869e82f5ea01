"""The registration of Gemma: what the entry points `isthmus.families` name."""

from isthmus.family import Family
from isthmus_gemma_vl import gemma4
from isthmus_gemma_vl.bridge import weights
from isthmus_gemma_vl.config import megatron_config
from isthmus_gemma_vl.layout import problems
from isthmus_gemma_vl.tiny import TINY
from isthmus_gemma_vl.vocabulary import overruled

FAMILY = Family(
    name="gemma_vl",
    model_types=("gemma3_text", "gemma3"),
    refused=dict.fromkeys(("gemma4", "gemma4_text"), gemma4.REASON),
    overruled=overruled,
    corrected=frozenset({"vocab_size"}),
    model_config=megatron_config,
    weights=weights,
    axes=frozenset({"tp", "sp", "pp", "vp", "cp", "dp"}),
    config_class="isthmus_gemma_vl.model_config:Gemma3ModelConfig",
    problems=problems,
    tiny=TINY,
    sample="isthmus_gemma_vl.samples:sample",
)
