"""Parameters that keep more precision than the rest of the model: those whose source has it."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from isthmus.checkpoint.dtypes import main_dtype, name_of, rounds
from isthmus.checkpoint.header import TensorInfo
from isthmus.names import live_tensors
from isthmus.precision import mark_param_dtype
from isthmus.weights import WeightMap, collapse


def mark_wide_sources(
    chunks: Sequence[nn.Module], weights: WeightMap, tensors: Mapping[str, TensorInfo]
) -> None:
    """Mark parameters whose source among `tensors` has values that `params_dtype` would round.

    Not where the source has the checkpoint's main dtype: rounding that is the user's choice. ValueError
    names parameters that even float32 would round.
    """
    usual = main_dtype(tensors.values())
    wide: dict[str, list[str]] = {}
    for live in live_tensors(chunks):
        bound = weights.megatron.get(live.canonical)
        if bound is None or not isinstance(live.tensor, nn.Parameter):
            continue
        sources = {tensors[hf.name].dtype for hf in bound.hf if hf.name in tensors} - {usual}
        dtype = functools.reduce(torch.promote_types, sources, live.tensor.dtype)
        if rounds(dtype, torch.float32):
            wide.setdefault(name_of(dtype), []).append(live.canonical)
        elif dtype != live.tensor.dtype:
            mark_param_dtype(live.tensor, dtype)
    if wide:
        raise ValueError(
            "parameters are float32 at most, and the checkpoint has wider numbers for some. Store"
            " these in float32:\n  "
            + "\n  ".join(f"{dtype}: {', '.join(collapse(names))}" for dtype, names in wide.items())
        )
