"""Errors on a logarithmic scale, as inline SVG and as bars; no script, nothing to fetch."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 34, 48
FLOAT32_ROUNDING = 2.0**-24


class Point(NamedTuple):
    """A place in the model and its error; `joined` points are connected to the one before."""

    label: str
    value: float
    joined: bool


def chart(points: Sequence[Point], bound: float, *, floor: bool) -> str:
    """An SVG of the errors from the first layer to the outputs, with the bound as a line.

    Args:
        floor: also draw the size of one float32 rounding.
    """
    shown = [bound, *(p.value for p in points if 0 < p.value < math.inf)]
    low, high = _decades([*shown, FLOAT32_ROUNDING] if floor else shown)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(points))

    def x(index: int) -> float:
        return LEFT + step * (index + 0.5)

    def y(value: float) -> float:
        clipped = min(max(value, 10.0**low), 10.0**high) if not math.isnan(value) else 10.0**high
        return TOP + (high - math.log10(clipped)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_gridline(y(10.0**e), f"1e{e:+03d}") for e in range(low, high + 1, 1 + (high - low) // 8)]
    parts.append(_level(y(bound), "bound", f"bound {bound:.0e}"))
    if floor:
        parts.append(_level(y(FLOAT32_ROUNDING), "floor", "one float32 rounding, 6e-08"))
    path = ""
    for index, point in enumerate(points):
        path += f"{'L' if point.joined else 'M'}{x(index):.1f} {y(point.value):.1f}"
    parts.append(f'<path class="path" d="{path}"/>')
    every = max(1, math.ceil(46 / step))
    for index, point in enumerate(points):
        over = "" if point.value <= bound else " over"
        parts.append(
            f'<circle class="dot{over}" cx="{x(index):.1f}" cy="{y(point.value):.1f}" r="5">'
            f"<title>{escape(point.label)}: {point.value:.2e}</title></circle>"
        )
        named = not point.label.isdigit()  # always told; the others where there is room
        if named or (index % every == 0 and (every == 1 or index + every < len(points))):
            below = 38 if named and not point.joined else 20  # MTP logits under the logits
            parts.append(
                f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + below}" text-anchor="middle">'
                f"{escape(point.label)}</text>"
            )
    parts.append(f'<text x="{LEFT - 10}" y="{HEIGHT - BOTTOM + 20}" text-anchor="end">layer</text>')
    parts.append('<text x="0" y="14">rel RMS, logarithmic scale</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="relative error by layer">'
        + "".join(parts)
        + "</svg>"
    )


def bar(value: float, bound: float) -> str:
    """A bar whose full length is the bound, on a scale of five decades below it; red where it is exceeded."""
    share = 1.0 if not value <= bound else max(0.0, 1 + math.log10(max(value, 1e-300) / bound) / 5)
    over = "" if value <= bound else " over"
    return f'<div class="track"><div class="fill{over}" style="width:{100 * share:.1f}%"></div></div>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten just outside the values."""
    return math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 1


def _gridline(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _level(y: float, kind: str, label: str) -> str:
    return (
        f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="of-{kind}" x="{WIDTH - RIGHT}" y="{y - 6:.1f}" text-anchor="end">{label}</text>'
    )
