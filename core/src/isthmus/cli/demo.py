"""A tiny checkpoint through Megatron and back: import on 4 CPU processes, train, export, reload, compare.

Needs no GPU, no weights and no network. Exit code 1 where any check fails.
"""

import argparse
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import isthmus.cpu
from isthmus.cli import model, output, progress, workers

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.family import Family
    from isthmus.layout import Layout
    from isthmus.testing.demo import Check, Journey, Stops

STAGES = {
    **model.BUILD,
    "import": "importing",
    "export": "exporting",
    "train": "training",
    "export_trained": "exporting what was trained",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which family, how long, and where."""
    parser.add_argument(
        "--family", metavar="MODEL_TYPE", help="as in config.json (default: the first installed)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of training (default: 5)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="keep the checkpoints here (default: nothing is kept)"
    )


def run(args: argparse.Namespace) -> int:
    """Tell the story while it happens; 1 where a check fails."""
    from isthmus.checkpoint.folder import check_target

    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: at least one step is needed to see anything change")
    if args.out is not None:
        if args.out.is_dir() and any(args.out.iterdir()):
            raise ValueError(f"--out {args.out} is not empty; give a new folder, or an empty one")
        check_target(args.out)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the demo is the same everywhere; set before torch looks
    isthmus.cpu.check_machine()
    family, variant = _family(args.family)
    kept = nullcontext(args.out) if args.out else tempfile.TemporaryDirectory(prefix="isthmus-demo-")
    with kept as folder:
        document = _story(output.console(args), family, variant, Path(folder), args.steps)
    if args.out:
        output.console(args).print(
            f"kept in {args.out}: {', '.join(sorted(p.name for p in args.out.iterdir()))}"
        )
    output.write_json(args, {**document, "folder": str(args.out) if args.out else None})
    return 0 if document["passed"] else 1


def _family(model_type: str | None) -> tuple["Family", str]:
    """The family asked for, else the first installed, and the variant that its model_type begins with.

    LookupError: there is none, or no tiny one.
    """
    from isthmus import registry

    if model_type is None:
        model_type = next(iter(registry.families()), None)
    if model_type is None:
        raise LookupError("no family is installed. Try: pip install isthmus-qwen3-next")
    family = registry.family(model_type)
    variants = family.variants(model_type) or family.variants()
    if not variants:
        raise LookupError(f"family {family.name} has no tiny checkpoints to show")
    return family, next(iter(variants))


def _story(out: "Console", family: "Family", variant: str, folder: Path, steps: int) -> dict[str, Any]:
    """Everything, with a line before each stage; the JSON document."""
    import torch

    from isthmus import launch
    from isthmus.layout import Layout
    from isthmus.testing.demo import Stops, checks, reference_logits
    from isthmus.testing.tiny import write_tiny

    layout, stops, watch = Layout(tp=2, pp=2).resolved(), Stops(folder), model.Stopwatch()
    launch.preload(
        "isthmus.testing.demo", "transformers.modeling_utils", family.config_class.partition(":")[0]
    )
    with watch("tiny"):
        write_tiny(family, stops.source, variant, dtype=torch.float32)
    out.print(f"1. a tiny {family.name} checkpoint, as its releases are laid out")
    out.print(f"2. Megatron on {layout.world_size} CPU processes, tp=2 x pp=2: import, {steps} steps, export")
    with watch("megatron"):
        journey, stages = launch.run(
            layout.world_size, workers.on_rank, layout, on_rank, (layout, stops, steps), progress.silent
        )[0]
    out.print("3. transformers loads what went in and what came out")
    with watch("transformers"):
        references = launch.run(1, reference_logits, layout, stops)[0]
    with watch("compare"):
        table = checks(stops, journey, references)
    _print(out, table)
    passed = all(check.passed for check in table)
    out.print("PASSED" if passed else "FAILED")
    return {
        "model_type": family.variant(variant).config["model_type"],
        "layout": layout.as_dict(),
        "passed": passed,
        "checks": [
            {"check": c.what, "result": c.result, "bound": c.bound, "passed": c.passed} for c in table
        ],
        "losses": journey.losses,
        "seconds": {**watch.seconds, **stages},
    }


def on_rank(layout: "Layout", stops: "Stops", steps: int) -> "tuple[Journey | None, dict[str, float]]":
    """One rank's part: what it knows of the journey, and seconds by stage."""
    from isthmus.testing.demo import train

    watch = model.Stopwatch(STAGES)
    return train(layout, stops, steps, watch), watch.seconds


def _print(out: "Console", table: "list[Check]") -> None:
    rows = output.table("check", "result", "bound", "", right=("bound",))
    for check in table:
        rows.add_row(check.what, check.result, check.bound, "ok" if check.passed else "FAILED")
    out.print(rows)
