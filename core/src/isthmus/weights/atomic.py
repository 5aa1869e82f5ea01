"""Groups of HF tensors that inference engines make one of: a stream of weights does not part them.

What one Megatron tensor is made of is a group by itself. `atomic` declares those that Megatron holds apart
and engines do not.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from isthmus.weights.names import collapse


@dataclass(frozen=True, slots=True)
class Atomic:
    """HF tensors of these names below one module, of which an engine makes one."""

    names: tuple[str, ...]


def atomic(*names: str) -> Atomic:
    """A group, wherever a module has it: ``atomic("self_attn.q_proj.weight", "self_attn.k_proj.weight")``."""
    return Atomic(names)


def groups(declared: Iterable[Atomic], hf: Collection[str]) -> list[list[str]]:
    """The declared groups that the HF tensors `hf` have, full names in declared order.

    LookupError where a module has one of a group's tensors and lacks another.
    """
    found, lacking = [], []
    for group in declared:
        ends = tuple(f".{name}" for name in group.names)
        below: dict[str, None] = {}  # what is before the names
        for name in hf:
            if name.endswith(ends):
                end = next(end for end in ends if name.endswith(end))
                below[name.removesuffix(end)] = None
        for module in below:
            found.append([module + end for end in ends])
            lacking += [name for name in found[-1] if name not in hf]
    if lacking:
        raise LookupError(
            f"declared as part of an atomic group, and no rule has them: {', '.join(collapse(lacking))};"
            " declare the group only where all of it exists"
        )
    return found
