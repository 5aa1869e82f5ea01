"""Parameters that keep their dtype when the model around them is cast, with their exact bits.

The one idea: a rounded value can never be widened back, so the bits must be held *before* the cast and put
back after it. A mark therefore keeps a reference to the parameter's storage; casting a module gives its
parameters new storage and leaves the old one, with everything written into it so far, to the mark. Order
matters: build, mark, (load), cast, enforce, then DDP and the optimizer, which take views of what they find.
Megatron's Float16Module, which casts, enforces marks by itself once a parameter was marked.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isthmus.checkpoint.dtypes import same_bits

if TYPE_CHECKING:
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(slots=True)
class _Mark:
    """A parameter's dtype, and its storage of that dtype: None once the last cast is over."""

    dtype: torch.dtype
    exact: Tensor | None


def mark_param_dtype(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Make `param` of `dtype` now, and remember to keep it so through any later cast of its module.

    A narrower parameter is widened in place, exactly. Values may be written into the parameter at any time
    before the cast: the mark shares its storage. A cast that came before the mark has already rounded, and
    only whoever holds the source can give the bits back. Also sets `param.keep_in_fp32`, which later versions
    of megatron-core read. ValueError where `dtype` could not hold the parameter's values.
    """
    if torch.promote_types(param.dtype, dtype) != dtype or not dtype.is_floating_point:
        raise ValueError(
            f"cannot mark a {param.dtype} parameter of shape {tuple(param.shape)} as {dtype}: values would "
            "be rounded. Cast it first, or mark it with a dtype that holds them"
        )
    param.data = param.data.to(dtype)
    param.keep_in_fp32 = dtype == torch.float32  # type: ignore[attr-defined]
    param.isthmus_mark = _Mark(dtype, param.data)  # type: ignore[attr-defined]
    _tell_megatron()


def marked_dtype(param: nn.Parameter) -> torch.dtype | None:
    """The dtype that `param` must keep; None where it may be cast with its module."""
    if (mark := _mark(param)) is not None:
        return mark.dtype
    return torch.float32 if getattr(param, "keep_in_fp32", False) else None


def enforce_marked_param_dtypes(model_chunks: nn.Module | Iterable[nn.Module]) -> list[str]:
    """Give marked parameters their dtype and exact bits back; the names of all marked parameters.

    Call it after the cast (Megatron's Float16Module) and before DDP. Calling it again changes nothing. A
    parameter whose value changed *after* the cast has no exact value to go back to, neither the held one,
    which is out of date, nor the current one, which is rounded: that is a ValueError naming all such
    parameters, and nothing is changed. Enforce first, then load: a load into an enforced parameter is exact.
    """
    _tell_megatron()
    chunks: list[nn.Module] = [model_chunks] if isinstance(model_chunks, nn.Module) else [*model_chunks]
    named = [(name, param) for chunk in chunks for name, param in chunk.named_parameters()]
    marked = [(name, param) for name, param in named if marked_dtype(param) is not None]
    _refuse({name: reason for name, param in marked if (reason := _lost(param))})
    for _, param in marked:
        if (mark := _mark(param)) is None:
            continue
        if param.dtype != mark.dtype:
            exact = param.data.to(mark.dtype) if param.is_meta else mark.exact
            assert exact is not None  # _lost has refused it
            param.data = exact.to(param.device)
        mark.exact = param.data
    return [name for name, _ in marked]


def exact_float16_module(config: "TransformerConfig", module: nn.Module) -> "Float16Module":
    """Megatron's Float16Module around `module`, its marked parameters exact; a `mixed_precision_wrapper`."""
    from megatron.core.transformer.module import Float16Module

    _tell_megatron()
    return Float16Module(config, module)


def _tell_megatron() -> None:
    """Have Megatron keep marks in its own casts and checkpoints, where this process uses Megatron."""
    if "megatron.core" in sys.modules:
        _correct_megatron()


@functools.cache
def _correct_megatron() -> None:
    from megatron.core.transformer.module import Float16Module

    from isthmus import optimizer_state

    optimizer_state.install()
    wrapper: Any = Float16Module
    wrapper.__init__ = _keeping(wrapper.__init__)


def _keeping(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Megatron's, after which the marked parameters of `module` are what they were."""
        marks = [(param, mark) for param in module.parameters() if (mark := _mark(param)) is not None]
        for param, mark in marks:
            # Also what replaced the storage: a move to another device, a new `.data`.
            if param.dtype == mark.dtype:
                mark.exact = param.data
        original(self, config, module, *args, **kwargs)
        enforce_marked_param_dtypes(module)
        for _, mark in marks:
            mark.exact = None  # DDP may move the parameter into its own buffer: do not keep two copies

    return init


def _mark(param: nn.Parameter) -> _Mark | None:
    return getattr(param, "isthmus_mark", None)


def _lost(param: nn.Parameter) -> str:
    """Why the exact value of a marked parameter is not to be had; empty where it is."""
    if param.dtype == marked_dtype(param) or param.is_meta:
        return ""
    if hasattr(param, "main_grad"):
        return f"is {param.dtype} and DDP holds it: enforce before wrapping with DDP"
    mark = _mark(param)
    if mark is None or mark.exact is None or mark.exact.is_meta:
        return f"was cast to {param.dtype} with no exact value held: call mark_param_dtype before the cast"
    if not same_bits(mark.exact.to(device=param.device, dtype=param.dtype), param.data):
        return f"was changed after the cast to {param.dtype}: enforce before loading or changing values"
    return ""


def _refuse(reasons: dict[str, str]) -> None:
    """One ValueError for all names, grouped by reason."""
    if not reasons:
        return
    from isthmus.weights import collapse

    lines = []
    for reason in dict.fromkeys(reasons.values()):
        lines += [f"  {name}: {reason}" for name in collapse([n for n, r in reasons.items() if r == reason])]
    raise ValueError("marked parameters have lost their exact values:\n" + "\n".join(lines))
