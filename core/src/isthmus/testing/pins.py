"""What a run with a learning rate of 0 does to parameters kept in float32: nothing, at any stage.

And how to break that at each place where a tensor passes, which a test of it must see.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.testing.files import tensors
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trainer import Trainer

# Of releases; a parameter is pinned where its source is float32 and the model is not.
PINNED = ("linear_attn.A_log", "linear_attn.norm.weight")


def pinned_source(family: Family, folder: Path, variant: str) -> Path:
    """A tiny checkpoint in bf16, but for pinned tensors whose values bf16 cannot hold."""
    write_tiny(family, folder, variant)
    for name, tensor in pinned(folder).items():
        if torch.equal(tensor, rounded(tensor)):
            raise ValueError(f"bf16 holds {name} of variant {variant!r}: it tests nothing")
    return folder


def pinned(folder: Path) -> dict[str, Tensor]:
    """The pinned tensors of a checkpoint, as its files have them. ValueError: it has none."""
    found = _wide(tensors(folder).items())
    if not found:
        raise ValueError(f"{folder} has no float32 tensor named *{' or *'.join(PINNED)}")
    return found


def own(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of this rank's pinned parameters by their live names."""
    return {name: parameter.detach().clone() for name, parameter in _pinned_parameters(chunks).items()}


def _pinned_parameters(chunks: list[Any]) -> dict[str, Tensor]:
    from isthmus.names import unwrapped

    return _wide(pair for chunk in chunks for pair in unwrapped(chunk).named_parameters())


def _wide(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t for name, t in named if name.endswith(PINNED) and t.dtype == torch.float32}


def rounded(tensor: Tensor) -> Tensor:
    """What bf16 keeps of it, in its own dtype."""
    return tensor.bfloat16().to(tensor.dtype)


def round_at(place: str | None) -> None:
    """Break one place where a tensor passes, in this process: each `case` below; None for none."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.transformer.module import Float16Module

    from isthmus.checkpoint import export, load

    match place:
        case "load":
            copier: Any = load._Copier
            copy = copier._slice

            def rounding_slice(*args: Any, into: Tensor | None = None) -> Tensor:
                found = rounded(copy(*args))
                return found if into is None else into.copy_(found)

            copier._slice = rounding_slice
        case "wrapper":  # and then widened, as one patch of other tools does
            keeping = Float16Module.__init__

            def widen(self: Any, config: Any, module: Any) -> None:
                keeping(self, config, module)
                for parameter in module.parameters():
                    if parameter.dtype == torch.float32:
                        parameter.data = rounded(parameter.data)

            Float16Module.__init__ = widen
        case "main copy":
            whole: Any = Float16OptimizerWithFloat16Params
            sharded: Any = DistributedOptimizer
            plain, shards = whole.__init__, sharded._build_model_and_main_param_groups.__func__

            def narrow(parameters: Any) -> None:
                for parameter in parameters:
                    parameter.data.copy_(rounded(parameter.data))

            def init(self: Any, optimizer: Any, *args: Any) -> None:
                plain(self, optimizer, *args)
                narrow(p for group in self.fp32_from_fp32_groups for p in group)

            def build(cls: Any, *args: Any) -> Any:
                found = shards(cls, *args)
                narrow(p for group in found[3] for p in group)
                return found

            whole.__init__ = init
            sharded._build_model_and_main_param_groups = classmethod(build)
        case "save":
            from megatron.core import dist_checkpointing
            from megatron.core.dist_checkpointing.dict_utils import nested_values

            save = dist_checkpointing.save

            def rounding(state: Any, *args: Any, **kwargs: Any) -> None:
                for tensor in nested_values(state):  # also the main copy, which loads into the parameter
                    if getattr(tensor, "key", "").endswith(PINNED):
                        tensor.data = rounded(tensor.data.detach())
                save(state, *args, **kwargs)

            dist_checkpointing.save = rounding
        case "export":
            piece = export.ExportPlan._piece

            def narrow_piece(self: Any, hf: Any, parts: list[Tensor], row: int | None = None) -> Any:
                return piece(self, hf, [rounded(part) for part in parts], row)

            export.ExportPlan._piece = narrow_piece
        case "after DDP":
            from isthmus import enforce_marked_param_dtypes, precision

            Float16Module.__init__ = Float16Module.__init__.__wrapped__
            precision._keeping = lambda original: original
            precision._lost = lambda parameter: ""
            wrap = DistributedDataParallel.__init__

            def enforce(self: Any, *args: Any, **kwargs: Any) -> None:
                wrap(self, *args, **kwargs)
                enforce_marked_param_dtypes(self)

            DistributedDataParallel.__init__ = enforce


def stages(
    source: Path, folder: Path, layout: Layout, distributed: bool, broken: str | None
) -> dict[str, list[str]]:
    """The tensors that have other bits than the source, by stage of a run whose learning rate is 0.

    `source` is a checkpoint of :func:`pinned_source`; `distributed` chooses Megatron's distributed optimizer;
    `broken` is a place of :func:`round_at`, None for none. `folder` takes what the run saves and exports.
    """
    expected, found = pinned(source), {}

    def look(stage: str, tensors: dict[str, Tensor]) -> None:
        found[stage] = _differing(expected, tensors)

    Trainer.build(source, layout, distributed=distributed, lr=0.0, load=False)  # imports, and corrects, all
    round_at(broken)
    trainer = Trainer.build(source, layout, distributed=distributed, lr=0.0)
    look("main copy", trainer.whole("param"))
    look("loaded", trainer.whole("model"))
    trainer.step(0)
    look("main copy after a step", trainer.whole("param"))
    look("after a step", trainer.whole("model"))
    trainer.save(folder / "saved", "fully_reshardable" if distributed else None)
    initial: dict[str, Tensor] = {}

    def note(chunks: list[Any]) -> None:
        for parameter in _pinned_parameters(chunks).values():
            parameter.data += 2.0**-12  # a norm begins as 1, which bf16 holds
        initial.update(own(chunks))

    again = Trainer.build(
        source,
        layout,
        distributed=distributed,
        lr=0.0,
        load=False,
        before_wrap=note,
    )
    found["cast"] = _differing(initial, own(again.chunks))
    again.load(folder / "saved")
    look("main copy resumed", again.whole("param"))
    look("resumed", again.whole("model"))
    again.bridge.save_hf_pretrained(again.chunks, folder / "exported")
    look("exported", pinned(folder / "exported"))
    return found


def _differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """The names whose tensors are not the expected bits, or are not there."""
    return [name for name, value in expected.items() if name not in found or not value.equal(found[name])]
