"""Dtypes and bits: what a dtype is called, what a change of dtype loses, which one a checkpoint is of."""

from collections import Counter
from collections.abc import Iterable

import torch

from isthmus.checkpoint.header import TensorInfo


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name as config.json and people write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_dtype(name: torch.dtype | str) -> torch.dtype | None:
    """A dtype by name; None for "auto" and "source"."""
    if name in ("auto", "source"):
        return None
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be auto, source, float32, bfloat16 or float16, got {name!r}")
    return dtype


def rounds(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether some value of `source` has no exact counterpart in `target`, both floats or both integers."""
    return torch.promote_types(source, target) != target


def other_kind(source: torch.dtype, held: torch.dtype) -> str:
    """Why a checkpoint's tensor and the model's are never cast to one another; empty where they may be."""
    if _kind(source) == _kind(held):
        return ""
    return f"source is {name_of(source)}, parameter is {name_of(held)}, numbers of another kind"


def narrower(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether finite values of `source` can be infinite in `target`."""
    if not source.is_floating_point or not target.is_floating_point:
        return False
    return torch.finfo(target).max < torch.finfo(source).max


def overflows(values: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether a finite one of the values has become infinite in the cast."""
    if not narrower(values.dtype, cast.dtype) or not (infinite := cast.isinf()).any():
        return False
    return bool((infinite & values.isfinite()).any())


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "integer"


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype | None:
    """The float dtype of most of the checkpoint's bytes; None where there are no floats.

    Rounding that one to `params_dtype` is the user's choice, rounding another never is.
    """
    nbytes: Counter[torch.dtype] = Counter()
    for info in infos:
        if info.dtype.is_floating_point:
            nbytes[info.dtype] += info.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; unlike `torch.equal`, NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
