"""A delta net whose ranks hand on their states: fla's context parallelism inside the HF module.

Each context-parallel rank runs all of its heads on one contiguous run of tokens. fla's kernels exchange what
the recurrence and the convolution need of the ranks before, in both directions. For GPUs alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Kernels(NamedTuple):
    """fla's functions; each takes a `cp_context`."""

    context: Callable[..., Any]
    delta_rule: Callable[..., Any]
    convolution: Callable[..., Any]


def kernels() -> Kernels:
    """fla's. ValueError: no GPU, or no fla that divides sequences over ranks."""
    if not torch.cuda.is_available():
        raise ValueError(
            "cp='state_passing' runs fla's Triton kernels and needs a GPU; on a CPU use cp='heads', which "
            "computes the same"
        )
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ValueError(
            f"cp='state_passing' needs flash-linear-attention 0.6 or newer ({error}). Try: pip install -U "
            "flash-linear-attention; or use cp='heads'"
        ) from error
    convolution: Any = causal_conv1d
    return Kernels(build_cp_context, chunk_gated_delta_rule, convolution)


@contextmanager
def delta_net(
    modeling: ModuleType, found: Kernels, bounds: tuple[tuple[int, int], ...], width: int, group: ProcessGroup
) -> Iterator[None]:
    """While inside, delta nets of `modeling` run this rank's part of a row of sequences. Collective.

    The part is (1, n, h), the rank-th of equal runs of tokens. RuntimeError at the end: the module called
    other functions, and has run its part as if it were the whole.

    Args:
        bounds: of the sequences, over all ranks; each starts from nothing.
        width: of the convolution.
    """
    starts = torch.tensor([0, *(stop for _, stop in bounds)], dtype=torch.int32)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    context = found.context(
        cu_seqlens=starts.to(device), cu_seqlens_cpu=starts, group=group, conv1d_kernel_size=width
    )

    called: set[str] = set()

    def convolution(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **rest: Any
    ) -> Tensor:
        """HF's is of (b, channels, s), fla's of (b, s, channels)."""
        called.add("causal_conv1d_fn")
        y, _ = found.convolution(
            x=x.transpose(1, 2).contiguous(),
            weight=weight,
            bias=bias,
            activation=activation,
            cp_context=context,
        )
        return y.transpose(1, 2)

    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> Any:
        called.add("torch_chunk_gated_delta_rule")
        return found.delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cp_context=context,
        )

    own: Any = modeling
    kept = own.causal_conv1d_fn, own.torch_chunk_gated_delta_rule
    own.causal_conv1d_fn, own.torch_chunk_gated_delta_rule = convolution, delta_rule
    try:
        yield
    finally:
        own.causal_conv1d_fn, own.torch_chunk_gated_delta_rule = kept
    if missed := {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"} - called:
        raise RuntimeError(
            f"Hugging Face's delta net did not call {' and '.join(sorted(missed))} of {modeling.__name__}, by"
            " which ranks hand on their states. Use hosted_cp='heads' with this version of transformers"
        )
