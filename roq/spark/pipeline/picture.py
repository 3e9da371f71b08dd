"""Lines over time as plain SVG: panels under each other with one axis of time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise

import msgspec

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 84, 20, 40, 30
PANEL, GAP = 130, 46  # heights in pixels; the gap holds a panel's name and legend
GRID_LINES, TIMES = 4, 5
GREY, RULE = "#555", "#ddd"
Point = tuple[float, float]  # Unix seconds, value


class Line(msgspec.Struct, frozen=True):
    """One line. Points further apart than gap_seconds are not joined. steps: a value holds until the next one."""

    name: str
    colour: str
    points: Sequence[Point]
    gap_seconds: float = math.inf
    steps: bool = False


class Panel(msgspec.Struct, frozen=True):
    """Lines over one axis of values."""

    name: str
    lines: Sequence[Line]


def draw(title: str, panels: Sequence[Panel], begin: float, end: float) -> str:
    """The whole picture from begin to end (Unix seconds)."""
    end = max(end, begin + 1.0)
    height = TOP + len(panels) * (PANEL + GAP) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL + GAP) + GAP, begin, end)
    parts += _time_axis(height - BOTTOM + 18, begin, end)
    return "\n".join([*parts, "</svg>", ""])


def nice_limit(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 … not below `value`."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * (1 - 1e-9))


def across(at: float, begin: float, end: float) -> float:
    """Pixels from the left."""
    return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)


def _panel(panel: Panel, top: float, begin: float, end: float) -> list[str]:
    bottom = top + PANEL
    most = nice_limit(max((value for line in panel.lines for _, value in line.points), default=0.0))
    parts = [f'<text x="{LEFT}" y="{top - 22}" font-weight="bold">{escape(panel.name)}</text>', *_legend(panel, top - 6)]
    for number in range(GRID_LINES + 1):
        y = bottom - PANEL * number / GRID_LINES
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        label = f"{most * number / GRID_LINES:,.6g}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{label}</text>')
    for line in panel.lines:
        for stretch in stretches(line):
            places = [(across(at, begin, end), bottom - PANEL * value / most) for at, value in stretch]
            if line.steps:
                corners = [place for before, after in pairwise(places) for place in (before, (after[0], before[1]))]
                places = corners + places[-1:]
            if len(places) == 1:
                parts.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="1.5" fill="{line.colour}"/>')
                continue
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.6"/>')
    return parts


def stretches(line: Line) -> list[list[Point]]:
    """Its points, divided where they are too far apart."""
    found: list[list[Point]] = []
    for point in line.points:
        if found and point[0] - found[-1][-1][0] <= line.gap_seconds:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def _legend(panel: Panel, y: float) -> list[str]:
    parts, x = [], LEFT
    for line in panel.lines:
        parts.append(f'<rect x="{x}" y="{y - 6:.1f}" width="14" height="4" fill="{line.colour}"/>')
        parts.append(f'<text x="{x + 19}" y="{y:.1f}" fill="{GREY}">{escape(line.name)}</text>')
        x += 40 + 7 * len(line.name)
    return parts


def _time_axis(y: float, begin: float, end: float) -> list[str]:
    seconds = end - begin
    form = "%H:%M:%S" if seconds < 3600 else "%H:%M" if seconds < 86400 else "%d %b %H:%M"
    parts = []
    for number in range(TIMES + 1):
        at = begin + seconds * number / TIMES
        anchor = "start" if number == 0 else "end" if number == TIMES else "middle"
        label = datetime.fromtimestamp(at, UTC).strftime(form) + (" UTC" if number == TIMES else "")
        parts.append(f'<text x="{across(at, begin, end):.1f}" y="{y}" text-anchor="{anchor}" fill="{GREY}">{label}</text>')
    return parts
