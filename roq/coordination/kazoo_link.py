"""The only module that imports kazoo: one client, one thread, no retries, no recipes.

Everything kazoo says arrives on the asyncio loop through call_soon_threadsafe, in the order in which the connection thread
saw it. What the states mean, deadlines and watches is in session.py and watch.py. kazoo's private names used here are those of
kazoo 2.10 and 2.11; tests/integration/test_coordination.py covers each.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kazoo import exceptions as kz  # type: ignore[import-untyped]
from kazoo.client import KazooClient, KazooState  # type: ignore[import-untyped]
from kazoo.handlers.threading import SequentialThreadingHandler  # type: ignore[import-untyped]
from kazoo.protocol.connection import ConnectionHandler  # type: ignore[import-untyped]
from kazoo.protocol.serialization import (  # type: ignore[import-untyped]
    GetData,
    MultiHeader,
    int_struct,
    read_buffer,
    stat_struct,
)
from kazoo.protocol.states import ZnodeStat  # type: ignore[import-untyped]
from kazoo.retry import KazooRetry  # type: ignore[import-untyped]
from kazoo.security import make_acl, make_digest_acl  # type: ignore[import-untyped]

from roq.coordination import paths
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
from roq.errors import AccessDenied, RoqError, ZooKeeperUnavailable
from roq.runtime.security import process_security

log = logging.getLogger(__name__)
T = TypeVar("T")
# A line for every failed try, several a second, would bury what a program says itself: the session logs and raises what counts.
# `logging.getLogger("roq.coordination.kazoo").setLevel(logging.DEBUG)` shows them.
kazoo_log = logging.getLogger("roq.coordination.kazoo")
kazoo_log.setLevel(logging.CRITICAL)

RECONNECT_FIRST_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5  # kazoo's default is an hour; a returned ZooKeeper must be seen within the fail-over time
ZOOKEEPER_USER = "roq"  # of GCMs and hosts, where their cards have a password for it
CLOSE_POLITE_SECONDS = 1.0  # for the server to confirm that the session is closed
CLOSE_FORCED_SECONDS = 2.0  # for kazoo's thread to end once its socket is shut

_AWAY = (
    kz.ConnectionLoss,
    kz.SessionExpiredError,
    kz.ConnectionClosedError,
    kz.OperationTimeoutError,
    kz.AuthFailedError,
    kz.SessionMovedError,
    kz.NotReadOnlyCallError,
)
_REFUSALS: dict[type[BaseException], type[CoordinationError]] = {
    kz.BadVersionError: VersionConflict,
    kz.NodeExistsError: NodeExists,
    kz.NoNodeError: NoNode,
    kz.NotEmptyError: NodeNotEmpty,
}


def boottime() -> float:
    """Seconds on a clock that neither jumps nor stops while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def translate(error: BaseException, path: str) -> BaseException:
    """The RoqError for what kazoo raised."""
    if isinstance(error, _AWAY):
        return ZooKeeperUnavailable(f"the connection to ZooKeeper was lost ({type(error).__name__})")
    if isinstance(error, kz.NoAuthError):
        return AccessDenied(f"ZooKeeper lets only the cluster's GCMs and hosts at {path!r}")
    kind = _REFUSALS.get(type(error))
    if kind is not None:
        return kind(f"{(kind.__doc__ or '').rstrip('.')}: {path!r}", path)
    if isinstance(error, kz.KazooException):
        return CoordinationError(f"ZooKeeper refused {path!r}: {type(error).__name__} {error}".rstrip(), path)
    return error


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threading without its two worker threads: callbacks run on the connection thread, because ours only post."""

    def __init__(self, host_connect_seconds: float, ended: Callable[[], None], tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._host_connect_seconds, self._tls = host_connect_seconds, tls
        self._told = False  # why TLS does not come about
        self._ended = ended

    def start(self) -> None:
        """Nothing to start: AsyncResult calls back directly while no worker runs."""

    def stop(self) -> None:
        """Nothing to stop."""

    def dispatch_callback(self, callback: Any) -> None:
        """Call a watcher (it only posts to the loop)."""
        callback.func(*callback.args)

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Connect with a bound of our own: kazoo would spend the whole session on one silent host."""
        kwargs["timeout"] = min(kwargs["timeout"], self._host_connect_seconds)
        made = super().create_connection(*args, **kwargs)
        if self._tls is None:
            return made
        try:
            return self._tls.wrap_socket(made, server_hostname=kwargs["hostname"].strip("[]"))
        except OSError as error:  # kazoo tries again for ever, and says nothing
            made.close()
            if not self._told:
                self._told = True
                log.error("no TLS with ZooKeeper at %s: %s", kwargs["hostname"], error)
            raise

    def select(self, read: Sequence[Any], write: Sequence[Any], _: Sequence[Any], timeout: float | None = None) -> Any:
        """As kazoo's, which makes an epoll descriptor for each call, and calls several times for each request. What TLS has
        opened already makes no socket readable."""
        if ready := [one for one in read if isinstance(one, ssl.SSLSocket) and one.pending()]:
            return ready, [], []
        poll = select.poll()
        for sources, mask in ((read, select.POLLIN), (write, select.POLLOUT)):
            for one in sources:
                poll.register(one, mask)
        told = {descriptor for descriptor, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1000))}
        return [one for one in read if one.fileno() in told], [one for one in write if one.fileno() in told], []

    def spawn(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> threading.Thread:
        """Run the connection loop and tell when it has ended, however that came."""

        def body() -> None:
            try:
                func(*args, **kwargs)
            except Exception:
                log.exception("kazoo's connection thread failed")
            finally:
                self._ended()

        thread = threading.Thread(target=body, name="roq-zookeeper", daemon=True)
        thread.start()
        return thread


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """Notes when the server was last heard, and the session time-out that was negotiated."""

    last_heard = 0.0  # CLOCK_BOOTTIME seconds
    session_seconds = 0.0

    def _read_header(self, timeout: float) -> Any:
        header = super()._read_header(timeout)
        self.last_heard = boottime()
        return header

    def _connect(self, *args: Any) -> Any:
        read_milliseconds, connect_milliseconds = super()._connect(*args)
        self.session_seconds = read_milliseconds * 1.5 / 1000  # kazoo reads for 2/3 of the session
        return read_milliseconds, connect_milliseconds


class KazooLink:
    """A Link: one kazoo client."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        session_seconds: float,
        host_connect_seconds: float,
        on_state: Callable[[LinkState, int], None],
    ) -> None:
        self._chroot = address.chroot
        self._loop = asyncio.get_running_loop()
        self._on_state = on_state
        self._closing = False
        self._thread_ended = asyncio.Event()
        security = process_security()
        passwords = security.zookeeper_passwords if security is not None else ()
        closed = passwords and security is not None and not security.mixed  # who has no card yet would be shut out
        members = [make_digest_acl(ZOOKEEPER_USER, passwords[0], all=True)] if closed else None
        self._public = [*members, make_acl("world", "anyone", read=True)] if members else None
        tls = security.zookeeper_tls if security is not None else None
        handler = _Handler(host_connect_seconds, lambda: self._post(self._ended), tls)
        self._client = KazooClient(
            hosts=address.hosts,
            logger=kazoo_log,
            timeout=session_seconds,
            handler=handler,
            connection_retry=KazooRetry(
                max_tries=-1, delay=RECONNECT_FIRST_SECONDS, max_delay=RECONNECT_MAX_SECONDS, ignore_expire=False
            ),
            command_retry=KazooRetry(max_tries=1, ignore_expire=False),
            default_acl=members,
            auth_data=[("digest", f"{ZOOKEEPER_USER}:{password}") for password in passwords],
        )
        self._connection = _Connection(self._client, self._client._conn_retry.copy(), logger=self._client.logger)
        self._connection.session_seconds = session_seconds
        self._client._connection = self._connection
        self._client.add_listener(self._listen)

    # --- connection ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin connecting; the state says when it worked."""
        self._thread_ended.clear()
        self._client.start_async()

    def silent_seconds(self) -> float:
        """How long the server has not been heard, by a clock that runs while this process is stopped."""
        return boottime() - self._connection.last_heard

    def session_seconds(self) -> float:
        """The negotiated session time-out."""
        return float(self._connection.session_seconds)

    def drop(self) -> None:
        """Cut the current connection; kazoo notices at once and makes a new one."""
        current = self._connection._socket
        if current is not None:
            try:
                current.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is gone already

    async def close(self) -> None:
        """End the session and the thread; bounded also when the server is silent."""
        if self._closing:
            return
        self._closing = True
        polite = self._client.connected
        closer = threading.Thread(target=self._stop_client, name="roq-zookeeper-close", daemon=True)
        closer.start()
        for seconds in (CLOSE_POLITE_SECONDS if polite else 0.05, *[CLOSE_FORCED_SECONDS / 10] * 10):
            try:
                async with asyncio.timeout(seconds):
                    await self._thread_ended.wait()
            except TimeoutError:
                self.drop()
            else:
                closer.join()  # its last step was to say so
                return
        log.warning("kazoo's thread did not end in time; it is left to end by itself")

    def _stop_client(self) -> None:
        self._client.stop()
        self._client.close()
        self._post(self._thread_ended.set)

    def _listen(self, state: str) -> None:
        """On the connection thread: only post."""
        if state == KazooState.CONNECTED:
            self._connection.last_heard = boottime()
            self._post(self._on_state, LinkState.CONNECTED, self._client._session_id)
        elif state == KazooState.SUSPENDED:
            self._post(self._on_state, LinkState.SUSPENDED, 0)
        else:
            self._post(self._on_state, LinkState.EXPIRED, 0)

    def _ended(self) -> None:
        if not self._closing:
            self._on_state(LinkState.ENDED, 0)

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the loop is closed; nobody listens to ZooKeeper any more")

    # --- requests: each returns a future, settled on the loop -----------------------------------------------------------

    def get(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[Node]:
        """See Link, here and below."""
        return self._settled(self._client.get_async(self._full(path), watch=watcher), path, lambda found: _node(*found))

    def get_many(self, paths: Sequence[str]) -> asyncio.Future[list[Node | None]]:
        """See Link."""
        request = self._client.handler.async_result()
        self._client._call(_MultiRead([self._full(path) for path in paths]), request)
        return self._settled(request, "", lambda found: [_found(*each) for each in zip(paths, found, strict=True)])

    def exists(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[bool]:
        """See Link."""
        return self._settled(self._client.exists_async(self._full(path), watch=watcher), path, lambda found: found is not None)

    def children(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[list[str]]:
        """See Link."""
        return self._settled(self._client.get_children_async(self._full(path), watch=watcher), path, sorted)

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> asyncio.Future[Node]:
        """See Link."""
        request = self._client.create_async(self._full(path), data, self._acl(path), ephemeral=ephemeral, include_data=True)
        return self._settled(request, path, lambda made: _node(data, made[1]))

    def create_ephemeral_sequential(self, prefix: str, data: bytes) -> asyncio.Future[str]:
        """See Link."""
        request = self._client.create_async(self._full(prefix), data, ephemeral=True, sequence=True)
        return self._settled(request, prefix, lambda path: path[len(self._chroot) + 1 :])

    def set(self, path: str, data: bytes, version: int) -> asyncio.Future[int]:
        """See Link."""
        return self._settled(self._client.set_async(self._full(path), data, version), path, lambda stat: int(stat.version))

    def delete(self, path: str, version: int) -> asyncio.Future[None]:
        """See Link."""
        return self._settled(self._client.delete_async(self._full(path), version), path, lambda _: None)

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        """See Link."""
        transaction = self._client.transaction()
        for op in ops:
            path = self._full(op.path)
            match op:
                case Check():
                    transaction.check(path, op.version)
                case Create():
                    transaction.create(path, op.data, self._acl(op.path))
                case CreateEphemeral():
                    transaction.create(path, op.data, self._acl(op.path), ephemeral=True)
                case SetData():
                    transaction.set_data(path, op.data, op.version)
                case Delete():
                    transaction.delete(path, op.version)
        future: asyncio.Future[None] = self._loop.create_future()
        transaction.commit_async().rawlink(lambda result: self._post(_settle_multi, future, result, ops))
        return future

    def is_open(self, path: str) -> asyncio.Future[bool]:
        """See Link."""

        def convert(found: Any) -> bool:
            acls, _ = found
            return self._public is not None and set(acls) != set(self._acl(path) or self._client.default_acl)

        return self._settled(self._client.get_acls_async(self._full(path)), path, convert)

    def protect(self, path: str) -> asyncio.Future[None]:
        """See Link."""
        acl = self._acl(path) or self._client.default_acl
        return self._settled(self._client.set_acls_async(self._full(path), acl), path, lambda _: None)

    def _acl(self, path: str) -> list[Any] | None:
        """What clients may read: who leads, the tree's format, and that there is a cluster. None: as everything else."""
        full = self._full(path)
        told = full in {self._full(paths.LEADER), self._full(paths.FORMAT)}
        return self._public if told or f"{self._chroot}/".startswith(f"{full}/") else None

    def _full(self, path: str) -> str:
        return full_path(self._chroot, path)

    def _settled(self, request: Any, path: str, convert: Callable[[Any], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        request.rawlink(lambda result: self._post(_settle, future, result, path, convert))
        return future


@dataclass(frozen=True)
class _MultiRead:
    """A request that kazoo does not have: data of many nodes. Its result: (data, stat) of each, or its error."""

    paths: list[str]
    type: ClassVar[int] = 22

    def serialize(self) -> bytes:
        reads = [MultiHeader(GetData.type, False, -1).serialize() + GetData(path, None).serialize() for path in self.paths]
        return b"".join([*reads, MultiHeader(-1, True, -1).serialize()])

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> list[Any]:
        found: list[Any] = []
        while True:
            header, offset = MultiHeader.deserialize(reply, offset)
            if header.done:
                return found
            if header.type == GetData.type:
                data, offset = read_buffer(reply, offset)
                found.append((data, ZnodeStat._make(stat_struct.unpack_from(reply, offset))))
                offset += stat_struct.size
            else:
                (code,) = int_struct.unpack_from(reply, offset)
                offset += int_struct.size
                found.append(kz.EXCEPTIONS[code]())


def _found(path: str, result: Any) -> Node | None:
    if isinstance(result, kz.NoNodeError):
        return None
    if isinstance(result, Exception):
        raise translate(result, path)
    return _node(*result)


def _node(data: bytes, stat: Any) -> Node:
    return Node(data, stat.version, stat.czxid, stat.mzxid, stat.ephemeralOwner, stat.mtime)


def _settle(future: asyncio.Future[T], result: Any, path: str, convert: Callable[[Any], T]) -> None:
    if future.done():
        return  # the caller gave up
    if result.exception is not None:
        future.set_exception(translate(result.exception, path))
        return
    try:
        future.set_result(convert(result.value))
    except RoqError as refused:
        future.set_exception(refused)


def _settle_multi(future: asyncio.Future[Any], result: Any, ops: Sequence[Op]) -> None:
    """kazoo returns failures as values: the operations beside the guilty one are RolledBack or RuntimeInconsistency."""
    if future.done():
        return
    if result.exception is not None:
        future.set_exception(translate(result.exception, ""))
        return
    innocent = (kz.RolledBackError, kz.RuntimeInconsistency)
    failures = [(op, outcome) for op, outcome in zip(ops, result.value, strict=False) if isinstance(outcome, Exception)]
    guilty = [(op, outcome) for op, outcome in failures if not isinstance(outcome, innocent)] or failures
    if guilty:
        op, outcome = guilty[0]
        future.set_exception(translate(outcome, op.path))
    elif len(result.value) != len(ops):
        future.set_exception(CoordinationError(f"{len(ops)} operations got {len(result.value)} results"))
    else:
        future.set_result(None)
