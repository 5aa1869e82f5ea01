"""Megatron layer specs of Gemma 3: Megatron's own attention and MLP, each with a norm before and after it.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` and Megatron's `--spec` call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from isthmus.activations import FUNCTIONS
from isthmus.hosting import spec
from isthmus_gemma_vl.masked import with_masks
from isthmus_gemma_vl.sandwich import Attention, FeedForward
from isthmus_gemma_vl.softcap import SoftCap

ROPE_LOCAL_BASE = 10_000.0  # of every release; Megatron's arguments do not know it
GELU = FUNCTIONS["gelu_pytorch_tanh"]


@partial(spec.layer_spec, gated_activation=GELU)
def layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, called as (model_config, vp_stage) or (args, config,
    vp_stage).

    `config.window_attn_skip_freq` says which layers slide. Of the first argument, `rope_local_base` is the
    base of their rope, and `softcap` what caps the logits, None for nothing.
    """
    config.mup_embedding_mult = embedding_scale(config)
    config.cp_comm_type = config.cp_comm_type or "all_gather"  # Transformer Engine's default has no windows
    if (cap := getattr(model_config, "softcap", None)) is not None:  # not of Megatron's args, without hooks
        hooks = model_config.pre_wrap_hooks
        if not any(isinstance(hook, SoftCap) for hook in hooks):  # of another chunk
            hooks.append(SoftCap(cap))
    block = spec.decoder_block(config, vp_stage, [None] * config.num_layers)
    layers: Any = block.layer_specs
    base = getattr(model_config, "rope_local_base", ROPE_LOCAL_BASE)
    masked = getattr(model_config, "part", "text") == "all"
    norm = spec.layer_backend(config).layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    return replace(
        block,
        layer_specs=[
            _sandwich(layer, norm, base if _slides(config, i) else None, masked)
            for i, layer in zip(spec.stage_layers(config, vp_stage), layers, strict=True)
        ],
    )


def embedding_scale(config: TransformerConfig) -> float:
    """The square root of the hidden size in the embedding's dtype: in bfloat16, 25.25 for 25.298."""
    return torch.tensor(config.hidden_size**0.5, device="cpu").to(config.params_dtype).item()


def _slides(config: TransformerConfig, layer: int) -> bool:
    every: Any = config.window_attn_skip_freq
    return is_layer_window_attention(config.window_size, every, layer + 1)


def _sandwich(layer: ModuleSpec, norm: Any, rotary_base: float | None, masked: bool) -> ModuleSpec:
    """The layer with norms behind its attention and its MLP; `masked`, with attention that images need."""
    submodules: Any = layer.submodules
    attention = submodules.self_attention
    if masked:
        core = with_masks(attention.submodules.core_attention)
        attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    params = {**attention.params, "norm": norm, "rotary_base": rotary_base}
    return replace(
        layer,
        submodules=replace(
            submodules,
            self_attention=replace(attention, module=Attention, params=params),
            mlp=partial(_feed_forward, norm=norm, **submodules.mlp.keywords),
        ),
    )


def vision_language_spec(*args: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """:func:`isthmus.hosting.spec.vision_language_spec`, of a gated GELU."""
    return spec.vision_language_spec(*args, **kwargs)


vision_language_spec.gated_activation = GELU  # pyright: ignore[reportFunctionMemberAccess]


def _feed_forward(*, norm: Any, submodules: Any, config: Any, pg_collection: Any, **kwargs: Any) -> Any:
    return FeedForward(
        norm=norm, submodules=submodules, config=config, tp_group=pg_collection.tp, name=kwargs.get("name")
    )
