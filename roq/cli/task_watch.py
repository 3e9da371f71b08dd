"""`roq task watch`: a work queue's progress over time, live, and as a chart to keep; with --json, or without a terminal, a JSON
line per look."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from roq.blocking import WorkQueue
from roq.cli.address import JsonOption
from roq.cli.output import age, console, print_json, rate, table
from roq.cli.task_address import AddressArgument, counts, opened
from roq.errors import TemporaryError
from roq.tools.charts import ChartLine, Panel, draw, since
from roq.wire.task import Status

FOR_EVER = 0
SAMPLES_MAX = 20_000  # kept for the chart; then every second one is forgotten
PACE_SECONDS = 30.0  # the rates shown are those of the last half minute
BAR_WIDTH = 60
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
    left = last.status.ready + last.status.delayed + last.status.leased + max(last.status.lag, 0)
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


IN_WORDS = {
    Progress.EMPTY: "nothing is left to do",
    Progress.MEASURING: "measuring",
    Progress.NO_WORKER: "none: no worker takes tasks",
    Progress.DELAYED: "none: all tasks are delayed",
    Progress.STALLED: f"none: no task was completed in the last {PACE_SECONDS:.0f} s",
    Progress.GROWING: "no end in sight: as many tasks are put as completed, or more",
}


class WatchLine(msgspec.Struct):
    """One JSON line."""

    at: float
    status: dict[str, float | None]
    pace: TaskRates


class _Watch:
    """What was seen so far."""

    def __init__(self, queue: WorkQueue, chart: Path | None) -> None:
        self._queue, self._chart = queue, chart
        self.samples: list[Sample] = []
        self._recent: deque[Sample] = deque()

    def look(self) -> Sample:
        """One more look; the chart is written anew."""
        sample = Sample(time.time(), self._queue.status())
        self.samples.append(sample)
        if len(self.samples) > SAMPLES_MAX:
            self.samples = [*self.samples[:-1][::2], sample]
        self._recent.append(sample)
        while len(self._recent) > 2 and sample.at - self._recent[0].at > PACE_SECONDS:
            self._recent.popleft()
        if self._chart is not None:
            temporary = self._chart.with_name(f".{self._chart.name}.{os.getpid()}")
            temporary.write_text(svg(self.samples, self._queue.address))
            temporary.replace(self._chart)
        return sample

    def pace(self) -> TaskRates:
        """Of the last half minute."""
        return pace(list(self._recent))

    def view(self, sample: Sample) -> RenderableType:
        """For people."""
        status, speed = sample.status, self.pace()
        done = status.completed + speed.left
        share = status.completed / done if done else 1.0
        filled = int(share * BAR_WIDTH)
        rows = [
            ("done", f"{'█' * filled}{'·' * (BAR_WIDTH - filled)} {share:.1%}"),
            ("ready / delayed / leased", f"{status.ready:,} / {status.delayed:,} / {status.leased:,}"),
            ("completed / inserted", f"{status.completed:,} / {status.inserted:,}"),
            ("dead", f"{status.dead:,}"),
            *([("expired", f"{status.expired:,}")] if status.expired else []),
            *([("on the tapes still", f"{status.lag:,}")] if status.lag >= 0 else []),
            ("oldest ready", age(status.oldest_seconds)),
            ("completed per second", rate(speed.completed_per_second)),
            ("inserted per second", rate(speed.inserted_per_second)),
            ("progress", progress(speed)),
            ("pace", sparkline(rates(self.samples[-BAR_WIDTH - 1 :]), BAR_WIDTH)),
        ]
        return table(self._queue.address, ("TASKS", ""), rows)


def progress(speed: TaskRates) -> str:
    """When it ends, or why that is not known."""
    seconds = speed.eta_seconds
    if speed.progress is not Progress.SHRINKING or seconds is None:
        return IN_WORDS[speed.progress]
    return f"ends in {age(seconds) if seconds >= 1 else 'less than 1 s'} at this rate"


def watch(
    address: AddressArgument,
    json: JsonOption = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between looks.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many looks; 0: never.")] = FOR_EVER,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Stop when no task is left.")] = False,
    chart: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Keep a chart of it.")] = None,
) -> None:
    """Watch a queue's progress: counts, rates, when it will be empty or why it won't be. Ctrl-C ends it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with opened(address) as queue:
        seen = _Watch(queue, chart)
        out = console()
        plain = json or not out.is_terminal
        with contextlib.nullcontext() if plain else Live(Text("…"), console=out, auto_refresh=False) as live:
            shown = 0
            while not stop.is_set():
                try:
                    sample = seen.look()
                except TemporaryError as error:
                    if isinstance(live, Live):
                        live.update(Text(f"{type(error).__name__}: {error}", style="red"), refresh=True)
                    stop.wait(every)
                    continue
                if isinstance(live, Live):
                    live.update(seen.view(sample), refresh=True)
                else:
                    print_json(WatchLine(sample.at, counts(sample.status), seen.pace()))
                shown += 1
                if shown == count or (until_empty and seen.pace().left == 0):
                    return
                stop.wait(every)
