"""What each rank of a layout would hold, and whether the model can be divided so: no weights are read.

Works from a config.json alone. Where the layout does not fit the model, or a tensor has no place, it ends
with FAILED, every reason and exit code 1.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import isthmus.cpu
from isthmus import arithmetic
from isthmus.cli import config_options, layout_options, output, progress

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
ADAM = (
    "Gradients are float32. Adam: two moments, and a float32 copy of narrower weights: 8 or 12 bytes a\n"
    "parameter, shared by the ranks that hold the same (distributed optimizer). Activations come on top."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, layout, and fields of the model."""
    parser.add_argument("source", metavar="HF_DIR", help="checkpoint folder, config.json, or hub id")
    layout_options.add_layout_arguments(parser)
    parser.add_argument(
        "--mtp",
        action=argparse.BooleanOptionalAction,
        help="with the prediction (MTP) block, or without (default: as in the checkpoint or config)",
    )
    config_options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan HF_DIR at the layout; 1 where something does not fit."""
    layout, source, overrides = layout_options.layout(args), _source(args.source), config_options.fields(args)
    bridge = _bridge(source)
    if args.mtp is not None:
        if "mtp_num_layers" in overrides:
            raise ValueError("--mtp/--no-mtp and --set mtp_num_layers say the same; give one of them")
        overrides["mtp_num_layers"] = (bridge.megatron_fields["mtp_num_layers"] or 1) if args.mtp else None
    arithmetic.check(bridge.megatron_fields, overrides, "the model of --set")
    document: dict[str, Any] = {
        "model_type": bridge.hf_config.model_type,
        "overruled": bridge.overruled,
        "layout": layout.as_dict(),
        "world_size": layout.world_size,
        "stages": [],
        "problems": layout.misfits(bridge.family, {**bridge.megatron_fields, **overrides}),
    }
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed
    isthmus.cpu.check_machine()
    if not document["problems"]:
        try:
            document |= _plan(layout, source, overrides)
        except ValueError as error:
            document["problems"] = [str(error)]
    document["passed"] = not document["problems"]
    document["notes"] = _notes(bridge) if args.mtp is None else []
    _print(output.console(args), document)
    output.write_json(args, document)
    return 0 if document["passed"] else 1


def _source(asked: str) -> Path:
    """The folder or config.json; of a hub id, config.json alone is downloaded. FileNotFoundError: neither."""
    from isthmus.checkpoint.source import read_config, resolve

    path = Path(asked)
    if path.exists():
        return path
    folder = resolve(asked, files=["config.json"])
    read_config(folder)
    return folder / "config.json"


def _bridge(source: Path) -> "AutoBridge":
    """Bound to the checkpoint, or to the config where there are no weights."""
    from isthmus import registry
    from isthmus.bridge import AutoBridge
    from isthmus.checkpoint.source import read_config
    from isthmus.config import HFConfig

    if source.is_dir() and any(source.glob("*.safetensors")):
        return AutoBridge.from_hf_pretrained(source)
    text = read_config(source) if source.is_dir() else source.read_text(encoding="utf-8")
    config = HFConfig.from_text(text)
    return AutoBridge(registry.family(config.model_type), config)


def _plan(layout: "Layout", source: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The plan, made in a process of its own."""
    from isthmus import launch

    progress.announce("building one rank of each stage, without weights")
    return launch.run(1, on_rank, layout, source, overrides)[0]


def on_rank(layout: "Layout", source: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """In the worker: the plan's document."""
    from isthmus.plan import plan

    return plan(_bridge(source), layout, overrides)


def _notes(bridge: "AutoBridge") -> list[str]:
    """What the source leaves open."""
    stated = any("mtp" in key or "nextn" in key for key in bridge.hf_config.raw)
    if bridge.folder is not None or stated or bridge.megatron_fields.get("mtp_num_layers"):
        return []
    return ["config.json does not say whether there is an MTP block; planned without (--mtp plans with one)"]


def _print(out: Any, document: dict[str, Any]) -> None:
    """What was assumed; one rank of each stage, by size and by kind of parameter; what is wrong."""
    for line in [*document["notes"], *output.overruled(document)]:
        out.print(f"note: {line}")
    ranks = output.counted(document["world_size"], "rank")
    if stages := document["stages"]:
        out.print(f"{document['model_type']}: {document['parameters']:,} parameters on {ranks}")
        out.print(_sizes(stages))
        out.print(ADAM)
        out.print(_kinds(stages))
    verdict, why = ("PASSED", ": every tensor has its place") if document["passed"] else ("FAILED", "")
    out.print(f"{verdict}: {document['model_type']}, {ranks}{why}")
    for problem in document["problems"]:
        out.print(f"  {problem}")


def _sizes(stages: list[dict[str, Any]]) -> Any:
    head = ("stage", "layers", "parameters", "weights", "gradients", "Adam", "total")
    rows = output.table(*head, right=head[2:], title="One rank of each pipeline stage")
    unit = "GiB" if max(stage["total_bytes"] for stage in stages) >= UNITS["GiB"] else "MiB"
    for stage in stages:
        parts = ("bytes", "gradient_bytes", "optimizer_bytes", "total_bytes")
        sizes = [f"{stage[part] / UNITS[unit]:,.2f} {unit}" for part in parts]
        rows.add_row(str(stage["stage"]), _ranges(stage["layers"]), f"{stage['parameters']:,}", *sizes)
    return rows


def _kinds(stages: list[dict[str, Any]]) -> Any:
    """A column for each group of stages that hold the same."""
    from isthmus.plan import KINDS

    groups: list[list[dict[str, Any]]] = []
    for stage in stages:
        if groups and groups[-1][0]["by_kind"] == stage["by_kind"]:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    head = [f"stage {_ranges([stage['stage'] for stage in group])}" for group in groups]
    rows = output.table("parameters of one rank", *head, right=tuple(head))
    for kind, _ in KINDS:
        counts = [group[0]["by_kind"].get(kind, 0) for group in groups]
        if any(counts):
            rows.add_row(kind, *(f"{count:,}" for count in counts))
    return rows


def _ranges(numbers: list[int]) -> str:
    """`0-11, 24-35` for runs of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
