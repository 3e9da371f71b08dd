"""The contract of shared logs (roq/log/contract.py): every kind, those on servers with real servers.

Not covered: servers that lose something (test_shared_log_losses.py); work queues over them (test_shared_log_queues.py; the
contract of work queues runs over them as over all others).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from roq.errors import (
    AccessDenied,
    AppendUnknown,
    CallError,
    Closed,
    InvalidAddress,
    InvalidConfiguration,
    LogTrimmed,
    LogUnavailable,
    RoqError,
    StorageFailed,
)
from roq.log.contract import LogEntry, SharedLog
from roq.log.jetstream import JetStreamLog
from roq.log.local.shared_log import FolderLog
from roq.log.memory import MemoryLog
from roq.log.postgresql import PostgresLog, log_exists
from tests.integration.log_servers import SECRET, SERVERS, LogServer, NatsServer, PostgresServer

pytestmark = pytest.mark.timeout(60)
KINDS = ("memory", "local", "postgresql", "jetstream")
ON_SERVERS = ("postgresql", "jetstream")
THREADS, EACH = 4, 50
AT_ONCE = 5.0  # seconds; far below the look that would find what nobody told
Servers = Callable[[str], LogServer]


def on_server(server: LogServer, name: str) -> SharedLog:
    """A log that its server may have already."""
    if isinstance(server, PostgresServer):
        return PostgresLog(server.dsn(), name, "test")
    assert isinstance(server, NatsServer)
    return JetStreamLog(server.server(), name, "test")


class Openings:
    """Opens one log again and again, each time as another process would; closes all."""

    def __init__(self, open_log: Callable[[], SharedLog]) -> None:
        self._open, self._opened = open_log, list[SharedLog]()

    def __call__(self) -> SharedLog:
        self._opened.append(self._open())
        return self._opened[-1]

    def close(self) -> None:
        for log in self._opened:
            log.close()


@pytest.fixture(params=KINDS)
def openings(request: pytest.FixtureRequest, tmp_path: Path, log_servers: Servers) -> Iterator[Openings]:
    """A log nobody has opened yet."""
    kind, name = str(request.param), f"a.b {uuid.uuid4().hex[:8]}"
    if kind == "memory":
        one = MemoryLog()
        made = Openings(lambda: one)
    elif kind == "local":
        made = Openings(lambda: FolderLog(tmp_path / "log"))
    else:
        server = log_servers(kind)
        made = Openings(lambda: on_server(server, name))
    yield made
    made.close()


@pytest.fixture(params=ON_SERVERS)
def own_server(request: pytest.FixtureRequest) -> Iterator[LogServer]:
    """A server that the test may end."""
    server = SERVERS[str(request.param)]()
    yield server
    server.close()


def entries_of(log: SharedLog, after: int = 0, bytes_max: int = 1 << 20) -> list[LogEntry]:
    """Everything behind a position, in as many reads as it takes: one may give less than there is."""
    found: list[LogEntry] = []
    while entries := log.read(found[-1].position if found else after, bytes_max):
        found += entries
    return found


def read_all(log: SharedLog, after: int = 0, bytes_max: int = 1 << 20) -> list[tuple[int, bytes]]:
    """The same without times."""
    return [(entry.position, entry.data) for entry in entries_of(log, after, bytes_max)]


# --- entries --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_what_is_appended_is_read_by_all_in_one_order(openings: Openings) -> None:
    log, other = openings(), openings()
    assert (log.read(0), log.end()) == ([], 0)
    wanted = [b"a", b"", bytes(range(256)), b"a"]
    positions = [one.append(entry) for one, entry in zip((log, other, log, other), wanted, strict=True)]
    assert positions == sorted(set(positions))
    assert log.end() == other.end() == positions[-1]
    for one in (log, other, openings()):
        assert read_all(one) == list(zip(positions, wanted, strict=True))
        assert read_all(one, positions[1]) == list(zip(positions, wanted, strict=True))[2:]
        assert one.read(positions[-1]) == []


def test_appends_of_many_threads_have_one_order_without_holes(openings: Openings) -> None:
    logs = [openings() for _ in range(THREADS)]
    seen: list[tuple[int, bytes]] = []
    stop = threading.Event()

    def follow() -> None:  # what it has read up to a position stays all there is up to it
        log = openings()
        while not (stop.is_set() and log.end() == (seen[-1][0] if seen else 0)):
            seen.extend((entry.position, entry.data) for entry in log.read(seen[-1][0] if seen else 0))

    def append(number: int) -> list[int]:
        return [logs[number].append(f"{number} {one}".encode()) for one in range(EACH)]

    with ThreadPoolExecutor(THREADS + 1) as pool:
        following = pool.submit(follow)
        positions = list(pool.map(append, range(THREADS)))
        stop.set()
        following.result()
    wanted = {position: f"{n} {one}".encode() for n, mine in enumerate(positions) for one, position in enumerate(mine)}
    assert len(wanted) == THREADS * EACH
    assert seen == sorted(wanted.items())
    assert all(mine == sorted(mine) for mine in positions)


def test_large_entries_come_in_parts_and_too_large_ones_are_refused(openings: Openings) -> None:
    log = openings()
    size = min(log.entry_bytes_max, 900_000)
    positions = [log.append(bytes([number]) * size) for number in range(5)]
    assert 1 <= len(log.read(0, size + 10)) < 5
    assert [(position, len(data)) for position, data in read_all(log, 0, size + 10)] == [(one, size) for one in positions]
    with pytest.raises(CallError):
        log.append(bytes(log.entry_bytes_max + 1))
    assert log.end() == positions[-1]


def test_entries_have_the_log_s_time(openings: Openings) -> None:
    log, other = openings(), openings()
    before = time.time()
    log.append(b"a")
    time.sleep(0.3)
    position = other.append(b"b")
    log.append(b"c")
    first, second, third = entries_of(log)
    assert abs(first.time / 1000 - before) < 2, "these servers run on this machine"
    assert 280 <= second.time - first.time <= 10_000
    assert second.position == position
    assert first.time <= second.time <= third.time
    assert third.time <= log.latest()
    time.sleep(0.2)
    assert third.time + 100 <= log.now() <= log.latest() <= log.now() + 1000


# --- waiting --------------------------------------------------------------------------------------------------------------


def test_the_clock_is_known_to_both_sides_from_appends_of_its_own(openings: Openings) -> None:
    log = openings()
    last = log.append(b"first")
    log.read(0)  # from here on entries are delivered
    for _ in range(5):
        position = log.append(b"x")
        assert len(log.read(last)) == 1
        last = position
        assert log.now() <= log.latest() < log.now() + 1000


def test_who_waits_is_woken_by_another_s_append(openings: Openings) -> None:
    log, other = openings(), openings()
    position = log.append(b"a")
    began = time.monotonic()
    assert not log.wait(position, 0.3)
    assert 0.25 < time.monotonic() - began < 5
    assert log.wait(position - 1, 5)
    for entry in (b"b", b"c"):
        timer = threading.Timer(0.3, lambda entry=entry: other.append(entry))
        timer.start()
        began = time.monotonic()
        assert log.wait(position, 20)
        assert time.monotonic() - began < 0.3 + AT_ONCE
        timer.join()
        [found] = log.read(position)
        assert found.data == entry
        position = found.position


def test_closing_ends_waits_and_later_calls(openings: Openings) -> None:
    log = openings()
    position = log.append(b"a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(log.wait, position, 30)
        time.sleep(0.3)
        began = time.monotonic()
        log.close()
        assert not waiting.result(5)
        assert time.monotonic() - began < 5
    with pytest.raises(Closed):
        log.append(b"b")
    log.close()


# --- snapshots ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_snapshot_stands_for_the_entries_before_it(openings: Openings) -> None:
    log, other = openings(), openings()
    assert (log.newest_snapshot(), log.load_snapshot()) == ((0, 0), None)
    positions = [log.append(str(number).encode() * 1000) for number in range(10)]
    assert len(read_all(other)) == 10
    data = bytes(range(256)) * 3000
    log.snapshot(positions[4], data)
    position, size = other.newest_snapshot()
    assert position == positions[4]
    assert len(data) <= size < len(data) + 1000
    assert other.load_snapshot() == (positions[4], data)
    other.snapshot(positions[2], b"older: nothing happens")
    assert log.load_snapshot() == (positions[4], data)
    for one in (log, other, openings()):
        assert [position for position, _ in read_all(one, positions[4])] == positions[5:]
    log.snapshot(positions[9], b"")
    assert log.load_snapshot() == (positions[9], b"")
    assert read_all(other, positions[9]) == []
    after = other.append(b"after")
    assert after > positions[9]
    assert read_all(openings(), positions[9]) == [(after, b"after")]


@pytest.mark.parametrize("openings", ["memory", *ON_SERVERS], indirect=True)  # a folder keeps some entries before it
def test_who_is_behind_the_snapshot_is_told(openings: Openings) -> None:
    log, other = openings(), openings()
    positions = [log.append(b"x") for _ in range(10)]
    assert len(entries_of(other)) == 10
    log.snapshot(positions[7], b"data")
    for one in (log, other, openings()):
        for after in (0, positions[6]):
            with pytest.raises(LogTrimmed):
                one.read(after)
        assert len(entries_of(one, positions[7])) == 2


def test_a_log_that_ends_too_early_is_told(openings: Openings) -> None:
    log = openings()
    position = log.append(b"x")
    with pytest.raises(StorageFailed, match="ends"):
        log.read(position + 10)


# --- servers ----------------------------------------------------------------------------------------------------------------


def patiently(call: Callable[[], int], *again: type[RoqError]) -> int:
    """As a work queue does: until it can be done."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return call()
        except again:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_server_that_crashes_loses_nothing_and_is_found_again(own_server: LogServer) -> None:
    log, other = on_server(own_server, "x"), on_server(own_server, "x")
    confirmed: dict[int, bytes] = {}
    stop = threading.Event()

    def append() -> None:
        for number in range(100_000):
            entry = str(number).encode()
            confirmed[patiently(lambda entry=entry: log.append(entry), LogUnavailable, AppendUnknown)] = entry  # type: ignore[misc]
            if stop.is_set():
                return

    def more() -> None:
        before = len(confirmed)
        while len(confirmed) < before + 50:
            assert not appending.done()
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        try:
            for _ in range(2):
                more()
                own_server.crash()
                with pytest.raises(LogUnavailable):
                    other.end()
                with pytest.raises((LogUnavailable, AppendUnknown)):
                    other.append(b"other")
                own_server.start()
            more()
        finally:
            stop.set()
        appending.result()
    end = patiently(other.end, LogUnavailable)
    position = patiently(lambda: 1 if other.wait(end - 1, 5) else 0, LogUnavailable)
    assert position == 1, "it is told of entries again"
    found = dict(read_all(other))
    assert confirmed.items() <= found.items()
    assert len(found) == end, "no holes"
    log.close()
    other.close()


def test_a_server_that_stands_still_is_not_waited_for_for_ever(own_server: LogServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.log.postgresql_session.STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr("roq.log.jetstream.ASK_SECONDS", 1.0)
    log = on_server(own_server, "x")
    log.append(b"a")
    with own_server.paused():
        began = time.monotonic()
        with pytest.raises(AppendUnknown):
            log.append(b"b")
        assert time.monotonic() - began < 10
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(log.end)
            time.sleep(0.2)
            with pytest.raises((LogUnavailable, Closed)):
                asking.result(10)
    patiently(lambda: log.append(b"c"), LogUnavailable, AppendUnknown)
    data = [data for _, data in read_all(log)]
    assert data[0] == b"a"
    assert b"c" in data
    log.close()


@pytest.mark.quick
def test_nobody_at_the_address_and_no_entry_are_told_without_the_password(log_servers: Servers) -> None:
    postgres, nats = log_servers("postgresql"), log_servers("jetstream")
    assert isinstance(postgres, PostgresServer)
    assert isinstance(nats, NatsServer)
    host, nowhere = postgres.host, f"{postgres.host}:1"
    attempts: list[tuple[type[RoqError], Callable[[], SharedLog]]] = [
        (LogUnavailable, lambda: PostgresLog(f"postgresql://strict:{SECRET}@{nowhere}/postgres", "x", "here")),
        (AccessDenied, lambda: PostgresLog(f"postgresql://strict:{SECRET}x@{host}:{postgres.port}/postgres", "x", "here")),
        (AccessDenied, lambda: PostgresLog(f"postgresql://strict@{host}:{postgres.port}/postgres", "x", "here")),
        (AccessDenied, lambda: PostgresLog(f"postgresql://guest@{host}:{postgres.port}/postgres", "new", "here")),
        (InvalidAddress, lambda: PostgresLog(f"postgresql://roq@{host}:{postgres.port}/nothing", "x", "here")),
        (InvalidAddress, lambda: PostgresLog(f"postgresql://strict:%hunter@{host}:{postgres.port}/strict", "x", "here")),
        (InvalidAddress, lambda: PostgresLog(f"postgresql://roq:{SECRET}@{host}:{postgres.port}/postgres?x=1", "x", "here")),
        (LogUnavailable, lambda: JetStreamLog(f"jetstream://strict:{SECRET}@{nowhere}", "x", "here")),
        (AccessDenied, lambda: JetStreamLog(f"jetstream://strict:{SECRET}x@{host}:{nats.port}", "x", "here")),
        (InvalidConfiguration, lambda: JetStreamLog(f"jetstream://{host}:{nats.port}?replicas=3", "three", "here")),
        (InvalidConfiguration, lambda: JetStreamLog(f"jetstream://{host}:{nats.port}?credentials=/none", "x", "here")),
    ]
    for kind, attempt in attempts:
        with pytest.raises(kind) as told:
            attempt()
        assert "hunter" not in f"{told.value!r} {told.value.__cause__!r}"
    for right in (
        lambda: PostgresLog(f"postgresql://strict:{SECRET}@{host}:{postgres.port}/strict", "strictly", "here"),
        lambda: JetStreamLog(f"jetstream://strict:{SECRET}@{host}:{nats.port}", "strictly", "here"),
    ):
        log: SharedLog = right()
        assert log.append(b"a") == 1
        log.close()


def test_looking_for_a_log_makes_none(log_servers: Servers) -> None:
    server = log_servers("postgresql")
    assert isinstance(server, PostgresServer)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE empty")
        dsn = server.dsn().removesuffix("postgres") + "empty"
        assert not log_exists(dsn, "x", "here")
        with psycopg.connect(dsn) as inside:
            assert inside.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'roq'").fetchone() == (0,)
        connection.execute("DROP DATABASE empty")


def test_two_that_make_the_first_log_at_once_make_one(own_server: LogServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        logs = list(pool.map(lambda _: on_server(own_server, "same"), range(8)))
    assert sorted(log.append(b"x") for log in logs) == list(range(1, 9))
    for log in logs:
        log.close()


def test_a_paused_client_holds_nobody_up(log_servers: Servers) -> None:
    """PostgreSQL: what takes the log's lock is one statement, so nobody can be stopped within it. A lock that somebody else
    holds is waited for, not for ever."""
    server = log_servers("postgresql")
    assert isinstance(server, PostgresServer)
    log = on_server(server, "locked")
    log.append(b"a")
    with psycopg.connect(server.dsn()) as foreign, ThreadPoolExecutor(1) as pool:
        foreign.execute("SELECT * FROM roq.logs WHERE name = 'locked' FOR UPDATE")
        appending = pool.submit(log.append, b"b")
        time.sleep(0.3)
        assert not appending.done()
        foreign.rollback()
        assert appending.result(5) == 2
    log.close()
