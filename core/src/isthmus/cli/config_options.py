"""`--set FIELD=VALUE`: fields of the Megatron model config, for commands that build a model."""

import argparse
import ast
from typing import Any

OWN = {  # fields that the commands set themselves -> by which options
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "virtual_pipeline_model_parallel_size": "--vp",
    "expert_model_parallel_size": "--ep",
    "expert_tensor_parallel_size": "--etp",
    "context_parallel_size": "--cp",
    "sequence_parallel": "--sp or --no-sp",
    "pipeline_model_parallel_layout": "--pipeline-layout",
    "params_dtype": "--dtype",
    "calculate_per_token_loss": None,
    "perform_initialization": None,
}
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
    """The fields by name. ValueError: not of the form FIELD=VALUE, or a field that is set otherwise."""
    found = dict(_parse(text) for text in args.fields)
    for name in found.keys() & OWN.keys():
        instead = f"use {OWN[name]}" if OWN[name] else "the command sets this field itself"
        raise ValueError(f"--set {name}={found[name]}: {instead}")
    return found


def _parse(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"--set {text}: expected FIELD=VALUE, for example --set moe_grouped_gemm=false")
    if value.lower() in PLAIN:
        return name, PLAIN[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return name, value  # a name: delta_net=megatron
