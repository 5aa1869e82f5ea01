"""The layout options that every command with ranks shares, and the layout they mean."""

import argparse
import sys

from isthmus.cli.output import is_reporting_rank
from isthmus.layout import SIZES, Layout

MEANING = {
    "tp": "tensor parallel ranks",
    "pp": "pipeline stages",
    "vp": "virtual stages (model chunks) per pipeline stage",
    "ep": "expert parallel ranks",
    "etp": "tensor parallel ranks inside an expert",
    "cp": "context parallel ranks",
    "dp": "data parallel ranks; raised where ep x etp asks for more ranks",
}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """`--tp --pp --vp --ep --etp --cp --dp --sp/--no-sp --pipeline-layout`."""
    group = parser.add_argument_group("layout", "World size is tp x pp x cp x dp.")
    for name in SIZES:
        meaning = f"{MEANING[name]} (default: 1)"
        group.add_argument(f"--{name}", type=int, default=1, metavar="N", help=meaning)
    group.add_argument(
        "--sp",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="sequence parallelism (default: on where tp > 1)",
    )
    group.add_argument(
        "--pipeline-layout",
        metavar="LAYOUT",
        help="Megatron's pipeline_model_parallel_layout, e.g. 'Et*3|t*4|t*4|t*3mL'",
    )


def layout(args: argparse.Namespace) -> Layout:
    """The resolved layout of the options; a note on stderr where dp had to be raised."""
    asked = Layout(
        **{name: getattr(args, name) for name in SIZES}, sp=args.sp, pipeline_layout=args.pipeline_layout
    )
    resolved = asked.resolved()
    if resolved.dp != asked.dp and is_reporting_rank():
        print(
            f"isthmus {args.command}: dp raised from {asked.dp} to {resolved.dp}, so that"
            f" ep x etp = {asked.ep} x {asked.etp} divides tp x cp x dp; world size {resolved.world_size}",
            file=sys.stderr,
        )
    return resolved
