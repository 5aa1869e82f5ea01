"""A training run saved at one layout and loaded at another, and one that stops and resumes."""

from pathlib import Path

import pytest

from isthmus import launch, registry
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trainer import Trainer, differences

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only

TP, UNEVEN, CHUNKS = Layout(tp=2), Layout(pp=2, pipeline_layout="Ettt|tmL"), Layout(pp=2, vp=2)
EP, DP = Layout(ep=2, dp=2), Layout(dp=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with an MTP block and `A_log` in float32."""
    folder = tmp_path_factory.mktemp("hf") / "source"
    write_tiny(registry.family("qwen3_next"), folder, "fp32_a_log")
    return folder


def saved(source: Path, path: Path, sharding: str | None, **options) -> dict:
    """The state of two steps in one process, which it saves."""
    trainer = Trainer.build(source, Layout(), **options)
    for seed in range(2):
        trainer.step(seed)
    trainer.save(path, sharding)
    return trainer.everything()


def carried(
    source: Path, path: Path, layouts: list[Layout], expected: dict, sharding: str | None, **options
) -> dict[str, list[str]]:
    """What differs after a load at each of `layouts`, of what the one before saved."""
    found = {}
    for number, layout in enumerate(layouts):
        trainer = Trainer.build(source, layout, load=False, **options)
        trainer.load(path)
        found[f"{number} {layout}"] = differences(trainer.everything(), expected)
        path = path.with_name(f"{path.name}-{number}")
        trainer.save(path, sharding)
    return found


@pytest.mark.parametrize(
    ("layouts", "sharding", "fields"),
    [
        ([TP, UNEVEN, CHUNKS, EP, DP], "fully_reshardable", {}),
        ([TP, CHUNKS], "fully_reshardable", {"hosted_mode": "replicated", "attention": "hosted"}),
        ([DP], "dp_reshardable", {}),
        ([TP, UNEVEN, EP, DP], None, {}),
    ],
    ids=["distributed", "replicated", "dp-reshardable", "plain"],
)
def test_parameters_main_copies_and_moments_move_between_layouts_bit_for_bit(
    source: Path, tmp_path: Path, layouts: list[Layout], sharding: str | None, fields: dict[str, str]
) -> None:
    options = {"distributed": sharding is not None, **fields}
    (expected,) = launch.run(1, saved, source, tmp_path / "saved", sharding, **options)
    assert expected["param"].keys() == expected["model"].keys()
    assert all(bool(moment.any()) for moment in expected["exp_avg_sq"].values()), "all trained"
    given = (source, tmp_path / "saved", layouts, expected, sharding)
    for rank in launch.run(2, carried, *given, **options):
        assert len(rank) == len(layouts)
        assert not any(rank.values()), rank


def resumed(
    source: Path, path: Path, layout: Layout, sharding: str | None, **options
) -> tuple[list, list[str]]:
    """(loss and norm of the third step of an uninterrupted run and a resumed one, what differs after it)."""
    running = Trainer.build(source, layout, **options)
    for seed in range(2):
        running.step(seed)
    running.save(path, sharding)
    steps, after = [running.step(2)], running.everything()
    again = Trainer.build(source, layout, load=False, **options)
    again.load(path)
    steps.append(again.step(2))
    return steps, differences(again.everything(), after)


@pytest.mark.parametrize(
    ("layout", "sharding"),
    [
        (TP, "fully_reshardable"),
        (EP, "dp_reshardable"),
        (CHUNKS, None),
        (Layout(cp=2), "dp_reshardable"),
    ],
    ids=["tp2", "ep2-dp-reshardable", "pp2-vp2-plain", "cp2"],
)
def test_a_resumed_run_takes_the_same_step_as_one_that_did_not_stop(
    source: Path, tmp_path: Path, layout: Layout, sharding: str | None
) -> None:
    given = (source, tmp_path / "saved", layout, sharding)
    found = launch.run(2, resumed, *given, distributed=sharding is not None)
    for (step, again), wrong in found:
        assert again == step
        assert wrong == []
    assert found[0][0][0][0] is not None


def load(source: Path, path: Path) -> None:
    Trainer.build(source, TP, load=False).load(path)


def test_the_format_for_data_parallel_changes_alone_is_refused_elsewhere(
    source: Path, tmp_path: Path
) -> None:
    launch.run(1, saved, source, tmp_path / "saved", "dp_reshardable")
    with pytest.raises(launch.WorkerError, match=r"optimizer\.distributed\..* not in state dict"):
        launch.run(2, load, source, tmp_path / "saved")
