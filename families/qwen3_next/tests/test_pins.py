"""`A_log` in float32 in a bf16 model: the source's bits at every stage of a training run."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.pins import own, pinned, pinned_source, round_at, rounded, stages
from isthmus.testing.trainer import Trainer
from isthmus_qwen3_next.family import FAMILY

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pinned_source(FAMILY, tmp_path_factory.mktemp("hf") / "source", "fp32_a_log")


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
