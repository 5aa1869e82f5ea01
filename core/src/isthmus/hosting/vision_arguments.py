"""What forward of a vision-language model is given: tensors of whole rows, or an error that lists the others.

Pure, and of every family alike; what belongs together in vision inputs each family knows itself.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """LookupError that lists the keyword arguments `given` that forward does not have."""
    if unknown := [name for name in given if name not in known]:
        raise LookupError(
            f"forward has no argument {', '.join(map(repr, unknown))}; it has {', '.join(known)}. Leave out"
            " what the model does not take"
        )


def check_ids(input_ids: Any) -> None:
    """ValueError: not the token ids (b, s) of whole rows."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}, expected a tensor (b, s) of whole rows")
    kind = input_ids.dtype
    if input_ids.dim() != 2 or not input_ids.numel() or not whole_numbers(input_ids):
        raise ValueError(
            f"input_ids is {tuple(input_ids.shape)} of {kind}, expected token ids (b, s) of whole rows"
        )


def check(
    input_ids: Tensor,
    boundaries: Tensor | None,
    position_ids: Any,
    per_token: Mapping[str, Any],
    vision: Mapping[str, Any],
    vocabulary: int,
    placeholders: Collection[int] = (),
    axes: int = 1,
    tp: int = 1,
    cp: int = 1,
) -> None:
    """ValueError, a line for each argument that is none for the rows `input_ids` (b, s).

    Args:
        boundaries: of a packed row, its sequences' starts and the last one's stop, in tokens.
        position_ids: (b, s), as Megatron counts them, or with more than one of `axes` (axes, b, s).
        per_token: by name, what has a value for each token.
        vision: by name, the vision inputs, whose shapes the family knows.
        vocabulary: its size, which all token ids but the `placeholders` are below.
        tp, cp: ranks that divide a row; tensor-parallel ones do under sequence parallelism alone.
    """
    shape, lines = tuple(input_ids.shape), []
    given = {"position_ids": position_ids, **per_token, **vision}
    others = [name for name, value in given.items() if value is not None and not isinstance(value, Tensor)]
    lines += [f"{name} is a {type(given[name]).__name__}, expected a tensor" for name in others]
    lines += [
        f"{name} is {tuple(value.shape)}, expected {shape} as input_ids, of whole rows"
        for name, value in per_token.items()
        if value is not None and name not in others and tuple(value.shape) != shape
    ]
    outside = (input_ids < 0) | (input_ids >= vocabulary)
    for token in placeholders:
        outside = outside & (input_ids != token)
    if bool(outside.any()):
        # Tensor-parallel ranks would take each for one of another rank's, and embed it as zeros.
        wrong = ", ".join(map(str, input_ids[outside].unique().tolist()[:8]))
        samples = ", ".join(map(str, outside.any(-1).nonzero().flatten().tolist()))
        lines.append(f"input_ids has {wrong} in row {samples}, expected tokens below vocab_size={vocabulary}")
    if shape[1] % (tp * cp):
        lines.append(
            f"input_ids has rows of {shape[1]} tokens, expected a multiple of {tp * cp}:"
            f" tensor_model_parallel_size={tp} with sequence_parallel and context_parallel_size={cp} divide"
            " them. Pad behind the tokens, with a loss_mask of 0 there"
        )
    if boundaries is not None and (stop := int(boundaries[-1])) != shape[1]:
        lines.append(
            f"packed_seq_params has its last boundary at {stop}, the row {shape[1]} tokens: make padding a"
            " sequence of its own, with its stop in cu_seqlens"
        )
    elif position_ids is not None and "position_ids" not in others:
        lines += _positions(shape, boundaries, position_ids, axes)
    if lines:
        raise ValueError("forward cannot take these arguments:\n  " + "\n  ".join(lines))


def _positions(
    shape: tuple[int, ...], boundaries: Tensor | None, position_ids: Tensor, axes: int
) -> list[str]:
    known = [shape, *([(axes, *shape)] if axes > 1 else [])]
    if (found := tuple(position_ids.shape)) not in known:
        return [f"position_ids is {found}, expected {' or '.join(map(str, known))}"]
    if found != shape:
        return []
    ends = [0, shape[1]] if boundaries is None else boundaries.tolist()
    counted = torch.cat([torch.arange(stop - start) for start, stop in pairwise(ends)])
    differ = (position_ids != counted.to(position_ids.device)).any(-1).nonzero().flatten().tolist()
    if not differ:
        return []
    return [
        f"position_ids of row {', '.join(map(str, differ))} are not 0, 1, 2, ... in each sequence, as"
        " Megatron counts them: leave position_ids out"
    ]


def whole_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds integers: no floats, and no booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def named(samples: Sequence[int]) -> str:
    """The numbers of samples as errors have them, each once: "sample 2", "samples 0, 2"."""
    unique = sorted(set(samples))
    return f"sample{'s' if len(unique) > 1 else ''} {', '.join(map(str, unique))}"


def check_together(lines: Sequence[str]) -> None:
    """ValueError with the lines, of how a family's vision inputs and tokens do not agree; none: nothing."""
    if lines:
        raise ValueError("vision inputs and tokens do not belong together:\n  " + "\n  ".join(lines))
