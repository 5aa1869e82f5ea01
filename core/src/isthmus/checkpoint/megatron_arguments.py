"""A model as arguments of Megatron's own training script, so that an import starts a run as it is."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional

from isthmus.activations import same_function

# Config fields whose argument has another name.
RENAMED = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
# Config fields that a training script sets from other arguments, or whose value follows from them.
IMPLIED = frozenset(
    {
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "fp16",
        "should_pad_vocab",
        "gated_linear_unit",
        "activation_func",
        "share_embeddings_and_output_weights",
        "transformer_impl",
    }
)
# Sizes that Megatron derives where no argument gives them; tensors' shapes tell them too.
DERIVED = frozenset({"vocab_size", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size"})


def arguments(fields: Mapping[str, Any], spec: Any = None) -> list[str]:
    """Arguments that make Megatron's training script build a model of these config `fields`.

    Parallel sizes, data, optimizer and sequence length are left to the run. `spec` is the layer spec's
    function, for `--spec`. ValueError lists fields that no argument can express.
    """
    actions, defaults = _actions(), _defaults()
    found = _implied(fields, getattr(spec, "gated_activation", None))
    if spec is not None:
        found += ["--spec", spec.__module__, spec.__name__]
    unknown = []
    for name, value in fields.items():
        if name in IMPLIED:
            continue
        action = actions.get(RENAMED.get(name, name))
        if action is None and name in defaults and defaults[name] == value:
            continue  # a script has no other value for it
        if action is None:
            unknown.append(f"{name}={value!r}")
        elif value != action.default:
            found += _argument(action, value)
    if unknown:
        raise ValueError(f"Megatron's training script has no argument for {', '.join(unknown)}")
    return found


def fields(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config fields among `names` that a run's arguments tell: inverse of :func:`arguments`.

    An argument that was not saved has its default; of `DERIVED`, only what was given is told.
    """
    told = {**{name: action.default for name, action in _actions().items()}, **args}
    found = {name: told[RENAMED.get(name, name)] for name in names if RENAMED.get(name, name) in told}
    found = {
        name: value
        for name, value in found.items()
        if name not in IMPLIED and not (name in DERIVED and value is None)
    }
    found["share_embeddings_and_output_weights"] = not told["untie_embeddings_and_output_weights"]
    if not told["group_query_attention"]:
        found["num_query_groups"] = told["num_attention_heads"]
    if told["swiglu"]:
        found |= {"gated_linear_unit": True, "activation_func": functional.silu}
    return found


def namespace(words: list[str]) -> argparse.Namespace:
    """The arguments `words` as Megatron's parser reads them: those alone, no default of another one."""
    parser = _parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser.parse_args(words)


def _implied(fields: Mapping[str, Any], by_spec: Any) -> list[str]:
    """Arguments that stand for several fields, or for a field turned round.

    `by_spec` is the activation of gated MLPs that the layer spec puts in where the arguments state no gate.
    """
    found = []
    if fields.get("params_dtype") in (torch.bfloat16, torch.float16):
        found.append("--bf16" if fields["params_dtype"] == torch.bfloat16 else "--fp16")
    if not fields.get("share_embeddings_and_output_weights"):
        found.append("--untie-embeddings-and-output-weights")
    if "num_query_groups" in fields:
        found.append("--group-query-attention")
    if fields.get("gated_linear_unit"):
        if fields["activation_func"] is functional.silu:
            found.append("--swiglu")
        elif by_spec is not None and same_function(fields["activation_func"], by_spec):
            found.append("--no-bias-gelu-fusion")  # it knows no gate
        else:
            raise ValueError(
                f"Megatron's training script has no argument for a gated {fields['activation_func']}"
            )
    return found


def _argument(action: argparse.Action, value: Any) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    return [flag, repr(value).replace(" ", "") if isinstance(value, list | tuple) else str(value)]


def _actions() -> dict[str, argparse.Action]:
    return {action.dest: action for action in _parser()._actions if action.option_strings}


def _defaults() -> dict[str, Any]:
    """Megatron's own value of every field that has one."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {field.name: field.default for field in dataclasses.fields(MLATransformerConfig)}


def _parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
