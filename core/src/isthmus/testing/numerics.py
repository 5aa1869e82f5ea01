"""How far two results are apart, and how far they may be.

The measure is RMS(found - expected) / RMS(expected), over all elements: one number that neither hides behind
a few large values, as the maximum does, nor blows up at small ones, as an elementwise ratio does.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64  # of logits: a double copy of (64, 150000) is 77 MB


@dataclass(slots=True)
class Difference:
    """The difference of everything added so far, piece by piece; sums are in float64."""

    squares: float = 0.0  # of found - expected
    expected_squares: float = 0.0
    max_abs: float = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Add one piece. ValueError where the shapes differ: nothing is broadcast, nothing is left out."""
        if found.shape != expected.shape:
            raise ValueError(f"cannot compare shape {tuple(found.shape)} with {tuple(expected.shape)}")
        wide = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
        delta = found.detach().to(wide).cpu() - expected.detach().to(wide).cpu()
        self.squares += delta.double().square().sum().item()
        self.expected_squares += expected.detach().double().square().sum().item()
        # max() of Python drops a NaN that comes second
        largest = delta.abs().max().item() if delta.numel() else 0.0
        self.max_abs = largest if math.isnan(largest) else max(self.max_abs, largest)

    def join(self, other: "Difference") -> None:
        """Add all that `other` holds."""
        self.squares += other.squares
        self.expected_squares += other.expected_squares
        self.max_abs = other.max_abs if math.isnan(other.max_abs) else max(self.max_abs, other.max_abs)

    @property
    def rel_rms(self) -> float:
        """RMS(found - expected) / RMS(expected); 0.0 where both are zero, inf where only `expected` is."""
        if self.expected_squares:
            return math.sqrt(self.squares / self.expected_squares)
        return math.inf if self.squares else self.squares


def difference(found: Tensor, expected: Tensor) -> Difference:
    """The difference of one pair of tensors. ValueError where the shapes differ."""
    result = Difference()
    result.add(found, expected)
    return result


def rel_rms(found: Tensor, expected: Tensor) -> float:
    """RMS(found - expected) / RMS(expected). ValueError where the shapes differ."""
    return difference(found, expected).rel_rms


def kl(found: Tensor, expected: Tensor) -> float:
    """Mean over tokens of KL(expected || found) in nats, from logits (T, V)."""
    total = 0.0
    for mine, theirs in zip(found.split(ROWS_AT_ONCE), expected.split(ROWS_AT_ONCE), strict=True):
        log_p = torch.log_softmax(theirs.double(), -1)
        log_q = torch.log_softmax(mine.double(), -1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total / max(1, len(expected))


def argmax_agreement(found: Tensor, expected: Tensor) -> float:
    """Share of the tokens with the same most likely next one, from logits (T, V)."""
    return (found.argmax(-1) == expected.argmax(-1)).double().mean().item()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a comparison may show and still pass; ratios."""

    forward: float  # logits and every layer's output
    gradients: float  # all parameters as one vector, and its norm
    worst_gradient: float  # any one parameter against its own RMS
    reason: str

    def as_dict(self) -> dict[str, float | str]:
        return {
            "forward": self.forward,
            "gradients": self.gradients,
            "worst_gradient": self.worst_gradient,
            "reason": self.reason,
        }


FLOAT32 = Bounds(
    forward=1e-5,
    gradients=1e-5,
    worst_gradient=1e-3,
    reason="the same arithmetic in another order: float32 rounds at 6e-8, and tiny vectors such as A_log sum"
    " up terms that cancel",
)

ROUNDING_RATIO = 2.0  # two roundings of one result, each of size e, lie sqrt(2) e apart
HALF_ULP = 2.0**-9  # of bfloat16: one rounding, where the reference has none


def rounded_bounds(forward: float, gradients: float, worst_gradient: float) -> Bounds:
    """Bounds in a dtype that rounds visibly, from how far HF itself moves between that dtype and float32."""
    return Bounds(
        forward=ROUNDING_RATIO * forward + HALF_ULP,
        gradients=ROUNDING_RATIO * gradients + HALF_ULP,
        worst_gradient=ROUNDING_RATIO * worst_gradient + HALF_ULP,
        reason=f"{ROUNDING_RATIO:g} times what rounding moves HF itself, measured against HF in float32"
        f" on the same tokens, plus one rounding ({HALF_ULP:.1e})",
    )


def within(value: float, bound: float) -> bool:
    """Whether `value` is a number and at most `bound`: NaN is not."""
    return value <= bound
