"""Checkpoints of Megatron's optimizers where 0.19 describes its state wrongly, put right.

What it gets wrong, on any machine:

- Groups with parameters of two dtypes, as float32 ones in a bf16 model: both optimizers hold a group in one
  order and describe it in another. Saving fails, or gives a parameter the moments of another of its shape.
- "fully_reshardable" state of a buffer with several buckets: places count the padding between these, the
  gathered state has none. Main parameters and moments of the later buckets are saved shifted. An embedding
  that two pipeline stages share is a bucket of its own.
- Experts have an optimizer of their own only where they are divided otherwise than the rest, and a checkpoint
  of one optimizer is refused by two.

A state that Megatron describes rightly is what it was: the files stay Megatron's.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Correct the optimizers of this process; a second call does nothing."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

    distributed: Any = DistributedOptimizer
    plain: Any = Float16OptimizerWithFloat16Params
    chained: Any = ChainedOptimizer
    ranges = distributed._build_optimizer_group_ranges.__func__
    distributed._build_optimizer_group_ranges = classmethod(_float32_first(ranges))
    described = distributed.sharded_param_state_fully_reshardable
    distributed.sharded_param_state_fully_reshardable = _without_padding(described)
    plain.__init__ = _float32_last(plain.__init__)
    plain.sharded_state_dict = _of_all_parameters(plain.sharded_state_dict)
    chained.load_state_dict = _of_any_number(chained.load_state_dict)


def _float32_first(original: Any) -> Any:
    """The distributed optimizer numbers a group as its buffers hold it, and then puts float32 ones first."""

    @functools.wraps(original)
    def build(cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
        places, groups = original(cls, param_groups, gbuf_ranges)
        for number, group in enumerate(groups):
            group["params"].sort(key=lambda param: param.dtype != torch.float32)
            places.update((param, (number, place)) for place, param in enumerate(group["params"]))
        return places, groups

    return build


def _float32_last(original: Any) -> Any:
    """The plain optimizer pairs its main copies with a group's first parameters: the 16-bit ones must be."""

    @functools.wraps(original)
    def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups if optimizer else ():
            group["params"].sort(key=lambda param: param.dtype == torch.float32)
        original(self, optimizer, *args, **kwargs)

    return init


def _of_all_parameters(original: Any) -> Any:
    """The plain optimizer numbers the 16-bit parameters, and its state counts all."""

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_stub_optimizer:
            return original(self, *args, **kwargs)
        narrow = self.float16_groups
        self.float16_groups = [a + b for a, b in zip(narrow, self.fp32_from_fp32_groups, strict=True)]
        try:
            return original(self, *args, **kwargs)
        finally:
            self.float16_groups = narrow

    return sharded_state_dict


def _without_padding(original: Any) -> Any:
    """The distributed optimizer's places in a buffer, without the padding that the gathered state lacks."""

    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _unpadded(buffer)
            return original(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    return sharded_param_state


def _unpadded(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Where each parameter lies once the buckets stand end to end without padding."""
    starts, total = [], 0
    for bucket in buffer.buckets:
        starts.append(total - bucket.offset)
        total += bucket.numel_unpadded
    return {
        param: (start + starts[bucket], stop + starts[bucket], bucket)
        for param, (start, stop, bucket) in buffer.param_index_map.items()
    }


def _of_any_number(original: Any) -> Any:
    """A chain of optimizers loads what a chain of another length saved."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        count = len(self.chained_optimizers)
        saved = _saved(state_dict) if isinstance(state_dict, Mapping) else []
        if saved and len(saved) != count:
            asked = [state_dict] if count == 1 else [state_dict[number] for number in range(count)]
            found = [
                _described(optimizer, own, saved)
                for optimizer, own in zip(self.chained_optimizers, asked, strict=True)
            ]
            state_dict = found[0] if count == 1 else dict(enumerate(found))
        original(self, state_dict)

    return load_state_dict


def _saved(state: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """What each optimizer saved besides tensors, from among the tensors that were asked for."""
    numbered = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    return [entry for entry in (*numbered, state) if _groups(entry)]


def _groups(entry: Mapping[Any, Any]) -> list[Any]:
    """The hyperparameters of an entry's groups; those that were asked for are but lists of parameters."""
    return [
        group for group in entry.get("optimizer", {}).get("param_groups", ()) if group.keys() - {"params"}
    ]


def _described(optimizer: Any, own: Mapping[str, Any], saved: list[Mapping[str, Any]]) -> dict[str, Any]:
    """`own` tensors of an optimizer with the saved hyperparameters of groups alike."""
    common = {key: value for key, value in saved[0].items() if isinstance(key, str)}
    inner = {**common["optimizer"], **own.get("optimizer", {})}
    groups, held = [], own.get("optimizer", {}).get("param_groups")
    for number, group in enumerate(optimizer.optimizer.param_groups if optimizer.optimizer else ()):
        found = {**_alike(group, saved), "is_expert_parallel": group.get("is_expert_parallel", False)}
        groups.append(found | {"params": held[number]["params"]} if held else found)
    return {**common, **{key: value for key, value in own.items() if isinstance(key, str)}} | {
        "optimizer": {**inner, "param_groups": groups}
    }


def _alike(group: Mapping[str, Any], saved: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The saved group of the same multipliers. LookupError where there is none."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    candidates = [found for entry in saved for found in _groups(entry)]
    for found in candidates:
        if all(found.get(key) == group.get(key) for key in keys):
            return {key: value for key, value in found.items() if key != "params"}
    wanted, known = ({key: entry.get(key) for key in keys} for entry in (group, candidates[0]))
    raise LookupError(
        f"the checkpoint has no parameter group like {wanted}; its first of {len(candidates)} is {known}. "
        "Build the optimizer with the options that it was saved with"
    )
