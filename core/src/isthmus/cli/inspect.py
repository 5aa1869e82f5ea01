"""What a checkpoint holds and what becomes of each tensor, from its headers alone.

Of a quantised one also a sample is read, to show what the scales make of the codes.

Exit code 1 where a tensor has no rule or another shape than the config makes it, or a rule finds no tensor. A
checkpoint that no installed family reads is still described, then the request fails with the family's error.
"""

import argparse
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from isthmus.cli import output

if TYPE_CHECKING:
    from isthmus.checkpoint.reader import TensorInfo
    from isthmus.config import HFConfig
    from isthmus.weights import WeightMap

EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
STACKED_EXPERTS = re.compile(r"(?:^|\.)experts\.\D")
MTP = re.compile(r"mtp\.layers\.(\d+)\.")

WRONG = {"missing": "MISSING", "unmapped_hf": "NO RULE", "wrong_shapes": "WRONG SHAPE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint's folder."""
    parser.add_argument("hf_dir", metavar="HF_DIR", help="checkpoint folder or hub id")


def run(args: argparse.Namespace) -> int:
    """Describe HF_DIR; 1 where coverage is incomplete."""
    from isthmus.checkpoint.dequantised import dequantised
    from isthmus.checkpoint.reader import CheckpointReader
    from isthmus.checkpoint.source import read_config, resolve
    from isthmus.config import HFConfig

    folder = resolve(args.hf_dir)
    config = HFConfig.from_text(read_config(folder))
    with CheckpointReader(folder) as stored:
        document = {"folder": str(folder), **describe(config, stored.tensors)}
        try:
            reader = dequantised(stored, config.raw)
            if reader is not stored:
                document["quantization"] |= {"tensors": formats(reader), "sample": sample(reader)}
                document["parameters"] = sum(map(_elements, reader.tensors.values()))
            document |= map_tensors(config, reader.tensors)
            unreadable = None
        except (LookupError, ValueError) as error:
            unreadable = error
    _print(output.console(args), document)
    output.write_json(args, document)
    if unreadable is not None:
        raise unreadable
    return 1 if any(document["coverage"][kind] for kind in WRONG) else 0


def describe(config: "HFConfig", tensors: Mapping[str, "TensorInfo"]) -> dict[str, Any]:
    """What config and headers say without a family; the fields that need one are null."""
    from isthmus.checkpoint.dtypes import name_of

    dtypes: dict[str, dict[str, int]] = {}
    for info in tensors.values():
        row = dtypes.setdefault(name_of(info.dtype), {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += _elements(info)
        row["bytes"] += info.nbytes
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "files": len({info.file for info in tensors.values()}),
        "tensors": len(tensors),
        "parameters": sum(row["parameters"] for row in dtypes.values()),
        "bytes": sum(row["bytes"] for row in dtypes.values()),
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1]["bytes"])),
        "quantization": _quantization(config, tensors),
        "experts": _experts(tensors),
        "tie_word_embeddings": config.get("tie_word_embeddings"),
        "family": None,
        "overruled": {},
        "mtp": None,
        "coverage": None,
    }


def map_tensors(config: "HFConfig", tensors: Mapping[str, "TensorInfo"]) -> dict[str, Any]:
    """What the checkpoint's family adds: tie, MTP block, coverage. LookupError where no family reads it."""
    from isthmus import registry

    family = registry.family(config.model_type)
    keys, shapes = frozenset(tensors), {name: info.shape for name, info in tensors.items()}
    overruled = family.overruled(config, shapes) if family.overruled else {}
    config = config.overruled_by(overruled)
    fields = family.model_config(config, keys)
    weights = family.weights(config, keys, SimpleNamespace(**fields))
    coverage = weights.cover(tensors)
    loaded = {name: shapes[name] for name in coverage.loaded}
    misshapen = family.tiny.misshapen(config, loaded) if family.tiny else {}
    return {
        "overruled": overruled,
        "family": family.name,
        "tie_word_embeddings": bool(fields.get("share_embeddings_and_output_weights")),
        "mtp": _mtp(weights, tensors),
        "coverage": {
            "hf_tensors": len(tensors),
            "loaded": len(coverage.loaded) - len(misshapen),
            "passed_through": sorted(coverage.passed_through),
            "passed_through_reasons": coverage.passed_through,
            "dropped": coverage.dropped,
            "missing": coverage.missing,
            "unmapped_hf": coverage.unknown,
            "wrong_shapes": misshapen,
        },
    }


def _quantization(config: "HFConfig", tensors: Mapping[str, "TensorInfo"]) -> dict[str, Any] | None:
    """The method that the config names, and the stored types that are codes, not numbers; None if neither."""
    from isthmus.quant.find import code_dtypes
    from isthmus.quant.settings import entries, method_of

    declared, dtypes = entries(config.raw), code_dtypes(config.raw, tensors)
    if not declared and not dtypes:
        return None
    entry = next(iter(declared.values()), None)
    stated = entry.get("fmt", entry.get("format")) if isinstance(entry, Mapping) else None
    return {"method": method_of(entry) if declared else None, "format": stated, "dtypes": dtypes}


def formats(reader: Any) -> dict[str, int]:
    """How many tensors of a quantised checkpoint each format has."""
    from collections import Counter

    return dict(Counter(item.label for item in reader.quantised.values()))


def sample(reader: Any, rows: int = 256) -> list[dict[str, Any]]:
    """Of the first tensor of each format, some rows: their spread as codes and as the numbers they mean."""
    found = {}
    for name, item in reader.quantised.items():
        if item.label not in found:
            index = 0 if len(item.shape) == 3 else None
            some = slice(0, min(rows, item.shape[-2]))
            codes = item.codec.decode(reader.stored.slice(item.codes, some, None, index)) * item.codec.unit
            values = reader.slice(name, some, None, index).float()
            found[item.label] = {
                "name": name,
                "format": item.label,
                "std_codes": codes.std().item(),
                "std_values": values.std().item(),
            }
    return list(found.values())


def _experts(tensors: Mapping[str, "TensorInfo"]) -> dict[str, Any] | None:
    """How experts are stored: one tensor each, or stacked along dim 0; None without experts."""
    single = {int(match[1]) for name in tensors if (match := EXPERT.search(name))}
    stacked = {info.shape[0] for name, info in tensors.items() if STACKED_EXPERTS.search(name) and info.shape}
    if single and stacked:
        return {"layout": "mixed", "count": max(max(single) + 1, *stacked)}
    if single:
        return {"layout": "per_expert", "count": max(single) + 1}
    return {"layout": "fused", "count": max(stacked)} if stacked else None


def _mtp(weights: "WeightMap", tensors: Mapping[str, "TensorInfo"]) -> dict[str, int] | None:
    """The multi-token-prediction block: its layers, and the source's tensors that only it holds."""
    layers = {int(match[1]) for name in weights.megatron if (match := MTP.match(name))}
    if not layers:
        return None
    held = [
        tensors[name]
        for name, owners in weights.hf.items()
        if name in tensors and all(MTP.match(owner) for owner in owners)
    ]
    return {"layers": len(layers), "tensors": len(held), "parameters": sum(map(_elements, held))}


def _elements(info: "TensorInfo") -> int:
    count = 1
    for size in info.shape:
        count *= size
    return count


def _print(out: Any, document: dict[str, Any]) -> None:
    """The document for people."""
    from rich.filesize import decimal

    experts, mtp, quantization = document["experts"], document["mtp"], document["quantization"]
    tie = document["tie_word_embeddings"]
    facts = output.table("", "")
    facts.show_header = False
    facts.add_row("folder", document["folder"])
    facts.add_row("model type", f"{document['model_type']} ({', '.join(document['architectures'] or ['?'])})")
    facts.add_row(
        "size",
        f"{document['parameters']:,} parameters, {decimal(document['bytes'])},"
        f" {document['tensors']:,} tensors in {output.counted(document['files'], 'file')}",
    )
    facts.add_row("quantisation", "none" if quantization is None else _words(quantization))
    sampled = quantization or {}
    for row in sampled.get("sample", ()):
        spread = f"std {row['std_codes']:.3g} as codes, {row['std_values']:.3g} as numbers"
        facts.add_row("", f"{sampled['tensors'][row['format']]} tensors {row['format']}: {spread}")
    facts.add_row("experts", "none" if experts is None else f"{experts['count']}, {experts['layout']}")
    facts.add_row("tied embeddings", "not stated" if tie is None else "yes" if tie else "no")
    if document["family"] is not None:
        for line in output.overruled(document):
            facts.add_row("overruled", line)
        facts.add_row("MTP", "none" if mtp is None else _words(mtp))
    out.print(facts)

    rows = output.table("dtype", "tensors", "parameters", "bytes", right=("tensors", "parameters", "bytes"))
    for name, row in document["dtypes"].items():
        rows.add_row(name, f"{row['tensors']:,}", f"{row['parameters']:,}", decimal(row["bytes"]))
    out.print()
    out.print(rows)
    if document["coverage"] is not None:
        out.print()
        _print_coverage(out, document["coverage"])


def _print_coverage(out: Any, coverage: dict[str, Any]) -> None:
    """One line for each kind of tensor, names collapsed."""
    from isthmus.weights import collapse

    rows = output.table("coverage", "tensors", "names", right=("tensors",))
    rows.add_row("loaded", f"{coverage['loaded']:,}", "")
    for kind, reasons in (("passed through", "passed_through_reasons"), ("dropped", "dropped")):
        for reason in dict.fromkeys(coverage[reasons].values()):
            names = [name for name, why in coverage[reasons].items() if why == reason]
            rows.add_row(kind, f"{len(names):,}", f"{', '.join(collapse(names))} ({reason})")
    for kind, words in WRONG.items():
        if isinstance(coverage[kind], dict):
            for what in dict.fromkeys(coverage[kind].values()):
                names = [name for name, why in coverage[kind].items() if why == what]
                rows.add_row(words, f"{len(names):,}", f"{', '.join(collapse(names))} {what}")
        elif coverage[kind]:
            rows.add_row(words, f"{len(coverage[kind]):,}", "\n".join(collapse(coverage[kind])))
    out.print(rows)


def _words(values: Mapping[str, Any]) -> str:
    """`layers 1; tensors 20`: what a small dict says."""
    told = []
    for key, value in values.items():
        if value not in (None, []) and key not in ("tensors", "sample"):
            words = (
                ", ".join(value)
                if isinstance(value, list)
                else f"{value:,}"
                if isinstance(value, int)
                else value
            )
            told.append(f"{key} {words}")
    return "; ".join(told)
