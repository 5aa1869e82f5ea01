"""Megatron layer specs of Qwen3-Next: Megatron's own layers, with a delta net in place of three attentions in
four.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` and Megatron's `--spec` call.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.hosting import spec as core
from isthmus_qwen3_next.attention import HostedAttention
from isthmus_qwen3_next.delta_net import HostedDeltaNet, NativeDeltaNet, OnesCentredNorm
from isthmus_qwen3_next.layout import LOST_GRADIENTS, loses_gradients

MIXERS = ("hosted", "megatron")


@dataclass(frozen=True, slots=True)
class Hosted:
    """The hosted modules of a family that is made of these blocks."""

    delta_net: type[HostedDeltaNet] = HostedDeltaNet
    attention: type[HostedAttention] = HostedAttention


@core.layer_spec
def layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, called as (model_config, vp_stage) or (args, config,
    vp_stage).

    Of the first argument, `delta_net` (default "hosted": HF's module) and `attention` (default "megatron")
    choose the modules, `hosted_mode` and `cp_layout` how HF's are divided; see Qwen3NextModelConfig.
    `config.linear_attention_freq` says which layers have a delta net (1) and which full attention (0), and
    `config.moe_layer_freq` which have experts, as everywhere in Megatron.
    """
    return block(Hosted(), model_config, config, vp_stage)


@core.layer_spec
def native_layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """`layer_spec` with Megatron's delta net, for `--spec`: Megatron's arguments have no `delta_net`."""
    return block(Hosted(), model_config, config, vp_stage, delta_net="megatron", attention="megatron")


@core.layer_spec
def hosted_layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """`layer_spec` with HF's delta net and HF's attention, for `--spec`."""
    return block(Hosted(), model_config, config, vp_stage, delta_net="hosted", attention="hosted")


def block(
    modules: Hosted,
    model_config: Any,
    config: TransformerConfig,
    vp_stage: int | None,
    **mixers: str,
) -> TransformerBlockSubmodules:
    """The layers of a stage, with `modules` where they are hosted; `mixers` overrule the model config."""
    delta_net = mixers.get("delta_net") or getattr(model_config, "delta_net", "hosted")
    attention = mixers.get("attention") or getattr(model_config, "attention", "megatron")
    _check(config, delta_net, attention)
    hosting = core.hosting(model_config)
    if hosting["cp"] == "state_passing" and delta_net != "hosted":
        raise ValueError("hosted_cp='state_passing' is of hosted delta nets; use delta_net='hosted'")
    specs: dict[int, ModuleSpec | None] = {0: None}
    if attention == "hosted":
        params = hosting | core.rope(model_config) | {"cp": "heads"}  # softmax has no state to pass
        specs[0] = ModuleSpec(module=modules.attention, params=params)
    if delta_net == "hosted":
        specs[1] = ModuleSpec(module=modules.delta_net, params=hosting)
    else:
        specs[1] = _native(config)
    kinds = get_linear_attention_pattern(config)
    return core.decoder_block(config, vp_stage, [specs[int(kind)] for kind in kinds])


def _native(config: TransformerConfig) -> ModuleSpec:
    """Megatron's delta net; the input norm is fused into its in_proj where the backend fuses."""
    backend = core.layer_backend(config)
    fused = backend.column_parallel_layer_norm_linear() if backend.fuse_layernorm_and_linear() else None
    out_norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    return ModuleSpec(
        module=NativeDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=fused or backend.column_parallel_linear(),
            out_norm=ModuleSpec(module=OnesCentredNorm, params={"norm": out_norm}),
            out_proj=backend.row_parallel_linear(),
        ),
        metainfo={
            "fuse_input_layernorm": fused is not None,
            "input_layernorm_key": "self_attention.in_proj.layer_norm_",
        },
    )


def _check(config: TransformerConfig, delta_net: str, attention: str) -> None:
    for name, value in (("delta_net", delta_net), ("attention", attention)):
        if value not in MIXERS:
            raise ValueError(f"{name} must be one of {MIXERS}, got {value!r}")
    if not isinstance(config.linear_attention_freq, list):
        raise ValueError(
            "linear_attention_freq must list each layer's kind, 1 for a delta net and 0 for full attention, "
            f"got {config.linear_attention_freq!r}. For example: linear_attention_freq=([1] * 3 + [0]) * 12 "
            "(--linear-attention-freq '([1]*3+[0])*12')"
        )
    if loses_gradients(delta_net, config.tensor_model_parallel_size, config.sequence_parallel):
        raise ValueError(LOST_GRADIENTS)
