"""SIGTERM and SIGINT for every `run` of this process: one owner of the handlers, whoever they stop.

The first `run` in the main thread installs the handlers, the last one there puts back what was before; Python lets no other
thread do either. While they are installed every signal goes to every `run` of the process, those in other threads too: the
first stops all, the second ends all at once, since each `run` counts what it was told. Who begins after the first signal, while
others still wind up, is told at once: a process that was asked to stop begins no more work.

Not covered: what a `run` does when it is told (handling.py, blocking_queue.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Run:
    """One `run`, told of each signal once, though its own thread and the handler may both try."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._told: dict[int, object] = {}  # by number of the signal; `setdefault` is one step to every thread

    def tell(self, number: int) -> None:
        """Signal `number`, from 1."""
        mine = object()
        if self._told.setdefault(number, mine) is mine:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile: it has ended
                self._stop()


class _Owner:
    """Of this process. The handler runs between any two lines of the main thread: it takes no lock, and reads `_runs` once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: tuple[_Run, ...] = ()  # replaced, never changed
        self._signals = 0  # since there was no run
        self._main_runs = 0  # those in the main thread; only it counts them
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def stopped(self, stop: Callable[[], None], loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
        """See `stopped_by_signals`."""
        in_main = threading.current_thread() is threading.main_thread()
        run = _Run(stop)
        try:
            with self._lock:
                self._runs = (*self._runs, run)
            if in_main:
                self._main_runs += 1
                if self._main_runs == 1:
                    self._install(loop)
            for number in range(1, self._signals + 1):
                run.tell(number)
            yield
        finally:
            if in_main:
                self._main_runs -= 1
                if not self._main_runs:
                    self._put_back()
            with self._lock:
                self._runs = tuple(one for one in self._runs if one is not run)
                if not self._runs:
                    self._signals = 0

    def _install(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._before, self._loop = {number: signal.getsignal(number) for number in SIGNALS}, loop
        for number in SIGNALS:
            if loop is not None:  # so that a signal wakes a loop that sleeps
                loop.add_signal_handler(number, _nothing)
            signal.signal(number, self._signalled)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) != self._signalled:
                continue  # the program has set another meanwhile
            if self._loop is not None:
                self._loop.remove_signal_handler(number)
            if handler is not None:  # None: set by something that is not Python
                signal.signal(number, handler)
        self._before, self._loop = {}, None

    def _signalled(self, *_: object) -> None:
        """The signal handler."""
        self._signals += 1
        for run in self._runs:
            run.tell(self._signals)


def _nothing() -> None:
    """What the loop itself has to do."""


_owner = _Owner()


def stopped_by_signals(
    stop: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None
) -> contextlib.AbstractContextManager[None]:
    """Inside, `stop` is called in a signal handler for each SIGTERM and SIGINT: it may only do what is safe there. loop: the
    running one of this thread, if any."""
    return _owner.stopped(stop, loop)
