"""One rank's part of a hosted module's parameters: what it holds, what it runs, and marks for Megatron.

Megatron's optimizer counts a shard on each tensor-parallel rank and a whole parameter on the first only; its
data-parallel reduction, which includes context parallelism, sums what each rank's slice got.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from isthmus.hosting.regions import scale_gradient
from isthmus.weights import Heads


class Share:
    """What this rank holds and runs of a module that divides as `heads` says; None: all of it."""

    def __init__(self, heads: Heads | None, groups: ProcessGroupCollection):
        self.heads = heads
        self.tp = (groups.tp.rank(), groups.tp.size())
        self.cp = (groups.cp.rank(), groups.cp.size())

    @property
    def runs_what_it_holds(self) -> bool:
        """Whether the module with this rank's parameters is the one that it runs."""
        return self.heads is None or self.heads.held(self.tp[1]) == self.heads.run(self.tp[1], self.cp[1])

    def held_config(self, config: TransformerConfig) -> TransformerConfig:
        """The config of the module that has this rank's parameters."""
        return config if self.heads is None else _with(config, self.heads.held(self.tp[1]))

    def run_config(self, config: TransformerConfig) -> TransformerConfig:
        """The config of the module that this rank runs."""
        return config if self.heads is None else _with(config, self.heads.run(self.tp[1], self.cp[1]))

    def dim(self, name: str) -> int | None:
        """The dim along which tensor-parallel ranks hold shards of the parameter."""
        return None if self.heads is None else self.heads.dim(name, self.tp[1])

    def check(self, hf_module: nn.Module) -> None:
        """LookupError where the declaration and the module's parameters differ."""
        if self.heads is None:
            return
        found, declared = {name for name, _ in hf_module.named_parameters()}, self.heads.parameters.keys()
        if found != declared:
            raise LookupError(
                f"{type(hf_module).__name__} has parameters {sorted(found - declared)} that heads() does not "
                f"divide, and lacks {sorted(declared - found)} that it does"
            )

    def mark(self, name: str, parameter: Any) -> None:
        """Tell Megatron how the parameter is divided, and what its gradient needs."""
        dim = self.dim(name)
        if dim is not None:
            # A stride says that a shard is so many equal pieces; parts may be unequal.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            return
        parameter.tensor_model_parallel = False
        # Megatron sums over tensor-parallel ranks under sequence parallelism only, but averages always.
        # Repeated work: equal gradients stay equal. Divided work: `bound` has multiplied by their number.
        parameter.average_gradients_across_tp_domain = True

    def bound(self, held: nn.Module, run: nn.Module) -> Any:
        """A callable in place of `run` that computes with this rank's slices of the parameters of `held`."""
        if self.heads is None or (run is held and self.tp[1] == 1):
            return run
        tensors: dict[str, Tensor] = dict(held.named_buffers())
        for name, parameter in held.named_parameters():
            tensors[name] = self._own(name, parameter)
        return Bound(run, tensors)

    def _own(self, name: str, parameter: Tensor) -> Tensor:
        assert self.heads is not None
        if self.dim(name) is None and self.tp[1] > 1:
            parameter = scale_gradient(parameter, self.tp[1])
        dim = self.heads.parameters[name].dim
        if dim is None:
            return parameter
        length = parameter.size(dim)
        slices = self.heads.own(name, length, self.tp, self.cp)
        if sum(piece.length for piece in slices) == length:
            return parameter
        pieces = [parameter.narrow(dim, piece.start, piece.length) for piece in slices]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def sharded_state(
    hf_module: nn.Module,
    share: Share,
    declared: Heads | None,
    prefix: str,
    offsets: Any,
    groups: ProcessGroupCollection,
    dp_cp: ProcessGroup,
) -> dict[str, Any]:
    """Megatron's sharded state dict of a hosted module, its names after `prefix`.

    Parts that divide each by itself are tensors of their own in the checkpoint, so that it loads at another
    size; by `declared`, also where `share` divides nothing, so that it loads in the other mode.
    """
    state = hf_module.state_dict(prefix="", keep_vars=True)
    dims = {name: share.dim(name) for name in (share.heads.parameters if share.heads else ())}
    divided = {name: dim for name, dim in dims.items() if dim is not None}
    found = make_sharded_tensors_for_checkpoint(
        state, prefix, divided, offsets, tp_group=groups.tp, dp_cp_group=dp_cp
    )
    for name, division in (declared.parameters if declared else {}).items():
        if division.rows is not None:
            size = groups.tp.size() if name in divided else 1
            lengths = [length // size for length in division.rows.values()]
            tensor = found[prefix + name]
            found[prefix + name] = _split_tensor_factory(tensor, lengths, list(division.rows), 0)
    return found


class Bound:
    """An HF module with other tensors as its parameters; attributes are the module's own."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]):
        self._module, self._tensors = module, tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._module, self._tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with(config: TransformerConfig, fields: Mapping[str, int]) -> TransformerConfig:
    """A copy of `config` with other `fields`, not checked again: they are one rank's."""
    config = copy.copy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config
