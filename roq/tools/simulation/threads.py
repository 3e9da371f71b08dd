"""Threads of simulated processes: real ones, but only one of them runs at a time, and the loop waits while it does.

A thread runs until it waits for something: a lock, a condition, an event, a queue, a disk, a socket. Then the loop goes on, and
lets the thread run again when what it waits for has come or its time is over; not if its process was killed meanwhile, later if
it was stopped. So a run with threads is as repeatable as one without. Sockets are in blocking.py.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from roq.tools.simulation.loop import RunOver, SimulatedLoop

_real = threading.local()  # .thread: which simulated one this real one carries


class _Carrier:
    """A real thread, which carries one simulated thread after the other."""

    idle: ClassVar[list[_Carrier]] = []

    def __init__(self) -> None:
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.work: Callable[[], None] | None = None
        threading.Thread(target=self._carry, name="simulated", daemon=True).start()

    def _carry(self) -> None:
        while True:
            self._go.acquire()
            if self.work is not None:
                self.work()
            self.work = None
            _Carrier.idle.append(self)
            self._back.release()

    def go(self) -> None:
        """From the loop: returns when the thread waits or has ended."""
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """From the thread: returns when it may go on."""
        self._back.release()
        self._go.acquire()


class SimulatedThread:
    """In place of threading.Thread."""

    def __init__(
        self,
        loop: SimulatedLoop,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self._loop, self._target, self._args, self.name = loop, target, args, name
        self._context, self._steps = contextvars.copy_context(), contextvars.copy_context()
        self._carrier: _Carrier | None = None
        self._turn = 0  # counts its waits
        self._waits = self._woken = self._ending = self._over = False
        self._joining: list[SimulatedThread] = []

    def start(self) -> None:
        """It begins when the loop comes to it."""
        self._loop.threads.known[self] = None
        self._loop.call_soon(self.step, context=self._steps)

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        wait_until(lambda: self._over, [self._joining], timeout)

    def step(self) -> None:
        """From the loop: run until it waits or ends."""
        if self._carrier is None:
            self._carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
            self._carrier.work = self._run
        self._carrier.go()

    def _run(self) -> None:
        _real.thread = self
        try:
            self._context.run(self._target, *self._args)
        except RunOver:
            pass
        except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
            self._loop.threads.failures.append(f"thread {self.name}: {type(error).__name__}: {error}")
        finally:
            _real.thread = None
            self._over = True
            self._loop.threads.known.pop(self, None)
            for other in self._joining:
                other.wake()

    def park(self, seconds: float | None) -> bool:
        """From the thread: wait for `wake`, or so long. Whether it was woken."""
        if self._ending:
            raise RunOver
        assert self._carrier is not None
        self._turn += 1
        self._waits, self._woken = True, False
        timer = None
        if seconds is not None:
            timer = self._loop.call_later(max(0.0, seconds), self._go_on, self._turn, context=self._steps)
        self._carrier.wait()
        if timer is not None:
            timer.cancel()
        if self._ending:
            raise RunOver
        return self._woken

    def wake(self) -> None:
        """What it waits for may be there."""
        if self._waits and not self._woken:
            self._woken = True
            self._loop.call_soon(self._go_on, self._turn, context=self._steps)

    def _go_on(self, turn: int) -> None:
        if self._waits and turn == self._turn:
            self._waits = False
            self.step()

    def take_apart(self) -> None:
        """Its process is gone. What it meant to do in the end does no harm now."""
        self._ending = True
        while self._carrier is not None and not self._over:
            self.step()


def current() -> SimulatedThread | None:
    """The simulated thread that runs; None in the loop."""
    thread: SimulatedThread | None = getattr(_real, "thread", None)
    return thread


def sleep(seconds: float) -> None:
    """The running thread does nothing for so long."""
    thread = current()
    assert thread is not None, "the loop would block"
    thread.park(seconds)


def wait_until(ready: Callable[[], bool], places: list[list[SimulatedThread]], seconds: float | None) -> bool:
    """The running thread waits, woken by whoever looks into one of these places; whether it is ready."""
    if ready():
        return True
    thread = current()
    assert thread is not None, "the loop would block"
    until = None if seconds is None else thread._loop.time() + seconds
    try:
        for place in places:
            place.append(thread)
        while not ready():
            left = None if until is None else until - thread._loop.time()
            if left is not None and left <= 0:
                return False
            thread.park(left)
    finally:
        for place in places:
            if thread in place:
                place.remove(thread)
    return True


def wake_all(place: list[SimulatedThread]) -> None:
    """Those who wait there look again."""
    for thread in place:
        thread.wake()


class Lock:
    """In place of threading.Lock."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[SimulatedThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See threading.Lock."""
        seconds = None if timeout < 0 else timeout
        if not wait_until(lambda: not self._held, [self._waiting], seconds if blocking else 0.0):
            return False
        self._held = True
        return True

    def release(self) -> None:
        """See threading.Lock. What is taken apart may release what it does not hold."""
        self._held = False
        wake_all(self._waiting)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class Condition:
    """In place of threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiting: deque[list[bool]] = deque()
        self._threads: list[SimulatedThread] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See threading.Condition."""
        told: list[bool] = []
        self._waiting.append(told)
        self._lock.release()
        try:
            return wait_until(lambda: bool(told), [self._threads], timeout)
        finally:
            self._waiting = deque(one for one in self._waiting if one is not told)
            self._lock.acquire()

    def notify(self, n: int = 1) -> None:
        """See threading.Condition."""
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft().append(True)
        wake_all(self._threads)

    def notify_all(self) -> None:
        """See threading.Condition."""
        self.notify(len(self._waiting))


class SimulatedEvent:
    """In place of threading.Event."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimulatedThread] = []

    def is_set(self) -> bool:
        """See threading.Event."""
        return self._set

    def set(self) -> None:
        """See threading.Event."""
        self._set = True
        wake_all(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        """See threading.Event."""
        return wait_until(lambda: self._set, [self._waiting], timeout)


class SimpleQueue:
    """In place of queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[SimulatedThread] = []

    def put(self, item: Any) -> None:
        """See queue.SimpleQueue."""
        self._items.append(item)
        wake_all(self._waiting)

    def get(self) -> Any:
        """See queue.SimpleQueue."""
        wait_until(lambda: bool(self._items), [self._waiting], None)
        return self._items.popleft()

    def __class_getitem__(cls, item: Any) -> type[SimpleQueue]:
        return cls


class Pool:
    """In place of concurrent.futures.ThreadPoolExecutor, for run_in_executor: so many at a time, the others in their order."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._idle = max_workers
        self._waiting: deque[Callable[[], None]] = deque()

    def taken(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What a thread is to do now; None: one of those there are will."""
        self._waiting.append(work)
        if not self._idle:
            return None
        self._idle -= 1
        return self._carry

    def _carry(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
        self._idle += 1

    def shutdown(self, wait: bool = True) -> None:
        """Its threads end when nothing is left to do."""


class SimulatedThreads:
    """All threads of one run. failures: those that ended with what nobody caught."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.known: dict[SimulatedThread, None] = {}
        self.failures: list[str] = []
        loop.threads = self

    def module(self) -> SimpleNamespace:
        """In place of the module `threading`."""
        return SimpleNamespace(
            Thread=partial(SimulatedThread, self._loop),
            Lock=Lock,
            Condition=Condition,
            Event=SimulatedEvent,
            current_thread=current,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )

    def run(self, executor: object, work: Callable[[], None]) -> None:
        """In a thread, which begins now unless all of its pool's are busy: returns when it waits or has ended."""
        carried = executor.taken(work) if isinstance(executor, Pool) else work
        if carried is None:
            return
        thread = SimulatedThread(self._loop, carried, name="executor")
        self.known[thread] = None
        thread.step()

    def take_apart(self) -> None:
        """Those that are in the middle of something."""
        for thread in list(self.known):
            thread.take_apart()
        self.known.clear()
