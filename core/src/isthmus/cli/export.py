"""Megatron torch_dist checkpoint -> Hugging Face folder; the layout need not be the one that saved it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli import config_options, layout_options, model, output, workers
from isthmus.cli.progress import progress

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, target, layout, and how the files are written."""
    parser.add_argument("megatron_dir", metavar="MEGATRON_DIR", type=Path, help="what was given to --save")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder to write; empty or absent")
    parser.add_argument(
        "--hf",
        metavar="HF_DIR",
        help="checkpoint whose config, side files and key spelling are used (default: the one imported)",
    )
    layout_options.add_layout_arguments(parser)
    config_options.add_arguments(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "source", *model.DTYPES),
        default="auto",
        help="of the tensors written (default: auto, each as in HF_DIR, quantised ones as plain numbers of"
        " the config's dtype); source quantises those again, in the format of HF_DIR",
    )
    parser.add_argument(
        "--passthrough",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="copy the tensors of HF_DIR that the model does not hold (default: yes)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace all that OUT_DIR holds")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of one safetensors file (default: 5GB)"
    )


def run(args: argparse.Namespace) -> int:
    """Export MEGATRON_DIR; OUT_DIR appears in one rename when everything is written."""
    from isthmus.checkpoint.folder import check_target, cleared
    from isthmus.checkpoint.writer import parse_size

    parse_size(args.max_shard_size)  # an error of a minute's work otherwise
    layout = layout_options.layout(args)
    fields = config_options.fields(args)
    bridge = _bridge(args.megatron_dir, args.hf)
    source = None if args.hf is None else bridge.folder
    model.check(bridge, layout, fields)
    sources = [args.megatron_dir] if source is None else [args.megatron_dir, source]
    check_target(args.out_dir, args.overwrite, sources=sources)
    options = {name: getattr(args, name) for name in ("dtype", "passthrough", "overwrite", "max_shard_size")}
    with cleared(args.out_dir):
        ranks = workers.run(layout, on_rank, layout, args.megatron_dir, args.out_dir, source, fields, options)
    output.console(args).print(
        f"{ranks[0]['model_type']}: {args.megatron_dir} exported to {args.out_dir}"
        f" on {output.counted(layout.world_size, 'rank')}"
    )
    document = {
        "model_type": ranks[0]["model_type"],
        "layout": layout.as_dict(),
        "megatron_dir": str(args.megatron_dir),
        "out_dir": str(args.out_dir),
        "peak_rss_mb_per_rank": [rank["peak_rss_mb"] for rank in ranks],
        "seconds": model.slowest(ranks),
    }
    output.write_json(args, document)
    return 0


def on_rank(
    layout: "Layout",
    megatron_dir: Path,
    out_dir: Path,
    hf_dir: Path | None,
    fields: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """One rank's part of the export."""
    from isthmus.checkpoint.torch_dist import found_fields

    watch = model.Stopwatch(model.BUILD)
    bridge = _bridge(megatron_dir, hf_dir)
    nbytes = sum(info.nbytes for info in bridge.reader.tensors.values())
    with watch("build"):
        chunks = model.build(bridge, layout, fields=found_fields(megatron_dir) | fields)
    with watch("export"), progress("exporting", nbytes // layout.world_size) as advance:
        bridge.export_ckpt(megatron_dir, out_dir, model=chunks, advance=advance, **options)
    return {
        "model_type": bridge.hf_config.model_type,
        "peak_rss_mb": model.peak_rss_mb(),
        "seconds": watch.seconds,
    }


def _bridge(megatron_dir: Path, hf_dir: str | Path | None) -> "AutoBridge":
    """Bound to the given checkpoint, else to the one that MEGATRON_DIR was imported from."""
    from isthmus.bridge import AutoBridge

    return AutoBridge.from_megatron(megatron_dir, hf_dir)
