"""Import a checkpoint into Megatron, export it again, compare bit for bit; of a quantised one, its codes.

Exit code 1 where a tensor of OUT_DIR is not the source's, bit for bit, or has no counterpart.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli import layout_options, model, output, workers
from isthmus.cli.progress import progress

if TYPE_CHECKING:
    from isthmus.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, target and layout."""
    parser.add_argument("hf_dir", metavar="HF_DIR", help="checkpoint folder or hub id")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder to write; empty or absent")
    parser.add_argument("--overwrite", action="store_true", help="replace all that OUT_DIR holds")
    layout_options.add_layout_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Round trip HF_DIR through the layout; 1 where the result differs."""
    from isthmus.bridge import AutoBridge
    from isthmus.checkpoint.folder import check_target, cleared

    layout = layout_options.layout(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_dir)
    source = Path(os.path.realpath(bridge.folder or args.hf_dir))
    if source == Path(os.path.realpath(args.out_dir)):
        raise ValueError(
            f"OUT_DIR {args.out_dir} is HF_DIR itself, and would be compared with itself;"
            " choose another folder"
        )
    model.check(bridge, layout)
    check_target(args.out_dir, args.overwrite, sources=[source])
    with cleared(args.out_dir):
        ranks = workers.run(layout, on_rank, layout, source, args.out_dir, args.overwrite)
    document = {"layout": layout.as_dict(), "out_dir": str(args.out_dir), **_merged(ranks)}
    out = output.console(args)
    result = document["roundtrip"]
    out.print(
        f"{document['model_type']}: {result['equal']} of {result['tensors']} tensors are bitwise equal"
        f" after HF -> Megatron -> HF on {output.counted(layout.world_size, 'rank')}"
    )
    if document["mismatches"]:
        from isthmus.weights import collapse

        for what in dict.fromkeys(document["mismatches"].values()):
            names = [name for name, why in document["mismatches"].items() if why == what]
            out.print(f"  {what}: {', '.join(collapse(names))}")
    output.write_json(args, document)
    return 0 if document["passed"] else 1


def on_rank(layout: "Layout", hf_dir: Path, out_dir: Path, overwrite: bool) -> dict[str, Any]:
    """One rank's part of the round trip: its own outcome of everything."""
    import torch.distributed as dist

    from isthmus.bridge import AutoBridge
    from isthmus.checkpoint.compare import compare
    from isthmus.checkpoint.reader import CheckpointReader

    watch = model.Stopwatch(model.BUILD)
    bridge = AutoBridge.from_hf_pretrained(hf_dir)
    with watch("build"):
        chunks = model.build(bridge, layout)
    with watch("load"):
        report = model.load(bridge, chunks)
    source = getattr(bridge.reader, "stored", bridge.reader)  # codes and scales of a quantised one
    nbytes = sum(info.nbytes for info in source.tensors.values())
    rank, size = dist.get_rank(), dist.get_world_size()
    with watch("export"), progress("exporting", nbytes // size) as advance:
        bridge.save_hf_pretrained(chunks, out_dir, dtype="source", overwrite=overwrite, advance=advance)
    dist.barrier()
    with (
        watch("compare"),
        CheckpointReader(out_dir) as written,
        progress("comparing", nbytes // size) as advance,
    ):
        outcome = compare(source, written, rank=rank, size=size, advance=advance)
    return {
        "model_type": bridge.hf_config.model_type,
        "source_tensors": len(source.tensors),
        "report": report,
        "outcome": outcome,
        "peak_rss_mb": model.peak_rss_mb(),
        "seconds": watch.seconds,
    }


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' outcomes as one document, in the words of `isthmus verify`."""
    first = ranks[0]
    report = first["report"]
    mismatches = dict.fromkeys(first["outcome"].added, "added")
    for rank in ranks:
        mismatches |= rank["outcome"].differing
        mismatches |= {name: "missing" for name in rank["outcome"].missing if name not in report.dropped}
    return {
        "model_type": first["model_type"],
        "passed": not mismatches,
        "coverage": {
            "hf_tensors": first["source_tensors"],
            "loaded": report.hf_tensors,
            "passed_through": sorted(report.passed_through),
            "passed_through_reasons": report.passed_through,
            "dropped": report.dropped,
        },
        "roundtrip": {
            "tensors": first["source_tensors"] - len(report.dropped),
            "equal": sum(rank["outcome"].equal for rank in ranks),
            "bitwise_equal": not mismatches,
            "mismatched": sorted(mismatches),
        },
        "mismatches": mismatches,
        "peak_rss_mb_per_rank": [rank["peak_rss_mb"] for rank in ranks],
        "seconds": model.slowest(ranks),
    }
