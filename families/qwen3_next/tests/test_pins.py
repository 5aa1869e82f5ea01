"""`A_log` in float32 in a bf16 model: the source's bits at every stage of a training run."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from isthmus import launch, registry
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trainer import Trainer

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only

PINNED = "linear_attn.A_log"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint, `A_log` in float32."""
    folder = tmp_path_factory.mktemp("hf") / "source"
    write_tiny(registry.family("qwen3_next"), folder, "fp32_a_log")
    for name, tensor in pinned(folder).items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"bf16 holds {name}: it tests nothing"
    return folder


def pinned(folder: Path) -> dict[str, Tensor]:
    """The pinned tensors of a checkpoint, as its files have them."""
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in from_file(file).items()}
    found = {name: tensor for name, tensor in tensors.items() if name.endswith(PINNED)}
    assert len(found) == 3
    return found


def from_file(file: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(file)


def own(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of this rank's pinned parameters by their live names."""
    from isthmus.names import unwrapped

    named = [pair for chunk in chunks for pair in unwrapped(chunk).named_parameters()]
    return {name: parameter.detach().clone() for name, parameter in named if name.endswith(PINNED)}


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def round_at(place: str | None) -> None:
    """Break one place where a tensor passes, in this process."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.transformer.module import Float16Module

    from isthmus.checkpoint import export, load

    match place:
        case "load":
            copy = load._Copier._slice

            def rounding_slice(*args: Any, into: Tensor | None = None) -> Tensor:
                found = rounded(copy(*args))
                return found if into is None else into.copy_(found)

            load._Copier._slice = rounding_slice
        case "wrapper":  # and then widened, as one patch of other tools does
            keeping = Float16Module.__init__

            def widen(self: Any, config: Any, module: Any) -> None:
                keeping(self, config, module)
                for parameter in module.parameters():
                    if parameter.dtype == torch.float32:
                        parameter.data = rounded(parameter.data)

            Float16Module.__init__ = widen
        case "main copy":
            plain = Float16OptimizerWithFloat16Params.__init__
            shards = DistributedOptimizer._build_model_and_main_param_groups.__func__

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

            Float16OptimizerWithFloat16Params.__init__ = init
            DistributedOptimizer._build_model_and_main_param_groups = classmethod(build)
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

            def narrow_piece(self: Any, hf: Any, parts: list[Tensor]) -> Any:
                return piece(self, hf, [rounded(part) for part in parts])

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
    """What has other bits than the source at each stage of a run whose learning rate is 0."""
    expected, found = pinned(source), {}

    def look(stage: str, tensors: dict[str, Tensor]) -> None:
        found[stage] = [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)]

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
    again = Trainer.build(
        source,
        layout,
        distributed=distributed,
        lr=0.0,
        load=False,
        before_wrap=lambda chunks: initial.update(own(chunks)),
    )
    found["cast"] = [
        name for name, value in own(again.chunks).items() if not torch.equal(value, initial[name])
    ]
    again.load(folder / "saved")
    look("main copy resumed", again.whole("param"))
    look("resumed", again.whole("model"))
    again.bridge.save_hf_pretrained(again.chunks, folder / "exported")
    look("exported", pinned(folder / "exported"))
    return found


@pytest.mark.parametrize(
    ("layout", "distributed"), [(Layout(tp=2), True), (Layout(dp=2), True), (Layout(pp=2), False)], ids=str
)
def test_pinned_parameters_keep_the_sources_bits_through_training(
    source: Path, tmp_path: Path, layout: Layout, distributed: bool
) -> None:
    for found in launch.run(2, stages, source, tmp_path, layout, distributed, None):
        assert len(found) == 8
        assert not any(found.values()), found


@pytest.mark.parametrize(
    ("broken", "distributed", "seen"),
    [
        ("load", True, "loaded"),
        ("wrapper", True, "cast"),
        ("main copy", True, "main copy"),
        ("main copy", False, "main copy"),
        ("save", True, "resumed"),
        ("export", True, "exported"),
    ],
)
def test_rounding_at_any_place_is_seen(
    source: Path, tmp_path: Path, broken: str, distributed: bool, seen: str
) -> None:
    (found,) = launch.run(1, stages, source, tmp_path, Layout(), distributed, broken)
    assert len(found[seen]) == 3, found


def after_steps(source: Path, broken: str | None) -> dict[str, Tensor]:
    """This rank's pinned parameters after two steps."""
    Trainer.build(source, Layout(dp=2), load=False)
    round_at(broken)
    trainer = Trainer.build(source, Layout(dp=2))
    for seed in range(2):
        trainer.step(seed)
    return own(trainer.chunks)


@pytest.mark.parametrize("broken", [None, "after DDP"])
def test_a_pin_that_is_enforced_after_ddp_is_not_trained_as_one(source: Path, broken: str | None) -> None:
    """Its values are then no part of the buffer through which data-parallel ranks share an update."""
    first, second = launch.run(2, after_steps, source, broken)
    start = pinned(source)
    same = [torch.equal(first[name], second[name]) for name in first]
    assert len(same) == 3
    assert all(same) == (broken is None)
    if broken:
        return
    for name, value in first.items():
        trained = next(t for hf, t in start.items() if hf.split(".")[2] == name.split(".")[2])
        assert not torch.equal(value, trained), "a step moves it"
        assert not torch.equal(value, rounded(value)), "and not by bf16 steps"
