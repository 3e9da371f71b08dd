"""`roq task watch`: a work queue's progress over time, live; with --json, or without a terminal, a JSON line per look."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from roq.blocking import WorkQueue
from roq.cli.address import JsonOption
from roq.cli.output import console, print_json, rate, table
from roq.cli.task_address import AddressArgument, age, opened
from roq.cli.task_chart import Progress, Sample, TaskRates, pace, rates, sparkline, svg
from roq.errors import TemporaryError
from roq.workqueue.contract import Status

FOR_EVER = 0
SAMPLES_MAX = 20_000  # kept for the picture; then every second one is forgotten
PACE_SECONDS = 30.0  # the rates shown are those of the last half minute
BAR_WIDTH = 60
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
    status: Status
    pace: TaskRates


class _Watch:
    """What was seen so far."""

    def __init__(self, queue: WorkQueue, picture: Path | None) -> None:
        self._queue, self._picture = queue, picture
        self.samples: list[Sample] = []
        self._recent: deque[Sample] = deque()

    def look(self) -> Sample:
        """One more look; the picture is written anew."""
        sample = Sample(time.time(), self._queue.status())
        self.samples.append(sample)
        if len(self.samples) > SAMPLES_MAX:
            self.samples = [*self.samples[:-1][::2], sample]
        self._recent.append(sample)
        while len(self._recent) > 2 and sample.at - self._recent[0].at > PACE_SECONDS:
            self._recent.popleft()
        if self._picture is not None:
            temporary = self._picture.with_name(f".{self._picture.name}.{os.getpid()}")
            temporary.write_text(svg(self.samples, self._queue.address))
            temporary.replace(self._picture)
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
            ("oldest ready", age(status.oldest_seconds)),
            ("completed per second", rate(speed.completed_per_second)),
            ("inserted per second", rate(speed.inserted_per_second)),
            ("progress", progress(speed)),
            ("pace", sparkline(rates(self.samples[-BAR_WIDTH - 1 :]), BAR_WIDTH)),
        ]
        return table(self._queue.address, ("TASKS", ""), rows)


def progress(speed: TaskRates) -> str:
    """When it ends, or why that can't be told."""
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
    picture: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Keep a picture of it.")] = None,
) -> None:
    """Watch a queue's progress: counts, rates, when it will be empty or why it won't be. Ctrl-C ends it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with opened(address) as queue:
        seen = _Watch(queue, picture)
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
                    print_json(WatchLine(sample.at, sample.status, seen.pace()))
                shown += 1
                if shown == count or (until_empty and seen.pace().left == 0):
                    return
                stop.wait(every)
