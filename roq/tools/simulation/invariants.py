"""The machines of a run, checked after each step: each has a `check` that says what must hold between two of its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from inspect import isfunction
from typing import Any
from zlib import crc32

from hcm.supervisor import Child
from roq.coordinator.tree import Tree
from roq.errors import RoqError
from roq.log.replicated.appending import Appending
from roq.log.replicated.writer import LogWriter
from roq.pubsub.monitor.membership import Membership
from roq.pubsub.order import OrderMachine
from roq.pubsub.path import PathMachine
from roq.pubsub.replay_buffer import ReplayBuffer
from roq.pubsub.tape import Tape
from roq.tools.simulation.loop import PROCESS, Process, SimulatedLoop
from roq.workqueue.fold import Fold
from roq.workqueue.master.follower import LogFollower

MACHINES: tuple[type, ...] = (Appending, Child, Fold, Membership, OrderMachine, PathMachine, ReplayBuffer, Tree)


class Inspector:
    """Looks at a machine, the coordinator's tree too, when a callback of the loop (or a thread's turn) has ended in which a
    public method of it was called."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._moved: dict[int, tuple[Any, Process | None]] = {}  # machines in this callback, by id(), and whose they are
        self.wrong: list[str] = []
        self.looks = 0
        loop.on_step = self._look

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of replacements: machines tell that they move."""
        owners = dict.fromkeys(owner for machine in MACHINES for owner in machine.__mro__[:-1])
        methods = [(owner, name, value) for owner in owners for name, value in vars(owner).items() if isfunction(value)]
        return [
            (owner, name, self._telling(method))
            for owner, name, method in methods
            if name == "__init__" or not (name.startswith("_") or name == "check")
        ]

    def _telling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def move(machine: Any, *args: Any, **options: Any) -> Any:
            self._moved[id(machine)] = machine, PROCESS.get()
            return method(machine, *args, **options)

        return move

    def _look(self) -> None:
        if not self._moved:
            return
        moved, self._moved = self._moved, {}
        for machine, process in moved.values():  # a check may ask its machine: that is no move
            self.looks += 1
            try:
                machine.check()
            except AssertionError as error:
                name = process.name if process is not None else "the coordinator"
                self.wrong.append(f"{name}: {type(machine).__name__}: {error}")
        self._moved.clear()


class LogInspector:
    """Looks at the logs of a run: an epoch has one writer, an acknowledged entry is the same for all who read it."""

    def __init__(self) -> None:
        self.writers: dict[tuple[str, int], LogWriter] = {}  # by log and epoch
        self._entries: dict[tuple[str, int], int] = {}  # log, position -> checksum of what was acknowledged there, or applied
        self.wrong: list[str] = []

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of replacements: writers and followers tell what they do."""
        write, begin, apply, fetch = LogWriter.write, LogWriter._open, LogFollower._apply, Tape.fetch

        def written(writer: LogWriter, entry: bytes, done: Callable[[int | RoqError], None]) -> None:
            def noted(result: int | RoqError) -> None:
                if isinstance(result, int):
                    self._note(writer.log_id, result, entry, f"acknowledged in epoch {writer.epoch}")
                done(result)

            write(writer, entry, noted)

        def begun(writer: LogWriter, meta: Any) -> None:
            if self.writers.setdefault((writer.log_id, writer.epoch), writer) is not writer:
                self.wrong.append(f"log {writer.log_id}: epoch {writer.epoch} has two writers")
            begin(writer, meta)

        async def applied(follower: LogFollower, entries: Iterable[tuple[int, bytes]]) -> None:
            entries = list(entries)
            for position, entry in entries:
                self._note(follower._reader.log_id, position, entry, "read")
            await apply(follower, entries)

        async def fetched(tape: Tape, *args: Any) -> int:
            trimmed = await fetch(tape, *args)
            for position, entry in tape.ahead:
                self._note(tape.log_id, position, entry, "read")
            return trimmed

        table = [(LogWriter, "write", written), (LogWriter, "_open", begun)]
        return [*table, (LogFollower, "_apply", applied), (Tape, "fetch", fetched)]

    def _note(self, log_id: str, position: int, entry: bytes, how: str) -> None:
        if self._entries.setdefault((log_id, position), crc32(entry)) != crc32(entry):
            self.wrong.append(f"log {log_id}: entry {position} is {how}, and was another one before")
