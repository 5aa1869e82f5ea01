"""The gated delta net, twice: HF's own module hosted, and Megatron's with HF's ones-centred output norm."""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from isthmus.activations import activation_name
from isthmus.hosting import state_passing
from isthmus.hosting.module import HostedModule
from isthmus.hosting.torch_functions import import_modeling
from isthmus.precision import mark_param_dtype
from isthmus.weights import Heads
from isthmus_qwen3_next import heads
from isthmus_qwen3_next.classes import CLASSES

SIZES = (  # fields of the same name and meaning in HF's config and Megatron's
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


class HostedDeltaNet(HostedModule):
    """transformers' Qwen3NextGatedDeltaNet as a layer's self_attention; its input norm stays outside.

    A subclass for another release of the same block names HF's classes and how it stores projections.
    """

    classes = CLASSES
    in_projections = heads.IN_PROJECTIONS
    hosted_name = "linear_attn"
    fp32_params = ("A_log",)  # a decay rate exp(-exp(A_log) dt): rounding it moves what the layer remembers

    def heads(self, config: TransformerConfig) -> Heads:
        """Value heads with their key head."""
        return heads.delta_net(config, self.in_projections)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """HF's module for one linear-attention layer of `config`."""
        hf = self.classes.config(
            hidden_size=config.hidden_size,
            hidden_act=activation_name(config.activation_func),
            rms_norm_eps=config.layernorm_epsilon,
            initializer_range=config.init_method_std,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            **{name: getattr(config, name) for name in SIZES},
        )
        return self.classes.delta_net(hf, layer_idx=0)

    def passing(self, bounds: tuple[tuple[int, int], ...]) -> AbstractContextManager[None]:
        """fla's context parallelism. ValueError: no GPU, or no fla that has it."""
        modeling, kernels = import_modeling(self.classes.modeling), state_passing.kernels()
        width: Any = self.config.linear_conv_kernel_dim
        return state_passing.delta_net(modeling, kernels, bounds, width, self.groups.cp)


class NativeDeltaNet(GatedDeltaNet):
    """Megatron's delta net, `A_log` in float32: Megatron takes its exponential in the parameter's dtype."""

    def __init__(self, *args: Any, pp_layer_offset: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        mark_param_dtype(self.A_log, torch.float32)


class OnesCentredNorm:
    """Builds `norm` with weights around 1 whatever the model's norms do: HF's delta net has no 1 + w.

    A class because Megatron's build_module calls classes only; what it builds is an instance of `norm`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, *, norm: Any) -> Any:
        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return norm(config=config, hidden_size=hidden_size, eps=eps)
