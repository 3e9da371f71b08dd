"""The machines of a run, checked again and again: each has a `check` that says what must hold between two of its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

from hcm.supervisor import Child
from roq.client.order import OrderMachine
from roq.client.path import PathMachine
from roq.client.ring import Ring
from roq.errors import RoqError
from roq.log.replicated.appending import Appending
from roq.log.replicated.writer import LogWriter
from roq.master.follower import Follower
from roq.monitor.membership import Membership
from roq.simulation.loop import PROCESS, Fate, Process, SimulatedLoop
from roq.workqueue.state import State

LOOK_SECONDS = 0.25
MACHINES: tuple[type, ...] = (Appending, Child, Membership, OrderMachine, PathMachine, Ring, State)


class Inspector:
    """Looks at every machine that a living process has made, and at the coordinator's tree."""

    def __init__(self, loop: SimulatedLoop, context: Any, tree: Any) -> None:
        self._loop, self._context, self._tree = loop, context, tree
        self._machines: list[tuple[Process, Any]] = []
        self.wrong: list[str] = []
        self.looks = 0
        self._later()

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of surroundings: machines that are made are known here."""
        return [(machine, "__init__", self._known(machine)) for machine in MACHINES]

    def _known(self, machine: Any) -> Any:
        make = machine.__init__

        @functools.wraps(make)
        def made(one: Any, *args: Any, **options: Any) -> None:
            make(one, *args, **options)
            process = PROCESS.get()
            if process is not None:
                self._machines.append((process, one))

        return made

    def _later(self) -> None:
        self._loop.call_later(LOOK_SECONDS, self._look, context=self._context)

    def _look(self) -> None:
        self._machines = [(process, one) for process, one in self._machines if process.fate is not Fate.DEAD]
        for process, one in self._machines:
            self._check(process.name, one)
        self._check("the coordinator", self._tree)
        self._later()

    def _check(self, name: str, machine: Any) -> None:
        self.looks += 1
        try:
            machine.check()
        except AssertionError as error:
            self.wrong.append(f"{name}: {type(machine).__name__}: {error}")


class LogInspector:
    """Looks at the one log of a run: an epoch has one writer, an acknowledged entry is the same for all who read it."""

    def __init__(self) -> None:
        self._writers: dict[int, LogWriter] = {}  # by epoch
        self._entries: dict[int, int] = {}  # position -> checksum of what was acknowledged there, or applied
        self.wrong: list[str] = []

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of surroundings: writers and followers tell what they do."""
        write, begin, apply = LogWriter.write, LogWriter._open, Follower._apply

        def written(writer: LogWriter, entry: bytes, done: Callable[[int | RoqError], None]) -> None:
            def noted(result: int | RoqError) -> None:
                if isinstance(result, int):
                    self._note(result, entry, f"acknowledged in epoch {writer.epoch}")
                done(result)

            write(writer, entry, noted)

        def begun(writer: LogWriter, meta: Any) -> None:
            if self._writers.setdefault(writer.epoch, writer) is not writer:
                self.wrong.append(f"the log: epoch {writer.epoch} has two writers")
            begin(writer, meta)

        async def applied(follower: Follower, entries: Iterable[tuple[int, bytes]]) -> None:
            entries = list(entries)
            for position, entry in entries:
                self._note(position, entry, "read")
            await apply(follower, entries)

        return [(LogWriter, "write", written), (LogWriter, "_open", begun), (Follower, "_apply", applied)]

    def _note(self, position: int, entry: bytes, how: str) -> None:
        if self._entries.setdefault(position, crc32(entry)) != crc32(entry):
            self.wrong.append(f"the log: entry {position} is {how}, and was another one before")
