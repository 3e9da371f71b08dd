"""One connection to PostgreSQL for plain code: statements with a time limit, and notifications.

The driver (psycopg) connects and speaks the protocol; how long to wait is said here, because a server that hangs says nothing.
A session that failed in any way, a signal in its middle included, is not used again.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from roq.errors import (
    AccessDenied,
    AppendUnknown,
    Closed,
    InvalidAddress,
    LogUnavailable,
    RoqError,
    StorageFailed,
    StorageFull,
    TemporaryError,
)

CONNECT_SECONDS = 5
STATEMENT_SECONDS = 20.0
LOCK_SECONDS = 15  # the server gives up before we do, and says so
BINARY = pq.Format.BINARY
DEFAULTS: Mapping[str, str | int] = {
    "application_name": "roq",
    "client_encoding": "UTF8",
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
    "target_session_attrs": "read-write",  # of several hosts, the one that is no standby
}
# What a commit promises is not to be less than stable storage, whatever the server's default is; more stays more. How long to
# wait is said by us. Of appends at the same time all but one would fail where transactions see nothing of each other.
START = (
    f"SELECT set_config('lock_timeout', '{LOCK_SECONDS}s', false),"
    f" set_config('idle_in_transaction_session_timeout', '{LOCK_SECONDS}s', false),"
    " set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false),"
    " set_config('default_transaction_isolation', 'read committed', false),"
    " set_config('statement_timeout', '0', false),"
    " set_config('client_min_messages', 'error', false)"
)
FULL = ("53100", "53200")  # disk, memory
DENIED = ("42501", "28000", "28P01")
AWAY = ("53300", "55P03", "57014", "25006", "40001", "40P01")  # nothing was written: rolled back
GONE = ("57P01", "57P02", "57P03")  # the server stops; a commit may have been under way
Row = list[bytes | None]


def completed(dsn: str) -> str:
    """The same address for the driver, with what it leaves to us. Raises InvalidAddress."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # it quotes what may be the password
        raise InvalidAddress(
            "PostgreSQL's driver can't read this address: in user and password, '%' is written %25, '@' %40, '/' %2F"
        ) from None
    return make_conninfo("", **{**DEFAULTS, **given})


def int8(value: int) -> bytes:
    """A bigint as a parameter."""
    return struct.pack(">q", value)


def number(value: bytes | None) -> int:
    """A bigint of a row."""
    assert value is not None
    return int(struct.unpack(">q", value)[0])


class StopSignal:
    """Ends what is under way on all connections that have it; its descriptor goes with the last of them."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0)

    def fileno(self) -> int:
        """Readable from `set` on."""
        return self._descriptor

    def set(self) -> None:
        """End it all."""
        os.eventfd_write(self._descriptor, 1)

    def __del__(self) -> None:
        os.close(self._descriptor)


class PostgresSession:
    """An open connection. One thread at a time. name: where, for messages."""

    def __init__(self, dsn: str, name: str, stop: StopSignal) -> None:
        self._name, self._stop = name, stop
        try:
            self._connection = psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError as error:
            raise _not_connected(name, str(error)) from None
        self._wire = self._connection.pgconn
        self._wire.nonblocking = 1
        self.usable = True
        try:
            self.ask(START)
        except BaseException:
            self.close()
            raise

    def ask(self, query: str, *parameters: bytes, changes: bool = False, seconds: float | None = None) -> list[Row]:
        """Run one statement; its rows, columns in PostgreSQL's binary form. Parameters are binary, their types are the query's.

        changes: it writes, so whether it did is unknown when no answer comes (AppendUnknown) in `seconds`.
        """
        self.usable = False
        seconds = seconds or STATEMENT_SECONDS
        lost: type[TemporaryError] = AppendUnknown if changes else LogUnavailable
        deadline = time.monotonic() + seconds
        try:
            self._wire.send_query_params(query.encode(), parameters, None, [BINARY] * len(parameters), BINARY)
            while self._wire.flush():
                self._await(deadline, write=True)
                self._wire.consume_input()
            results: list[Any] = []
            while True:
                while self._wire.is_busy():
                    self._await(deadline)
                    self._wire.consume_input()
                result = self._wire.get_result()
                if result is None:
                    break
                results.append(result)
        except psycopg.OperationalError as error:
            raise lost(f"{self._name}: the connection broke: {str(error).strip()}") from None
        except TimeoutError:
            raise lost(f"{self._name}: no answer within {seconds:g} s") from None
        for result in results:
            if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                raise self._refused(result, lost)
        self.usable = True
        return [[one.get_value(row, column) for column in range(one.nfields)] for one in results for row in range(one.ntuples)]

    def _await(self, deadline: float, *, write: bool = False) -> None:
        """Sleep until the connection has something for us, or takes more of us."""
        poll = select.poll()
        poll.register(self._wire.socket, select.POLLIN | (select.POLLOUT if write else 0))
        poll.register(self._stop, select.POLLIN)
        ready = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
        if any(descriptor == self._stop.fileno() for descriptor, _ in ready):
            raise Closed(f"{self._name} was closed")
        if not ready:
            raise TimeoutError

    def _refused(self, result: Any, lost: type[TemporaryError]) -> RoqError:
        """What the server's error means for the caller."""
        code = _text(result.error_field(pq.DiagnosticField.SQLSTATE))
        said = _text(result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY))
        what = f"{self._name}: PostgreSQL says: {said}"
        self.usable = self._wire.status == pq.ConnStatus.OK
        if code in FULL:
            return StorageFull(what)
        if code in DENIED:
            return AccessDenied(f"{what}; the user needs what docs/existing-logs.md grants")
        if code in AWAY:
            return LogUnavailable(what)
        if code in GONE or self._wire.status != pq.ConnStatus.OK:
            return lost(what)
        return StorageFailed(f"{what} ({code})")

    def listen(self, channel: str) -> None:
        """Have notifications come."""
        self.ask(f"LISTEN {channel}")

    def notified(self, seconds: float) -> list[bytes]:
        """Payloads of notifications; waits until there is one, for so long at most."""
        found: list[bytes] = []
        try:
            self._wire.consume_input()
            while not found and (notice := self._wire.notifies()) is None:
                self._await(time.monotonic() + seconds)
                self._wire.consume_input()
            while notice is not None:
                found.append(notice.extra)
                notice = self._wire.notifies()
        except TimeoutError:
            pass
        except psycopg.OperationalError as error:
            self.usable = False
            raise LogUnavailable(f"{self._name}: the connection broke: {str(error).strip()}") from None
        return found

    def is_alive(self) -> bool:
        """Whether the server has not ended it meanwhile, as far as can be seen without asking."""
        try:
            self._wire.consume_input()  # nonblocking
        except (psycopg.OperationalError, OSError):
            return False
        return self._wire.status == pq.ConnStatus.OK

    def close(self) -> None:
        """End it."""
        self.usable = False
        self._connection.close()


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _not_connected(name: str, said: str) -> RoqError:
    """The driver tells why in words only, one line for each host it tried."""
    why = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    fatal = [part for part in ("password authentication failed", "no pg_hba.conf entry", "no password supplied") if part in why]
    if fatal:
        return AccessDenied(f"{name}: PostgreSQL lets us not in: {why}")
    if " does not exist" in why and "FATAL" in why:
        return InvalidAddress(f"{name}: {why}; create it first")
    return LogUnavailable(f"{name}: PostgreSQL can't be reached: {why}")
