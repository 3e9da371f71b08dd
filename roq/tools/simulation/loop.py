"""An event loop whose time passes only when nothing is left to do now, and whose callbacks belong to simulated processes.

What a program starts (tasks, timers, callbacks) carries the context variable PROCESS on. The loop asks it before it runs
anything: what belongs to a killed process is never run again, not even a `finally`, and what belongs to a stopped one (SIGSTOP)
waits. Each callback takes a moment of virtual time, so that no loop of programs stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import zlib
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from enum import StrEnum
from random import Random
from typing import Any, NoReturn

BOOTED_SECONDS = 1000.0  # the clock of machines that have been up for a while
STEP_SECONDS = 2e-6  # of each callback
EXECUTOR_SECONDS = 2e-4  # of what runs in a thread
GOOD_BYES_MAX = 100  # awaits of a coroutine that is taken apart
STEPS_MAX = 20_000_000  # of one run; more is a defect


class Fate(StrEnum):
    """How a process is."""

    ALIVE = "alive"
    STOPPED = "stopped"
    DEAD = "dead"


class Process:
    """Whose a callback is. address: of its machine. on_end: called when it is dead, however that came."""

    def __init__(self, name: str, address: str, pid: int) -> None:
        self.name, self.address, self.pid = name, address, pid
        self.fate = Fate.ALIVE
        self.tasks: set[asyncio.Task[Any]] = set()
        self.held: deque[asyncio.Handle] = deque()  # while it is stopped
        self.on_end: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.pid} {self.fate}>"


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)


class RunOver(BaseException):
    """The run is over: what a killed process left in the middle is taken apart."""


class SimulatedTask(asyncio.Task[Any]):
    """Sets of tasks are in the same order in every run."""

    def __init__(self, coroutine: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__


class Standstill(Exception):
    """Nothing will ever happen again."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """random: draws the order of what is ready at the same time. `kill`, `stop` and `go_on` change a process's fate."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._now = BOOTED_SECONDS
        self._random = random
        self.steps = self._numbers = 0  # of what it has run; of what it has made
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap
        self._dead: list[Process] = []
        self._begun_late: list[asyncio.Task[Any]] | None = None  # by what is taken apart
        self._readers: dict[int, asyncio.Handle] = {}
        self.set_task_factory(self._new_task)
        self.network: Any = None  # network.Network, for create_connection and create_server
        self.threads: Any = None  # threads.Threads, for run_in_executor
        self.on_step: Callable[[], object] = lambda: None  # called after each callback
        self.trace = 0  # a number that differs if anything happened in another order

    # --- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """What is due at the same time runs in the order in which it was asked for."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        return timer

    def _run_once(self) -> None:
        timers = self._timers
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Standstill("nothing is left to do, now or later")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._run_handle(handle)

    def _run_handle(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and process.fate is not Fate.ALIVE:
            if process.fate is Fate.STOPPED:
                process.held.append(handle)
            return
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise Standstill(f"more than {STEPS_MAX} steps")
        self._now += STEP_SECONDS
        handle._run()
        self.on_step()

    def hold_up(self, seconds: float) -> None:
        """What runs now takes so long, and everything else waits for it."""
        self._now += seconds

    def note(self, *what: object) -> None:
        """This happened now: part of the run's trace."""
        self.trace = hash_of(self.trace, round(self._now * 1e6), *what)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _new_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self._numbers += 1
        task = SimulatedTask(coroutine, self._numbers, loop=loop, **options)
        process = (options.get("context") or {PROCESS: PROCESS.get()}).get(PROCESS)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        elif self._begun_late is not None:
            self._begun_late.append(task)
        return task

    def kill(self, process: Process) -> None:
        """As SIGKILL: it never runs again, and its connections end."""
        if process.fate is Fate.DEAD:
            return
        process.fate = Fate.DEAD
        process.held.clear()
        self._dead.append(process)
        for call in process.on_end:
            call()

    def stop_process(self, process: Process) -> None:
        """As SIGSTOP."""
        if process.fate is Fate.ALIVE:
            process.fate = Fate.STOPPED

    def go_on(self, process: Process) -> None:
        """As SIGCONT."""
        if process.fate is Fate.STOPPED:
            process.fate = Fate.ALIVE
            self._ready.extend(process.held)  # type: ignore[attr-defined]
            process.held.clear()

    def bury(self) -> None:
        """At the end: take apart what killed processes left in the middle. Their `finally` blocks run now and do no harm."""
        if self.threads is not None:
            self.threads.take_apart()
        left = self._begun_late = []
        for process in self._dead:
            left += process.tasks
            process.tasks.clear()
            process.on_end.clear()
        for task in left:  # it grows: what they close begins more
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _take_apart(task.get_coro())
        self._begun_late = None
        self._dead.clear()

    def dispose(self) -> None:
        """Take apart what is left, timers too."""
        self.bury()
        self._timers.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        if not self.is_closed():
            self.close()

    # --- what a loop has to do with the world ---------------------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """fd: of a simulated socket."""
        self._readers[fd] = asyncio.Handle(callback, args, self, None)

    def remove_reader(self, fd: Any) -> bool:
        """False if there was none."""
        handle = self._readers.pop(fd, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def readable(self, fd: int) -> None:
        """The descriptor tells news."""
        handle = self._readers.get(fd)
        if handle is not None:
            self.call_soon(handle._callback, *handle._args, context=handle._context)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """executor: None or a Pool of threads.py. The thread begins at once, if one is idle; that its work is done is known a
        moment after it is."""
        future = self.create_future()

        def told(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except Exception as raised:  # noqa: BLE001 - the caller's, wherever it is raised
                error = raised
            self.call_later(EXECUTOR_SECONDS * (0.5 + self._random.random()), told, result, error)

        self.threads.run(executor, work)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Through the simulated network. Raises ConnectionRefusedError, TimeoutError."""
        return await self.network.open_connection(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **options: Any) -> Any:
        """sock: of network.listen."""
        return self.network.serve(protocol_factory, sock)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def _write_to_self(self) -> None:
        return

    def _process_events(self, event_list: Any) -> NoReturn:
        raise AssertionError("no events come from outside")

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""


def _take_apart(coroutine: Any) -> None:
    """Whatever it meant to do, it is too late; what it awaits in the end does not come."""
    with contextlib.suppress(BaseException):
        for _ in range(GOOD_BYES_MAX):
            coroutine.throw(RunOver())


def hash_of(*parts: object) -> int:
    """The same in every process, other than `hash`."""
    return zlib.crc32(repr(parts).encode())
