"""The coordinator: a tree behind ZooKeeper's protocol. It accepts clients, has the tree answer, and commits in groups.

A request changes the tree at once; its reply, and every reply and event that could show the change, waits until the journal has
it: what a client was told survives kill -9. One sync covers all that came while the one before ran (`_commit`, in a thread of
its own). If the journal fails nothing is answered any more, and `ended` raises.

Sessions are part of the journal and survive a restart, with their time begun anew; watches end with their connections, as in
ZooKeeper. Not covered: what requests do (tree.py), framing and limits of one client (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from roq.config import CoordinatorConfig
from roq.coordinator.changes import TreeTransaction, encode
from roq.coordinator.connection import Connection
from roq.coordinator.journal import TreeJournal
from roq.coordinator.sessions import Expiry, Firing, negotiated
from roq.coordinator.tree import Outcome
from roq.errors import FrameError, StorageFull
from roq.runtime.files import Disk
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.sockets import listen
from roq.wire import jute
from roq.wire.limits import LISTEN_BACKLOG
from roq.wire.zookeeper import COORDINATOR_VERSION, PASSWORD_BYTES, Close, Code, ErrorResponse, PingRequest, Unsupported

log = logger(__name__)

CONNECTIONS_MAX = 10_000
DESCRIPTORS_KEPT = 64  # of those the process may have, for everything but clients
SESSIONS_MAX = 100_000  # also of clients that are gone, until their time is over
WATCHES_MAX = 1_000_000  # of one client: some 200 MB
UNWRITTEN_BYTES_MAX = 64 * 1024 * 1024  # transactions that wait for the disk: above that clients wait with theirs
WORDS = (
    b"conf",
    b"cons",
    b"crst",
    b"dirs",
    b"dump",
    b"envi",
    b"gtmk",
    b"hash",
    b"mntr",
    b"srst",
    b"stat",
    b"stmk",
    b"wchc",
    b"wchp",
    b"wchs",
)
SESSION_ID_MARK = 1 << 56  # above the time of the start, which keeps ids apart from those of an earlier folder
SESSION_COUNT_BITS = 14
CLOSE_SECONDS = 2.0  # for what is being written when the coordinator stops


class Coordinator:
    """One coordinator on the running loop: `await start()`, `ended()`, `await stop()`; any time later another one may go on in
    the same folder.

    wall: ms since 1970, what nodes show as their times; clock: seconds, what sessions last by. disk: for tests. listener: a
    socket that listens already, in place of the configuration's address and port.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._config, self._wall, self._clock, self._disk = config, wall, clock, disk
        self._listener = listener
        self.port = 0
        self.counters = Counters()
        self._refusals = Refusals(log, self.counters)
        self._connections: dict[int, Connection] = {}  # by number
        self._numbers = 0
        self._of_session: dict[int, Connection] = {}
        self._server: asyncio.Server | None = None
        self._thread = ThreadPoolExecutor(1, "roq-journal")
        self._snapshots = ThreadPoolExecutor(1, "roq-snapshot")
        self._snapshot: asyncio.Future[None] | None = None
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._committing: asyncio.Task[None] | None = None
        self._durable = 0
        self._stopped = False
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._connections_max = min(CONNECTIONS_MAX, max(1, soft - DESCRIPTORS_KEPT))

    async def start(self) -> None:
        """Read the journal, then serve. Raises what Journal raises, and PortTaken."""
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        listener = self._listener or listen(self._config.address, self._config.port)
        self.port = listener.getsockname()[1]
        try:
            self._journal = TreeJournal(self._config.data_dir, force_sync=self._config.force_sync, disk=self._disk)
            try:
                self._tree = self._journal.replay()
            except BaseException:
                self._journal.close()
                raise
        except BaseException:
            listener.close()
            raise
        self._durable = self._tree.zxid
        self._expiry = Expiry(self._config.tick_seconds, self._clock())
        for id_, session in self._tree.sessions.items():
            self._expiry.touch(id_, session.timeout_ms / 1000, self._clock())
        self._next_session = self._wall() << SESSION_COUNT_BITS | SESSION_ID_MARK
        self._server = await loop.create_server(self._accept, sock=listener, backlog=LISTEN_BACKLOG)
        self._tick()

    async def ended(self) -> None:
        """Return when it was stopped. Raises the error that ended it by itself: StorageFailed, StorageFull."""
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Serve no more. What was answered is in the journal; sessions go on when it is started again."""
        if self._server is None or self._stopped:
            return
        self._stopped = True
        self._server.close()
        self._ticking.cancel()
        for connection in list(self._connections.values()):
            connection.end()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):  # of a disk that hangs: what it was asked for is not answered
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._committing is not None:
                    await asyncio.gather(asyncio.shield(self._committing), return_exceptions=True)
                for threads in (self._thread, self._snapshots):
                    await loop.run_in_executor(None, threads.shutdown)
                self._journal.close()
        for connection in list(self._connections.values()):
            connection.transport.close()
        if not self._failed.done():
            self._failed.set_result(None)
        self._failed.exception()  # whoever did not ask does not want to know

    def _accept(self) -> Connection:
        self._numbers += 1
        return Connection(self, self._numbers)

    def _fail(self, error: BaseException) -> None:
        """Nothing can be promised any more."""
        if self._failed.done():
            return
        self._ticking.cancel()
        self._failed.set_exception(error)
        for connection in list(self._connections.values()):
            connection.transport.abort()

    # --- what a connection needs (connection.Service) ------------------------------------------------------------------

    def durable(self) -> int:
        """zxid up to which everything is durable."""
        return self._durable

    def has_room(self) -> bool:
        """Whether another request may be taken: not while too much waits for the disk."""
        return self._unwritten_bytes <= UNWRITTEN_BYTES_MAX

    def opened(self, connection: Connection) -> bool:
        """A client connected; whether there is room for it."""
        if self._stopped or self._failed.done() or len(self._connections) >= self._connections_max:
            return False
        self._connections[connection.number] = connection
        return True

    def lost(self, connection: Connection) -> None:
        """The connection ended; its session goes on for its time."""
        self._connections.pop(connection.number, None)
        self._tree.left(connection.number)
        if self._of_session.get(connection.session) is connection:
            del self._of_session[connection.session]

    def word(self, connection: Connection, word: bytes) -> bool:
        """Answer a four-letter word; False: it is none."""
        match word:
            case b"ruok":
                text = "imok"
            case b"isro":
                text = "rw"
            case b"srvr":
                text = self._status()
            case _ if word in WORDS:
                text = f"{word.decode()} is not executed because it is not in the whitelist.\n"
            case _:
                return False
        connection.send(text.encode(), 0)
        return True

    def _status(self) -> str:
        lines = {
            "Zookeeper version": COORDINATOR_VERSION,
            "Received": self.counters["requests"],
            "Sent": self.counters["replies"],
            "Connections": len(self._connections),
            "Outstanding": len(self._unwritten),
            "Zxid": f"{self._durable:#x}",
            "Mode": "standalone",
            "Node count": len(self._tree),
        }
        return "".join(f"{name}: {value}\n" for name, value in lines.items())

    def connect(self, connection: Connection, body: bytes) -> None:
        """Begin a session, or go on with one. Raises FrameError."""
        request = jute.parse_connect(body)
        if request.zxid_seen > self._tree.zxid:
            raise FrameError(
                f"the client has seen zxid {request.zxid_seen:#x}, ours is {self._tree.zxid:#x}: it knows another ZooKeeper"
            )
        least, most = self._config.session_range
        timeout_ms = negotiated(request.timeout_ms, int(least * 1000), int(most * 1000))
        tells = request.read_only is not None
        if request.session:
            known = self._tree.sessions.get(request.session)
            if known is None or not hmac.compare_digest(known.password, request.password):
                connection.send(jute.connected(0, 0, bytes(PASSWORD_BYTES), tells_read_only=tells), self._tree.zxid)
                connection.end()
                return
            session, password = request.session, known.password
            former = self._of_session.get(session)
            if former is not None:
                former.transport.abort()
        else:
            if len(self._tree.sessions) >= SESSIONS_MAX:
                raise FrameError(f"there are {SESSIONS_MAX} sessions already")
            session, password = self._new_session_id(), secrets.token_bytes(PASSWORD_BYTES)
            self._write(self._tree.open_session(session, password, timeout_ms, self._wall()))
        connection.session, connection.timeout_seconds = session, timeout_ms / 1000
        self._of_session[session] = connection
        self._expiry.touch(session, connection.timeout_seconds, self._clock())
        connection.send(jute.connected(timeout_ms, session, password, tells_read_only=tells), self._tree.zxid)

    def request(self, connection: Connection, body: bytes) -> None:
        """Answer one request. Raises FrameError."""
        xid, request = jute.parse_request(body)
        self.counters["requests"] += 1
        session = connection.session
        if not isinstance(request, Close) and session in self._tree.sessions:
            self._expiry.touch(session, connection.timeout_seconds, self._clock())
        outcome = self._tree.handle(session, connection.number, request, self._wall())
        if self._tree.watches.count(connection.number) > WATCHES_MAX:
            raise FrameError(f"more than {WATCHES_MAX} watches on one connection")
        self._publish(outcome)
        if isinstance(request, Unsupported):
            self._refusals.note("only_zookeeper_has_it", f"request of type {request.type} from {connection.peer}")
        zxid = outcome.transaction.zxid if outcome.transaction else self._tree.zxid
        connection.send(jute.reply(jute.PING_XID if isinstance(request, PingRequest) else xid, zxid, outcome.reply), zxid)
        self.counters["replies"] += 1
        if isinstance(request, Close):
            self._expiry.forget(session)
            connection.end()
        elif outcome.reply in (ErrorResponse(Code.AUTH_FAILED), ErrorResponse(Code.SESSION_EXPIRED)):
            connection.end()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _new_session_id(self) -> int:
        self._next_session += 1
        while self._next_session in self._tree.sessions:  # the clock was set back
            self._next_session += 1
        return self._next_session

    def _tick(self) -> None:
        """End the sessions that were not heard of, again and again. Whom the disk holds up can't be heard."""
        self._ticking = asyncio.get_running_loop().call_later(self._config.tick_seconds, self._tick)
        for session, one in self._of_session.items():
            if one.is_held_back and session in self._tree.sessions:
                self._expiry.touch(session, one.timeout_seconds, self._clock())
        for session in self._expiry.look(self._clock()):
            log.info("session expired", extra={"fields": {"session": f"{session:#x}"}})
            self._publish(self._tree.end_session(session, self._wall()))
            connection = self._of_session.get(session)
            if connection is not None:
                connection.end()
        for connection in list(self._connections.values()):
            connection.look()

    # --- committing ---------------------------------------------------------------------------------------------------

    def _publish(self, outcome: Outcome) -> None:
        """Write down what changed, and tell who waited for it."""
        if outcome.transaction is not None:
            self._write(outcome.transaction)
        if outcome.firings:
            self._tell(outcome.firings, outcome.zxid)

    def _tell(self, firings: Iterable[Firing], zxid: int) -> None:
        for watcher, kind, path in firings:
            connection = self._connections.get(watcher)
            if connection is not None:
                connection.send(jute.event(kind, path, zxid), self._tree.zxid)

    def _write(self, transaction: TreeTransaction) -> None:
        entry = encode(transaction)
        self._unwritten.append(entry)
        self._unwritten_bytes += len(entry)
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit(), name="commit")

    async def _commit(self) -> None:
        """Write and sync what has gathered, until nothing is left: once for all of it."""
        loop = asyncio.get_running_loop()
        try:
            while self._unwritten:
                entries, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
                zxid = self._tree.zxid
                image = self._image_if_wanted()
                position = await loop.run_in_executor(self._thread, self._journal.write, entries)
                self._durable = zxid
                for connection in list(self._connections.values()):
                    if connection.is_waiting:
                        connection.flush()
                if image is not None:
                    self._snapshot = loop.run_in_executor(self._snapshots, self._journal.snapshot, position, image)
        except Exception as error:  # whatever it was: what was to be written may not be
            log.exception("the journal failed; nothing more is answered", extra={"fields": {"reason": str(error)}})
            self._fail(error)
        finally:
            self._committing = None

    def _image_if_wanted(self) -> bytes | None:
        """The tree, as the entries that are written now leave it. A snapshot that failed ends the coordinator, too, unless
        there is no room for it: entries may still find some."""
        if self._snapshot is not None:
            if not self._snapshot.done():
                return None
            try:
                self._snapshot.result()
            except StorageFull as error:
                log.warning("disk is full: snapshot postponed", extra={"fields": {"reason": str(error)}})
            self._snapshot = None
        return encode(self._tree.image()) if self._journal.wants_snapshot() else None
