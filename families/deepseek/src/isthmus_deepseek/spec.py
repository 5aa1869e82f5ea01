"""Megatron layer specs of DeepSeek: Megatron's own layers, with what HF's model has otherwise.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` and Megatron's `--spec` call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.hosting import spec
from isthmus_deepseek.attention import HostedAttention, HostedSparseAttention
from isthmus_deepseek.groups import differs
from isthmus_deepseek.latent import LATENT_NORM_EPS
from isthmus_deepseek.latent_norm import LatentNorm
from isthmus_deepseek.layout import SPARSE_CP
from isthmus_deepseek.router import GroupLimitedRouter
from isthmus_deepseek.sparse import sparse_attention

ATTENTIONS = ("megatron", "hosted")


@spec.layer_spec
def layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, called as (model_config, vp_stage) or (args, config,
    vp_stage).

    Of the first argument, `attention` chooses the module; see DeepseekModelConfig.

    ValueError: tensor parallelism without sequence parallelism, or layers of another kind than Transformer
    Engine's.
    """
    return _block(model_config, config, vp_stage, getattr(model_config, "attention", "megatron"))


@spec.layer_spec
def hosted_layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """`layer_spec` with HF's attention, for `--spec`: Megatron's arguments have no `attention`."""
    return _block(model_config, config, vp_stage, "hosted")


def _block(
    model_config: Any,
    config: Any,
    vp_stage: int | None,
    attention: str,
) -> TransformerBlockSubmodules:
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {ATTENTIONS}, got {attention!r}")
    _check(config, attention)
    mixer = _attention(config)
    if attention == "hosted":
        params = {"rotary_base": config.rotary_base, **spec.hosting(model_config)}
        module = HostedAttention if config.dsa_indexer_topk is None else HostedSparseAttention
        mixer = ModuleSpec(module=module, params=params)
    block = spec.decoder_block(config, vp_stage, [mixer] * config.num_layers)
    if not differs(config):
        return block
    layers = [_with_router(layer) for layer in block.layer_specs or []]
    return replace(block, layer_specs=layers)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, its linears and norms as the spec has them.

    Megatron itself fuses a norm into `linear_q_proj` where queries have no latent, a norm of what the input
    norm has normed, which HF's module does not have.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def _attention(config: Any) -> ModuleSpec | None:
    """The latent attention; None where Megatron's own is HF's."""
    if config.dsa_indexer_topk is not None:
        return sparse_attention(config)
    if config.q_lora_rank is not None and config.layernorm_epsilon == LATENT_NORM_EPS:
        return None
    backend: Any = spec.layer_backend(config)  # its `linear` is not in the base class
    norm = partial(LatentNorm, norm=backend.layer_norm(rms_norm=True, for_qk=True))
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _with_router(layer: ModuleSpec) -> ModuleSpec:
    """A copy of `layer`, the router of its experts, if it has any, replaced."""
    submodules: Any = layer.submodules
    moe = submodules.mlp.keywords["submodules"]
    if not hasattr(moe, "router"):
        return layer
    mlp = partial(submodules.mlp.func, submodules=replace(moe, router=GroupLimitedRouter))
    return replace(layer, submodules=replace(submodules, mlp=mlp))


def _check(config: TransformerConfig, attention: str) -> None:
    if config.transformer_impl != "transformer_engine":
        raise ValueError(
            f"transformer_impl={config.transformer_impl!r} has no latent attention that trains right: use"
            " 'transformer_engine', on a CPU with isthmus.cpu"
        )
    if attention == "megatron" and config.dsa_indexer_topk is not None and config.context_parallel_size > 1:
        raise ValueError(f"context_parallel_size={config.context_parallel_size}: {SPARSE_CP}")
    native = attention == "megatron" or config.mtp_num_layers  # the MTP layer's attention is Megatron's
    if native and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            "Megatron's latent attention does not reduce the gradients of the rotated keys over"
            " tensor-parallel ranks when sequence_parallel is off. Turn it on"
        )
