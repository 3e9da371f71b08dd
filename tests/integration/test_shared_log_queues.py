"""Work queues over logs on servers, with real ones: processes that are killed or paused while they work, a server that crashes.

Not covered: the contract of work queues, which test_workqueue_*.py have for these as for all others; the logs themselves
(test_shared_logs.py).
"""

from __future__ import annotations

import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from roq import blocking
from roq.errors import AccessDenied, AppendUnknown, LogUnavailable, WorkQueueNotFound
from roq.log.contract import SharedLog
from roq.log.jetstream import JetStreamLog
from roq.log.postgresql import PostgresLog
from roq.testing.freezing import freeze
from roq.wire.task import NewTask, Settlement
from roq.workqueue.shared_queue import SharedQueue
from tests.harness.documented import block, run
from tests.integration.log_servers import SERVERS, LogServer, NatsServer, PostgresServer
from tests.integration.workqueue_rig import program

pytestmark = pytest.mark.timeout(120)
ON_SERVERS = ("postgresql", "jetstream")
LEASE = 2.0  # seconds
STARTS_SECONDS = 30.0
DONE_SECONDS = 40.0
Servers = Callable[[str], LogServer]

# Puts and works until it is told to stop; says what was confirmed to it, in a file that outlives it.
WORK = """
import os, random, sys, time
from roq import blocking
from roq.errors import TemporaryError
address, path, stop = sys.argv[1:4]
out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def say(kind, ids):
    os.write(out, "".join(f"{kind} {one}\\n" for one in ids).encode())
with blocking.open_queue(address) as queue:
    say("ready", ["-"])
    while not os.path.exists(stop):
        try:
            say("put", queue.put_many(os.urandom(200) for _ in range(3)))
            tasks = queue.lease(2.0, 5, 0.2)
            say("leased", [task.id for task in tasks])
            time.sleep(random.random() * 0.05)
            lost = {task.id for task in queue.ack_many(tasks)}
            say("lost", lost)
            say("acked", [task.id for task in tasks if task.id not in lost])
        except TemporaryError as error:
            say("error", [type(error).__name__])
say("ended", ["-"])
"""


class Worker(NamedTuple):
    """A running WORK."""

    process: Any
    path: Path

    def said(self, kind: str) -> list[str]:
        """What it said of a kind until now."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{kind} ")]


class Crew:
    """Some processes at one queue."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self._folder = address, folder
        self._stop = folder / "stop"
        self._stack = ExitStack()
        self.workers: list[Worker] = []

    def hire(self, count: int) -> list[Worker]:
        """So many more, at work when this returns."""
        hired = []
        for _ in range(count):
            path = self._folder / f"worker-{len(self.workers)}"
            process = self._stack.enter_context(program(WORK, self.address, str(path), str(self._stop)))
            hired.append(Worker(process, path))
            self.workers.append(hired[-1])
        for worker in hired:
            self.until(lambda worker=worker: len(worker.said("acked")) > 20)  # type: ignore[misc]
        return hired

    def until(self, seen: Callable[[], bool]) -> None:
        """Wait for something that the workers say."""
        deadline = time.monotonic() + STARTS_SECONDS
        while not seen():
            assert time.monotonic() < deadline, [
                worker.path.read_text()[-300:] for worker in self.workers if worker.path.exists()
            ]
            time.sleep(0.02)

    def said(self, kind: str) -> list[str]:
        """What all of them said of a kind."""
        return [one for worker in self.workers for one in worker.said(kind)]

    def finish(self, *killed: Worker) -> None:
        """All stop; the rest of the tasks is done here. Then what was confirmed must be true."""
        self._stop.touch()
        for worker in self.workers:
            assert worker.process.wait(STARTS_SECONDS) == (-signal.SIGKILL if worker in killed else 0)
        acked = self.said("acked")
        deadline = time.monotonic() + DONE_SECONDS
        with blocking.open_queue(self.address) as queue:
            while (status := queue.status()).ready or status.leased:
                for task in queue.lease(60, 500, 1.0):
                    task.ack()
                    acked.append(task.id)
                assert time.monotonic() < deadline, status
        assert (status.dead, status.delayed) == (0, 0)
        assert status.completed == status.inserted >= len(set(self.said("put")))
        twice = [id for id, times in Counter(acked).items() if times > 1]
        assert not twice, "a task was acked by two leases"
        # An ack whose answer did not come may have counted: nobody else gets the task then.
        unsure = {id for worker in self.workers if worker in killed or worker.said("error") for id in worker.said("leased")}
        assert set(self.said("put")) - set(acked) <= unsure, "a task was lost"
        assert len(set(acked)) <= status.completed <= len(set(acked) | unsure)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(params=ON_SERVERS)
def address(request: pytest.FixtureRequest, log_servers: Servers) -> str:
    """Of a queue nobody has opened yet."""
    return log_servers(str(request.param)).address(f"q-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def crew(address: str, tmp_path: Path) -> Iterator[Crew]:
    made = Crew(address, tmp_path)
    yield made
    made.close()


def folded(server: LogServer, name: str, **options: Any) -> SharedQueue:
    """A queue opened in this process, without an address."""

    def open_log() -> SharedLog:
        if isinstance(server, PostgresServer):
            return PostgresLog(server.dsn(), name, "test")
        assert isinstance(server, NatsServer)
        return JetStreamLog(server.server(), name, "test")

    return SharedQueue(open_log, **options)


@pytest.mark.quick
def test_killed_workers_tasks_are_done_by_others(crew: Crew) -> None:
    crew.hire(3)
    killed = []
    for _ in range(2):
        [worker] = crew.hire(1)
        time.sleep(0.05)
        worker.process.kill()  # anywhere: while it appends, while it has leases
        killed.append(worker)
    crew.hire(1)
    crew.finish(*killed)


def test_paused_workers_lose_their_leases_and_nothing_is_done_twice(crew: Crew) -> None:
    paused = crew.hire(2)
    crew.hire(2)
    for _ in range(2):
        freeze(*[worker.process.pid for worker in paused])
        before = len(crew.said("acked"))
        time.sleep(LEASE + 1.0)
        crew.until(lambda before=before: len(crew.said("acked")) > before + 20)  # type: ignore[misc]
        for worker in paused:
            worker.process.send_signal(signal.SIGCONT)
        for worker in paused:
            seen = len(worker.said("acked"))
            crew.until(lambda worker=worker, seen=seen: len(worker.said("acked")) > seen)  # type: ignore[misc]
    assert not crew.said("error")
    crew.finish()


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_a_server_that_crashes_under_load_loses_nothing(kind: str, tmp_path: Path) -> None:
    server = SERVERS[kind]()
    crew = Crew(server.address("loaded"), tmp_path)
    try:
        crew.hire(3)
        for _ in range(2):
            server.crash()
            time.sleep(0.5)
            server.start()
            before = [len(worker.said("acked")) for worker in crew.workers]
            crew.until(
                lambda before=before: all(  # type: ignore[misc]
                    len(worker.said("acked")) > seen + 5 for worker, seen in zip(crew.workers, before, strict=True)
                )
            )
        assert not crew.said("error"), "calls wait for the server to come back"
        crew.finish()
    finally:
        crew.close()
        server.close()


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_all_copies_are_equal_from_snapshots_and_from_the_log(kind: str, log_servers: Servers) -> None:
    server, name = log_servers(kind), f"copies-{uuid.uuid4().hex[:8]}"
    queues = [folded(server, name, replay_bytes=20_000) for _ in range(3)]

    def work(queue: SharedQueue) -> None:
        for number in range(60):
            queue.put([NewTask(b"x" * 50, 0.01 * (number % 3), number % 5, f"key {number}"), NewTask(b"y")])
            tokens = [task.token for task in queue.lease(0.2 if number % 7 == 0 else 60.0, 3, 0.1).tasks]
            queue.settle([Settlement.ack(token) for token in tokens[:1]])
            queue.settle([Settlement.release(token, 0.1, "error") for token in tokens[1:2]])
            queue.settle([Settlement.reject(token, "no") for token in tokens[2:]])

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queues[0]._log.newest_snapshot()[0] > 0
    queues.append(folded(server, name, replay_bytes=1 << 40))  # from a snapshot
    for queue in queues:
        queue._caught_up()
        queue._replica.state.check()
    assert len({(queue._replica.position, queue._replica.state.digest()) for queue in queues}) == 1
    assert queues[0].status().inserted == 3 * 60 + 60
    for queue in queues:
        queue.close()


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_a_server_that_is_away_for_longer_is_told(kind: str) -> None:
    server = SERVERS[kind]()
    try:
        with blocking.open_queue(server.address("away", "patience_seconds=1")) as queue:
            queue.put(b"x")
            server.crash()
            calls: list[Callable[[], object]] = [lambda: queue.put(b"y"), queue.status, lambda: queue.lease(10.0), queue.purge]
            for call in calls:
                began = time.monotonic()
                with pytest.raises((LogUnavailable, AppendUnknown)):
                    call()
                assert time.monotonic() - began < 10
            server.start()
            assert queue.status().inserted >= 1
        server.crash()
        began = time.monotonic()
        with pytest.raises(LogUnavailable):
            blocking.open_queue(server.address("away", "patience_seconds=1")).open()
        assert time.monotonic() - began < 12
    finally:
        server.close()


# --- the document ---------------------------------------------------------------------------------------------------------

PAGE = "docs/existing-logs.md"


@pytest.fixture
def postgres(log_servers: Servers) -> PostgresServer:
    server = log_servers("postgresql")
    assert isinstance(server, PostgresServer)
    return server


def test_the_document_s_program_runs(postgres: PostgresServer, tmp_path: Path) -> None:
    source = block(PAGE, "A program")
    here = source.replace("worker@db.example.com/jobs", f"roq@{postgres.host}:{postgres.port}/postgres")
    assert here != source
    assert run(here, tmp_path) == f"{socket.gethostname()} cat.png\n"


def test_who_only_uses_queues_needs_less(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute("CREATE USER worker")
        with blocking.open_queue(postgres.address("granted")) as queue:
            queue.put(b"x")
        strangers = postgres.address("granted").replace("//roq@", "//worker@")
        with pytest.raises(AccessDenied, match="existing-logs"):
            blocking.open_queue(strangers).open()
        for statement in block(PAGE, "PostgreSQL", 1).split(";"):
            if statement.strip():
                connection.execute(statement.encode())
        with blocking.open_queue(strangers) as queue:
            for task in queue.leases(60, wait_seconds=0):
                task.ack()
            queue.put(b"y")
            assert (queue.status().completed, queue.status().ready) == (1, 1)
        with pytest.raises(AccessDenied):
            blocking.open_queue(strangers.replace("granted", "another")).open()
        connection.execute("DROP OWNED BY worker")
        connection.execute("DROP USER worker")


def test_a_queue_is_removed_with_its_log(postgres: PostgresServer) -> None:
    with blocking.open_queue(postgres.address("thumbnails")) as queue:
        queue.put(b"x")
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            connection.execute(block(PAGE, "PostgreSQL", 2).encode())
        with pytest.raises(WorkQueueNotFound):
            queue.status()
    with blocking.open_queue(postgres.address("thumbnails")) as queue:
        assert queue.status().inserted == 0
