"""The experts' linear layers in Transformer Engine's grouped slots: `weight0`, `weight1`, ... in a loop."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide


class GroupedLinear(torch.nn.Module):
    """This rank's experts; a subclass says which dim of the (output, input) weights expert TP divides."""

    partition_dim: ClassVar[int]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        tp_comm_buffer_name: str | None = None,
        name: str | None = None,
    ):
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.config, self.num_gemms, self.use_bias = config, num_gemms, bias
        self.returns_bias = skip_bias_add and bias
        self._pg_collection, self._tp_group = groups, groups.expt_tp
        shape = [output_size, input_size]
        shape[self.partition_dim] = divide(shape[self.partition_dim], self._tp_group.size())
        options: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        tracker: Any = get_cuda_rng_tracker()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, **options))
            if config.perform_initialization:
                with tracker.fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            self.register_parameter(f"weight{i}", self._mark(weight, True, self.partition_dim))
            if bias:
                zeros = torch.nn.Parameter(torch.zeros(shape[0], **options))
                self.register_parameter(f"bias{i}", self._mark(zeros, self.partition_dim == 0, 0))
        self._register_load_state_dict_pre_hook(self._merge_extra_states)

    def _mark(self, parameter: Any, partitioned: bool, dim: int) -> torch.nn.Parameter:
        """Set the attributes by which Megatron finds the groups of a parameter's gradient and norm."""
        config = self.config
        parameter.allreduce = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        parameter.tensor_model_parallel = partitioned
        if partitioned:
            parameter.partition_dim, parameter.partition_stride = dim, 1
        return parameter

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """(T, I) tokens sorted by expert -> (T, O); `m_splits` says how many each expert takes."""
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.returns_bias else biases
        out = [
            F.linear(tokens, getattr(self, f"weight{i}"), added[i])
            for i, tokens in enumerate(torch.split(x, [int(n) for n in m_splits]))
        ]
        return torch.cat(out), (biases if self.returns_bias else None)  # pyright: ignore[reportReturnType]

    def backward_dw(self) -> None:
        """TE's delayed weight gradient: nothing is delayed here."""

    def get_extra_state(self) -> None:
        """TE keeps its fp8 state under this key: the key is there, empty."""

    def set_extra_state(self, state: Any) -> None:
        pass

    def _merge_extra_states(self, state_dict: dict, prefix: str, *_: Any) -> None:
        """Checkpoints hold an `_extra_state` for each expert, the module one for all."""
        for i in range(1, self.num_gemms):
            state_dict.pop(f"{prefix}_extra_state{i}", None)
        state_dict.setdefault(f"{prefix}_extra_state", None)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """TE's checkpoint keys: one `weight` with an expert axis before the others, or one key an expert."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        singleton = metadata.get("singleton_local_shards", False)
        ep, axis = self._pg_collection.ep, len(sharded_offsets)
        first, total = ep.rank() * self.num_gemms, ep.size() * self.num_gemms
        state, sharded = self.state_dict(prefix="", keep_vars=True), {}
        for i in range(self.num_gemms):
            tensors = {f"{i}.weight": state[f"weight{i}"], f"{i}._extra_state": None}
            axes = {f"{i}.weight": self.partition_dim}
            if self.use_bias:
                tensors[f"{i}.bias"] = state[f"bias{i}"]
                if self.partition_dim == 0:
                    axes[f"{i}.bias"] = 0
            shards = make_sharded_tensors_for_checkpoint(
                tensors,
                "",
                axes,
                sharded_offsets if singleton else (*sharded_offsets, (axis, first + i, total)),
                tp_group=self._tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shards, f"{i}.", f"{first + i}.{prefix}" if singleton else prefix)
            sharded[f"{prefix}weight{i}"] = shards[f"{i}.weight"]
            sharded[f"{prefix}_extra_state{i or ''}"] = shards[f"{i}._extra_state"]
            if self.use_bias:
                sharded[f"{prefix}bias{i}"] = shards[f"{i}.bias"]
        for shard in sharded.values():  # an expert's copies live in its own data-parallel group
            whole = getattr(shard, "is_data_parallel_fully_shard", False)
            shard.replica_id = (*shard.replica_id[:2], 0 if whole else self._pg_collection.expt_dp.rank())
        return sharded


class ColumnGroupedLinear(GroupedLinear):
    """In TEColumnParallelGroupedLinear's slot."""

    partition_dim = 0


class RowGroupedLinear(GroupedLinear):
    """In TERowParallelGroupedLinear's slot."""

    partition_dim = 1
