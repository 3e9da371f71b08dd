"""What the processes of the model of the list share, as one of them sees it: the list's memory, the combiner's lock, the log.

A run of the real code is given what it has got so far, and ends with `Pause` where it wants more: so a process that waits
between two accesses is just a tuple. Not here: what an access does (combining.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from fcntl import LOCK_EX
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from roq.errors import StorageFull
from roq.log.local import publication as publication_module
from roq.log.local import shared
from roq.log.local.publication import _ANSWER, _REQUEST, HEAD_BYTES, PLACE_BYTES, REQUEST_BYTES, PublicationList
from roq.wire.work_queue import TaskSettings
from roq.workqueue.log_queue import LogQueue

Access = tuple[Any, ...]
Trace = tuple[Any, ...]
FULL = "full"  # what an append of the model returns when it was refused


class Pause(BaseException):
    """The next access of a process; unlike an Exception not to be caught by what it runs."""

    def __init__(self, access: Access) -> None:
        self.access = access


class Machine:
    """What a process has of the world: what it got so far, then `Pause`."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._at = trace, 0
        self._paused: Pause | None = None

    def access(self, *access: Any) -> Any:
        """What this access returned; ends the run if it was not made yet, and whatever is tried on the way out."""
        if self._paused is not None or self._at == len(self._trace):
            self._paused = self._paused or Pause(access)
            raise self._paused
        self._at += 1
        return self._trace[self._at - 1]


class Words:
    """The words that matter. Who serves and since when are hints about time, which the model has not."""

    def __init__(self, machine: Machine, base: int = 0) -> None:
        self._machine, self._base = machine, base

    def __getitem__(self, word: int) -> int:
        return cast(int, self._machine.access("load", word + self._base)) if word + self._base >= _REQUEST else 0

    def __setitem__(self, word: int, value: int) -> None:
        if word >= _REQUEST:
            self._machine.access("store", word, value)

    def __eq__(self, other: object) -> bool:
        return bool(self._machine.access("settled"))

    __hash__ = None  # type: ignore[assignment]


class ModelList(PublicationList):
    """The real list over the model's memory."""

    def __init__(self, machine: Machine, place: int, *, patient: bool) -> None:
        self.machine, self.place, self._patient = machine, place, patient
        words: Any = Words(machine)
        self._words, self._requests, self._answers = (
            words,
            cast(Any, Words(machine, _REQUEST)),
            cast(Any, Words(machine, _ANSWER)),
        )
        self._bells = [0] * publication_module.PLACES
        self._locks = cast(Any, SimpleNamespace(is_open=True, combiner=machine))
        self._mine, self._began = False, 0
        self._served, self._company = 0, 0.0
        self._number = self._inherited()

    def _inherited(self) -> int:
        return max(self._words[_REQUEST + self.place], self._words[_ANSWER + self.place])

    def is_ours(self) -> bool:
        """Nobody is waited for."""
        return False

    def pause(self, patience: float) -> float:
        """See PublicationList.pause."""
        return 1.0 if self._patient else 0.0

    def wait(self, seconds: float) -> None:
        """See PublicationList.wait."""
        self.machine.access("wait", self._number)

    def _write(self, at: int, number: int, text: bytes) -> None:
        memory = bytearray(PLACE_BYTES)
        self._mapped = cast(Any, SimpleNamespace(bytes=memory))
        super()._write(0, number, text)
        self.machine.access("write", _slot(at), bytes(memory[: len(text) + 8]))

    def _read(self, at: int, number: int, length_max: int) -> bytes | None:
        self._mapped = cast(Any, SimpleNamespace(bytes=self.machine.access("read", _slot(at))))
        return super()._read(0, number, length_max)


class ModelLog:
    """The log: positions count its entries."""

    folder = Path("/nowhere")
    is_tight = False  # so no snapshot is begun: the search wants a log alone

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def end(self) -> int:
        """Position of the last entry."""
        return cast(int, self._machine.access("end"))

    @staticmethod
    def start_of(position: int, entries: Sequence[bytes]) -> int:
        """See LocalLog.start_of."""
        return position - len(entries)

    def append(self, entries: Sequence[bytes], *, keep_bytes: int = 0) -> int:
        """See LocalLog.append."""
        end = self._machine.access("append", tuple(entries))
        if end == FULL:
            raise StorageFull("as the search wants it")
        return cast(int, end)

    def sync(self, position: int) -> None:
        """See LocalLog.sync."""
        self._machine.access("sync", position)

    def load_snapshot(self) -> None:
        """There is none."""

    def read(self, after: int) -> list[tuple[int, bytes]]:
        """See LocalLog.read."""
        return cast("list[tuple[int, bytes]]", self._machine.access("entries", after))


def _slot(at: int) -> int:
    """Number of a text: of a place's request, or of its answer."""
    place, offset = divmod(at - HEAD_BYTES, PLACE_BYTES)
    return 2 * place + (offset == REQUEST_BYTES)


def _try_alone(machine: Machine) -> bool:
    return bool(machine.access("lock"))


def _flock(machine: Machine, operation: int) -> None:
    machine.access("held" if operation == LOCK_EX else "unlock")


@contextlib.contextmanager
def modelled(places: int) -> Iterator[None]:
    """While this lasts, lists have so many places, locks are the model's, and every wait has lasted long."""
    with (
        patch.object(publication_module, "PLACES", places),
        patch.object(publication_module, "try_alone", _try_alone),
        patch.object(publication_module, "flock", _flock),
        patch.object(publication_module, "LONG_ROUND_SECONDS", float("inf")),
        patch.object(shared, "futex_wake", lambda *_: None),
        patch.object(publication_module, "PAUSE_SECONDS", publication_module.COMBINER_SECONDS),
        patch.object(LogQueue, "_agree", lambda self, wanted: TaskSettings()),
    ):
        yield
