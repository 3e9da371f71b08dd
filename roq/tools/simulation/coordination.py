"""The coordinator's twin: the tree of roq/coordinator in memory, and a Link to it over simulated ways.

A session is kept alive by what its client says, and is over when nothing was heard for its time-out, on the server's own clock.
A connection is over when the client hears nothing for two thirds of that; then, as with kazoo, the state is SUSPENDED, what was
asked may or may not have happened, and watches are gone; a new connection finds the session alive (CONNECTED) or not (EXPIRED,
then CONNECTED with a new one). Requests of a connection are answered in their order, a watch's event before them.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from roq.coordination.link import (
    Check,
    CoordinationError,
    Create,
    CreateEphemeral,
    Delete,
    LinkState,
    Node,
    NodeExists,
    NodeNotEmpty,
    NoNode,
    Op,
    SetData,
    VersionConflict,
    Watcher,
    ZooKeeperAddress,
    full_path,
)
from roq.coordinator.tree import EPHEMERAL, SEQUENTIAL, Tree
from roq.errors import ZooKeeperUnavailable
from roq.tools.simulation.clocks import Wall
from roq.tools.simulation.loop import PROCESS, Fate, Process, SimulatedLoop
from roq.tools.simulation.network import Network
from roq.wire import zookeeper as wire

T = TypeVar("T")
RECONNECT_SECONDS = 0.05, 0.5  # from one try to the next
HANDLE_SECONDS = 0.0005  # a request with its sync
REFUSALS: dict[wire.Code, type[CoordinationError]] = {
    wire.Code.BAD_VERSION: VersionConflict,
    wire.Code.NODE_EXISTS: NodeExists,
    wire.Code.NO_NODE: NoNode,
    wire.Code.NOT_EMPTY: NodeNotEmpty,
}


class SimulatedCoordinator:
    """The server: one tree, its sessions' ends, its connections. address: of its machine, whose clock is one of `wall`."""

    def __init__(self, network: Network, address: str, wall: Wall) -> None:
        self.network, self.address, self._wall = network, address, wall
        self.loop: SimulatedLoop = network.loop
        self.tree = Tree()
        self._heard: dict[int, float] = {}  # session -> when
        self._ids = itertools.count(0x1000)
        self._watchers = itertools.count(1)
        self._connections: dict[int, TreeLink] = {}  # watcher -> whose
        self._tick()

    def now_ms(self) -> int:
        """As tree nodes have it."""
        return int(self._wall.seconds(self.address) * 1000)

    def _tick(self) -> None:
        now = self.loop.time()
        for session in sorted(self.tree.sessions):
            if now - self._heard[session] > self.tree.sessions[session].timeout_ms / 1000:
                self.expire(session)
        self.loop.call_later(0.1, self._tick, context=self.network.context)

    def expire(self, session: int) -> None:
        """It is over."""
        if session in self.tree.sessions:
            self.loop.note("expired", session)
            self._tell(self.tree.end_session(session, self.now_ms()).firings)

    def open(self, link: TreeLink, session: int, timeout_ms: int) -> tuple[int, int]:
        """A connection, with this session or a new one (0): (session or 0 if that one is over, watcher)."""
        if session and session not in self.tree.sessions:
            return 0, 0
        if not session:
            session = next(self._ids)
            self.tree.open_session(session, b"", timeout_ms, self.now_ms())
        self._heard[session] = self.loop.time()
        watcher = next(self._watchers)
        self._connections[watcher] = link
        return session, watcher

    def left(self, watcher: int) -> None:
        """The connection is over."""
        self.tree.left(watcher)
        self._connections.pop(watcher, None)

    def handle(self, session: int, watcher: int, request: wire.Request) -> wire.Reply:
        """Answer it."""
        self._heard[session] = self.loop.time()
        outcome = self.tree.handle(session, watcher, request, self.now_ms())
        self._tell(outcome.firings)
        return outcome.reply

    def _tell(self, firings: Sequence[Any]) -> None:
        for watcher, _, path in firings:
            link = self._connections.get(watcher)
            if link is not None:
                link.fired(watcher, path)


class TreeLink:
    """A Link to the twin."""

    def __init__(
        self,
        coordinator: SimulatedCoordinator,
        address: ZooKeeperAddress,
        session_seconds: float,
        on_state: Callable[[LinkState, int], None],
    ) -> None:
        process = PROCESS.get()
        assert process is not None, "only simulated processes have sessions"
        self._process: Process = process
        self._server, self._network, self._loop = coordinator, coordinator.network, coordinator.loop
        self._chroot, self._seconds, self._on_state = address.chroot, session_seconds, on_state
        self.server_address = address.hosts.partition(":")[0]  # the server answers at any: a test cuts off one of them
        self._session = self._watcher = 0
        self._last_heard = 0.0
        self._closed = self._connected = False
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._arrived = [0.0, 0.0]  # the newest arrival there, and here: order is kept
        self._watches: dict[str, list[Watcher]] = {}
        self._context = contextvars.copy_context()  # of the process
        process.on_end.append(self._process_ended)

    # --- connection ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Link, here and below."""
        self._loop.call_soon(self._try)

    def silent_seconds(self) -> float:
        """See Link."""
        return self._loop.time() - self._last_heard

    def session_seconds(self) -> float:
        """See Link."""
        return self._seconds

    def drop(self) -> None:
        """See Link."""
        self._lose()

    async def close(self) -> None:
        """See Link."""
        if self._closed:
            return
        if self._connected:
            self._send(wire.Close(), None)
        self._closed = True
        self._disconnect()

    def _process_ended(self) -> None:
        self._server.left(self._watcher)

    def _is_open(self) -> bool:
        here, there = self._process.address, self.server_address
        return self._network.is_open(here, there) and self._network.is_open(there, here)

    def _try(self) -> None:
        """Connect, with the session we had."""
        if self._closed or self._connected:
            return
        if not self._is_open():
            self._again()
            return
        self._loop.call_later(2 * self._network.delay(self._process.address, self.server_address), self._opened)

    def _again(self) -> None:
        self._loop.call_later(self._network.random.uniform(*RECONNECT_SECONDS), self._try)

    def _opened(self) -> None:
        if self._closed or self._connected:
            return
        if not self._is_open():
            self._again()
            return
        had = self._session
        self._session, self._watcher = self._server.open(self, had, round(self._seconds * 1000))
        self._last_heard = self._loop.time()
        if not self._session:
            self._on_state(LinkState.EXPIRED, 0)
            self._again()
            return
        self._connected = True
        self._loop.note("session", self._process.name, self._session)
        self._on_state(LinkState.CONNECTED, self._session)
        self._ping(self._watcher)

    def _ping(self, watcher: int) -> None:
        """Every third of the session, and look whether anything was heard."""
        if self._closed or not self._connected or watcher != self._watcher:
            return
        if self.silent_seconds() > self._seconds * 2 / 3:
            self._lose()
            return
        self._send(wire.PingRequest(), None)
        self._loop.call_later(self._seconds / 3, self._ping, watcher)

    def _lose(self) -> None:
        if self._connected:
            self._disconnect()
            self._on_state(LinkState.SUSPENDED, 0)
            self._again()

    def _disconnect(self) -> None:
        self._connected = False
        self._server.left(self._watcher)
        self._watcher = 0
        self._watches.clear()
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(ZooKeeperUnavailable("the connection to ZooKeeper was lost"))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _at(self, way: int, source: str, target: str) -> float:
        at = max(self._loop.time() + self._network.delay(source, target), self._arrived[way])
        self._arrived[way] = at
        return at

    def _send(self, request: wire.Request, number: int | None) -> None:
        """It gets there unless the way is cut; the answer comes back unless that one is."""
        here, there = self._process.address, self.server_address
        session, watcher = self._session, self._watcher

        def arrive() -> None:
            if not self._network.is_open(here, there):
                return  # what TCP would bring later comes on a connection that was given up by then
            if isinstance(request, wire.Close):
                self._server.expire(session)
                return
            if watcher != self._watcher and self._process.fate is Fate.ALIVE:
                return
            reply = self._server.handle(session, watcher, request)
            self._loop.call_at(self._at(1, there, here) + HANDLE_SECONDS, told, reply, context=self._network.context)

        def told(reply: wire.Reply) -> None:
            if self._network.is_open(there, here):
                self._loop.call_soon(self._heard, watcher, number, reply, context=self._context)

        self._loop.call_at(self._at(0, here, there), arrive, context=self._network.context)

    def _heard(self, watcher: int, number: int | None, reply: wire.Reply) -> None:
        if watcher != self._watcher or not self._connected:
            return
        self._last_heard = self._loop.time()
        future = self._asked.pop(number, None) if number is not None else None
        if future is None or future.done():
            return
        if isinstance(reply, wire.ErrorResponse) and reply.code is wire.Code.SESSION_EXPIRED:
            self._asked[number or 0] = future
            self._lose()
        else:
            future.set_result(reply)

    def fired(self, watcher: int, path: str) -> None:
        """The server tells of a change."""
        here, there = self._process.address, self.server_address

        def told() -> None:
            if watcher == self._watcher and self._network.is_open(there, here):
                for call in self._watches.pop(path, []):
                    self._loop.call_soon(call, None, context=self._context)

        self._loop.call_at(self._at(1, there, here), told, context=self._network.context)

    def _ask(self, request: wire.Request, path: str, convert: Callable[[Any], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        result: asyncio.Future[T] = self._loop.create_future()
        if not self._connected:
            result.set_exception(ZooKeeperUnavailable("the connection to ZooKeeper was lost"))
            return result
        number = next(self._numbers)
        self._asked[number] = answer
        self._send(request, number)

        def settle(done: asyncio.Future[Any]) -> None:
            error = done.exception()  # looked at, whether or not anybody still waits
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            elif isinstance(reply := done.result(), wire.ErrorResponse):
                result.set_exception(_refusal(reply.code, path))
            else:
                try:
                    result.set_result(convert(reply))
                except CoordinationError as refused:
                    result.set_exception(refused)

        answer.add_done_callback(settle)
        return result

    def _watch(self, path: str, watcher: Watcher | None) -> str:
        full = full_path(self._chroot, path)
        if watcher is not None:
            self._watches.setdefault(full, []).append(watcher)
        return full

    def get(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[Node]:
        """See Link."""
        request = wire.GetData(self._watch(path, watcher), watcher is not None)
        return self._ask(request, path, lambda reply: _node(reply.data, reply.stat))

    def get_many(self, paths: Sequence[str]) -> asyncio.Future[list[Node | None]]:
        """See Link."""

        def convert(reply: wire.Results) -> list[Node | None]:
            return [_found(path, one) for path, one in zip(paths, reply.replies, strict=True)]

        return self._ask(
            wire.MultiRead(tuple(wire.GetData(full_path(self._chroot, path), False) for path in paths)), "", convert
        )

    def exists(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[bool]:
        """See Link."""
        asked = self._ask(wire.ExistsRequest(self._watch(path, watcher), watcher is not None), path, lambda reply: True)
        result: asyncio.Future[bool] = self._loop.create_future()

        def settle(done: asyncio.Future[bool]) -> None:
            error = done.exception()
            if result.done():
                return
            if error is None or isinstance(error, NoNode):
                result.set_result(error is None)
            else:
                result.set_exception(error)

        asked.add_done_callback(settle)
        return result

    def children(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[list[str]]:
        """See Link."""
        request = wire.GetChildren(self._watch(path, watcher), watcher is not None, True)
        return self._ask(request, path, lambda reply: sorted(reply.names))

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> asyncio.Future[Node]:
        """See Link."""
        flags = EPHEMERAL if ephemeral else 0
        request = wire.CreateRequest(full_path(self._chroot, path), data, wire.OPEN_ACL, flags, True)
        return self._ask(request, path, lambda reply: _node(data, reply.stat))

    def create_ephemeral_sequential(self, prefix: str, data: bytes) -> asyncio.Future[str]:
        """See Link."""
        request = wire.CreateRequest(full_path(self._chroot, prefix), data, wire.OPEN_ACL, EPHEMERAL | SEQUENTIAL, False)
        return self._ask(request, prefix, lambda reply: str(reply.path)[len(self._chroot) + 1 :])

    def set(self, path: str, data: bytes, version: int) -> asyncio.Future[int]:
        """See Link."""
        request = wire.SetDataRequest(full_path(self._chroot, path), data, version)
        return self._ask(request, path, lambda reply: int(reply.stat.version))

    def delete(self, path: str, version: int) -> asyncio.Future[None]:
        """See Link."""
        return self._ask(wire.DeleteRequest(full_path(self._chroot, path), version), path, lambda reply: None)

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        """See Link."""
        request = wire.Multi(tuple(self._operation(op) for op in ops))

        def convert(reply: wire.Results) -> None:
            failed = [(op, one.code) for op, one in zip(ops, reply.replies, strict=True) if isinstance(one, wire.ErrorResponse)]
            innocent = (wire.Code.OK, wire.Code.RUNTIME_INCONSISTENCY)
            guilty = [(op, code) for op, code in failed if code not in innocent] or failed
            if guilty:
                raise _refusal(guilty[0][1], guilty[0][0].path)

        return self._ask(request, "", convert)

    def is_open(self, path: str) -> asyncio.Future[bool]:
        """See Link: nobody has cards here."""
        return self._ask(wire.GetAcl(full_path(self._chroot, path)), path, lambda _: False)

    def protect(self, path: str) -> asyncio.Future[None]:
        """See Link."""
        return self._ask(wire.SetAcl(full_path(self._chroot, path), wire.OPEN_ACL, -1), path, lambda _: None)

    def _operation(self, op: Op) -> wire.CreateRequest | wire.DeleteRequest | wire.SetDataRequest | wire.CheckRequest:
        path = full_path(self._chroot, op.path)
        match op:
            case Check():
                return wire.CheckRequest(path, op.version)
            case Create() | CreateEphemeral():
                flags = EPHEMERAL if isinstance(op, CreateEphemeral) else 0
                return wire.CreateRequest(path, op.data, wire.OPEN_ACL, flags, False)
            case SetData():
                return wire.SetDataRequest(path, op.data, op.version)
            case Delete():
                return wire.DeleteRequest(path, op.version)


def _found(path: str, reply: wire.Reply) -> Node | None:
    if isinstance(reply, wire.DataReply):
        return _node(reply.data, reply.stat)
    assert isinstance(reply, wire.ErrorResponse)
    if reply.code is wire.Code.NO_NODE:
        return None
    raise _refusal(reply.code, path)


def _node(data: bytes | None, stat: wire.Stat) -> Node:
    return Node(data or b"", stat.version, stat.czxid, stat.mzxid, stat.owner, stat.mtime)


def _refusal(code: wire.Code, path: str) -> CoordinationError:
    kind = REFUSALS.get(code)
    if kind is None:
        return CoordinationError(f"ZooKeeper refused {path!r}: {code.name}", path)
    return kind(f"{(kind.__doc__ or '').rstrip('.')}: {path!r}", path)
