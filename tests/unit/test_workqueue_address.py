"""Addresses of work queues: what is understood, and what is refused with a hint."""

from __future__ import annotations

import pytest

from roq.errors import InvalidAddress, InvalidName, WorkQueueConflict
from roq.wire.task import NewTask
from roq.workqueue.address import BACKENDS, Options, QueueAddress, folder_address, open_backend, parse, queue_address
from roq.workqueue.contract import Backend
from roq.workqueue.file_queue.queue import FileQueue
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.memory import MemoryQueue, SharedMemory
from roq.workqueue.sharded import ShardedQueue


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("memory:", QueueAddress("memory", "")),
        ("memory:jobs", QueueAddress("memory", "jobs")),
        ("file:///data/tasks", QueueAddress("file", "/data/tasks")),
        ("file:///data/with%20blank%23", QueueAddress("file", "/data/with blank#")),
        ("log:///data/tasks/", QueueAddress("log", "/data/tasks/")),
        ("roq://zk1:2181/jobs", QueueAddress("roq", "jobs", "zk1:2181")),
        ("roq://zk1:2181,10.0.0.2:2182,zk3/RoQ/eu/jobs", QueueAddress("roq", "jobs", "zk1:2181,10.0.0.2:2182,zk3/RoQ/eu")),
        ("roq://zk1:2181/two%20words", QueueAddress("roq", "two words", "zk1:2181")),
        ("roq://zk1:2181/what%3F", QueueAddress("roq", "what?", "zk1:2181")),
        ("memory:jobs?max_attempts=3", QueueAddress("memory", "jobs", "", Options(max_attempts=3))),
        ("file:///data/a%3Fb?ack_sync_seconds=0.5", QueueAddress("file", "/data/a?b", "", Options(ack_sync_seconds=0.5))),
        (
            "roq://zk1:2181,zk2/RoQ/jobs?write_quorum=3&ack_quorum=2&standbys=0&inline_bytes=1000&patience_seconds=5",
            QueueAddress(
                "roq",
                "jobs",
                "zk1:2181,zk2/RoQ",
                Options(write_quorum=3, ack_quorum=2, standbys=0, inline_bytes=1000, patience_seconds=5.0),
            ),
        ),
    ],
)
def test_an_address_is_understood(address: str, place: QueueAddress) -> None:
    assert parse(address) == place


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("", "file:///data/tasks"),
        ("tasks", "file:///data/tasks"),
        ("/data/my tasks", "file:///data/my%20tasks"),
        ("./tasks", "file:///absolute/path"),
        ("redis://localhost", "roq://"),
        ("moved", "is not the address of a work queue. Addresses look like"),
        ("file://relative", "three slashes"),
        ("file://host/data", "three slashes"),
        ("file:relative", "two slashes"),
        ("file:///", "no folder"),
        ("file:///a%00b", "no folder"),
        ("log:///data#x", "%23"),
        ("redis://localhost?max_attempts=1", "roq://"),
        ("memory://name", "without slashes"),
        ("roq://zk1:2181", "a queue's name"),
        ("roq://zk1:2181/", "a queue's name"),
        ("roq:///name", "ZooKeeper"),
        ("roq://zk1:99999/name", "host:port"),
        ("roq://zk1:,zk2:2181/name", "host:port"),
        ("roq://:2181/name", "host:port"),
        (7, "a string"),
    ],
)
def test_a_wrong_address_is_refused_with_a_hint(address: str, hint: str) -> None:
    with pytest.raises(InvalidAddress) as raised:
        parse(address)
    assert hint in str(raised.value)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(InvalidName):
        parse("roq://zk1:2181/..")


@pytest.mark.parametrize("name", ["jobs", "two words", "what?", "100%", "a&b=c"])
def test_a_queue_s_address_means_the_queue(name: str) -> None:
    assert parse(queue_address("zk1:2181/RoQ", name)) == QueueAddress("roq", name, "zk1:2181/RoQ")


def test_a_folder_s_address_means_the_folder() -> None:
    for path in ("/data/tasks", "/data/a b#?%é"):
        assert parse(folder_address(path)).path == path


def test_a_private_queue_is_one_s_own_and_a_named_one_is_shared() -> None:
    first, second = open_backend("memory:", None), open_backend("memory:", None)
    first.put([NewTask(b"x")])
    assert second.status().ready == 0
    one, other = open_backend("memory:shared", Options(max_attempts=3)), open_backend("memory:shared", None)
    one.put([NewTask(b"x")])
    one.close()
    assert (other.status().ready, other.settings.max_attempts) == (1, 3)
    with pytest.raises(WorkQueueConflict):
        open_backend("memory:shared", Options(max_attempts=0))


def test_every_scheme_has_its_backend() -> None:
    kinds: list[type[Backend]] = [FileQueue, LogQueue, ShardedQueue]  # mypy: each keeps the contract's signatures
    others: list[type[Backend]] = [MemoryQueue, SharedMemory]
    assert [(kind.__module__, kind.__name__) for kind in kinds] == [BACKENDS[scheme] for scheme in ("file", "log", "roq")]
    assert {type(open_backend(address, None)) for address in ("memory:", "memory:one")} == set(others)
