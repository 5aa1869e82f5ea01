"""Loss curves of `examples/finetune.py` in every layout beside one process: `loss_curves.json` and `.svg`.

    python docs/loss_curves.py

Needs CPUs only, and some minutes of 2 cores. A layout further from one process than BOUND at any step is an
error, after both files are written.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import finetune
from curves_chart import chart

from isthmus import launch
from isthmus.registry import family
from isthmus.testing.tiny import write_tiny

BOUND = 1e-4  # nats, of a step's loss: rounding in float32, carried through every step before
OPTIONS = """--dtype float32 --lr 3e-4 --warmup-steps 5 --steps 30
    --seq-length 64 --global-batch-size 8 --micro-batch-size 2"""


class Run(NamedTuple):
    """Training on so many ranks; `rounded` starts from embeddings that differ in their last bit."""

    ranks: int
    layout: str
    rounded: bool = False


ALONE = "one process"
RUNS = {
    ALONE: Run(1, ""),
    "tp 2, sp": Run(2, "--tp 2"),
    "cp 2": Run(2, "--cp 2"),
    "pp 2 x vp 2": Run(2, "--pp 2 --vp 2"),
    "ep 2": Run(2, "--ep 2"),
    "dp 2": Run(2, ""),
    "tp 2 x cp 2": Run(4, "--tp 2 --cp 2"),
    "one process, last bits": Run(1, "", rounded=True),
}


def main() -> int:
    """Train all, write both files; 1 where a layout is beyond the bound."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: train(Path(folder), name, run) for name, run in RUNS.items()}
    differences = {
        name: [abs(loss - expected) for loss, expected in zip(run, losses[ALONE], strict=True)]
        for name, run in losses.items()
        if name != ALONE
    }
    for name, steps in differences.items():
        print(f"{name}: largest difference {max(steps):.1e}, at step {steps.index(max(steps)) + 1}")
    runs = {name: run._asdict() | {"losses": losses[name]} for name, run in RUNS.items()}
    numbers = {"options": " ".join(OPTIONS.split()), "bound": BOUND, "runs": runs}
    (HERE / "loss_curves.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (HERE / "loss_curves.svg").write_text(chart(losses, differences, BOUND))
    return int(any(max(steps) > BOUND for steps in differences.values()))


def train(folder: Path, name: str, run: Run) -> list[float]:
    """The losses of every step."""
    print(name, flush=True)
    hf, out = folder / f"hf {name}", folder / name
    write_tiny(family("qwen3_next"), hf, dtype=torch.float32)
    if run.rounded:
        weights = load_file(hf / "model.safetensors")
        embeddings = weights["model.embed_tokens.weight"]
        embeddings.copy_(embeddings.nextafter(torch.tensor(torch.inf)))
        save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    args = finetune.parse([str(hf), str(out), *OPTIONS.split(), *run.layout.split()])
    return [report["loss"] for report in launch.run(run.ranks, finetune.train, args, timeout=3600)[0]]


if __name__ == "__main__":
    sys.exit(main())
