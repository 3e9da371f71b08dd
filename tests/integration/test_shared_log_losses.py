"""Shared logs on servers that are not as they should be: come back as an older state of themselves, full, set up in other ways.

Not covered: what they promise on servers that are well (test_shared_logs.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nats
import psycopg
import pytest
from nats.js.api import DiscardPolicy

from roq import blocking
from roq.errors import AppendUnknown, InvalidConfiguration, LogUnavailable, StorageFailed, StorageFull
from roq.wire.task import NewTask, Settlement
from roq.workqueue.shared_queue import SharedQueue
from tests.harness import commands
from tests.integration.log_servers import SECRET, SERVERS, LogServer, NatsServer, PostgresServer
from tests.integration.test_shared_logs import ON_SERVERS, Servers, on_server, patiently, read_all

pytestmark = pytest.mark.timeout(120)
# Data of a snapshot comes in when advisory lock 42 is free.
SLOW_SNAPSHOTS = """
CREATE OR REPLACE FUNCTION roq.slow() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE INSERT ON roq.snapshots FOR EACH ROW EXECUTE FUNCTION roq.slow();
"""


@pytest.fixture(params=ON_SERVERS)
def own_server(request: pytest.FixtureRequest) -> Iterator[LogServer]:
    """A server that the test may end."""
    server = SERVERS[str(request.param)]()
    yield server
    server.close()


def test_a_server_that_comes_back_as_an_older_state_is_noticed_although_the_log_has_grown_again(own_server: LogServer) -> None:
    """Three programs: one has read what was lost; one has written it; one has done neither."""
    reader, writer, third = (on_server(own_server, "x") for _ in range(3))
    reader.append(b"a")
    assert read_all(reader) == read_all(writer) == [(1, b"a")]

    def lost() -> None:
        for _ in range(3):
            patiently(lambda: writer.append(b"lost"), LogUnavailable)
        assert patiently(lambda: len(read_all(reader, 1)), LogUnavailable) == 3

    own_server.put_back("x", 1, lost)
    for _ in range(6):
        patiently(lambda: third.append(b"new"), LogUnavailable, AppendUnknown)
    with pytest.raises(StorageFailed, match="came back as an older state of itself"):
        patiently(lambda: len(reader.read(4)), LogUnavailable)
    end = patiently(third.end, LogUnavailable)
    for refused in (lambda: reader.append(b"y"), reader.end, lambda: reader.read(7)):
        with pytest.raises(StorageFailed, match="came back as an older state"):
            refused()
    assert patiently(third.end, LogUnavailable) == end, "it writes no more by what it believes"
    assert [data for _, data in read_all(writer, 1)] == [b"new"] * 6, "who had not read the lost ones goes on"
    for log in (reader, writer, third):
        log.close()


def test_an_append_that_comes_where_was_read_long_ago_is_noticed(own_server: LogServer) -> None:
    log = on_server(own_server, "x")
    log.append(b"a")

    def lost() -> None:
        for _ in range(3):
            patiently(lambda: log.append(b"lost"), LogUnavailable)
        assert patiently(lambda: len(read_all(log)), LogUnavailable) == 4

    own_server.put_back("x", 1, lost)
    with pytest.raises(StorageFailed, match="came back as an older state"):
        patiently(lambda: log.append(b"new"), LogUnavailable, AppendUnknown)
    log.close()


def test_a_large_snapshot_holds_no_append_up(log_servers: Servers) -> None:
    """PostgreSQL: its data is written before the log's row is locked."""
    server = log_servers("postgresql")
    assert isinstance(server, PostgresServer)
    log, other = on_server(server, "large"), on_server(server, "large")
    position = log.append(b"x")
    with psycopg.connect(server.dsn(), autocommit=True) as foreign, ThreadPoolExecutor(1) as pool:
        foreign.execute(SLOW_SNAPSHOTS)
        foreign.execute("SELECT pg_advisory_lock(42)")
        keeping = pool.submit(log.snapshot, position, b"data")
        deadline = time.monotonic() + 10
        while not foreign.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        began = time.monotonic()
        assert [other.append(b"x") for _ in range(3)] == [2, 3, 4]
        assert time.monotonic() - began < 2
        assert other.newest_snapshot() == (0, 0)
        assert len(other.read(0)) == 4
        foreign.execute("SELECT pg_advisory_unlock(42)")
        keeping.result(20)
        foreign.execute("DROP TRIGGER slow ON roq.snapshots")
    assert other.load_snapshot() == (1, b"data")
    log.snapshot(3, b"newer")
    other.snapshot(2, b"older")
    with psycopg.connect(server.dsn()) as database:
        query = "SELECT s.position FROM roq.snapshots s JOIN roq.logs l ON l.id = s.log WHERE l.name = 'large'"
        assert database.execute(query).fetchall() == [(3,)], "others are gone"
    for one in (log, other):
        one.close()


@pytest.mark.parametrize("own_server", ["postgresql"], indirect=True)
def test_what_a_database_has_as_defaults_does_not_matter(own_server: LogServer) -> None:
    assert isinstance(own_server, PostgresServer)
    with psycopg.connect(own_server.dsn(), autocommit=True) as database:
        for setting in ("default_transaction_isolation = 'repeatable read'", "statement_timeout = 500"):
            database.execute(f"ALTER DATABASE postgres SET {setting}".encode())
    logs = [on_server(own_server, "x") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        positions = list(pool.map(lambda log: [log.append(b"x") for _ in range(20)], logs))
        assert sorted(one for mine in positions for one in mine) == list(range(1, 81))
        with psycopg.connect(own_server.dsn()) as foreign:
            foreign.execute("SELECT * FROM roq.logs FOR UPDATE")
            appending = pool.submit(logs[0].append, b"x")
            time.sleep(1.0)  # twice what the database gives a statement
            assert not appending.done()
            foreign.rollback()
            assert appending.result(10) == 81
    for log in logs:
        log.close()


def add_stream(server: NatsServer, name: str, **settings: Any) -> None:
    """For a log of this name."""

    async def make() -> None:
        connection = await nats.connect(f"nats://{server.host}:{server.port}")
        await connection.jetstream().add_stream(
            name=f"ROQ_{name}", subjects=[f"roq.log.{name}"], discard=DiscardPolicy.NEW, **settings
        )
        await connection.close()

    asyncio.run(make())


@pytest.mark.parametrize("setting", [{"max_msgs_per_subject": 5}, {"deny_purge": True}, {"no_ack": True}])
def test_a_stream_that_would_lose_or_keep_too_much_is_refused(log_servers: Servers, setting: dict[str, Any]) -> None:
    server, name = log_servers("jetstream"), f"made{uuid.uuid4().hex[:8]}"
    assert isinstance(server, NatsServer)

    add_stream(server, name, **setting)
    with pytest.raises(InvalidConfiguration, match=f"{next(iter(setting))} is set"):
        on_server(server, name)


def test_a_queue_whose_server_is_an_older_state_leases_and_acks_nothing_by_mistake(own_server: LogServer) -> None:
    one, other = (SharedQueue(lambda: on_server(own_server, "q"), patience_seconds=15) for _ in range(2))
    one.put([NewTask(b"first")])
    before = one.status().ready
    assert (before, other.status().ready) == (1, 1)
    entries = one._replica.position

    def lost() -> None:
        one.put([NewTask(b"lost") for _ in range(5)])
        [task] = one.lease(60.0, 1, 0.0).tasks
        assert one.settle([Settlement.ack(task.token)]) == [""]

    own_server.put_back("q", entries, lost)
    for _ in range(9):
        other.put([NewTask(b"new")])
    with pytest.raises(StorageFailed, match="older state of itself"):
        one.lease(60.0, 20, 0.0)
    with pytest.raises(StorageFailed, match="older state of itself"):
        one.put([NewTask(b"more")])
    assert other.status().inserted == 10
    one.close()
    other.close()


def test_a_full_stream_refuses_puts_until_a_lease_makes_room(log_servers: Servers) -> None:
    server, name = log_servers("jetstream"), f"full{uuid.uuid4().hex[:8]}"
    assert isinstance(server, NatsServer)
    add_stream(server, name, max_bytes=100_000)
    address = server.address(name, "patience_seconds=5")
    with blocking.open_queue(address) as putting, blocking.open_queue(address) as queue:

        def fill(size: int) -> None:
            for _ in range(1000):
                putting.put(b"x" * size)

        for size in (10_000, 1):
            with pytest.raises(StorageFull):
                fill(size)
        tasks = queue.lease(60, count=1000)
        assert len(tasks) > 9
        assert queue.ack_many(tasks) == []
        putting.put(b"y" * 10_000)
        assert [task.payload for task in queue.lease(60, count=10)] == [b"y" * 10_000]


@pytest.mark.quick
def test_a_command_shows_no_password(log_servers: Servers) -> None:
    server = log_servers("postgresql")
    address = f"postgresql://strict:{SECRET}@{server.host}:{server.port}/strict?queue=secret"
    for words in (("create", address), ("status", address), ("create", address.replace("?queue", "&x=1?queue"))):
        done = commands.run("task", *words, timeout=60)
        assert b"hunter" not in done.stdout + done.stderr
    assert b"secret" in done.stderr
