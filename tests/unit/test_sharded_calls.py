"""What a queue of shards asks of its masters and of the GCM, and that one of a single shard asks no more than it ever did: real
clients and masters, in the world of test_shard_crashes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from gcm import shards as gcm_shards
from gcm import work_queues
from roq.errors import Unavailable
from roq.wire import master as wire
from roq.wire.gcm import CreateWorkQueue, RemoveWorkQueue
from roq.wire.shards import SetShards, shard_name, unmarked
from roq.wire.task import NewTask, Settlement, TaskState
from roq.wire.work_queue import WorkQueueRecord
from roq.workqueue.sharded import HELLO_SECONDS, ShardedQueue
from tests.unit.test_shard_crashes import LEASE_SECONDS, ShardWorld, TwinLink, twin

__all__ = ["twin"]  # a fixture


class WatchedWorld(ShardWorld):
    """It notes what is asked. dead: shards without a master. away: the GCM is."""

    def __init__(self, shards: int) -> None:
        super().__init__(1, shards)
        self.lock = threading.Lock()
        self.asked: list[str] = []
        self.described = 0
        self.dead: set[str] = set()
        self.away = False
        TwinLink.world = self

    def request(self, name: str, body: wire.Request) -> object:
        if name in self.dead:
            raise Unavailable(f"no master of {name}")
        with self.lock:  # shards are asked side by side
            self.asked.append(type(body).__name__)
            return super().request(name, body)

    def split(self, shards: int, now: float = 8.0) -> None:
        self.change(lambda cluster: gcm_shards.set_shards(cluster, SetShards("w", shards, f"s{now}"), now, self.chance))
        self.hear()


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch, twin: None) -> None:
    def describe(self: TwinLink) -> WorkQueueRecord:
        world = self.world
        assert isinstance(world, WatchedWorld)
        if world.away:
            raise Unavailable("the GCM is away")
        world.described += 1
        return world.cluster.work_queues[self.name]

    monkeypatch.setattr(TwinLink, "describe", describe)


CALLS: dict[str, tuple[Callable[[ShardedQueue], object], str]] = {
    "status": (lambda queue: queue.status(), "GetStatus"),
    "peek": (lambda queue: queue.peek(TaskState.READY, 1), "Peek"),
    "purge": (lambda queue: queue.purge(), "PurgeQueue"),
    "release_all": (lambda queue: queue.release_all(), "ReleaseEvery"),
    "requeue_dead": (lambda queue: queue.requeue_dead(None), "RequeueLetters"),
    "remove_dead": (lambda queue: queue.remove_dead([f"{1:016x}-1"]), "RemoveLetters"),
    "put": (lambda queue: queue.put([NewTask(b"")]), "Put"),
    "lease": (lambda queue: queue.lease(LEASE_SECONDS, 1, 0.0), "Lease"),
    "settle": (lambda queue: queue.settle([Settlement.ack("1.0.0000000000000001")]), "SettleAll"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_queue_of_one_shard_is_asked_once_for_each_call(name: str) -> None:
    world, queue = WatchedWorld(1), ShardedQueue("", "w")
    queue._first.heard -= 3600.0  # nobody was asked for long
    world.asked.clear()
    world.described = 0
    call, request = CALLS[name]
    call(queue)
    assert (world.asked, world.described) == ([request], 0)


def test_a_call_about_all_shards_finds_those_that_another_program_has_made() -> None:
    world, old = WatchedWorld(1), ShardedQueue("", "w")
    for number, name in enumerate(("status", "peek", "requeue_dead", "release_all"), start=2):
        world.split(number, 7.0 + number)
        world.asked.clear()
        call, request = CALLS[name]
        call(old)
        assert world.asked == [request] * number
    ids = ShardedQueue("", "w").put([NewTask(b"%d" % number, dedup_key=f"{number}") for number in range(50)])
    assert {unmarked(id)[0] for id in ids} == {0}, "the only home of keys"
    assert old.status().ready == 50
    assert old.purge() == 50


def test_who_opens_a_queue_that_once_had_shards_knows_its_list() -> None:
    """Else the first lease that waits ends at once: its master tells of another list."""
    world = WatchedWorld(1)
    world.split(2)
    world.split(1, 9.0)
    world.change(lambda cluster: gcm_shards.without_shard(cluster, "w", _log(world, 1), 1, 9.0))
    world.hear()
    queue = ShardedQueue("", "w")
    assert queue._first.shards == queue._list.version > 0


def _log(world: ShardWorld, number: int) -> str:
    return world.cluster.work_queues[shard_name("w", number)].spec.log


def leased_at(shard: int) -> str:
    """The token of a task of this shard, leased by another program."""
    other = ShardedQueue("", "w")
    while True:
        for id in other.put([NewTask(b"task")]):
            if unmarked(id)[0] == shard:
                return next(one.token for one in other.lease(LEASE_SECONDS, 1000, 0.0).tasks if unmarked(one.token)[0] == shard)


def test_a_lease_at_a_shard_that_is_not_known_yet_is_not_taken_for_lost() -> None:
    world, old = WatchedWorld(1), ShardedQueue("", "w")
    world.split(3)
    token = leased_at(2)
    world.away = True
    with pytest.raises(Unavailable, match="away"):
        old.settle([Settlement.ack(token)])
    with pytest.raises(Unavailable, match="away"):
        old.requeue_dead(["2:1-1"])
    world.away = False
    assert old.settle([Settlement.ack(token), Settlement.ack("9:1.0.0000000000000001")]) == ["", None]


def test_a_shard_without_a_master_keeps_no_other_from_settling() -> None:
    world, queue = WatchedWorld(3), ShardedQueue("", "w")
    for dead in range(3):
        tokens = [leased_at(shard) for shard in range(3)]
        world.dead = {shard_name("w", dead)}
        with pytest.raises(Unavailable, match="no master"):
            queue.settle([Settlement.ack(token) for token in tokens])
        world.dead = set()
        assert queue.settle([Settlement.ack(token) for token in tokens]) == [
            "" if shard == dead else None for shard in range(3)
        ]


def test_a_first_shard_that_is_silent_for_long_is_asked_now_and_then_and_by_one_thread() -> None:
    world, queue = WatchedWorld(3), ShardedQueue("", "w")
    token = leased_at(2)
    queue._first.heard -= 3600.0
    world.dead, tried = {"w"}, list[float]()
    hello = queue._first.hello

    def greet(patience_seconds: float) -> None:
        tried.append(patience_seconds)
        hello(patience_seconds)

    queue._first.hello = greet  # type: ignore[method-assign]
    for _ in range(20):
        assert queue.settle([Settlement.extend(token, LEASE_SECONDS)]) == [token]
    assert tried == [HELLO_SECONDS]


def test_a_queue_that_is_made_anew_is_found_by_who_had_the_former_one_open() -> None:
    world, old = WatchedWorld(1), ShardedQueue("", "w")
    for number in range(2, 9):
        world.split(number, 7.0)
    world.split(2, 8.0)
    old.status()
    world.change(lambda cluster: work_queues.remove(cluster, RemoveWorkQueue("w", "r"), 100.0))
    world.change(lambda cluster: gcm_shards.create(cluster, CreateWorkQueue("w", "t2", shards=4), 101.0, world.chance))
    ShardedQueue("", "w").put([NewTask(b"%d" % number, dedup_key=f"{number}") for number in range(100)])
    assert old.status().ready == 100
    assert len(old.lease(LEASE_SECONDS, 100, 0.0).tasks) == 100
