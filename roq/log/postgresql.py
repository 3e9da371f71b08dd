"""A shared log in a PostgreSQL database: one table for each, in the schema `roq`.

    roq.logs            id, name, last position, time of the last entry, position up to which entries are in the snapshot
    roq.snapshots       log, position, data; the one that counts has the position of `trimmed` in roq.logs
    roq.entries_<id>    position, time, data

An append is one statement: it raises `last` in the log's row, takes the position from there, writes the entry and notifies.
The row stays locked until the commit, which is on stable storage, so appends of one log commit one after the other, positions
have no gaps, and who sees one sees all before it. (Numbers of a sequence would become visible in another order.) No lock is
held while the server waits for a client: one that is stopped stops nobody. Time is the server's clock, never going back.

Who waits has a connection of its own that LISTENs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from threading import Lock, Thread

from roq.errors import CallError, Closed, LogTrimmed, RoqError, StorageFailed, WorkQueueNotFound
from roq.log.arrivals import Arrivals
from roq.log.clock import LogClock
from roq.log.contract import READ_BYTES, LogEntry
from roq.log.joint import Joint
from roq.log.postgresql_session import PostgresSession, Row, StopSignal, completed, int8, number
from roq.runtime.backoff import delays

ENTRY_BYTES_MAX = 64 * 1024 * 1024
SNAPSHOT_BYTES_MAX = 900 * 1024 * 1024  # a value has less than 1 GiB
SNAPSHOT_SECONDS = 120.0
ROWS_AT_ONCE = 2000
TRIMMED_AT_ONCE = 20_000  # rows
IDLE_MAX = 4  # connections kept for the next call
LISTEN_SECONDS = 10.0  # without a notification: ask
LISTENER_SECONDS = 1.0  # it may be connecting, and ends soon after
NAME_LOCK = 0x526F51  # advisory lock of who creates tables: two at once would collide
FORMAT = 1
NOW = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

CREATE = (
    "CREATE SCHEMA IF NOT EXISTS roq",
    "CREATE TABLE IF NOT EXISTS roq.logs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE,"
    " format bigint NOT NULL, last bigint NOT NULL DEFAULT 0, ms bigint NOT NULL DEFAULT 0, trimmed bigint NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS roq.snapshots (log bigint NOT NULL REFERENCES roq.logs ON DELETE CASCADE,"
    " position bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (log, position))",
)
FIND = "SELECT id, format FROM roq.logs WHERE name = convert_from($1::bytea, 'UTF8')"
INSERT = "INSERT INTO roq.logs (name, format) VALUES (convert_from($1::bytea, 'UTF8'), $2::bigint) RETURNING id"
SNAPSHOT = "FROM roq.snapshots s JOIN roq.logs l ON l.id = s.log AND l.trimmed = s.position WHERE l.id = $1::bigint"
# Its data, which may take long, is written before the log's row is touched, whose lock all appends need.
KEEP_DATA = (
    "INSERT INTO roq.snapshots SELECT id, $2::bigint, $3::bytea FROM roq.logs"
    " WHERE id = $1::bigint AND trimmed < $2::bigint AND last >= $2::bigint ON CONFLICT DO NOTHING"
)
KEEP = (
    "UPDATE roq.logs SET trimmed = $2::bigint WHERE id = $1::bigint AND trimmed < $2::bigint"
    " AND EXISTS (SELECT FROM roq.snapshots WHERE log = $1::bigint AND position = $2::bigint)"
)
FORGET = "DELETE FROM roq.snapshots WHERE log = $1::bigint AND position < (SELECT trimmed FROM roq.logs WHERE id = $1::bigint)"

logger = logging.getLogger(__name__)


class PostgresLog:
    """A SharedLog (contract.py), made if there is none. dsn: as the driver takes it. place: the same for messages, without a
    password. Raises InvalidAddress, AccessDenied, LogUnavailable."""

    entry_bytes_max = ENTRY_BYTES_MAX

    def __init__(self, dsn: str, log: str, place: str) -> None:
        self.name = f"log {log!r} in {place}"
        self._dsn = completed(dsn)
        self._clock = LogClock()
        self._arrivals, self._joint = Arrivals(), Joint(self.name)
        self._idle: list[PostgresSession] = []  # taken and given back without a lock: a signal may come at any time
        self._stop = StopSignal()
        self._closing = Lock()
        self._closed = False
        self._listener: Thread | None = None
        try:
            self._id = self._find(log) or self._create(log)
        except BaseException:
            self.close()
            raise
        table = f"roq.entries_{self._id}"
        self._channel = f"roq_{self._id}"
        self._append = (
            f"WITH head AS (UPDATE roq.logs SET last = last + 1, ms = greatest(ms, {NOW}) WHERE id = $1::bigint"
            f" RETURNING last, ms), entry AS (INSERT INTO {table} SELECT last, ms, $2::bytea FROM head)"
            f" SELECT last, ms, pg_notify('{self._channel}', last::text) FROM head"
        )
        self._read = (
            f"SELECT l.last, l.trimmed, greatest(l.ms, {NOW}), e.position, e.ms, e.data,"
            f" (SELECT sha256(int8send(ms) || data) FROM {table} WHERE position = $4::bigint) FROM roq.logs l LEFT JOIN ("
            " SELECT position, ms, data FROM (SELECT position, ms, data,"
            " sum(octet_length(data)) OVER (ORDER BY position) - octet_length(data) AS before FROM ("
            f"  SELECT position, ms, data FROM {table} WHERE position > $2::bigint ORDER BY position LIMIT {ROWS_AT_ONCE}"
            ") first) sized WHERE before < $3::bigint) e ON true WHERE l.id = $1::bigint ORDER BY e.position"
        )
        self._trim = (
            f"WITH gone AS (DELETE FROM {table} WHERE position IN (SELECT position FROM {table} WHERE position <= $1::bigint"
            f" ORDER BY position LIMIT {TRIMMED_AT_ONCE}) RETURNING 1) SELECT count(*) FROM gone"
        )

    # --- the log itself -------------------------------------------------------------------------------------------------

    def _find(self, log: str) -> int:
        """Its id, 0: there is none."""
        with self._session() as session:
            return _found(session, log, self.name)

    def _create(self, log: str) -> int:
        with self._session() as session:
            session.ask("BEGIN")
            try:
                session.ask(f"SELECT pg_advisory_xact_lock({NAME_LOCK})")
                [[there]] = session.ask("SELECT (to_regclass('roq.snapshots') IS NOT NULL)::int::bigint")
                for statement in () if number(there) else CREATE:
                    session.ask(statement)
                if not (rows := session.ask(FIND, log.encode())):
                    rows = session.ask(INSERT, log.encode(), int8(FORMAT))
                    session.ask(
                        f"CREATE TABLE roq.entries_{number(rows[0][0])}"
                        " (position bigint PRIMARY KEY, ms bigint NOT NULL, data bytea NOT NULL)"
                    )
                session.ask("COMMIT")
            except BaseException:
                session.usable = False
                raise
        return number(rows[0][0])

    # --- entries --------------------------------------------------------------------------------------------------------

    def now(self) -> int:
        """See SharedLog."""
        return self._clock.now()

    def latest(self) -> int:
        """See SharedLog."""
        return self._clock.latest()

    def append(self, entry: bytes) -> int:
        """See SharedLog."""
        if len(entry) > ENTRY_BYTES_MAX:
            raise CallError(f"an entry of {len(entry)} bytes; {self.name} takes {ENTRY_BYTES_MAX} at once")
        self._joint.check()
        with self._session() as session:
            before, sent = self._joint.position, time.monotonic()
            rows = session.ask(self._append, int8(self._id), entry, changes=True)
        if not rows:
            raise self._removed()
        position, ms = number(rows[0][0]), number(rows[0][1])
        self._joint.appended(before, position)
        self._clock.observe(ms, sent)
        self._arrivals.rise(position)
        return position

    def end(self) -> int:
        """See SharedLog."""
        self._joint.check()
        with self._session() as session:
            return self._end(session)

    def _end(self, session: PostgresSession) -> int:
        sent = time.monotonic()
        rows = session.ask(f"SELECT last, greatest(ms, {NOW}) FROM roq.logs WHERE id = $1::bigint", int8(self._id))
        if not rows:
            raise self._removed()
        self._clock.observe(number(rows[0][1]), sent)
        end = number(rows[0][0])
        self._arrivals.rise(end)
        return end

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        """See SharedLog."""
        known = self._joint.mark(after)
        with self._session() as session:
            sent = time.monotonic()
            rows = session.ask(self._read, int8(self._id), int8(after), int8(bytes_max), int8(after if known else 0))
        if not rows:
            raise self._removed()
        last, trimmed, now = map(number, rows[0][:3])
        self._clock.observe(now, sent)
        self._arrivals.rise(last)
        if after < trimmed:
            raise LogTrimmed(f"{self.name}: entries behind position {after} are in the snapshot")
        if after > last:
            raise StorageFailed(
                f"{self.name} ends at {last}, before position {after}, which was confirmed: its server lost the end of it. "
                "Close the work queue everywhere and open it anew"
            )
        self._joint.compare(known, rows[0][6])
        entries = [_entry(row) for row in rows if row[3] is not None]
        wanted = list(range(after + 1, after + 1 + max(len(entries), min(last - after, 1))))
        if [entry.position for entry in entries] != wanted:
            raise StorageFailed(f"{self.name} has lost entries behind position {after}: restore them, or begin a new queue")
        if entries:
            self._joint.read(entries[-1])
        return entries

    def _removed(self) -> RoqError:
        return WorkQueueNotFound(f"{self.name} was removed")

    # --- waiting --------------------------------------------------------------------------------------------------------

    def wait(self, after: int, seconds: float) -> bool:
        """See SharedLog."""
        if self._listener is None:
            with self._closing:
                if self._listener is None and not self._closed:
                    self._listener = Thread(target=self._listen, name="roq-log-listen", daemon=True)
                    self._listener.start()
        return self._arrivals.wait(after, seconds)

    def _listen(self) -> None:
        """Thread: hear of entries as they come."""
        pauses = delays(0.1, 2.0)
        while not self._closed:
            try:
                session = PostgresSession(self._dsn, self.name, self._stop)
                try:
                    session.listen(self._channel)
                    pauses = delays(0.1, 2.0)
                    self._end(session)
                    while not self._closed:
                        if said := session.notified(LISTEN_SECONDS):
                            self._arrivals.rise(max(int(one) for one in said if one.isdigit()))
                        else:
                            self._end(session)  # a connection that is dead says nothing
                finally:
                    session.close()
            except Closed:
                return
            except RoqError as error:
                logger.warning("%s: no notice of new entries, connecting again: %s", self.name, error)
                self._arrivals.pause(next(pauses))

    # --- snapshots ------------------------------------------------------------------------------------------------------

    def snapshot(self, position: int, data: bytes) -> None:
        """See SharedLog."""
        if len(data) > SNAPSHOT_BYTES_MAX:
            raise StorageFailed(f"{self.name}: a snapshot of {len(data)} bytes; {SNAPSHOT_BYTES_MAX} fit: have tasks done")
        self._joint.check()
        log, at = int8(self._id), int8(position)
        with self._session() as session:
            session.ask(KEEP_DATA, log, at, data, changes=True, seconds=SNAPSHOT_SECONDS)
            session.ask(KEEP, log, at, changes=True)
            session.ask(FORGET, log, changes=True)
            [[trimmed]] = session.ask("SELECT trimmed FROM roq.logs WHERE id = $1::bigint", int8(self._id))
            while number(session.ask(self._trim, int8(number(trimmed)))[0][0]) == TRIMMED_AT_ONCE:
                pass

    def newest_snapshot(self) -> tuple[int, int]:
        """See SharedLog."""
        with self._session() as session:
            rows = session.ask(f"SELECT s.position, octet_length(s.data)::bigint {SNAPSHOT}", int8(self._id))
        return (number(rows[0][0]), number(rows[0][1])) if rows else (0, 0)

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """See SharedLog."""
        with self._session() as session:
            rows = session.ask(f"SELECT s.position, s.data {SNAPSHOT}", int8(self._id), seconds=SNAPSHOT_SECONDS)
        return (number(rows[0][0]), rows[0][1] or b"") if rows else None

    # --- connections ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self) -> Iterator[PostgresSession]:
        """A connection for one call."""
        if self._closed:
            raise Closed(f"{self.name} was closed")
        session = self._take()
        try:
            yield session
        finally:
            if session.usable and not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(session)
            else:
                session.close()

    def _take(self) -> PostgresSession:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                session = self._idle.pop()
                if session.is_alive():
                    return session
                session.close()
        return PostgresSession(self._dsn, self.name, self._stop)

    def close(self) -> None:
        """See SharedLog."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        self._arrivals.close()
        if self._listener is not None:
            self._listener.join(LISTENER_SECONDS)
        while self._idle:
            self._idle.pop().close()


def _entry(row: Row) -> LogEntry:
    return LogEntry(number(row[3]), number(row[4]), row[5] or b"")


def log_exists(dsn: str, log: str, place: str) -> bool:
    """Whether the database has this log. Raises InvalidAddress, AccessDenied, LogUnavailable."""
    name = f"log {log!r} in {place}"
    session = PostgresSession(completed(dsn), name, StopSignal())
    try:
        return bool(_found(session, log, name))
    finally:
        session.close()


def _found(session: PostgresSession, log: str, name: str) -> int:
    """Its id, 0: there is none."""
    [[there]] = session.ask("SELECT (to_regclass('roq.logs') IS NOT NULL)::int::bigint")
    rows = session.ask(FIND, log.encode()) if number(there) else []
    if not rows:
        return 0
    if (format_ := number(rows[0][1])) != FORMAT:
        raise StorageFailed(f"{name} has format {format_}; this program reads {FORMAT}: use the one that made it")
    return number(rows[0][0])
