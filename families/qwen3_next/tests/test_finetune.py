"""The example that trains: its losses are transformers', alike in every layout, and a run resumes exactly."""

import filecmp
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.batch import Batch
from isthmus.testing.tiny import write_tiny
from isthmus_qwen3_next.family import FAMILY

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only

EXAMPLE = Path(__file__).parents[3] / "examples/finetune.py"
STEPS = 5
TRAIN = ["--seq-length", "32", "--global-batch-size", "4", "--micro-batch-size", "2", "--lr", "3e-3"]
LOSS = 1e-4  # nats, as docs/training.md says: float32 rounding, carried through every step before
HF_LOSS = 1e-5  # relative; float32 sums in another order

type Reports = list[dict[str, float]]


def example() -> Any:
    """The example as a module; importing it installs the CPU backend, so in workers only."""
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(words: list[str]) -> Reports:
    module = example()
    return module.train(module.parse(words))


def finetune(world_size: int, hf: Path, out: Path, *words: str) -> Reports:
    """What the last rank reports of each step."""
    return launch.run(world_size, train, [str(hf), str(out), *TRAIN, *words])[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "source"
    write_tiny(FAMILY, folder, "default", dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reports]:
    """What one process wrote and reported."""
    out = tmp_path_factory.mktemp("alone") / "out"
    words = f"--dtype float32 --steps {STEPS} --export-every {STEPS - 1}".split()
    return out, finetune(1, source, out, *words)


@pytest.mark.parametrize(
    ("layout", "words"),
    [(Layout(tp=2, cp=2), "--tp 2 --cp 2"), (Layout(ep=2, dp=2), "--ep 2 --recompute")],
    ids=["tp2-cp2", "ep2-recompute"],
)
def test_a_layout_trains_as_one_process_does(
    source: Path, alone: tuple[Path, Reports], tmp_path: Path, layout: Layout, words: str
) -> None:
    options = f"--dtype float32 --steps {STEPS} {words}".split()
    reports = finetune(layout.world_size, source, tmp_path / "out", *options)
    expected = alone[1]
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.1
    for name in ("loss", "mtp_loss"):
        distances = [abs(ours[name] - theirs[name]) for ours, theirs in zip(reports, expected, strict=True)]
        assert max(distances) < LOSS, (name, distances)


def hf_losses(folder: Path, step: int) -> tuple[float, float | None]:
    """transformers' mean losses, of the model and of its MTP block, for the sequences of a step."""
    from isthmus.bridge import AutoBridge

    module = example()
    text = module.tokenize(module.CORPUS.read_text(), AutoBridge.from_hf_pretrained(folder))
    rows = module.sequences(text, step, module.parse([str(folder), "out", *TRAIN]))
    model = reference.load(folder, torch.float32, FAMILY.mtp_reference)
    outputs = reference.run(model, Batch(tuple(rows), 1, False), gradients=False)
    return outputs.loss, outputs.mtp_loss


@pytest.mark.parametrize("steps", [0, STEPS - 1])
def test_the_losses_are_those_of_transformers(source: Path, alone: tuple[Path, Reports], steps: int) -> None:
    out, reports = alone
    folder = out / f"hf-{steps}" if steps else source
    loss, mtp_loss = launch.run(1, hf_losses, folder, steps)[0]
    assert reports[steps]["loss"] == pytest.approx(loss, rel=HF_LOSS)
    assert reports[steps]["mtp_loss"] == pytest.approx(mtp_loss, rel=HF_LOSS)


def test_a_resumed_run_is_the_run_itself_bit_for_bit(tmp_path: Path) -> None:
    """In bf16 with a parameter in fp32, experts and optimizer divided; the second half under torchrun."""
    source, words = tmp_path / "source", ["--ep", "2", "--warmup-steps", "1"]
    write_tiny(FAMILY, source, "fp32_a_log")
    whole = finetune(2, source, tmp_path / "whole", *words, "--steps", "4")
    halves = tmp_path / "halves"
    first = finetune(2, source, halves, *words, "--steps", "2", "--decay-steps", "4", "--save-every", "2")
    options = [*words, "--steps", "4", "--resume", "--json", str(tmp_path / "second.json")]
    torchrun(2, [str(EXAMPLE), str(source), str(halves), *TRAIN, *options])
    second = json.loads((tmp_path / "second.json").read_text())
    assert first + second == whole
    names = sorted(path.name for path in (tmp_path / "whole/hf-4").iterdir())
    equal, *_ = filecmp.cmpfiles(tmp_path / "whole/hf-4", halves / "hf-4", names, shallow=False)
    assert equal == names


def torchrun(processes: int, command: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launcher, str(processes), *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_run_does_not_write_into_the_folder_of_another(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match=r"is not empty: continue with --resume, or choose another"):
        finetune(1, source, tmp_path)
