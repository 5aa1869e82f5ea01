"""Prove that a checkpoint's Megatron model is the Hugging Face model: bits, outputs, gradients.

Exit code 1 where any check fails.
"""

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus import registry
from isthmus.cli import config_options, layout_options, model, output, workers

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout
    from isthmus.testing.verify import Request

STAGES = {
    **model.BUILD,
    "load": "loading the weights",
    "export": "exporting them again, comparing bits",
    "build_for_forward": "building the model in the dtype of the comparison",
    "load_for_forward": "loading the weights into it",
    "forward": "running Megatron",
    "reference": "running Hugging Face",
    "gradients": "comparing gradients",
}
REL_RMS = (
    "rel RMS: the size of the difference from Hugging Face over the size of Hugging Face's values;"
    " 1e-06 means that six digits agree."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, layout, what to compare and on which tokens."""
    parser.add_argument("hf_dir", metavar="HF_DIR", help="checkpoint folder or hub id")
    layout_options.add_layout_arguments(parser)
    config_options.add_arguments(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of both models in the comparison (default: float32, which shows the smallest mistake)",
    )
    parser.add_argument("--grads", action="store_true", help="compare the gradient of every parameter too")
    parser.add_argument("--packed", action="store_true", help="run sequences packed end to end in one row")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="also write a page to look at")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of a sequence (default: 32)")
    model.add_seed_argument(parser, "the tokens")


def run(args: argparse.Namespace) -> int:
    """Verify HF_DIR at the layout; 1 where a check fails."""
    if workers.under_torchrun():
        from isthmus.launch.worker import EXACT

        os.environ.update(EXACT)
    import torch

    from isthmus.bridge import AutoBridge
    from isthmus.testing.verify import Request

    layout = layout_options.layout(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_dir)
    request = Request(
        dtype=getattr(torch, args.dtype),
        grads=args.grads,
        packed=args.packed,
        tokens=args.tokens,
        seed=args.seed,
        overrides=config_options.fields(args),
    )
    bridge.hf_config.as_transformers_reads_it()  # or there is no model to compare with
    model.check(bridge, layout, request.overrides)
    request.check(layout, bridge.megatron_fields["seq_length"])
    if args.report is not None:
        output.check_file("--report", args.report)
    _preload(bridge)
    ranks = workers.run(layout, on_rank, layout, str(bridge.folder), request)
    document = {"checkpoint": args.hf_dir, **merged(ranks), "versions": _versions(bridge)}
    _print(document, args)
    if args.report is not None and output.is_reporting_rank():
        from isthmus.testing.report import page

        args.report.write_text(page(document), encoding="utf-8")
    output.write_json(args, document)
    return 0 if document["passed"] else 1


def on_rank(layout: "Layout", hf_dir: str, request: "Request") -> dict[str, Any]:
    """One rank's part: its document, memory and seconds."""
    from isthmus.bridge import AutoBridge
    from isthmus.testing.verify import verify

    watch = model.Stopwatch(STAGES)
    document = verify(AutoBridge.from_hf_pretrained(hf_dir), layout, request, watch)
    return {"document": document, "peak_rss_mb": model.peak_rss_mb(), "seconds": watch.seconds}


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's document, with the memory of every rank and the seconds of the slowest."""
    seconds: dict[str, float] = {}
    for rank in ranks:
        for stage, time in rank["seconds"].items():
            seconds[stage] = max(time, seconds.get(stage, 0.0))
    return {
        **ranks[0]["document"],
        "peak_rss_mb_per_rank": [rank["peak_rss_mb"] for rank in ranks],
        "seconds": seconds,
    }


def _versions(bridge: "AutoBridge") -> dict[str, str]:
    """Of what took part, by dist."""
    names = ["isthmus-core", registry.families()[bridge.hf_config.model_type].dist]
    return {name: version(name) for name in (*names, "megatron-core", "transformers", "torch")}


def _preload(bridge: "AutoBridge") -> None:
    """Import the family's and HF's modeling files once, for all local workers."""
    if workers.under_torchrun():
        return
    from isthmus import launch

    names = [bridge.family.config_class, bridge.family.mtp_reference or ""]
    launch.preload("isthmus.testing.verify", *(name.partition(":")[0] for name in names if name))


def _print(document: dict[str, Any], args: argparse.Namespace) -> None:
    """A line for each check, the verdict, and what failed."""
    out = output.console(args)
    checks = output.table("check", "result", "at most", right=("at most",))
    for row in rows(document):
        checks.add_row(*row)
    out.print(checks)
    if document["forward"]:
        out.print(REL_RMS)
    ranks = output.counted(len(document["peak_rss_mb_per_rank"]), "rank")
    verdict = "PASSED" if document["passed"] else "FAILED"
    out.print(f"{verdict}: {document['model_type']}, {document['dtype']}, {ranks}")
    for name, value in document["request"].get("dropout_off", {}).items():
        out.print(f"  {name}={value} of config.json is off in both models")
    for line in [*output.overruled(document), *document["failures"]]:
        out.print(f"  {line}")


def rows(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(check, result, bound) of each section that was reached."""
    found, bounds = [], document["bounds"] or {}
    if coverage := document["coverage"]:
        left = len(coverage["passed_through"]) + len(coverage["dropped"])
        place = "loaded" if document["roundtrip"] else "have their place"
        text = f"{coverage['loaded']} of {coverage['hf_tensors']} tensors {place}"
        text += f", {left} not loaded on purpose" if left else ""
        text += "".join(f", {name} is {source}" for name, source in coverage.get("shared", {}).items())
        found.append(("coverage", f"{text}, {coverage['megatron_params']} Megatron tensors", ""))
    if quantised := document.get("quantisation"):
        formats = ", ".join(f"{count} {label}" for label, count in quantised["formats"].items())
        low, high = quantised["gain"]
        wrong = len(quantised["implausible"]) or "none"
        text = f"{formats}; gains {low:.2g} to {high:.2g}, {wrong} implausible"
        found.append(("quantised tensors", text, ""))
    if trip := document["roundtrip"]:
        text = f"{trip['tensors'] - len(trip['mismatched'])} of {trip['tensors']} tensors bitwise equal"
        found.append(("round trip", text, ""))
    if dtypes := document["dtypes"]:
        text = f"{output.counted(len(dtypes['fp32_params']), 'parameter')} kept in float32"
        found.append(("dtypes", f"{text}, {len(dtypes['rounded']) or 'none'} rounded", ""))
    if forward := document["forward"]:
        bound = f"{bounds['forward']:.0e}"
        found.append(("logits", _logits(forward), bound))
        worst = max(forward["layers"], key=lambda row: row["rel_rms"])
        text = f"rel RMS {worst['rel_rms']:.1e} at worst, after layer {worst['layer']}"
        found.append(("hidden states", f"{text} of 0 to {len(forward['layers']) - 1}", bound))
        if forward["mtp"]:
            found.append(("prediction block (MTP)", _logits(forward["mtp"]), bound))
    if gradients := document["gradients"]:
        text = f"rel RMS {gradients['rel_rms']:.1e} over {gradients['params']} parameters"
        found.append(("gradients", text, f"{bounds['gradients']:.0e}"))
        text = f"rel RMS {gradients['rel_rms_max']:.1e}: {gradients['worst']}"
        found.append(("worst gradient", text, f"{bounds['worst_gradient']:.0e}"))
        text = f"{gradients['grad_norm']:.6g}, off by {gradients['grad_norm_rel_err']:.1e}"
        found.append(("gradient norm", text, f"{bounds['gradients']:.0e}"))
    return found


def _logits(section: dict[str, Any]) -> str:
    return f"rel RMS {section['rel_rms']:.1e}, same next token for {section['argmax_agreement']:.1%}"
