"""What plain blocking clients stand on, in a simulation: sockets and the stop event of threads, an event loop beside them."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from roq.errors import Closed
from roq.runtime.blocking_connection import SEND_SECONDS
from roq.runtime.sockets import DEAD_SECONDS
from roq.tools.simulation.loop import SimulatedLoop
from roq.tools.simulation.network import End, Network
from roq.tools.simulation.threads import SimulatedThread, wait_until, wake_all

T = TypeVar("T")
KERNEL_BYTES = 2_000_000  # sent and not read yet by the other end, before `send` waits
_TIMEVAL = struct.Struct("@ll")


class SimulatedSocket:
    """A thread's end of a connection, with the face of a socket.socket as roq/runtime/blocking_connection.py uses it."""

    def __init__(self, network: Network, end: End) -> None:
        self._network, self._end = network, end
        self._data: deque[bytes] = deque()
        self._unread_by_peer = 0
        self._over = False
        self._receive_seconds: float | None = None
        self.waiting: list[SimulatedThread] = []
        end.on_item, end.on_closed = self._item, self._closed
        end.patience_seconds = DEAD_SECONDS

    def _item(self, item: Any) -> None:
        if isinstance(item, int):
            self._unread_by_peer -= item
        else:
            self._data.append(item)
        wake_all(self.waiting)

    def _closed(self) -> None:
        self._over = True
        wake_all(self.waiting)

    def readable(self) -> bool:
        """Whether `recv` would not wait."""
        return bool(self._data) or self._over

    def recv(self, count: int, flags: int = 0) -> bytes:
        """See socket.socket."""
        seconds = 0.0 if flags & socket.MSG_DONTWAIT else self._receive_seconds
        if not wait_until(self.readable, [self.waiting], seconds):
            raise BlockingIOError
        if not self._data:
            return b""
        data = self._data.popleft()
        if len(data) > count:
            self._data.appendleft(data[count:])
        self._end.send(len(data[:count]))  # acknowledged
        return data[:count]

    def send(self, data: Any) -> int:
        """See socket.socket."""
        if self._over or self._end.closed:
            raise ConnectionResetError
        if not wait_until(lambda: self._unread_by_peer < KERNEL_BYTES or self._over, [self.waiting], SEND_SECONDS):
            raise BlockingIOError
        self._unread_by_peer += len(data)
        self._end.send(bytes(data))
        return len(data)

    def sendall(self, data: Any) -> None:
        """See socket.socket."""
        self.send(data)

    def settimeout(self, seconds: float | None) -> None:
        """It waits, as told by SO_RCVTIMEO."""

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Only how long `recv` waits."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            seconds, micros = _TIMEVAL.unpack(value)
            self._receive_seconds = seconds + micros / 1e6

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """TCP_INFO: zeros if the other end answers, and else not."""
        there, back = (self._end.address, self._end.peer.address), (self._end.peer.address, self._end.address)
        answers = self._network.is_open(*there) and self._network.is_open(*back)
        return (b"\0" if answers else b"\xff") * size

    def close(self) -> None:
        """See socket.socket."""
        self._end.close()


class Sockets:
    """In place of the module `socket` of blocking code."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def module(self) -> SimpleNamespace:
        """Its constants, and `create_connection`."""
        names = ("SOL_SOCKET", "SO_RCVTIMEO", "SO_SNDTIMEO", "MSG_DONTWAIT", "IPPROTO_TCP", "TCP_INFO", "TCP_USER_TIMEOUT")
        constants = {name: getattr(socket, name) for name in names}
        return SimpleNamespace(**constants, create_connection=self.create_connection)

    def create_connection(self, address: tuple[str, int], timeout: float) -> SimulatedSocket:
        """See socket.create_connection."""
        made: list[SimulatedSocket | None] = []
        waiting: list[SimulatedThread] = []
        late: list[bool] = []

        def connected(end: End) -> None:
            if late:
                end.close()
                return
            made.append(SimulatedSocket(self._network, end))
            wake_all(waiting)

        def failed() -> None:
            made.append(None)
            wake_all(waiting)

        self._network.connect(*address, connected, failed)
        if not wait_until(lambda: bool(made), [waiting], timeout):
            late.append(True)
            raise TimeoutError(f"{address}")
        if made[0] is None:
            raise ConnectionRefusedError(f"{address}")
        return made[0]


class SimulatedStopEvent:
    """In place of roq.runtime.blocking_connection.StopEvent."""

    def __init__(self) -> None:
        self._set = False
        self.waiting: list[SimulatedThread] = []

    def readable(self) -> bool:
        """For Poll."""
        return self._set

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """For ever."""
        self._set = True
        wake_all(self.waiting)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is set; whether it is set."""
        return wait_until(self.readable, [self.waiting], seconds)


class Poll:
    """In place of select.poll."""

    def __init__(self) -> None:
        self._those: list[Any] = []

    def register(self, one: Any, events: int) -> None:
        """one: a socket or a stop event."""
        self._those.append(one)

    def poll(self, milliseconds: float) -> None:
        """Until one of them is readable, or so long."""
        places = [one.waiting for one in self._those]
        wait_until(lambda: any(one.readable() for one in self._those), places, milliseconds / 1000)


SELECT = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN)


class LoopBeside:
    """In place of roq.runtime.loop_thread.LoopThread: what it runs, runs on the one loop there is."""

    def __init__(self, loop: SimulatedLoop, name: str = "roq", ended: str | None = None) -> None:
        self.loop, self._ended = loop, ended
        self._ending = False
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """From a thread: its result."""
        if self._ending:
            work.close()
            raise Closed(self._ended)
        waiting: list[SimulatedThread] = []
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self.loop.create_task(work)
            tasks.append(task)
            self._tasks[task] = None
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[T]) -> None:
            self._tasks.pop(task, None)
            wake_all(waiting)

        self.loop.call_soon(begin)
        wait_until(lambda: bool(tasks) and tasks[0].done(), [waiting], None)
        if tasks[0].cancelled():
            raise Closed(self._ended)
        return tasks[0].result()

    def soon(self, function: Callable[[], None]) -> None:
        """Have `function` called on the loop."""
        if self._ending:
            raise Closed(self._ended)
        self.loop.call_soon(function)

    def stop(self) -> None:
        """What is under way ends with Closed."""
        self._ending = True
        for task in list(self._tasks):
            self.loop.call_soon(task.cancel)
