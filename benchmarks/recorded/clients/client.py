"""What a system's file has to have: ways of publishing, of reading and of sharing, for the processes that run.py starts.

A way connects, calls `Run.begin`, does what is measured, calls `Run.end`, and returns what it found, to be checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple, Protocol

from benchmarks.crew import Parent
from benchmarks.recorded.workload import windows

WAIT_SECONDS = 60.0  # for what has to come
POLL_SECONDS = 0.2  # of a member with nothing to do: then it looks whether all is done


class Run:
    """A client's run. count: messages to publish, or stored ones to read; seconds: after which publishing ends anyhow."""

    def __init__(self, parent: Parent, address: str, queue: str, count: int, seconds: float, group: str, shared: Any) -> None:
        self.address, self.queue, self.count, self.group = address, queue, count, group
        self._parent, self._seconds, self._taken = parent, seconds, shared
        self.began_ns = self.ended_ns = 0
        self.cpu_seconds = 0.0
        self.prepared: Iterable[list[bytes]] = ()

    def prepare(self) -> None:
        """Make the payloads, which is no part of the measure."""
        self.prepared = windows(self.count)

    def begin(self) -> None:
        """Say that everything is ready, wait for the word, start the clock."""
        self._parent.ready()
        self.cpu_seconds, self.began_ns = time.process_time(), time.monotonic_ns()
        self.ended_ns = 0

    def end(self) -> None:
        """Stop the clock: everything up to here counts."""
        self.ended_ns = time.monotonic_ns()

    def timed(self) -> Iterable[list[bytes]]:
        """Payloads, a WINDOW at a time, until the time is over."""
        until = time.monotonic() + self._seconds
        for window in self.prepared:
            yield window
            if time.monotonic() > until:
                return

    def took(self, count: int) -> bool:
        """A member of the group has acknowledged so many more: stop the clock, and tell whether all members have them all."""
        if count:
            self.end()
        taken: Synchronized[int] = self._taken
        with taken.get_lock():
            taken.value += count
            return taken.value >= self.count


Publish = Callable[[Run], int]  # how many were confirmed
OneByOne = Callable[[Run], list[int]]  # nanoseconds of each
Replay = Callable[[Run], list[bytes]]
Member = Callable[[Run], list[bytes]]


class Reader(Protocol):
    """Reads on, a list at a time, for whoever comes and goes."""

    def next(self) -> list[bytes]:
        """What there is, at least one message; waits for it. After WAIT_SECONDS without any: none, or TimeoutError."""

    def position(self) -> object:
        """Where a reader has to begin that goes on after what this one has read."""

    def close(self) -> None:
        """Disconnect."""


class Writer(Protocol):
    """Publishes at somebody's pace, confirmed in the background."""

    def send(self, payloads: list[bytes]) -> None:
        """These are due."""

    def rest(self, seconds: float) -> None:
        """Nothing is due for so long."""

    def finish(self) -> None:
        """Return when everything is confirmed."""


class Clients(NamedTuple):
    """A system's ways, by the names they have in tables; the first of each is the fastest, and fills and checks elsewhere. A
    member makes its group unless it is there. unsettled: the group's messages that are not acknowledged, as it says. once: it
    gives each message away once, so each turn needs messages of its own, and nothing can be replayed."""

    prepare: Callable[[str, str], None]
    publish: Mapping[str, Publish]
    one_by_one: Mapping[str, OneByOne]
    replay: Mapping[str, Replay]
    member: Mapping[str, Member]
    member_singly: Mapping[str, Member]
    unsettled: Callable[[str, str, str], int]
    reader: Callable[[str, str, object], Reader] | None = None
    writer: Callable[[str, str], Writer] | None = None
    once: bool = False
