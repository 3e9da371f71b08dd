"""Pictures of a work queue's progress: a line of bars for the terminal, an SVG file to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from roq.tools.charts import ChartLine, Panel, draw, since
from roq.workqueue.contract import Status

BARS = "▁▂▃▄▅▆▇█"
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


class TaskRates(msgspec.Struct, frozen=True):
    """What samples tell. left: tasks not done. eta_seconds: from the measured rates; None unless the queue is empty or
    shrinks."""

    completed_per_second: float
    inserted_per_second: float
    left: int
    eta_seconds: float | None
    progress: Progress


def pace(samples: Sequence[Sample]) -> TaskRates:
    """Between the first and the last sample given."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    done = max(0, last.status.completed - first.status.completed) / seconds if seconds > 0 else 0.0
    put = max(0, last.status.inserted - first.status.inserted) / seconds if seconds > 0 else 0.0
    left = last.status.ready + last.status.delayed + last.status.leased
    found = Progress.EMPTY if left == 0 else Progress.MEASURING if seconds < MEASURED_SECONDS else _progress(samples, done, put)
    eta = {Progress.EMPTY: 0.0, Progress.SHRINKING: left / (done - put) if done > put else None}.get(found)
    return TaskRates(done, put, left, eta, found)


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


def svg(samples: Sequence[Sample], title: str) -> str:
    """Counts above, completed tasks per second below, over time."""
    step = max(1, math.ceil(len(samples) / POINTS_MAX))
    shown = [*samples[:-1][::step], samples[-1]]
    counts = [ChartLine(name, colour, [(one.at, float(of(one.status))) for one in shown]) for name, colour, of in LINES]
    speed = [(one.at, rate) for one, rate in zip(shown[1:], rates(shown), strict=True)]
    panels = [Panel("tasks", counts), Panel("completed per second", [ChartLine("", LINES[0][1], speed)])]
    return draw(title, "", panels, shown[0].at, shown[-1].at, across=since)
