"""A ZooKeeper session for asyncio: calls with deadlines, states, level-triggered watches.

Rules kept here (RELIABILITY §2.2): nothing is queued while the connection is away, every call has a deadline, a call that
times out counts as a lost connection, a session that was not heard for its whole time-out is LOST although nobody says so, and
kazoo's thread never runs RoQ's code. What a state means for leadership and registration is in latch.py and registration.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

from roq.coordination import paths
from roq.coordination.kazoo_link import KazooLink
from roq.coordination.link import (
    ANY_VERSION,
    Check,
    CoordinationError,
    Delete,
    LinkState,
    Node,
    NodeExists,
    NoNode,
    Op,
    OpenLink,
    Watcher,
    ZooKeeperAddress,
    parse_address,
)
from roq.errors import AccessDenied, CallError, Closed, ZooKeeperUnavailable
from roq.runtime.observe import logger

log = logger(__name__)

T = TypeVar("T")

open_link: OpenLink = KazooLink  # a simulation puts its own here

SESSION_SECONDS = 6.0
CONNECT_SECONDS = 5.0
HOST_CONNECT_SECONDS_MAX = 1.0  # one silent ZooKeeper host must not cost the session
CALL_SECONDS_MIN = 1.5  # a call's deadline is half a session, but a slow disk is allowed this much
REREAD_SECONDS = 10.0
CALLS_IN_FLIGHT = 128  # kazoo's wake-up pipe blocks the loop at about 280 unsent requests
READ_TOGETHER = 16  # nodes of one request: of a megabyte each, what a coordinator sends and a client reads at once
MANY_IN_FLIGHT = 4  # of such requests
WATCH_READS_IN_FLIGHT = 32  # of them for watches: after a reconnection thousands are read again, and nobody waits behind them
DATA_BYTES_MAX = 1_000_000  # ZooKeeper cuts the connection above 1 MiB (jute.maxbuffer), which would look like an outage
SILENT_FRACTION = 2 / 3  # of the session: kazoo pings every third; silence beyond this is a lost connection
LOST_CHECK_SECONDS = 0.5  # the loop's own timers stand still while the machine sleeps


class SessionState(StrEnum):
    """How the session is. SUSPENDED: stop acting on what ephemeral nodes granted. LOST: they are gone or will be."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"
    CLOSED = "closed"


class Watch(Generic[T]):
    """One watched node, level-triggered: it tells the newest value, not every change. Made by Session.watch_data and
    Session.watch_children.

    ZooKeeper's watches fire once and are lost with the connection, so each is only a hint to read again. A Watch reads at the
    start, when its hint fires, after every reconnection, and every so often in any case.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[Watcher], Awaitable[T]],
        callback: Callable[[T], None],
        reread_seconds: float,
        closed: Callable[[Watch[T]], object],
    ) -> None:
        self.path = path
        self._read = read
        self._callback = callback
        self._reread_seconds = reread_seconds
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._stale = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name=f"watch {path}")

    def reread(self) -> None:
        """Read again now (the session does so after a reconnection)."""
        self._stale.set()

    def close(self) -> None:
        """No more callbacks, from now on."""
        self._task.cancel()
        self._closed(self)

    def _fired(self, event: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stale.set)
        except RuntimeError:
            return  # the loop is closed: nobody listens any more

    async def _run(self) -> None:
        while True:
            self._stale.clear()
            try:
                value = await self._read(self._fired)
            except ZooKeeperUnavailable:
                pass  # the session wakes us after the reconnection
            except CoordinationError as error:
                log.warning("watched node is unreadable", extra={"fields": {"path": self.path, "reason": str(error)}})
            else:
                self._tell(value)
            try:  # spread, so that a thousand watches don't read in the same instant
                async with asyncio.timeout(self._reread_seconds * random.uniform(0.75, 1.25)):
                    await self._stale.wait()
            except TimeoutError:
                continue

    def _tell(self, value: T) -> None:
        try:
            self._callback(value)
        except Exception:  # the watcher's fault must neither end the watch nor pass unseen
            log.exception("a watch callback failed", extra={"fields": {"path": self.path}})


class Session:
    """One ZooKeeper session after the other: when one is lost, the next begins by itself as soon as ZooKeeper answers.

    All paths are relative to the chroot. Every call raises ZooKeeperUnavailable at once while the state isn't CONNECTED, and
    when the connection breaks meanwhile; then it is unknown whether a write took effect.
    """

    def __init__(self, address: ZooKeeperAddress, session_seconds: float, reread_seconds: float) -> None:
        self.address = address
        self._link = open_link(address, session_seconds, min(HOST_CONNECT_SECONDS_MAX, session_seconds / 3), self._on_link)
        self._loop = asyncio.get_running_loop()
        self._call_seconds = max(session_seconds / 2, CALL_SECONDS_MIN)
        self._reread_seconds = reread_seconds
        self._state = SessionState.SUSPENDED
        self._session_id = 0
        self._connections = 0  # how often we connected: tells a late answer of an older connection
        self._callbacks: list[Callable[[SessionState], None]] = []
        self._watches: dict[Watch[Any], None] = {}  # in order: a run that is simulated again is the same
        self._slots = asyncio.Semaphore(CALLS_IN_FLIGHT)
        self._reads = asyncio.Semaphore(WATCH_READS_IN_FLIGHT)
        self._connected = asyncio.Event()
        self._lost_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls,
        zookeeper: str,
        session_seconds: float = SESSION_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
        reread_seconds: float = REREAD_SECONDS,
    ) -> Session:
        """A connected session. `zookeeper`: "h1:p,h2:p[/chroot]", chroot /RoQ if left out; it need not exist yet.

        Raises InvalidConfiguration, ZooKeeperUnavailable after `connect_seconds`.
        """
        session = cls(parse_address(zookeeper), session_seconds, reread_seconds)
        try:
            session._link.start()
            async with asyncio.timeout(connect_seconds):
                await session._connected.wait()
        except TimeoutError:
            await session.close()
            raise ZooKeeperUnavailable(
                f"no ZooKeeper answered at {session.address.hosts} within {connect_seconds:g} s"
            ) from None
        except BaseException:
            await session.close()
            raise
        return session

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SessionState:
        """The state now. Also notices that this process itself stood still for too long to be sure of its session."""
        if self._state is SessionState.CONNECTED and self._silent_too_long():
            self._loop.call_soon(self._cut, self._connections)
            return SessionState.SUSPENDED
        return self._state

    @property
    def session_id(self) -> int:
        """Id of the current (or last) session: the `owner` of the ephemeral nodes it made."""
        return self._session_id

    @property
    def session_seconds(self) -> float:
        """The time-out that was negotiated with ZooKeeper."""
        return self._link.session_seconds()

    def on_state(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call back on the loop at every change of state; returns how to unsubscribe.

        After LOST comes CONNECTED, with a new session_id, or the old one if ZooKeeper itself was away and still kept it.
        """
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    async def wait_connected(self) -> None:
        """Wait until the state is CONNECTED; raises Closed if it never will be."""
        while self.state is not SessionState.CONNECTED:
            if self._state is SessionState.CLOSED:
                raise Closed("the ZooKeeper session was closed")
            self._connected.clear()
            await self._connected.wait()

    async def close(self) -> None:
        """End the session, so that its ephemeral nodes vanish at once. Takes at most a few seconds, even without ZooKeeper."""
        if self._state is SessionState.CLOSED:
            return
        for watch in list(self._watches):
            watch.close()
        self._cancel_lost_timer()
        self._change(SessionState.CLOSED)
        self._connected.set()
        await self._link.close()

    def _on_link(self, state: LinkState, session_id: int) -> None:
        if self._state is SessionState.CLOSED:
            return
        match state:
            case LinkState.CONNECTED:
                self._cancel_lost_timer()
                self._connections += 1
                self._session_id = session_id
                self._change(SessionState.CONNECTED)
                self._connected.set()
                for watch in self._watches:
                    watch.reread()
            case LinkState.SUSPENDED:
                self._suspend(self._connections)
            case LinkState.EXPIRED:
                self._lose()
            case LinkState.ENDED:
                log.error(
                    "kazoo gave up reconnecting to ZooKeeper; restarting it", extra={"fields": {"zookeeper": str(self.address)}}
                )
                self._lose()
                self._link.start()

    def _change(self, state: SessionState) -> None:
        if state is self._state:
            return
        self._state = state
        log.log(
            logging.INFO if state in (SessionState.CONNECTED, SessionState.CLOSED) else logging.WARNING,
            "ZooKeeper session",
            extra={"fields": {"state": state.value, "session": f"{self._session_id & (2**64 - 1):#x}"}},
        )
        for callback in list(self._callbacks):
            try:
                callback(state)
            except Exception:  # one listener's fault must not keep the others from stepping down
                log.exception("a session listener failed", extra={"fields": {"state": state.value}})

    def _silent_too_long(self) -> bool:
        return self._link.silent_seconds() > self.session_seconds * SILENT_FRACTION

    def _cut(self, connection: int) -> None:
        """The connection number `connection` doesn't answer: make kazoo begin a new one."""
        if connection == self._connections and self._state is SessionState.CONNECTED:
            self._link.drop()
            self._suspend(connection)

    def _suspend(self, connection: int) -> None:
        """The connection number `connection` is over."""
        if connection != self._connections or self._state is not SessionState.CONNECTED:
            return
        self._connected.clear()
        self._change(SessionState.SUSPENDED)
        self._check_lost()

    def _check_lost(self) -> None:
        if self._state is not SessionState.SUSPENDED:
            return
        remaining = self.session_seconds - self._link.silent_seconds()
        if remaining <= 0:
            self._lose()
        else:
            self._lost_timer = self._loop.call_later(min(remaining, LOST_CHECK_SECONDS), self._check_lost)

    def _lose(self) -> None:
        self._cancel_lost_timer()
        self._connected.clear()
        self._change(SessionState.LOST)

    def _cancel_lost_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None

    # --- calls --------------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Node | None:
        """The node, or None if there is none."""
        try:
            return await self._call(lambda: self._link.get(path))
        except NoNode:
            return None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """The nodes, in the order of their paths, None for one that is not there. READ_TOGETHER of them in one request, all of
        which are asked at once; not all of one moment."""
        parts = [paths[first : first + READ_TOGETHER] for first in range(0, len(paths), READ_TOGETHER)]
        found: list[Node | None] = []
        for first in range(0, len(parts), MANY_IN_FLIGHT):  # a deadline counts from the call, so only as many as answer in time
            some = parts[first : first + MANY_IN_FLIGHT]
            for nodes in await asyncio.gather(*(self._call(partial(self._link.get_many, part)) for part in some)):
                found += nodes
        return found

    async def children(self, path: str) -> list[str]:
        """Sorted names of the node's children; [] also if there is no such node."""
        try:
            return await self._call(lambda: self._link.children(path))
        except NoNode:
            return []

    async def create(self, path: str, data: bytes = b"") -> Node:
        """Make a persistent node. Raises NodeExists; NoNode if the parent is missing."""
        _check_size(len(data))
        return await self._call(lambda: self._link.create(path, data))

    async def create_ephemeral(self, path: str, data: bytes = b"") -> Node:
        """Make a node that vanishes with this session. Raises NodeExists; NoNode if the parent is missing."""
        _check_size(len(data))
        return await self._call(lambda: self._link.create(path, data, ephemeral=True))

    async def create_ephemeral_sequential(self, prefix: str, data: bytes = b"") -> str:
        """Make an ephemeral node named `prefix` + ten digits; returns its path. Raises NoNode if the parent is missing."""
        _check_size(len(data))
        return await self._call(lambda: self._link.create_ephemeral_sequential(prefix, data))

    async def set(self, path: str, data: bytes, version: int) -> int:
        """Replace the data of the node if it has `version` (ANY_VERSION: whatever); returns the new version.

        Raises VersionConflict, NoNode.
        """
        _check_size(len(data))
        return await self._call(lambda: self._link.set(path, data, version))

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        """Remove the node. Raises NoNode, VersionConflict, NodeNotEmpty."""
        await self._call(lambda: self._link.delete(path, version))

    async def multi(self, ops: Sequence[Op]) -> None:
        """All operations or none. Raises VersionConflict, NodeExists, NoNode, NodeNotEmpty with the guilty one's `path`."""
        if not ops:
            return
        _check_size(sum(len(op.path.encode()) + (0 if isinstance(op, Check | Delete) else len(op.data)) for op in ops))
        await self._call(lambda: self._link.multi(ops))

    async def ensure_path(self, path: str) -> None:
        """Make the node and its parents, as far as they are missing; "" is the chroot itself."""
        parts = f"{self.address.chroot}/{path}".strip("/").split("/")
        depth = len(parts)
        while depth and not await self._made("/" + "/".join(parts[:depth])):  # mostly only the last one is missing
            depth -= 1
        for below in range(depth + 1, len(parts) + 1):
            await self._made("/" + "/".join(parts[:below]))

    async def is_open(self, path: str = "") -> bool:
        """Whether others than members may do something to the node, where new ones are for members alone; "" is the chroot.
        Raises NoNode, AccessDenied."""
        return await self._call(lambda: self._link.is_open(path))

    async def protect(self) -> tuple[int, list[str]]:
        """Give all of the cluster's nodes the rights that new ones get: those that everybody may write, as of a cluster that
        had no cards, and those of an earlier password. How many, and which are not ours to change. The chroot comes last, and
        nothing beside what is RoQ's is looked at."""
        found, closed, denied = [""] if self.address.chroot else [], 0, list[str]()
        pending = list(reversed(paths.OWN))
        while pending:
            path = pending.pop()
            found.append(path)
            with contextlib.suppress(AccessDenied):  # told below
                pending += [f"{path}/{name}" for name in await self.children(path)]
        for path in reversed(found):
            try:
                if await self.is_open(path):
                    await self._call(lambda path=path: self._link.protect(path))  # type: ignore[misc]
                    closed += 1
            except NoNode:
                continue
            except AccessDenied:
                denied.append(path or self.address.chroot)
        return closed, denied

    async def wait_root(self) -> None:
        """Wait until the chroot exists. Only a GCM makes it: its existence is what says that here is a cluster."""
        found = asyncio.Event()
        watch = self.watch_data("", lambda node: found.set() if node is not None else None)
        try:
            await found.wait()
        finally:
            watch.close()

    async def _made(self, full_path: str) -> bool:
        """True if the node is there now, False if its parent is missing."""
        try:
            await self._call(lambda: self._link.create(full_path, b""))
        except NodeExists:
            return True
        except NoNode:
            return False
        return True

    async def _call(self, start: Callable[[], asyncio.Future[T]]) -> T:
        self._check_usable()
        async with self._slots:  # the wait for one is no silence of ZooKeeper: thousands of reads may be ahead of us
            self._check_usable()
            connection = self._connections
            try:
                async with asyncio.timeout(self._call_seconds):
                    return await start()
            except TimeoutError:
                self._cut(connection)
                raise ZooKeeperUnavailable(f"ZooKeeper did not answer within {self._call_seconds:g} s") from None
            except ZooKeeperUnavailable:
                self._suspend(connection)  # what kazoo says of its state comes a moment later
                raise

    def _check_usable(self) -> None:
        state = self.state
        if state is SessionState.CLOSED:
            raise Closed("the ZooKeeper session was closed")
        if state is not SessionState.CONNECTED:
            raise ZooKeeperUnavailable(f"the ZooKeeper session is {state}")

    # --- watches ------------------------------------------------------------------------------------------------------

    def watch_data(self, path: str, callback: Callable[[Node | None], None]) -> Watch[Node | None]:
        """Call back on the loop with the node: soon, at every change, after each reconnection, and every `reread_seconds`.

        Several changes may come as one call, and a call may come without a change. Never call back into ZooKeeper from it:
        start a task.
        """
        return self._watch(path, lambda hint: self._read_node(path, hint), callback)

    def watch_children(self, path: str, callback: Callable[[list[str]], None]) -> Watch[list[str]]:
        """As watch_data, with the sorted names of the node's children ([] if there is no such node).

        A child that was removed and made again has the same name: compare Node.czxid where that matters.
        """
        return self._watch(path, lambda hint: self._read_children(path, hint), callback)

    def _watch(self, path: str, read: Callable[[Watcher], Awaitable[T]], callback: Callable[[T], None]) -> Watch[T]:
        if self._state is SessionState.CLOSED:
            raise Closed("the ZooKeeper session was closed")
        watch = Watch(path, read, callback, self._reread_seconds, lambda closed: self._watches.pop(closed, None))
        self._watches[watch] = None
        return watch

    async def _read_node(self, path: str, hint: Watcher) -> Node | None:
        while True:
            async with self._reads:
                try:
                    return await self._call(lambda: self._link.get(path, hint))
                except NoNode:  # get leaves no watch on a missing node, exists does
                    if not await self._call(lambda: self._link.exists(path, hint)):
                        return None

    async def _read_children(self, path: str, hint: Watcher) -> list[str]:
        while True:
            async with self._reads:
                try:
                    return await self._call(lambda: self._link.children(path, hint))
                except NoNode:
                    if not await self._call(lambda: self._link.exists(path, hint)):
                        return []


def _check_size(count: int) -> None:
    if count > DATA_BYTES_MAX:
        raise CallError(f"{count} bytes for ZooKeeper: at most {DATA_BYTES_MAX}")
