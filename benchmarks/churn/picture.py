"""Lines over two axes as plain SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 760, 420, 70, 40, 50, 230
COLOURS = ("#1f618d", "#c0392b", "#1e8449", "#7d3c98", "#d68910", "#566573")
TICKS = 5


class Line(NamedTuple):
    """points: (x, y). dashed: computed, not measured."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: str = ""


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """The picture."""
    right = max((x for line in lines for x, _ in line.points), default=1.0) or 1.0
    top = _round_up(max((y for line in lines for _, y in line.points), default=1.0) or 1.0)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    base = TOP + height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT + width / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>',
        f'<text x="6" y="{TOP - 8}">{escape(up)}</text>',
    ]
    for step in range(TICKS + 1):
        y, x = base - height * step / TICKS, LEFT + width * step / TICKS
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * step / TICKS:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{right * step / TICKS:.4g}</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{LEFT + width * x / right:.1f},{base - height * y / top:.1f}" for x, y in line.points)
        dash = f' stroke-dasharray="{line.dashed}"' if line.dashed else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        at = TOP + 12 + 18 * number
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 12}" y1="{at}" x2="{WIDTH - RIGHT + 36}" y2="{at}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{at + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * 1.000001)
