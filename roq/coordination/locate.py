"""Finding and asking the leading GCM. Clients know ZooKeeper's addresses only and keep no session there: one short session, one
read, nothing kept.

Every request is retried with the same body (and so the same transaction id) until its deadline: after NotLeader at the
leader it names, after silence at the leader ZooKeeper names. Who has nothing to ask for a while keeps no connection to the
leader either, only its address: there are more programs in a cluster than a leader has room for connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from roq.coordination import paths
from roq.coordination.election import participants
from roq.coordination.link import parse_address
from roq.coordination.session import SESSION_SECONDS, Session
from roq.errors import (
    AccessDenied,
    Closed,
    ClusterNotFound,
    DeadlineExceeded,
    FrameError,
    NotLeader,
    RoqError,
    StaleEpoch,
    Unavailable,
    ZooKeeperUnavailable,
)
from roq.runtime.backoff import delays
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.runtime.security import enter_cluster, leave_cluster, process_security
from roq.wire import gcm as wire
from roq.wire.assignment import from_json
from roq.wire.tree_format import TreeFormat, read_format

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")
TRY_SECONDS = 3.0  # one try; the whole request has its own deadline
LOOK_UP_SECONDS = 2.0  # one look at ZooKeeper
RETRY_SECONDS_MAX = 0.25  # between two tries
IDLE_SECONDS = 20.0  # without a request: then the connection to the leader ends
ZOOKEEPER_SECONDS = (
    5.0  # a ZooKeeper that has never answered: longer than its restart, shorter than people wait for a wrong address
)


async def read_leader(zookeeper: str, timeout_seconds: float = 5.0) -> wire.LeaderAddress:
    """The leading GCM's address. `zookeeper`: "zk1:2181,zk2:2181[/chroot]".

    Raises InvalidConfiguration, ZooKeeperUnavailable, ClusterNotFound (no such chroot), Unavailable (no leader just now).
    """
    return await _with_session(zookeeper, timeout_seconds, _read)


async def read_election(zookeeper: str, timeout_seconds: float = 5.0) -> list[str]:
    """What the participants of the election call themselves, the leader first: GCMs, and whoever else takes part.

    Raises InvalidConfiguration, ZooKeeperUnavailable.
    """
    return await _with_session(zookeeper, timeout_seconds, lambda session: participants(session, paths.LATCH))


async def read_tree_format(zookeeper: str, timeout_seconds: float = 5.0) -> TreeFormat:
    """The format of what is written in ZooKeeper.

    Raises InvalidConfiguration, ZooKeeperUnavailable, UnknownFormat (the node is damaged).
    """
    node = await _with_session(zookeeper, timeout_seconds, lambda session: session.get(paths.FORMAT))
    return read_format(node.data if node is not None else None)


async def _with_session(zookeeper: str, timeout_seconds: float, work: Callable[[Session], Awaitable[V]]) -> V:
    try:
        async with asyncio.timeout(timeout_seconds):
            session = await Session.connect(zookeeper, SESSION_SECONDS, connect_seconds=timeout_seconds)
            try:
                return await work(session)
            finally:
                await session.close()
    except TimeoutError:
        raise ZooKeeperUnavailable(f"no ZooKeeper answered at {zookeeper} within {timeout_seconds:.1f} s") from None


async def _read(session: Session) -> wire.LeaderAddress:
    node = await session.get(paths.LEADER)
    if node is None:
        if await session.get("") is None:
            raise ClusterNotFound(f"no RoQ cluster at ZooKeeper {session.address}")
        raise Unavailable("no Global Configuration Manager leads just now")
    try:
        return from_json(node.data, wire.LeaderAddress)
    except FrameError as error:
        raise Unavailable(f"gcm/leader: {error}") from error


class GcmClient:
    """`zookeeper`: "host:port,host:port[/chroot]". zookeeper_seconds: until ZooKeeper has answered once, a request gives up
    after so long, whatever its own deadline; then the address is taken for right. Raises InvalidConfiguration, AccessDenied:
    the card that is kept for this cluster can't be used."""

    def __init__(self, zookeeper: str, zookeeper_seconds: float = ZOOKEEPER_SECONDS) -> None:
        self.zookeeper = zookeeper
        self._cluster = str(parse_address(zookeeper))
        enter_cluster(self._cluster)
        self._zookeeper_seconds = zookeeper_seconds
        self._answered = False
        self._rpc: RpcClient | None = None
        self._rested_at = ""  # endpoint of the leader whose connection was closed as there was nothing to ask
        self._remembered: RpcClient | None = None  # the connection that was made there: it may lead no more
        self._under_way, self._asked_at = 0, 0.0
        self._resting: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def request(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float = 15.0) -> T:
        """The leader's answer. Raises the leader's refusal, Unavailable or its subclasses, or DeadlineExceeded."""
        self._under_way += 1
        try:
            return await self._ask(body, expect, timeout_seconds)
        finally:
            self._under_way -= 1
            self._asked_at = time.monotonic()
            if self._resting is None and not self._closed:
                self._resting = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._rest)

    async def _ask(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float) -> T:
        begun = time.monotonic()
        deadline = begun + timeout_seconds
        waits = delays(0.05, RETRY_SECONDS_MAX)
        while True:
            if self._closed:
                raise Closed("this cluster connection is closed")
            limit = deadline if self._answered else min(deadline, begun + self._zookeeper_seconds)
            left = limit - time.monotonic()
            rpc: RpcClient | None = None
            remembered = False
            try:
                rpc = await self._leader(min(left, LOOK_UP_SECONDS))
                remembered = rpc is self._remembered
                self._answered = True
                return await rpc.request(body, expect, max(0.05, min(TRY_SECONDS, deadline - time.monotonic())))
            except NotLeader as error:
                self._forget(rpc, error.leader)
                failure: RoqError = error
            except AccessDenied as error:
                if rpc is None or not rpc.denied:
                    raise
                self._forget(rpc, "")  # who leads when it is asked next may let us in
                if not remembered:
                    raise
                failure = error
            except (DeadlineExceeded, Unavailable, StaleEpoch, Closed) as error:
                if self._closed:
                    raise
                self._forget(rpc, "")
                failure = error
            if not isinstance(failure, ZooKeeperUnavailable):
                self._answered, limit = True, deadline
            wait = next(waits)
            if time.monotonic() + wait >= limit:
                if isinstance(failure, ZooKeeperUnavailable):
                    waited = time.monotonic() - begun
                    raise ZooKeeperUnavailable(f"no ZooKeeper answered at {self.zookeeper} within {waited:.1f} s") from failure
                raise (
                    failure
                    if isinstance(failure, Unavailable | DeadlineExceeded)
                    else Unavailable(
                        f"no leading Global Configuration Manager answered within {timeout_seconds:g} s: {failure}"
                    )
                ) from failure
            await asyncio.sleep(wait)

    async def _leader(self, timeout_seconds: float) -> RpcClient:
        async with self._lock:
            if self._rpc is None:
                endpoint, self._rested_at = self._rested_at, ""
                remembered = endpoint != ""
                if not remembered:
                    leader = await read_leader(self.zookeeper, max(0.1, timeout_seconds))
                    endpoint = f"tcp://{leader.host}:{leader.port}"
                self._rpc = RpcClient(endpoint, wire.Reply, on_disconnect=OnDisconnect.FAIL)
                self._remembered = self._rpc if remembered else None
            return self._rpc

    def _rest(self) -> None:
        """Nothing was asked lately: close the connection, and begin with the same leader when there is something. Whose card is
        over by now is let in nowhere, but may stay."""
        self._resting = None
        left, security = self._asked_at + IDLE_SECONDS - time.monotonic(), process_security()
        if self._rpc is None or self._closed:
            return
        if self._under_way or left > 0 or (security is not None and security.is_over):
            self._resting = asyncio.get_running_loop().call_later(left if left > 0 else IDLE_SECONDS, self._rest)
            return
        self._rested_at = self._rpc.endpoint
        self._rpc.close()
        self._rpc = None

    def _forget(self, rpc: RpcClient | None, leader: str) -> None:
        """Drop this connection unless somebody has already; the next try goes to `leader` if given, else to whom ZooKeeper
        names."""
        if self._rpc is not rpc:
            return
        if self._rpc is not None:
            self._rpc.close()
            self._rpc = None
        if leader and not self._closed:
            self._rpc = RpcClient(f"tcp://{leader}", wire.Reply, on_disconnect=OnDisconnect.FAIL)

    def close(self) -> None:
        """Close the connection; requests under way fail with Closed."""
        if not self._closed:
            leave_cluster(self._cluster)
        self._closed = True
        if self._resting is not None:
            self._resting.cancel()
        self._forget(self._rpc, "")
