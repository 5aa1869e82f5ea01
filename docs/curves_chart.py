"""Two panels as one SVG: the losses of every run, and their distances from one process on a log scale."""

import math
from collections.abc import Mapping, Sequence

WIDTH, LEFT, RIGHT = 900, 64, 250
TOP, UPPER, GAP, LOWER, BOTTOM = 30, 250, 46, 200, 44
HEIGHT = TOP + UPPER + GAP + LOWER + BOTTOM
COLOURS = ("#0369a1", "#b45309", "#15803d", "#be185d", "#6d28d9", "#0f766e", "#a16207")
STYLE = """
  text { font-size: 12px; fill: #0f172a } .title { font-weight: 600; font-size: 13px }
  .grid { stroke: #e2e8f0 } .bound { stroke: #b91c1c; stroke-dasharray: 6 4 } .of-bound { fill: #b91c1c }
  .whole { stroke: #94a3b8; stroke-width: 5; fill: none; stroke-linejoin: round }
  .run { stroke-width: 1.5; fill: none }
"""


def chart(losses: Mapping[str, Sequence[float]], differences: Mapping[str, list[float]], bound: float) -> str:
    """An SVG. `differences` has the runs that are compared, `losses` also what those are compared with."""
    steps = max(map(len, losses.values()))
    colours = dict(zip(differences, COLOURS, strict=False))
    values = [loss for run in losses.values() for loss in run]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    middle = TOP + UPPER + GAP
    found = [value for run in differences.values() for value in run if value > 0]
    least, most = math.floor(math.log10(min(found))), math.ceil(math.log10(max([*found, bound])))

    def x(step: int) -> float:
        return LEFT + (step + 0.5) / steps * (WIDTH - LEFT - RIGHT)

    def of_loss(value: float) -> float:
        return TOP + (high - value) / (high - low) * UPPER

    def of_difference(value: float) -> float:
        return middle + (most - math.log10(max(value, 10.0**least))) / (most - least) * LOWER

    ticks = [low + i / 2 for i in range(round((high - low) * 2) + 1)]
    parts = [_gridline(of_loss(tick), f"{tick:.1f}") for tick in ticks]
    parts += [_gridline(of_difference(10.0**e), f"1e{e}") for e in range(least, most + 1)]
    for name in losses.keys() - differences.keys():
        parts.append(_line([(x(i), of_loss(v)) for i, v in enumerate(losses[name])], 'class="whole"'))
    for number, (name, run) in enumerate(differences.items()):
        colour = colours[name]
        # All lie on one line: each run is a mark at some of its steps.
        for step in range(number, steps, len(differences)):
            at = f'cx="{x(step):.1f}" cy="{of_loss(losses[name][step]):.1f}"'
            parts.append(f'<circle {at} r="4" fill="{colour}"><title>{name}</title></circle>')
        points = [(x(step), of_difference(value)) for step, value in enumerate(run)]
        parts.append(_line(points, f'class="run" stroke="{colour}"'))
        y = TOP + 60 + 22 * number
        parts.append(f'<circle cx="{WIDTH - RIGHT + 30}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 42, y, f"{name}: {max(run):.0e}"))
    y = of_difference(bound)
    parts.append(f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(_text(WIDTH - RIGHT + 8, y + 4, f"bound {bound:.0e}", 'class="of-bound"'))
    parts.append(_text(LEFT, TOP - 10, "loss, nats", 'class="title"'))
    parts.append(
        _text(LEFT, middle - 10, "|loss - loss of one process|, nats (0 is at the bottom)", 'class="title"')
    )
    parts.append(_text(WIDTH - RIGHT + 22, TOP + 16, "largest difference", 'class="title"'))
    parts.append(_text(WIDTH - RIGHT + 22, TOP + 36, "grey: one process"))
    for step in range(4, steps, 5):
        parts.append(_text(x(step), HEIGHT - BOTTOM + 20, str(step + 1), 'text-anchor="middle"'))
    parts.append(_text(LEFT - 10, HEIGHT - BOTTOM + 20, "step", 'text-anchor="end"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="system-ui, sans-serif">\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _gridline(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 10, y + 4, label, 'text-anchor="end"')


def _line(points: Sequence[tuple[float, float]], attributes: str) -> str:
    return f'<polyline {attributes} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{text}</text>'
