"""Hugging Face checkpoint -> Megatron torch_dist checkpoint, for `--load`."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli import config_options, layout_options, model, output, workers
from isthmus.cli.progress import progress

if TYPE_CHECKING:
    from isthmus.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, target, layout, dtype."""
    parser.add_argument("hf_dir", metavar="HF_DIR", help="checkpoint folder or hub id")
    parser.add_argument("megatron_dir", metavar="MEGATRON_DIR", type=Path, help="folder to write")
    layout_options.add_layout_arguments(parser)
    model.add_dtype_argument(parser)
    config_options.add_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace all that MEGATRON_DIR holds")


def run(args: argparse.Namespace) -> int:
    """Import HF_DIR at the layout; any other layout can load the result."""
    from isthmus.bridge import AutoBridge
    from isthmus.checkpoint.folder import check_target, cleared

    layout = layout_options.layout(args)
    fields = config_options.fields(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_dir)
    source = bridge.folder or Path(args.hf_dir)
    model.check(bridge, layout, fields)
    check_target(args.megatron_dir, args.overwrite, sources=[source])
    with cleared(args.megatron_dir):
        ranks = workers.run(
            layout, on_rank, layout, source, args.megatron_dir, args.dtype, fields, args.overwrite
        )
    report = ranks[0]["report"]
    output.console(args).print(
        f"{ranks[0]['model_type']}: {report.hf_tensors} tensors loaded"
        f" on {output.counted(layout.world_size, 'rank')},"
        f" {len(report.passed_through)} left to an export to copy, {len(report.dropped)} dropped"
        + "".join(f", {name} is {source}" for name, source in report.shared.items())
        + "".join(f"\n{line}" for line in output.overruled(ranks[0]))
        + "\n"
        + _next_step(shlex.quote(str(args.megatron_dir)), ranks[0]["has_tower"])
    )
    document = {
        "model_type": ranks[0]["model_type"],
        "overruled": ranks[0]["overruled"],
        "layout": layout.as_dict(),
        "megatron_dir": str(args.megatron_dir),
        "loaded": report.hf_tensors,
        "passed_through": sorted(report.passed_through),
        "passed_through_reasons": report.passed_through,
        "dropped": report.dropped,
        "shared": report.shared,
        "parameters_per_rank": [rank["report"].parameters for rank in ranks],
        "bytes_read_per_rank": [rank["report"].bytes_read for rank in ranks],
        "peak_rss_mb_per_rank": [rank["peak_rss_mb"] for rank in ranks],
        "seconds": model.slowest(ranks),
    }
    output.write_json(args, document)
    return 0


def _next_step(target: str, has_tower: bool) -> str:
    """What a user does with the folder `target`."""
    if has_tower:
        return (
            "train it from a script of yours that builds it with AutoBridge.build_model (docs/vision.md);"
            " Megatron's own builds no vision tower, and takes an import with --set part=text"
        )
    return (
        f"start Megatron's training script with: $(cat {target}/megatron_args.txt) --load {target}"
        "\n(in bash after `set -f`, which keeps lists in brackets as they are)"
    )


def on_rank(
    layout: "Layout",
    hf_dir: Path,
    megatron_dir: Path,
    dtype: str | None,
    fields: dict[str, Any],
    overwrite: bool,
) -> dict[str, Any]:
    """One rank's part of the import."""
    from isthmus.bridge import AutoBridge
    from isthmus.hosting.vision_model import VisionLanguageModel
    from isthmus.names import unwrapped

    watch = model.Stopwatch(model.BUILD)
    bridge = AutoBridge.from_hf_pretrained(hf_dir)
    with watch("build"):
        chunks = model.build(bridge, layout, dtype, fields)
    nbytes = sum(
        parameter.numel() * parameter.element_size() for chunk in chunks for parameter in chunk.parameters()
    )
    with watch("import"), progress("importing", nbytes) as advance:
        report = bridge.import_ckpt(megatron_dir, chunks, overwrite=overwrite, advance=advance)
    return {
        "model_type": bridge.hf_config.model_type,
        "overruled": bridge.overruled,
        "has_tower": any(isinstance(unwrapped(chunk), VisionLanguageModel) for chunk in chunks),
        "report": report,
        "peak_rss_mb": model.peak_rss_mb(),
        "seconds": watch.seconds,
    }
