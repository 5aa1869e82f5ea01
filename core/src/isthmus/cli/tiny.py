"""A tiny random checkpoint of a family in its published layout, MTP block included.

The same seed gives the same numbers in every variant. `--list` tells the variants and writes nothing.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli import output
from isthmus.cli.model import DTYPES, add_seed_argument

if TYPE_CHECKING:
    from isthmus.tiny import Variant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Family, target and what to vary."""
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="as in config.json, e.g. qwen3_next")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, nargs="?", help="folder to write")
    add_seed_argument(parser, "the random values")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors (default: the config's own)")
    parser.add_argument("--variant", metavar="V", help="see --list (default: the first that it lists)")
    parser.add_argument("--list", action="store_true", help="list the family's variants; OUT_DIR is not used")
    parser.add_argument("--overwrite", action="store_true", help="replace all that OUT_DIR holds")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, or list the variants."""
    from isthmus.checkpoint.folder import check_target
    from isthmus.registry import family
    from isthmus.tiny import QUANTISED

    chosen = family(args.model_type)
    variants = chosen.variants(args.model_type)
    if args.list:
        _list(args, variants)
        about = {name: variant.about for name, variant in variants.items()} | dict(QUANTISED)
        output.write_json(args, {"model_type": args.model_type, "variants": list(about), "about": about})
        return 0
    if args.out_dir is None:
        raise ValueError(f"where to? Give a folder: isthmus tiny {args.model_type} OUT_DIR")

    if not variants:
        written = {variant.config["model_type"] for variant in chosen.variants().values()}
        raise LookupError(
            f"there is no tiny checkpoint of model_type {args.model_type!r}; family {chosen.name} has them of"
            f" {', '.join(sorted(written)) or 'none'}"
        )
    variant = args.variant or next(iter(variants))
    tiny = chosen.variant(variant, args.model_type)
    check_target(args.out_dir, args.overwrite)

    import torch

    from isthmus.checkpoint.reader import CheckpointReader
    from isthmus.testing.tiny import write_tiny

    dtype = getattr(torch, args.dtype) if args.dtype else None
    write_tiny(chosen, args.out_dir, tiny, seed=args.seed, dtype=dtype, overwrite=args.overwrite)
    with CheckpointReader(args.out_dir) as reader:
        count, nbytes = len(reader.tensors), sum(info.nbytes for info in reader.tensors.values())
    output.console(args).print(f"{args.out_dir}: {variant}, {count} tensors, {nbytes:,} bytes")
    document = {"model_type": args.model_type, "out_dir": str(args.out_dir), "variant": variant}
    output.write_json(args, {**document, "seed": args.seed, "tensors": count, "bytes": nbytes})
    return 0


def _list(args: argparse.Namespace, variants: Mapping[str, "Variant"]) -> None:
    """One line for each variant: what it is."""
    from isthmus.tiny import QUANTISED

    rows = output.table("variant", "what it is")
    for name, variant in variants.items():
        rows.add_row(name, variant.about)
    for name, about in QUANTISED.items():
        rows.add_row(name, f"{about}; of another variant: tied+{name}")
    output.console(args).print(rows)
