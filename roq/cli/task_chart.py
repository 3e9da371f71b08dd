"""Pictures of a work queue's progress: a line of bars for the terminal, an SVG file to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

import msgspec

from roq.workqueue.contract import Status

BARS = "▁▂▃▄▅▆▇█"
WIDTH, LEFT, RIGHT = 900, 80, 20
UPPER, LOWER = (60, 260), (310, 430)  # from, to: the two panels
HEIGHT = 470
GRID_LINES = 4
POINTS_MAX = 450  # of one line; one per two pixels
LINES: tuple[tuple[str, str, Callable[[Status], int]], ...] = (
    ("completed", "#2a9d4a", lambda status: status.completed),
    ("ready", "#2f6fde", lambda status: status.ready + status.delayed),
    ("leased", "#e08a1e", lambda status: status.leased),
    ("dead", "#c63737", lambda status: status.dead),
)


class Sample(msgspec.Struct, frozen=True):
    """One look at the queue. at: Unix seconds."""

    at: float
    status: Status


class Pace(msgspec.Struct, frozen=True):
    """What samples tell. left: tasks not done. eta_seconds: None if nothing gets done."""

    completed_per_second: float
    inserted_per_second: float
    left: int
    eta_seconds: float | None


def pace(samples: Sequence[Sample]) -> Pace:
    """Between the first and the last sample given."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    done = max(0, last.status.completed - first.status.completed) / seconds if seconds > 0 else 0.0
    put = max(0, last.status.inserted - first.status.inserted) / seconds if seconds > 0 else 0.0
    left = last.status.ready + last.status.delayed + last.status.leased
    # What counts is how fast the queue shrinks; while it grows there is no end in sight.
    shrinks = done - put
    return Pace(done, put, left, 0.0 if left == 0 else left / shrinks if shrinks > 1e-9 else None)


def rates(samples: Sequence[Sample]) -> list[float]:
    """Tasks completed per second between one sample and the next."""
    return [pace(pair).completed_per_second for pair in pairwise(samples)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, the highest one full."""
    shown = values[-width:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return BARS[0] * len(shown)
    return "".join(BARS[min(len(BARS) - 1, int(value / highest * len(BARS)))] for value in shown)


def nice_limit(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 … not below `value`."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * (1 - 1e-9))


def svg(samples: Sequence[Sample], title: str) -> str:
    """Counts above, completed tasks per second below, over time."""
    step = max(1, math.ceil(len(samples) / POINTS_MAX))
    shown = [*samples[:-1][::step], samples[-1]]
    begin, end = shown[0].at, max(shown[-1].at, shown[0].at + 1.0)
    across = [LEFT + (one.at - begin) / (end - begin) * (WIDTH - LEFT - RIGHT) for one in shown]
    counts = [(name, color, [float(of(one.status)) for one in shown]) for name, color, of in LINES]
    speed = rates(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_legend(),
        *_panel(UPPER, counts, across, "tasks"),
        *_panel(LOWER, [("rate", LINES[0][1], speed)], across[1:], "completed per second"),
        *_time_axis(end - begin),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    parts = []
    for number, (name, color, _) in enumerate(LINES):
        x = LEFT + number * 110
        parts.append(f'<rect x="{x}" y="34" width="14" height="4" fill="{color}"/><text x="{x + 20}" y="40">{name}</text>')
    return parts


def _panel(
    span: tuple[int, int], lines: Sequence[tuple[str, str, list[float]]], across: Sequence[float], unit: str
) -> list[str]:
    top, bottom = span
    limit = nice_limit(max((value for _, _, values in lines for value in values), default=0.0))
    parts = [f'<text x="{LEFT}" y="{top - 6}" fill="#555">{unit}</text>']
    for number in range(GRID_LINES + 1):
        y = bottom - (bottom - top) * number / GRID_LINES
        label = f"{limit * number / GRID_LINES:,.6g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{label}</text>')
    for _, color, values in lines:
        points = " ".join(
            f"{x:.1f},{bottom - value / limit * (bottom - top):.1f}" for x, value in zip(across, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    return parts


def _time_axis(seconds: float) -> list[str]:
    y = LOWER[1] + 18
    unit, per = ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
    parts = []
    for number in range(GRID_LINES + 1):
        x = LEFT + (WIDTH - LEFT - RIGHT) * number / GRID_LINES
        label = f"{seconds / per * number / GRID_LINES:.3g} {unit}"
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#555">{label}</text>')
    return parts
