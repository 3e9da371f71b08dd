"""The network between simulated machines: connections that carry items in order, late, and that break as TCP's do.

A machine is an IP address. What is sent arrives after a random delay; while the way is cut (one or both) it waits, and comes
when the way is free again, as TCP's repeats would bring it. A killed process's connections end with what had left by then (a
random part of what was on its way); a machine without power says nothing, until it is back and answers with a reset. While a
way rejects what is sent, who sends is told, and who only reads is not.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from roq.errors import PortTaken
from roq.runtime.sockets import PROBE_SECONDS, PROBES, QUIET_SECONDS
from roq.tools.simulation.loop import PROCESS, Fate, Process, SimulatedLoop

DELAY_SECONDS = 0.0002, 0.001  # least and most of one way, in a quiet network
KERNEL_BYTES = 64 * 1024  # of one way, on both machines together: few, so that readers that stop are felt
WRITE_BUFFER_BYTES = 64 * 1024  # unless a transport is told another limit


class End:
    """One end of a connection. on_item(item) for what arrives, on_closed() once when the other end is gone, on_reset() if what
    was sent to it was rejected."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self.process, self.address = network, process, address
        self.peer: End
        self.on_item: Callable[[Any], None] = lambda item: None
        self.on_closed: Callable[[], None] = lambda: None
        self.on_reset: Callable[[], None] | None = None
        self.closed = self._told = self.lost_power = False
        self.way: deque[tuple[float, Any]] = deque()  # to us: when it may arrive at the earliest, and what
        self.patience_seconds: float | None = None  # a way that is cut for longer is a connection that ended
        self._timer: asyncio.TimerHandle | None = None
        self._context: Any = None  # in which our callbacks run

    def send(self, item: Any) -> None:
        """It arrives behind what was sent before, unless the connection ends first."""
        if self.closed:
            return
        if self._network.rejects(self.address, self.peer.address):
            if not isinstance(item, int):  # that something was read: the other end's kernel says so with what it sends
                self._reset()
            return
        if not self.peer.closed:
            self.peer.coming(item)
        elif self.peer.lost_power and self._network.is_open(self.address, self.peer.address):
            self._tell_closed()  # the machine is back and knows nothing of us

    def coming(self, item: Any) -> None:
        """On its way to us."""
        at = self._network.loop.time() + self._network.delay(self.peer.address, self.address)
        if self.way:
            at = max(at, self.way[-1][0])
        self.way.append((at, item))
        if self._timer is None:
            self._wait()

    def _wait(self) -> None:
        if self.way:
            loop = self._network.loop
            context = self._network.context
            self._timer = loop.call_at(max(self.way[0][0], loop.time()), self._arrive, context=context)

    def _arrive(self) -> None:
        """In the network's own context: what belongs to a stopped process waits in its buffers."""
        self._timer = None
        if not self._network.is_open(self.peer.address, self.address):
            self._network.blocked.append(self)
            return
        now, items, ended = self._network.loop.time(), [], False
        while self.way and self.way[0][0] <= now:
            item = self.way.popleft()[1]
            if item is _FIN:
                ended = True
            else:
                items.append(item)
        if items and not self.closed and self.process.fate is not Fate.DEAD:
            self._network.loop.call_soon(self._take, items, context=self._context)
        if ended:
            self._tell_closed()
        self._wait()

    def go_on(self) -> None:
        """The way may be free again."""
        if self._timer is None:
            self._wait()

    def _take(self, items: list[Any]) -> None:
        for item in items:
            if not self.closed:
                self.on_item(item)

    def _tell_closed(self) -> None:
        if not self.closed and not self._told:
            self._told = True
            self._network.loop.call_soon(self._heard_closed, context=self._context)

    def _heard_closed(self) -> None:
        if not self.closed:
            self.closed = True
            self._network.ends.pop(self, None)
            self.on_closed()

    def _reset(self) -> None:
        """What we sent was rejected. The other end does not know until it sends, or is quiet for too long."""
        self.closed = self.lost_power = True
        self._network.ends.pop(self, None)
        self._network.loop.call_soon(self.on_reset or self.on_closed, context=self._context)
        if not self.peer.closed and (patience := self.peer.patience_seconds) is not None:
            self._network.loop.call_later(patience, self.peer.give_up, context=self._network.context)

    def give_up(self) -> None:
        """The other end has not been heard for too long. It learns of it when the way is free again."""
        if not self.closed and not self.peer.closed:
            self.peer.coming(_FIN)
        self._tell_closed()

    def close(self) -> None:
        """The other end reads what was sent, and then the end."""
        if not self.closed:
            self.closed = True
            if not self.peer.closed:
                self.peer.coming(_FIN)
            self._network.ends.pop(self, None)

    def die(self, *, silently: bool) -> None:
        """Our process was killed. silently: so was its machine. What had not left yet is lost."""
        if self.closed:
            return
        self.closed = True
        self._network.ends.pop(self, None)
        way = self.peer.way
        for _ in range(self._network.random.randint(0, len(way))):
            way.pop()
        self.lost_power = silently
        if self.peer.closed:
            return
        if not silently:
            self.peer.coming(_FIN)
        elif (patience := self.peer.patience_seconds) is not None:
            self._network.loop.call_later(patience, self.peer.give_up, context=self._network.context)


_FIN = object()


class Listener:
    """A port somebody listens at; also what stands for the listening socket."""

    def __init__(self, network: Network, address: str, port: int, process: Process) -> None:
        self._network, self.address, self.port, self.process = network, address, port, process
        self.accept: Callable[[End], None] | None = None
        self.context: Any = None

    def getsockname(self) -> tuple[str, int]:
        """As a socket's."""
        return self.address, self.port

    def close(self) -> None:
        """Nobody listens any more."""
        if self._network.listeners.get((self.address, self.port)) is self:
            del self._network.listeners[self.address, self.port]


class Network:
    """All machines' network. `cut` and `heal` change which ways are open; `slow` adds delay to a machine."""

    def __init__(self, loop: SimulatedLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        loop.network = self
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.ends: dict[End, None] = {}
        self.blocked: list[End] = []
        self._cut: dict[tuple[str, str], tuple[int, float]] = {}  # from, to: how many faults cut this way, since when
        self._rejecting = Counter[tuple[str, str]]()  # from, to: how many faults have this way answer with resets
        self.down: set[str] = set()  # machines without power
        self._slow: dict[str, float] = {}
        self.far: dict[str, float] = {}  # machine -> seconds that each way from or to it takes longer, always
        self.context = contextvars.copy_context()
        self._ports = 20_000

    # --- ways -----------------------------------------------------------------------------------------------------------

    def delay(self, source: str, target: str) -> float:
        """Seconds of one way, now."""
        slow = self._slow.get(source, 0.0) + self._slow.get(target, 0.0)
        far = self.far.get(source, 0.0) + self.far.get(target, 0.0)
        return self.random.uniform(*DELAY_SECONDS) + far + slow * self.random.random()

    def is_open(self, source: str, target: str) -> bool:
        """Whether anything gets there now."""
        return source == target or ((source, target) not in self._cut and target not in self.down)

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from there to there, until it is healed as often."""
        count, since = self._cut.get((source, target), (0, self.loop.time()))
        self._cut[source, target] = count + 1, since
        if count:
            return
        for end in self.ends:
            if (end.address, end.peer.address) in ((source, target), (target, source)) and end.patience_seconds is not None:
                self.loop.call_later(end.patience_seconds, self._look, end, source, target, since, context=self.context)

    def _look(self, end: End, source: str, target: str, since: float) -> None:
        if self._cut.get((source, target), (0, 0.0))[1] == since:
            end.give_up()

    def heal(self, source: str, target: str) -> None:
        """Undo one `cut`."""
        count, since = self._cut[source, target]
        if count > 1:
            self._cut[source, target] = count - 1, since
            return
        del self._cut[source, target]
        self._flow()

    def rejects(self, source: str, target: str) -> bool:
        """Whether what is sent there is answered with a reset."""
        return self._rejecting[source, target] > 0

    def reject(self, source: str, target: str) -> None:
        """So it is from now on, until `accept` was called as often."""
        self._rejecting[source, target] += 1

    def accept(self, source: str, target: str) -> None:
        """Undo one `reject`."""
        self._rejecting[source, target] -= 1

    def _flow(self) -> None:
        blocked, self.blocked = self.blocked, []
        for end in blocked:
            end.go_on()

    def lose_power(self, address: str) -> None:
        """The machine says nothing any more. Its processes are killed by whoever says so."""
        self.down.add(address)

    def regain_power(self, address: str) -> None:
        """It answers again."""
        self.down.discard(address)
        self._flow()

    def slow(self, address: str, seconds: float) -> None:
        """Whatever comes from or goes to this machine takes up to so much longer; 0: as ever."""
        self._slow[address] = seconds

    # --- listening and connecting -----------------------------------------------------------------------------------------

    def listen(self, address: str, port: int) -> Listener:
        """port 0: any free one. Raises PortTaken."""
        process = PROCESS.get()
        assert process is not None, "only simulated processes listen"
        while port == 0:
            self._ports += 1
            if (address, self._ports) not in self.listeners:
                port = self._ports
        if (address, port) in self.listeners:
            raise PortTaken(f"can't bind {address}:{port}: it is taken")
        listener = self.listeners[address, port] = Listener(self, address, port, process)
        process.on_end.append(listener.close)
        return listener

    def is_free(self, address: str, port: int) -> bool:
        """Whether it can be bound now."""
        return (address, port) not in self.listeners

    def connect(self, address: str, port: int, on_connected: Callable[[End], None], on_failed: Callable[[], None]) -> None:
        """One of the two is called, in the caller's context."""
        process, context = PROCESS.get(), contextvars.copy_context()
        assert process is not None, "only simulated processes connect"
        loop, source = self.loop, process.address

        def arrive(tries: int) -> None:
            if process.fate is Fate.DEAD:
                return
            if not self.is_open(source, address) or not self.is_open(address, source):
                if tries < 10:  # SYN again, after 1 s, 2 s, 4 s, …
                    loop.call_later(min(2.0**tries, 32.0), arrive, tries + 1, context=self.context)
                else:
                    loop.call_soon(on_failed, context=context)
                return
            listener = self.listeners.get((address, port))
            if listener is None or listener.accept is None or self.rejects(source, address) or self.rejects(address, source):
                loop.call_soon(on_failed, context=context)
                return
            ours, theirs = End(self, process, source), End(self, listener.process, address)
            ours.peer, theirs.peer = theirs, ours
            ours._context, theirs._context = context, listener.context
            self.ends[ours] = self.ends[theirs] = None
            loop.call_soon(listener.accept, theirs, context=listener.context)
            loop.call_soon(on_connected, ours, context=context)

        loop.call_later(2 * self.delay(source, address), arrive, 0, context=self.context)

    def serve_ends(self, listener: Listener, accept: Callable[[End], Any]) -> None:
        """Connections that come are handed over as they are."""
        listener.context, listener.accept = contextvars.copy_context(), accept

    def serve(self, protocol_factory: Callable[[], Any], listener: Listener) -> Listener:
        """For loop.create_server."""
        self.serve_ends(listener, lambda end: Transport(self, end, protocol_factory()).begin())
        return listener

    async def open_connection(self, protocol_factory: Callable[[], Any], address: str, port: int) -> tuple[Transport, Any]:
        """For loop.create_connection."""
        future: asyncio.Future[tuple[Transport, Any]] = self.loop.create_future()

        def connected(end: End) -> None:
            if future.done():
                end.close()
                return
            protocol = protocol_factory()
            transport = Transport(self, end, protocol)
            transport.begin()
            future.set_result((transport, protocol))

        def failed() -> None:
            if not future.done():
                future.set_exception(ConnectionRefusedError(f"{address}:{port}"))

        self.connect(address, port, connected, failed)
        return await future

    def killed(self, process: Process, *, silently: bool = False) -> None:
        """All its connections end."""
        for end in [end for end in self.ends if end.process is process]:
            end.die(silently=silently)


class _Socket:
    """What a transport says its socket is: the options that end a connection count."""

    def __init__(self, end: End) -> None:
        self._end = end
        end.patience_seconds = QUIET_SECONDS + PROBE_SECONDS * PROBES

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self._end.patience_seconds = value / 1000


def unread(transport: Transport) -> Iterator[bytes]:
    """For roq.runtime.sockets.unread."""
    return transport.take_unread()


class Transport(asyncio.Transport):
    """asyncio's byte stream on an End."""

    def __init__(self, network: Network, end: End, protocol: Any) -> None:
        super().__init__()
        self._loop, self._end, self._protocol = network.loop, end, protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._closing = self._paused = self._lost = False
        self._unread: deque[bytes] = deque()
        self._unsent = 0
        self._limits = WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES // 4
        self._full = False
        self._socket = _Socket(end)
        end.on_item, end.on_closed, end.on_reset = self._item, self._ended, self._was_reset

    def begin(self) -> None:
        """The protocol is told."""
        self._protocol.connection_made(self)

    def _item(self, item: Any) -> None:
        if isinstance(item, int):
            self._unsent -= item
            if self._full and self.get_write_buffer_size() <= self._limits[1]:
                self._full = False
                self._protocol.resume_writing()
            return
        self._unread.append(item)
        if not self._paused:
            self._read()

    def _read(self) -> None:
        while self._unread and not self._paused and not self._closing:
            data = self._unread.popleft()
            self._end.send(len(data))  # acknowledged
            if not self._buffered:
                self._protocol.data_received(data)
                continue
            while data and not self._closing:
                room = self._protocol.get_buffer(len(data))
                count = min(len(room), len(data))
                room[:count] = data[:count]
                data = data[count:]
                self._protocol.buffer_updated(count)
                if self._paused and data:
                    self._unread.appendleft(data)
                    return

    def take_unread(self) -> Iterator[bytes]:
        """What has come, read in no turn of the loop."""
        while self._unread and not self._closing:
            data = self._unread.popleft()
            self._end.send(len(data))
            yield data

    def _ended(self) -> None:
        self._lose(None)

    def _was_reset(self) -> None:
        self._lose(ConnectionResetError())

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def write(self, data: Any) -> None:
        """Bytes on their way."""
        if not self._closing and data:
            self._unsent += len(data)
            self._end.send(bytes(data))
            self._look_if_full()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As asyncio has them."""
        high = WRITE_BUFFER_BYTES if high is None else high
        self._limits = high, high // 4 if low is None else low
        self._look_if_full()

    def _look_if_full(self) -> None:
        if not self._full and self.get_write_buffer_size() > self._limits[0]:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        """In one piece."""
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        """What was not read yet by the other end, beyond what kernels hold."""
        return max(0, self._unsent - KERNEL_BYTES)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The socket, or where the other end is."""
        return {"socket": self._socket, "peername": (self._end.peer.address, 0)}.get(name, default)

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether it takes anything."""
        return not (self._paused or self._closing)

    def pause_reading(self) -> None:
        """What comes waits."""
        self._paused = True

    def resume_reading(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Behind what was written."""
        if not self._closing:
            self._closing = True
            self._end.close()
            self._lose(None)

    def abort(self) -> None:
        """At once."""
        self.close()
