"""Pictures of a work queue's progress: a line of bars for the terminal, an SVG file to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
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
MEASURED_SECONDS = 2.0  # a rate over less time is no ground for an estimate
STILL_SECONDS = 5.0  # nothing leased and nothing changed for so long: nobody works
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


class Progress(StrEnum):
    """What becomes of the tasks that are left."""

    EMPTY = "empty"  # there are none
    MEASURING = "measuring"  # not known yet
    NO_WORKER = "no worker"  # some are ready and nobody takes them
    DELAYED = "delayed"  # all wait for their time
    STALLED = "stalled"  # some are taken, none is completed
    GROWING = "growing"  # at least as many are put as are completed
    SHRINKING = "shrinking"


class Pace(msgspec.Struct, frozen=True):
    """What samples tell. left: tasks not done. eta_seconds: from the measured rates; None unless the queue is empty or
    shrinks."""

    completed_per_second: float
    inserted_per_second: float
    left: int
    eta_seconds: float | None
    progress: Progress


def pace(samples: Sequence[Sample]) -> Pace:
    """Between the first and the last sample given."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    done = max(0, last.status.completed - first.status.completed) / seconds if seconds > 0 else 0.0
    put = max(0, last.status.inserted - first.status.inserted) / seconds if seconds > 0 else 0.0
    left = last.status.ready + last.status.delayed + last.status.leased
    found = Progress.EMPTY if left == 0 else Progress.MEASURING if seconds < MEASURED_SECONDS else _progress(samples, done, put)
    eta = {Progress.EMPTY: 0.0, Progress.SHRINKING: left / (done - put) if done > put else None}.get(found)
    return Pace(done, put, left, eta, found)


def _progress(samples: Sequence[Sample], done: float, put: float) -> Progress:
    """With tasks left, and rates that were measured."""
    last = samples[-1]
    recent = [one for one in samples[:-2] if last.at - one.at <= STILL_SECONDS]
    if _is_still([*recent, *samples[-2:]]):
        return Progress.NO_WORKER if last.status.ready else Progress.DELAYED
    if done <= 0:
        return Progress.STALLED
    return Progress.SHRINKING if done > put else Progress.GROWING


def _is_still(samples: Sequence[Sample]) -> bool:
    """Nobody leased anything: a failed task would be dead, or delayed without having been put."""
    return not any(one.status.leased for one in samples) and all(
        (before.status.completed, before.status.dead) == (after.status.completed, after.status.dead)
        and after.status.delayed - before.status.delayed <= after.status.inserted - before.status.inserted
        for before, after in pairwise(samples)
    )


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
