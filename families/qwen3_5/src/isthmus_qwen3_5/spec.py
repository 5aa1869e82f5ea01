"""Megatron layer specs of Qwen3.5's language model: those of Qwen3-Next, with Qwen3.5's own modules hosted.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` and Megatron's `--spec` call.
"""

from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.hosting import spec
from isthmus_qwen3_5.blocks import DENSE, IN_PROJECTIONS
from isthmus_qwen3_next.attention import HostedAttention
from isthmus_qwen3_next.delta_net import HostedDeltaNet
from isthmus_qwen3_next.spec import Hosted, block


class Qwen35DeltaNet(HostedDeltaNet):
    """transformers' Qwen3_5GatedDeltaNet as a layer's self_attention; its input norm stays outside."""

    classes = DENSE
    in_projections = IN_PROJECTIONS


class Qwen35Attention(HostedAttention):
    """transformers' Qwen3_5Attention as a layer's self_attention; its input norm stays outside."""

    classes = DENSE


HOSTED = Hosted(Qwen35DeltaNet, Qwen35Attention)


@spec.layer_spec
def layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage: see :func:`isthmus_qwen3_next.spec.layer_spec`."""
    return block(HOSTED, model_config, config, vp_stage)


@spec.layer_spec
def native_layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """`layer_spec` with Megatron's delta net, for `--spec`: Megatron's arguments have no `delta_net`."""
    return block(HOSTED, model_config, config, vp_stage, delta_net="megatron", attention="megatron")


@spec.layer_spec
def hosted_layer_spec(
    model_config: Any, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """`layer_spec` with HF's delta net and HF's attention, for `--spec`."""
    return block(HOSTED, model_config, config, vp_stage, delta_net="hosted", attention="hosted")
