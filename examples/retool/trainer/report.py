"""The curves of a run, as text for a terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from trainer.evidence import Evidence

ROWS, COLUMNS = 6, 56  # of a curve in the terminal
WIDTH, HEIGHT, GAP = 360, 150, 64  # of a curve in the picture, in pixels


class Curve(NamedTuple):
    title: str
    axis: str  # what is counted from left to right
    points: list[tuple[float, float]]
    marks: list[tuple[float, float]]  # measured on problems that are not trained on
    bounds: tuple[float, float] | None  # of the values; None for as far as they go
    logarithmic: bool = False


def curves(found: Evidence) -> list[Curve]:
    """Steps are counted from 1; what was measured before the first one stands at 0."""
    steps = [(step.number + 1.0, step) for step in found.steps]
    held = [(float(number), step) for number, step in sorted(found.evaluations.items())]
    loss = [(place + 1.0, value) for place, value in enumerate(found.sft_loss)]
    difference = [(x, step.difference) for x, step in steps]
    return [
        Curve("SFT: loss per trained token", "step of SFT", loss, [], None, logarithmic=True),
        Curve(
            "RL: accuracy (held-out problems: o)",
            "step of RL",
            [(x, step.accuracy) for x, step in steps],
            [(x, step.accuracy) for x, step in held],
            (0, 1),
        ),
        Curve(
            "RL: share of episodes with a tool call (held-out: o)",
            "step of RL",
            [(x, step.calls) for x, step in steps],
            [(x, step.calls) for x, step in held],
            (0, 1),
        ),
        Curve("RL: |log-prob of engine - of Megatron|, mean", "step of RL", difference, [], (1e-8, 1e-5), True),
    ]


def in_text(curve: Curve) -> str:
    """The curve in characters: a title, ROWS lines with the bounds beside them, the range of the axis below."""
    if not curve.points:
        return f"{curve.title}: nothing measured"
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    place = _scale(curve, COLUMNS - 1, ROWS - 1)
    for sign, points in (("·", curve.points), ("o", curve.marks)):
        for point in points:
            column, row = place(point)
            grid[ROWS - 1 - round(row)][round(column)] = sign
    low, high = _bounds(curve)
    beside = {0: f"{high:.3g}", ROWS - 1: f"{low:.3g}"}
    lines = [f"{beside.get(number, ''):>8} |{''.join(row)}" for number, row in enumerate(grid)]
    left, right = _range(curve)
    axis = f"{'':>8}  {left:g}{curve.axis:^{COLUMNS - 8}}{right:>4g}"
    return "\n".join([curve.title, *lines, axis])


def picture(found: Evidence, caption: str) -> str:
    """All curves in an SVG file, two and two."""
    parts = []
    for number, curve in enumerate(curves(found)):
        left, top = GAP + number % 2 * (WIDTH + GAP), GAP / 2 + number // 2 * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({left:g} {top:g})">{_panel(curve)}</g>')
    width, height = 2 * WIDTH + 2 * GAP + 16, 2 * HEIGHT + 2 * GAP + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}'
        f'<text x="{GAP}" y="{height - 12}" fill="#555">{escape(caption)}</text></svg>\n'
    )


def _panel(curve: Curve) -> str:
    place = _scale(curve, WIDTH, HEIGHT)
    at = [(x, HEIGHT - y) for x, y in map(place, curve.points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{HEIGHT - y:.1f}" r="5" fill="none" stroke="#c2410c" stroke-width="2"/>'
        for x, y in map(place, curve.marks)
    )
    (low, high), (left, right) = _bounds(curve), _range(curve)
    return (
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>'
        f'<polyline points="{line}" fill="none" stroke="#1d4ed8" stroke-width="1.5"/>{marks}'
        f'<text y="-8" font-weight="bold">{escape(curve.title)}</text>'
        f'<text x="-6" y="10" text-anchor="end">{high:.3g}</text>'
        f'<text x="-6" y="{HEIGHT}" text-anchor="end">{low:.3g}</text>'
        f'<text y="{HEIGHT + 16}">{left:g}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 16}" text-anchor="middle">{escape(curve.axis)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{right:g}</text>'
    )


def _bounds(curve: Curve) -> tuple[float, float]:
    values = [y for _, y in (*curve.points, *curve.marks) if math.isfinite(y)]
    return curve.bounds or (min(values), max(values))


def _range(curve: Curve) -> tuple[float, float]:
    places = [x for x, _ in (*curve.points, *curve.marks)]
    return min(places), max(places)


def _scale(curve: Curve, width: float, height: float):
    """A function from a point of the curve to one in a field of this size, (0, 0) at its lower left."""
    (left, right), (low, high) = _range(curve), _bounds(curve)
    level = math.log if curve.logarithmic else float
    floor, rise = level(low), (level(high) - level(low)) or 1.0

    def place(point: Sequence[float]) -> tuple[float, float]:
        x, y = point
        y = min(max(y, low), high) if math.isfinite(y) else high
        return (x - left) / ((right - left) or 1.0) * width, (level(y) - floor) / rise * height

    return place
