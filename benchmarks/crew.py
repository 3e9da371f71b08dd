"""Client processes of a benchmark, each an interpreter of its own: started, given the word, asked what they found."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec

P = ParamSpec("P")
START_SECONDS, END_SECONDS = 60.0, 10.0
READY, GO = "ready", "go"


class Failed(NamedTuple):
    """The last words of a client that raised; its traceback is on standard error."""

    error: str


class Parent:
    """What a client process has of whoever started it."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def ready(self) -> None:
        """Say so and wait for the word."""
        self._line.send(READY)
        self._line.recv()

    def tell(self, found: object) -> None:
        """What was done."""
        self._line.send(found)

    def heard(self) -> bool:
        """Whether it has said something more."""
        return self._line.poll()

    def hear(self) -> Any:
        """What it said."""
        return self._line.recv()


class Worker:
    """One client process. Its failure is a RuntimeError of whoever asks it next."""

    def __init__(self, process: multiprocessing.process.BaseProcess, line: Connection) -> None:
        self._process, self._line = process, line

    def until_ready(self, seconds: float = START_SECONDS) -> None:
        """Return when it waits for the word."""
        if (found := self.told(seconds)) != READY:
            raise RuntimeError(f"a client said {found!r} instead of that it is ready")

    def say(self, word: object = GO) -> None:
        """The word."""
        self._line.send(word)

    def check(self) -> None:
        """Raise if it has failed so far; for one that has nothing to tell yet."""
        if self._line.poll():
            raise RuntimeError(f"a client said {self.told(0)!r} though nobody had asked it")

    def told(self, seconds: float) -> Any:
        """What it tells next, within so long."""
        if not self._line.poll(seconds):
            raise RuntimeError(f"a client did not answer in {seconds:g} s")
        try:
            found = self._line.recv()
        except EOFError:
            raise RuntimeError("a client ended without a word") from None
        if isinstance(found, Failed):
            raise RuntimeError(f"a client failed: {found.error}")
        return found

    def end(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._line.close()


class Crew:
    """All client processes of one run; none outlives the `with`."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self._workers: list[Worker] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end(END_SECONDS if kind is None else 0.0)

    def start(self, body: Callable[Concatenate[Parent, P], None], *arguments: P.args, **named: P.kwargs) -> Worker:
        """A process that runs `body(parent, *arguments)`: a function of a module."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_client, args=(theirs, body, arguments, named), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(Worker(process, ours))
        return self._workers[-1]


def _client(line: Connection, body: Callable[..., None], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        body(Parent(line), *arguments, **named)
    except BaseException as error:  # whatever a client's library raises is told to the parent
        line.send(Failed("".join(traceback.format_exception_only(error)).strip()))
        raise
