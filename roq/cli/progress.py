"""A progress bar on stderr for what takes long, if a person watches: one line for each thing that is worked on."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from roq.cli.output import console
from roq.runtime.log_output import visible

KIB = 1024
Told = Callable[[str, int, int], None]  # what it is, how much is done, of how much (0: not known)


def untold(subject: str, done: int, total: int) -> None:
    """Where nobody watches."""


@contextmanager
def progressing(what: str) -> Iterator[Told]:
    """Give a function that is told how far it has got. what: is done to each, "saving"."""
    if not sys.stderr.isatty():
        yield untold
        return
    text = TextColumn("{task.description}", markup=False)  # names come from anybody
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, redirect_stdout=False) as bars:
        known = {}

        def told(subject: str, done: int, total: int) -> None:
            if subject not in known:
                known[subject] = bars.add_task(visible(f"{what} {subject}"))
            bars.update(known[subject], completed=done, total=total or None)

        yield told


@contextmanager
def progressing_beside(what: str) -> Iterator[Told]:
    """As `progressing`, of a command that prints as it goes: nothing is shown where both would be on one terminal."""
    if sys.stdout.isatty():
        yield untold
        return
    with progressing(what) as told:
        yield told


def how_far(told: Told, descriptor: int) -> Callable[[], None]:
    """To be called as it is read: tells how much of a file has been, in KiB; of a pipe, whose end nobody knows, nothing."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return lambda: None
    size = max(1, found.st_size // KIB)
    return lambda: told("the input (KiB)", min(size, os.lseek(descriptor, 0, os.SEEK_CUR) // KIB), size)
