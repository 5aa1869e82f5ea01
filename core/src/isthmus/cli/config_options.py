"""`--set FIELD=VALUE`: fields of the Megatron model config, for commands that build a model."""

import argparse
import ast
from typing import Any

PLAIN = {"true": True, "false": False, "none": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--set FIELD=VALUE`, as often as needed."""
    parser.add_argument(
        "--set",
        dest="fields",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the Megatron model config, e.g. moe_grouped_gemm=false; may be repeated",
    )


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields by name. ValueError: not of the form FIELD=VALUE."""
    return dict(_parse(text) for text in args.fields)


def _parse(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"--set {text}: expected FIELD=VALUE, for example --set moe_grouped_gemm=false")
    if value.lower() in PLAIN:
        return name, PLAIN[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a name: delta_net=megatron
