"""What training leaves alone or keeps equal: frozen modules, copies of the embedding and of parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus import launch, registry
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trainer import Trainer, differences
from isthmus.tiny import Variant
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import tiny_config

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only

STEPS = 3


def tiny(folder: Path, variant: str) -> Path:
    write_tiny(registry.family("qwen3_next"), folder, variant)
    return folder


def freeze(chunks: list[Any], of_layers: tuple[int, ...], names: str) -> None:
    """No gradients for the hosted modules of these layers (numbered over all stages), where `names` fits."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if layer.layer_number - 1 in of_layers:
                for name, parameter in layer.self_attention.named_parameters():
                    if name.startswith(names):
                        parameter.requires_grad_(False)


def frozen_run(hf: Path, path: Path, layout: Layout, distributed: bool, layers: tuple, names: str) -> dict:
    """Of runs with frozen parameters and without: the weights at both ends, the moments after a step."""
    found = {}
    for run in ("free", "frozen"):
        trainer = Trainer.build(
            hf,
            layout,
            distributed=distributed,
            clip=0.0,
            before_wrap=lambda chunks, run=run: freeze(chunks, layers, names) if run == "frozen" else None,
        )
        found[run, "start"] = trainer.whole("model")
        trainer.step(0)
        # From 0, a tenth of the gradient; of a frozen parameter, the parameter itself.
        found[run, "gradient"] = trainer.whole("exp_avg")
        trainer.step(1)
        found[run, "end"] = trainer.whole("model")
    trainer.save(path, "fully_reshardable" if distributed else None)
    again = Trainer.build(
        hf,
        layout,
        distributed=distributed,
        load=False,
        before_wrap=lambda chunks: freeze(chunks, layers, names),
    )
    again.load(path)
    found["resumed"] = again.whole("model")
    return found


@pytest.mark.parametrize(
    ("layout", "distributed", "layers", "names", "count"),
    [
        (Layout(tp=2), True, (0, 1, 2), "", 21),
        (Layout(pp=2), True, (0, 1, 2), "", 21),  # all of the first stage's hosted modules
        (Layout(tp=2), False, (1,), "linear_attn.in_proj", 2),
        (Layout(dp=2), True, (0,), "linear_attn.A_log", 1),
    ],
    ids=["tp2-all", "pp2-all", "tp2-part", "dp2-pinned"],
)
def test_a_frozen_hosted_module_stays_and_the_rest_trains_as_without_it(
    tmp_path: Path, layout: Layout, distributed: bool, layers: tuple[int, ...], names: str, count: int
) -> None:
    hf = tiny(tmp_path / "hf", "fp32_a_log")
    given = (hf, tmp_path / "saved", layout, distributed, layers, names)
    found, _ = launch.run(2, frozen_run, *given)
    start, end = found["frozen", "start"], found["frozen", "end"]
    frozen = {
        name
        for name in start
        if ".linear_attn." in name
        and int(name.split(".")[2]) in layers
        and name.partition(f"{name.split('.')[2]}.")[2].startswith(names or "linear_attn.")
    }
    assert len(frozen) == count
    assert end.keys() == found["free", "end"].keys(), "what is frozen is exported all the same"
    for name in end:
        assert torch.equal(end[name], start[name]) == (name in frozen), name
        same = torch.equal(found["frozen", "gradient"][name], found["free", "gradient"][name])
        assert same or name in frozen, f"{name}: its gradient depends on what is frozen"
    assert differences({"model": found["resumed"]}, {"model": end}) == []


def embeddings(cases: list[tuple[Path, dict]], layout: Layout) -> list[tuple[dict[str, Tensor], Tensor]]:
    """(this rank's copies of the embedding by name, its initial values) after some steps, of each case."""
    from isthmus.names import unwrapped

    found = []
    for hf, fields in cases:
        trainer = Trainer.build(hf, layout, **fields)
        chunks = [unwrapped(chunk) for chunk in trainer.chunks]
        held = {}
        for number, chunk in enumerate(chunks):
            if chunk.pre_process or chunk.mtp_process:
                held[f"{number} embedding"] = chunk.embedding.word_embeddings.weight
            elif chunk.post_process and chunk.share_embeddings_and_output_weights:
                held[f"{number} head"] = chunk.output_layer.weight
        before = [copy.detach().clone() for copy in held.values()]
        for seed in range(STEPS):
            trainer.step(seed)
        found.append(({name: copy.detach().clone() for name, copy in held.items()}, before))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=2, pipeline_layout="Etttt|mL"),  # the MTP block in a stage of its own
        Layout(pp=2, vp=2),
        Layout(tp=2, pp=2),
    ],
    ids=["pp2", "mtp-alone", "pp2-vp2", "tp2-pp2"],
)
def test_copies_of_the_embedding_stay_equal(tmp_path: Path, layout: Layout) -> None:
    untied, tied = tiny(tmp_path / "untied", "default"), tiny(tmp_path / "tied", "tied")
    cases = [(untied, {}), (tied, {})]
    if not layout.pipeline_layout:
        cases.append((tied, {"mtp_num_layers": None, "distributed": False}))
    found = launch.run(layout.world_size, embeddings, cases, layout)
    for number, _ in enumerate(cases):
        for tp in range(layout.tp):
            stages = [found[tp + layout.tp * stage][number] for stage in range(layout.pp)]
            copies = [copy for held, _ in stages for copy in held.values()]
            assert len(copies) == 2, "one at each end of the pipeline"
            assert torch.equal(*copies)
            assert not torch.equal(copies[0], stages[0][1][0]), "it trains"


def copies_after(hf: Path, layout: Layout, steps: int, **fields: Any) -> dict[str, tuple[Tensor, bool]]:
    """This rank's parameters that are whole on every tensor-parallel rank, and whether they have moved."""
    trainer = Trainer.build(hf, layout, **fields)
    parameters = {
        name: parameter
        for name, parameter in trainer.chunks[0].named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name
    }
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for seed in range(steps):
        trainer.step(seed)
    return {
        name: (parameter.detach().clone(), not torch.equal(parameter, before[name]))
        for name, parameter in parameters.items()
    }


@pytest.mark.parametrize("mode", ["heads", "replicated"])
def test_copies_of_hosted_parameters_do_not_drift_in_fifty_steps(tmp_path: Path, mode: str) -> None:
    config = tiny_config(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2)  # both are delta nets
    write_tiny(FAMILY, tmp_path / "hf", Variant(config, mtp=False))
    first, second = launch.run(2, copies_after, tmp_path / "hf", Layout(tp=2), 50, hosted_mode=mode)
    hosted = [name for name in first if ".linear_attn." in name]
    assert len(hosted) == 2 * (7 if mode == "replicated" else 1)
    for name, (value, moved) in first.items():
        assert moved, name
        assert torch.equal(value, second[name][0]), name
