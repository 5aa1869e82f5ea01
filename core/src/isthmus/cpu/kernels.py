"""Torch functions in the place of CUDA and Triton kernels: the delta net's three and DSA's Hadamard rotation.

`B` batch, `S` tokens, `C` channels, `N` heads, `K` and `V` key and value sizes. Arithmetic is fp32. Packed
sequences (B = 1, `cu_seqlens` their bounds) run one by one: nothing passes between them. No megatron here.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens solved at once; any value gives the same result


def l2norm(x: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    """`x` (..., K) with unit length along its last dim."""
    full = x.float()
    return (full * torch.rsqrt(full.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Depthwise convolution of `x` (B, S, C) with `weight` (C, W), each token seeing the W - 1 before it.

    Raises:
        ValueError: an initial or final state, or an activation other than silu, is asked for.
    """
    if initial_state is not None or output_final_state:
        raise ValueError("causal_conv1d keeps no state on the CPU: it is for training")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: activation {activation!r} is not silu")
    channels, width = weight.shape

    def convolve(part: torch.Tensor) -> torch.Tensor:
        past = F.pad(part.transpose(1, 2), (width - 1, 0))
        return F.conv1d(past, weight.unsqueeze(1), bias, groups=channels).transpose(1, 2)

    out = per_sequence(convolve, cu_seqlens, x)
    return (F.silu(out) if activation else out), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Linear attention whose state S (K, V) decays and learns: S = e^g S; S += beta k (v - k S)^T; out = q S.

    `q`, `k` (B, S, N, K), `v` and out (B, S, N, V), `beta` (B, S, N) in 0..1, `g` (B, S, N) <= 0, log decay.

    Raises:
        ValueError: an initial or final state is asked for.
    """
    if initial_state is not None or output_final_state:
        raise ValueError("chunk_gated_delta_rule keeps no state on the CPU: it is for training")
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    factor = q.size(-1) ** -0.5 if scale is None else scale
    out = per_sequence(lambda *parts: _delta_rule(*parts, scale=factor), cu_seqlens, q, k, v, g, beta)
    return out.to(v.dtype), None


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """One sequence, in chunks of L tokens; inside a chunk the recurrence is one triangular system."""
    length = q.size(1)
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))  # (B, N, S, ...)
    g, beta = (t.transpose(1, 2).float() for t in (g, beta))
    state = q.new_zeros(*q.shape[:2], k.size(-1), v.size(-1))
    out = []
    for start in range(0, length, CHUNK):
        qc, kc, vc, gc, bc = (t[:, :, start : start + CHUNK] for t in (q, k, v, g, beta))
        log_decay = gc.cumsum(-1)  # (B, N, L) since the chunk began
        between = (
            (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).tril().exp().tril()
        )  # (L, L) from column to row
        since_start = log_decay.exp().unsqueeze(-1)
        # New values u solve (1 + tril(beta k k^T decay, -1)) u = beta (v - decayed k S).
        seen = (kc @ kc.transpose(-1, -2)) * between * bc.unsqueeze(-1)
        wanted = bc.unsqueeze(-1) * (vc - (kc * since_start) @ state)
        u = torch.linalg.solve_triangular(seen.tril(-1), wanted, upper=False, unitriangular=True)
        within = (qc @ kc.transpose(-1, -2)) * between
        out.append(scale * ((qc * since_start) @ state + within @ u))
        until_end = (log_decay[..., -1:] - log_decay).exp().unsqueeze(-1)
        state = state * log_decay[..., -1:, None].exp() + (kc * until_end).transpose(-1, -2) @ u
    return torch.cat(out, 2).transpose(1, 2)


def per_sequence(
    function: Callable[..., torch.Tensor], cu_seqlens: torch.Tensor | None, *tensors: torch.Tensor
) -> torch.Tensor:
    """Apply `function` to each packed sequence of the tensors (B, S, ...) by itself."""
    if cu_seqlens is None:
        return function(*tensors)
    bounds = cu_seqlens.tolist()
    length = tensors[0].size(1)
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}, but there are {length} tokens")
    return torch.cat(
        [function(*(t[:, start:stop] for t in tensors)) for start, stop in pairwise(bounds) if stop > start],
        1,
    )


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """`x` (..., K) times the orthonormal Hadamard matrix of size K, a power of two."""
    size = x.size(-1)
    matrix = torch.ones(1, 1)
    while matrix.size(0) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    if matrix.size(0) != size:
        raise ValueError(f"a Hadamard rotation needs a power of two, not {size}")
    return (x.float() @ matrix * size**-0.5).to(x.dtype)
