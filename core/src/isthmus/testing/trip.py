"""A checkpoint's way through Megatron and back, as one rank sees it: what was built, loaded, written."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isthmus.layout import Layout


class LiveParameter(NamedTuple):
    """A parameter of this rank beside the rule that fills it."""

    canonical: str
    live: str
    shape: tuple[int, ...]
    built: torch.dtype  # as built, under Float16Module
    loaded: torch.dtype
    source: tuple[torch.dtype, ...]  # of the HF tensors it is made of
    divided: bool  # Megatron's tensor_model_parallel
    partition_dim: int
    partition_stride: int
    allreduce: bool  # False: its gradient is summed over the ranks that hold the same experts only
    rule: str | None  # the rule's own name, None where there is no rule
    rule_dim: int | None
    rule_parts: int  # parts that are concatenated; 1 where groups interleave
    rule_expert: bool
    ranks: int  # that divide the tensor

    @property
    def source_bytes(self) -> int:
        """What a rank has to read to fill it."""
        return prod(self.shape) * (self.source[0].itemsize if self.source else 0)

    @property
    def kept(self) -> bool:
        """Whether all of the source's precision fits, as built and as loaded."""
        return all(
            torch.promote_types(source, held) == held
            for source in self.source
            for held in (self.built, self.loaded)
        )


class Trip(NamedTuple):
    """One rank's account."""

    parameters: list[LiveParameter]
    hf_tensors: int  # that rules load, over all ranks
    bytes_read: int
    moved: list[str]  # parameters whose storage a load replaced: DDP and the optimizer would miss it


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny variant, the layout it goes through, and how the model is built."""

    variant: str
    layout: Layout
    overrides: Mapping[str, Any]  # of the model config
    ddp: bool = False


def go(folder: Path, target: Path, case: Case) -> Trip:
    """HF -> Megatron -> HF on this rank of the case's layout; `target` is the folder written. Collective."""
    from isthmus.bridge import AutoBridge
    from isthmus.built import model_config_of
    from isthmus.checkpoint.place import Place
    from isthmus.names import live_tensors, unwrapped

    case.layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(**{**case.layout.config_overrides(), **case.overrides})
    model = bridge.build_model(config, wrap_with_ddp=case.ddp)
    live = list(live_tensors(model))
    built = [tensor.tensor.dtype for tensor in live]
    storage = [tensor.tensor.data_ptr() for tensor in live]
    report = bridge.load_hf_weights(model)
    pairs = zip(live_tensors(model), storage, strict=True)
    moved = [tensor.canonical for tensor, where in pairs if tensor.tensor.data_ptr() != where]
    bridge.save_hf_pretrained(model, target)

    place = Place.of(unwrapped(model[0]))
    weights = bridge.weight_map(model_config_of(model))
    parameters = []
    for tensor, dtype in zip(live_tensors(model), built, strict=True):
        bound = weights.megatron.get(tensor.canonical)
        rule = bound.rule if bound else None
        parameters.append(
            LiveParameter(
                canonical=tensor.canonical,
                live=tensor.live,
                shape=tuple(tensor.tensor.shape),
                built=dtype,
                loaded=tensor.tensor.dtype,
                source=tuple(bridge.reader.tensors[hf.name].dtype for hf in bound.hf) if bound else (),
                divided=getattr(tensor.tensor, "tensor_model_parallel", False),
                partition_dim=getattr(tensor.tensor, "partition_dim", -1),
                partition_stride=getattr(tensor.tensor, "partition_stride", 1),
                allreduce=getattr(tensor.tensor, "allreduce", True),
                rule=rule.megatron if rule else None,
                rule_dim=rule.dim if rule else None,
                rule_parts=len(rule.parts.names) if rule and rule.parts.groups is None else 1,
                rule_expert=rule.expert if rule else False,
                ranks=place.shard(rule)[1] if rule else 1,
            )
        )
    return Trip(parameters, report.hf_tensors, report.bytes_read, moved)


def import_(hf: Path, layout: Layout, megatron: Path, overrides: Mapping[str, Any]) -> None:
    """HF -> Megatron's torch_dist checkpoint at this layout. Collective."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(hf)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides(), **overrides))
    bridge.import_ckpt(megatron, model)


def export(megatron: Path, layout: Layout, out: Path) -> None:
    """Megatron's torch_dist checkpoint -> HF at this layout. Collective."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    AutoBridge.from_megatron(megatron).export_ckpt(megatron, out)
