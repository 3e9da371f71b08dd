"""The history of a run as Jepsen's tools read it: EDN, one operation a line, written as it happens, so it takes no memory.

{:index 7, :time 1203000000, :process 3, :type :ok, :f :enqueue, :value 12}

Each client does one thing at a time: it invokes, then that is :ok (it took effect), :fail (it did not) or :info (nobody knows).
After an :info a client goes on as another process, as Jepsen has it. Faults are :info operations of the process :nemesis. Which
operations each load has: docs/failure-kit.md. Reads no clock: seconds are monotonic ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from pathlib import Path
from typing import IO

from roq.errors import InvalidConfiguration

NANOSECONDS = 1_000_000_000
NEMESIS = "nemesis"
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class Keyword(str):
    """`:name` in EDN."""

    __slots__ = ()


class OperationType(StrEnum):
    """`:type` of an operation."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


def to_edn(value: object) -> str:
    """None, bool, int, float, str, Keyword, sequences (vectors), sets and mappings. Raises TypeError for anything else."""
    match value:
        case None:
            return "nil"
        case bool():
            return "true" if value else "false"
        case Keyword():
            return f":{value}"
        case str():
            return _text(value)
        case int() | float():
            return repr(value)
        case Mapping():
            return f"{{{', '.join(f'{to_edn(key)} {to_edn(one)}' for key, one in value.items())}}}"
        case Set():
            return f"#{{{' '.join(sorted(map(to_edn, value)))}}}"
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return f"[{' '.join(map(to_edn, value))}]"
    raise TypeError(f"{type(value).__name__} has no place in a history")


def _text(value: str) -> str:
    parts = (_ESCAPES.get(one) or (f"\\u{ord(one):04x}" if ord(one) < 0x20 or ord(one) == 0x7F else one) for one in value)
    return f'"{"".join(parts)}"'


class EdnHistory:
    """`begin(started)`, then operations, then `close()`. path: None: nothing is written. Raises InvalidConfiguration if the
    file can't be written. A disk that fails later ends the history, not the run: `failure` says so."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        self.failure = ""  # why it is not complete
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise InvalidConfiguration(f"the history can't be written: {error}: give --history-file another file") from None
        self._started: float | None = None
        self._last = 0  # nanoseconds: time never goes back from one line to the next
        self._lines = self._processes = 0
        self._process: dict[str, int] = {}  # by client
        self._invoked: dict[str, tuple[str, object]] = {}  # by client: what it does now

    @property
    def written(self) -> bool:
        """Whether anybody wants it: values that cost something need not be made otherwise."""
        return self._file is not None

    def begin(self, started: float) -> None:
        """Times count from here. What came before has time 0."""
        self._started = started

    def invoke(self, client: str, f: str, value: object, at: float) -> None:
        """A client begins something. What it did before, and never came back from, is unknown."""
        if self._file is None:
            return
        if client in self._invoked:
            self.complete(client, OperationType.INFO, at)
        if client not in self._process:
            self._process[client], self._processes = self._processes, self._processes + 1
        self._invoked[client] = f, value
        self._write(self._process[client], OperationType.INVOKE, f, value, at)

    def complete(self, client: str, outcome: OperationType, at: float, value: object = None) -> None:
        """What came of it. value: None: as it was invoked. Nothing, if the client does nothing now."""
        if self._file is None or client not in self._invoked:
            return
        f, invoked = self._invoked.pop(client)
        process = self._process.pop(client) if outcome is OperationType.INFO else self._process[client]
        self._write(process, outcome, f, invoked if value is None else value, at)

    def fault(self, f: str, value: object, at: float) -> None:
        """The nemesis did something."""
        if self._file is not None:
            self._write(Keyword(NEMESIS), OperationType.INFO, f, value, at)

    def close(self) -> None:
        """What nobody came back from is unknown; the file is complete."""
        for client in list(self._invoked):
            self.complete(client, OperationType.INFO, 0.0)
        self._close_file()

    def _write(self, process: object, type: OperationType, f: str, value: object, at: float) -> None:
        if self._file is None:  # the line before was the one that failed
            return
        since = 0.0 if self._started is None else at - self._started
        self._last = max(self._last, int(since * NANOSECONDS))
        operation = {
            "index": self._lines,
            "time": self._last,
            "process": process,
            "type": Keyword(type),
            "f": Keyword(f),
            "value": value,
        }
        self._lines += 1
        try:
            self._file.write(to_edn({Keyword(key): one for key, one in operation.items()}) + "\n")
        except OSError as error:
            self._fail(error)
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:  # what was still in memory
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = self.failure or f"the history is not complete: {error}: give --history-file a place with more room"
