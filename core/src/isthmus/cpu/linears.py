"""The linear layers in Transformer Engine's slots: Megatron's own, with TE's parameter names.

Classes are told apart by identity in multi_latent_attention, so each slot has a class of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

from isthmus.cpu.norms import norm_parameters, normalize


class ColumnLinear(ColumnParallelLinear):
    """In TEColumnParallelLinear's slot."""


class RowLinear(RowParallelLinear):
    """In TERowParallelLinear's slot."""


class NormColumnLinear(ColumnParallelLinear):
    """In TELayerNormColumnParallelLinear's slot: `layer_norm_weight`, `layer_norm_bias`, `weight`, `bias`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight, bias = norm_parameters(config, input_size)
        if bias is not None:  # TE has no such parameter for RMSNorm, not even None
            self.layer_norm_bias = bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        config: Any = self.config  # a TransformerConfig, which the base class does not promise
        normed = normalize(
            x,
            self.layer_norm_weight,
            getattr(self, "layer_norm_bias", None),
            kind=config.normalization,
            eps=config.layernorm_epsilon,
            zero_centered=config.layernorm_zero_centered_gamma,
        )
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return super().sharded_state_dict(prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata))


class DuplicatedLinear(torch.nn.Module):
    """In TELinear's slot: one weight (O, I), the same on every TP rank (MLA's down projections)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        **_: Any,
    ):
        super().__init__()
        if parallel_mode != "duplicated":
            raise ValueError(
                f"TELinear's slot on the CPU takes parallel_mode='duplicated', not {parallel_mode!r}"
            )
        self.config, self.skip_bias_add = config, skip_bias_add
        options: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **options))
        self.bias: Any = torch.nn.Parameter(torch.zeros(output_size, **options)) if bias else None
        if config.perform_initialization:
            tracker: Any = get_cuda_rng_tracker()
            with tracker.fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        for parameter in self.parameters():
            marks: Any = parameter
            marks.allreduce = True
            marks.sequence_parallel = config.sequence_parallel  # its gradient is summed over TP
            marks.tensor_model_parallel = False
        self._register_load_state_dict_pre_hook(_extra_state_is_optional)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.skip_bias_add:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias), None

    def backward_dw(self) -> None:
        """TE's delayed weight gradient: nothing is delayed here."""

    def get_extra_state(self) -> None:
        """TE keeps its fp8 state under this key: the key is there, empty."""

    def set_extra_state(self, state: Any) -> None:
        pass

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def _extra_state_is_optional(state_dict: dict, prefix: str, *_: Any) -> None:
    state_dict.setdefault(f"{prefix}_extra_state", None)
