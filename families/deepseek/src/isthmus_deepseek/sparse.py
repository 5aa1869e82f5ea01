"""Megatron's own sparse attention for DeepSeek-V3.2, its indexer trained or frozen.

Hugging Face's indexer has no gradient: a choice of keys has none. Megatron trains it by a loss of its own,
how far the indexer's scores are from what attention looks at, where `dsa_indexer_loss_coeff` is above 0.
"""

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
)
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.spec_utils import ModuleSpec

from isthmus.hosting import spec
from isthmus_deepseek.latent_norm import LatentNorm


class Indexer(DSAIndexer):
    """Megatron's indexer; frozen where no loss trains it, since DDP waits for each parameter's gradient."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.requires_grad_(bool(config.dsa_indexer_loss_coeff))


def sparse_attention(config: Any) -> ModuleSpec:
    """Megatron's spec, with HF's norms of the latents and the indexer above."""
    backend: Any = spec.layer_backend(config)
    found = get_dsa_module_spec_for_backend(config, backend)
    submodules: Any = found.submodules
    core = submodules.core_attention
    indexer = replace(core.submodules.indexer, module=Indexer)
    norm = ModuleSpec(LatentNorm, {"norm": backend.layer_norm(rms_norm=True, for_qk=True)})
    return replace(
        found,
        submodules=replace(
            submodules,
            core_attention=replace(core, submodules=replace(core.submodules, indexer=indexer)),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
