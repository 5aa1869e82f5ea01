"""Two checkpoint folders, tensor by tensor and bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus.checkpoint.dtypes import name_of, same_bits
from isthmus.checkpoint.reader import CheckpointReader

RELEASE = 1 << 30  # bytes compared before their pages are let go, so that memory stays flat


@dataclass(slots=True)
class Comparison:
    """Names of tensors by outcome; `differing` maps a name to what differs."""

    equal: int = 0
    differing: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # in the first only
    added: list[str] = field(default_factory=list)  # in the second only


def compare(
    first: CheckpointReader,
    second: CheckpointReader,
    *,
    rank: int = 0,
    size: int = 1,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Comparison:
    """Compare every `size`-th tensor from `rank` on: ranks divide the work, all of them together cover it.

    `advance` is told the bytes of the first folder as they are compared.
    """
    result = Comparison()
    if rank == 0:
        result.added = [name for name in second.tensors if name not in first.tensors]
    compared = 0
    for name in list(first.tensors)[rank::size]:
        info, other = first.tensors[name], second.tensors.get(name)
        if other is None:
            result.missing.append(name)
        elif other.dtype != info.dtype:
            result.differing[name] = f"dtype {name_of(info.dtype)}, {name_of(other.dtype)}"
        elif other.shape != info.shape:
            result.differing[name] = f"shape {info.shape}, {other.shape}"
        elif same_bits(first.slice(name), second.slice(name)):
            result.equal += 1
        else:
            result.differing[name] = "bits"
        advance(info.nbytes)
        compared += info.nbytes
        if compared > RELEASE:
            first.release()
            second.release()
            compared = 0
    return result
