"""Measure import, export and hosting: `nox -s bench`. Every figure is a ratio inside one run."""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import checkpoint
import import_export
import measure

from isthmus.launch import run
from isthmus.layout import Layout

LAYOUTS = {
    "1 rank": {},
    "tp2": {"tp": 2, "etp": 2},  # experts are divided over the same two ranks
    "ep2": {"ep": 2},
}
MEMORY = 0.05  # of the rank's model, besides the tensors that are in hand


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate that must reach `least` of a reference's; the function measures both in turn."""

    name: str
    function: str
    layout: str
    least: float
    reference: str

    def measure(self, folder: str, scratch: Path, repeats: int) -> dict[str, Any]:
        """The row of this rate, with all its seconds."""
        writes = self.function in ("export", "import_quantised")
        out = {"out": str(scratch / "export")} if writes else {}
        if self.function.endswith("quantised"):
            out["quantised"] = _quantised(folder, scratch)
        # The first rank sees all others finish before it stops its clock.
        seconds = _run(self.function, LAYOUTS[self.layout], folder, repeats=repeats, **out)[0]
        found = measure.ratio(seconds, "reference", "isthmus")
        return {
            "what": f"{self.name}, {self.layout}",
            "against": self.reference,
            "found": f"{found:.2f} of its rate",
            "limit": f">= {self.least:.2g}",
            "holds": found >= self.least,
            "seconds": {name: statistics.median(times) for name, times in seconds.items()},
            "all_seconds": seconds,
        }


RATES = [
    Rate("import, cached files", "import_warm", "1 rank", 0.5, "`get_tensor` + `copy_` into tensors"),
    Rate("import, cold files", "import_cold", "1 rank", 0.8, "reading the files, cold"),
    Rate("whole import, FP8 files", "import_quantised", "1 rank", 1 / 1.5, "the same from bf16 files"),
    Rate("loading, FP8 files, cached", "load_quantised", "1 rank", 1 / 5, "the same from bf16 files, cached"),
    Rate("export", "export", "1 rank", 0.8, "`save_file` of the same tensors"),
    Rate("export", "export", "tp2", 0.8, "`save_file` of all tensors by one process"),
    Rate("export", "export", "ep2", 0.8, "`save_file` of all tensors by one process"),
]


def memory(layout: str, folder: str, scratch: Path, files: str = "") -> list[dict[str, Any]]:
    """The rows of bytes read and of memory above the built model, for the worst rank of a layout.

    `files` says in a row's name what is read where it is not bf16.
    """
    ranks = _run("memory", LAYOUTS[layout], folder, out=str(scratch / "export"))
    worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    room = MEMORY * worst["model"]
    rows = [
        _row(
            f"memory of import{files}, {layout}",
            f"{MEMORY:.0%} of the rank's model, its largest tensor",
            worst["import"],
            room + worst["largest_held"],
        ),
        _row(
            f"memory of export{files}, {layout}",
            f"{MEMORY:.0%} of the rank's model, the largest tensor and its shards",
            worst["export"],
            room + 2 * worst["largest"],
        ),
    ]
    whole, experts = worst["checkpoint"], worst["experts"]
    if layout == "tp2":
        rows.append(_row("bytes read, tp2", "52% of the checkpoint", worst["read"], 0.52 * whole))
    if layout == "ep2":
        own = whole - experts + experts // 2
        rows.append(_row("bytes read, ep2", "half of the experts, all else", worst["read"], own))
    return rows


def _quantised(folder: str, scratch: Path) -> str:
    """The folder of the same checkpoint in FP8, made on first use."""
    target = scratch / "quantised"
    if not target.exists():
        run(1, "checkpoint:quantise", folder, str(target), timeout=3600)
    return str(target)


MIXERS = ("delta net", "attention")


def hosting(mixer: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a hosted module: its time against the bare one's, and a rank's part of the work."""
    name = f"hosted {mixer}"
    (seconds,) = run(1, "hosting:overhead", {}, mixer, repeats=3 * repeats, timeout=3600)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    time = medians["isthmus"] / medians["reference"]
    (whole,) = run(1, "hosting:work", {}, mixer, timeout=3600)
    parts = run(4, "hosting:work", {"tp": 2, "cp": 2}, mixer, timeout=3600)
    part = max(parts) / whole
    return [
        {
            "what": f"{name}, forward and backward, tp1",
            "against": "the same module without Megatron around it",
            "found": f"{time:.3f} of its time",
            "limit": "<= 1.05",
            "holds": time <= 1.05,
            "seconds": medians,
            "all_seconds": seconds,
        },
        {
            "what": f"{name}, FLOPs of a rank, tp2 x cp2",
            "against": "one process",
            "found": f"{part:.3f} of its FLOPs",
            "limit": "<= 0.25",
            "holds": part <= 0.25,
            "flops": {"rank": max(parts), "one process": whole},
        },
    ]


def _row(what: str, against: str, found: float, most: float) -> dict[str, Any]:
    return {
        "what": what,
        "against": against,
        "found": f"{found / 1e6:,.0f} MB",
        "limit": f"<= {most / 1e6:,.0f} MB",
        "holds": found <= most,
        "bytes": found,
    }


def _run(function: str, layout: dict[str, int], folder: str, **options: Any) -> list[dict[str, Any]]:
    world_size = Layout(**layout).resolved().world_size
    return run(world_size, f"import_export:{function}", folder, layout, timeout=3600, **options)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("isthmus-core", "torch", "megatron-core", "safetensors")
    return {
        "cpu": f"{len(names)} x {names[0].partition(': ')[2]}" if names else platform.processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "load": os.getloadavg()[0],
    }


def markdown(rows: list[dict[str, Any]], about: str) -> str:
    """The table for a README."""
    lines = [about, "", "| measured | against | found | limit | |", "|---|---|---|---|---|"]
    for row in rows:
        seconds = row.get("seconds")
        found = row["found"]
        if seconds:
            found += f" ({seconds['isthmus']:.2f} s to {seconds['reference']:.2f} s)"
        mark = "holds" if row["holds"] else "**fails**"
        lines.append(f"| {row['what']} | {row['against']} | {found} | {row['limit']} | {mark} |")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=checkpoint.SHAPES, default="512-experts", help="of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each side; medians are compared")
    parser.add_argument("--only", default="", help="measure what has this text in its name")
    parser.add_argument("--folder", help="where to work: a real disk with 6 GB of room")
    parser.add_argument("--json", help="write all numbers to this file")
    options = parser.parse_args()

    rows = []
    for mixer in MIXERS:
        if options.only in f"hosted {mixer}":
            rows += hosting(mixer, options.repeats)
            print(f"{rows[-2]['what']}: {rows[-2]['found']}", file=sys.stderr)
    if options.only.startswith("hosted"):
        return report(rows, "", options)
    scratch = Path(tempfile.mkdtemp(prefix="isthmus-bench-", dir=options.folder))
    try:
        folder = str(scratch / "checkpoint")
        [nbytes] = run(1, "checkpoint:make", folder, options.shape, timeout=3600)
        tensors = import_export.count(folder)
        for rate in RATES:
            if options.only in f"{rate.name}, {rate.layout}":
                rows.append(rate.measure(folder, scratch, options.repeats))
                print(f"{rows[-1]['what']}: {rows[-1]['found']}", file=sys.stderr)
        for layout in LAYOUTS:
            rows += [row for row in memory(layout, folder, scratch) if options.only in row["what"]]
        if any(options.only in f"memory of {way}, FP8 files, 1 rank" for way in ("import", "export")):
            found = memory("1 rank", _quantised(folder, scratch), scratch, ", FP8 files")
            rows += [row for row in found if options.only in row["what"]]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report(rows, f"{options.shape}: {nbytes / 1e9:.2f} GB in {tensors:,} tensors. ", options)


def report(rows: list[dict[str, Any]], about: str, options: argparse.Namespace) -> int:
    """Print the table; the exit code."""
    about += ", ".join(f"{name} {value}" for name, value in machine().items())
    print(markdown(rows, about))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
