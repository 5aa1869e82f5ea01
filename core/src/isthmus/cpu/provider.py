"""What Megatron's spec functions ask of a backend, answered as Transformer Engine's provider does."""

import functools
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP

from isthmus.cpu.attention import DotProductAttention
from isthmus.cpu.grouped import ColumnGroupedLinear, RowGroupedLinear
from isthmus.cpu.linears import ColumnLinear, DuplicatedLinear, NormColumnLinear, RowLinear
from isthmus.cpu.norms import Norm

# Transformer Engine's name in megatron.core.extensions.transformer_engine -> the class in its slot.
SLOTS: dict[str, type] = {
    "TENorm": Norm,
    "TELinear": DuplicatedLinear,
    "TEColumnParallelLinear": ColumnLinear,
    "TERowParallelLinear": RowLinear,
    "TELayerNormColumnParallelLinear": NormColumnLinear,
    "TEColumnParallelGroupedLinear": ColumnGroupedLinear,
    "TERowParallelGroupedLinear": RowGroupedLinear,
    "TEDotProductAttention": DotProductAttention,
}


class CPUSpecProvider(BackendSpecProvider):
    """In TESpecProvider's slot: the same module tree and parameter names."""

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return functools.partial(Norm, has_residual=True) if has_residual else Norm

    def core_attention(self) -> type:
        return DotProductAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """experts.linear_fc1.weight{i} if grouped, experts.local_experts.{i}.linear_fc1.weight if not."""
        if moe_use_grouped_gemm:
            fc1: Any = ColumnGroupedLinear
            fc2: Any = RowGroupedLinear
            grouped = GroupedMLPSubmodules(linear_fc1=fc1, linear_fc2=fc2, activation_func=None)
            return functools.partial(TEGroupedMLP, submodules=grouped)
        one_by_one = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear, activation_func=None)
        return functools.partial(SequentialMLP, submodules=one_by_one)
