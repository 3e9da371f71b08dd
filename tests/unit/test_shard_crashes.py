"""Splits and merges with everything going wrong: real clients, real masters and the GCM's real decisions, in one process.

Masters die before and after what they did is durable, answers are lost, masters hear late that they are closed, clients have
old lists, a shard is removed long after its master said that it is empty. Each run is drawn from a seed. Checked: every task is
done once, a key is one task, what a put has returned is done. Not covered: sockets and time (tests/integration/test_shards.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcm import shards as gcm_shards
from gcm.cluster import ClusterState
from roq.errors import RoqError, TemporaryError, Unavailable, WorkQueueNotFound
from roq.wire import master as wire
from roq.wire.assignment import STORES, work_subject
from roq.wire.gcm import CreateWorkQueue
from roq.wire.shards import SetShards, shard_name
from roq.wire.task import NewTask, Settlement, StoreAddress
from roq.wire.work_queue import WorkQueueRecord
from roq.workqueue import remote, sharded
from roq.workqueue.fold import Fold
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.service import MasterService
from roq.workqueue.records import Configure, decode, encode
from roq.workqueue.sharded import ShardedQueue
from roq.workqueue.spread import homes
from tests.unit.test_recorded_queues import cluster_of, written

STEPS, CLIENTS, KEYS = 60, 3, 6
LEASE_SECONDS = 1e6
PEER = b"peer"
BLOB_BYTES = 1 << 20


class CrashingMaster:
    """One shard's: a log, and the service that folds it. What it did counts when it is in the log."""

    def __init__(self, record: WorkQueueRecord) -> None:
        self.record, self.entries = record, list[bytes]()
        self.start(0)
        self.service.apply(Configure(1, record.spec.settings, 0))
        self.commit()

    def start(self, now: int) -> None:
        """Another one takes over: it knows what is in the log, and what the GCM wants."""
        fold, recent = Fold(), Recent()
        for entry in self.entries:
            for one in decode(entry):
                recent.note(one, fold.apply(one))
        self.service = MasterService(fold, recent, 1, BLOB_BYTES, lambda hosts: tuple(StoreAddress(h, "") for h in hosts))
        self.obey()

    def obey(self) -> None:
        """It is told what the GCM wants."""
        self.service.shards, self.service.closed = self.record.spec.shards, self.record.spec.closed

    def commit(self) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for batch in list(self.service.cut()):
            if batch.records:
                self.entries.append(encode(batch.records))
            self.service.waiting.durable(batch)
            answers |= {id: body for _, id, body in batch.answers}
        self.service.batches.clear()
        return answers


class ShardWorld:
    """The cluster, and what happens to it by chance."""

    def __init__(self, seed: int, shards: int) -> None:
        self.chance, self.now, self._id = random.Random(seed), 1_000, 0
        self.cluster: ClusterState = cluster_of("a", "b", "c")
        self.masters: dict[str, CrashingMaster] = {}
        self.faults = 0.0
        asked = CreateWorkQueue("w", "t", shards=shards)
        self.change(lambda cluster: gcm_shards.create(cluster, asked, 7.0, self.chance))

    def change(self, decide: Callable[[ClusterState], ClusterState]) -> None:
        """As the leading GCM does it: one write."""
        self.cluster = written(self.cluster, decide(self.cluster), work_subject("w"), STORES)
        known = self.cluster.work_queues
        self.masters = {name: one for name, one in self.masters.items() if name in known}
        for name, record in known.items():
            if name not in self.masters:
                self.masters[name] = CrashingMaster(record)
            self.masters[name].record = record  # which it hears of later

    def hear(self) -> None:
        for one in self.masters.values():
            one.obey()

    def request(self, name: str, body: wire.Request) -> Any:
        """The answer; None: it is lost, or its master died, before it took effect or after."""
        self.now += 1
        self._id += 1
        if name not in self.masters:
            raise WorkQueueNotFound
        master, wrong = self.masters[name], self.chance.random() < self.faults
        master.service.take(PEER, self._id, body, self.now)
        if wrong and self.chance.random() < 0.4:
            master.start(self.now)
            return None
        answer = master.commit()[self._id]
        if wrong and self.chance.random() < 0.5:
            master.start(self.now)
        return None if wrong else answer


class TwinLink:
    """A MasterLink into that world: it asks until it is answered."""

    world: ShardWorld

    def __init__(self, zookeeper: str, name: str, patience_seconds: float = 30.0, beside: Any = None) -> None:
        self.name, self.patience_seconds = name, patience_seconds

    def open(self, *asked: object) -> WorkQueueRecord:
        return self.describe()

    def describe(self) -> WorkQueueRecord:
        return self.world.cluster.work_queues[self.name]

    def ask(self, make: Callable[[int], wire.Request], expect: type, *waits: float, patience_seconds: float = 30.0) -> Any:
        for again in range(50):
            answer = self.world.request(self.name, make(min(again, 1)))
            if isinstance(answer, TemporaryError):
                self.world.hear()
            elif isinstance(answer, RoqError):
                raise answer
            elif answer is not None:
                assert isinstance(answer, expect)
                return answer
        raise Unavailable

    def close(self) -> None: ...


class Run:
    """One history, and what is to be true of it."""

    def __init__(self, world: ShardWorld) -> None:
        self.world, self.chance = world, world.chance
        self.clients = [ShardedQueue("", "w") for _ in range(CLIENTS)]
        self.put: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.by_key: dict[str, set[str]] = {}
        self.done: Counter[bytes] = Counter()
        self.left: list[tuple[str, str]] = []  # (shard, log) of which a master said that nothing is left
        self.steps: list[Callable[[], None]] = [self.puts, self.puts, self.leases, self.splits, self.hears, self.dies]
        self.steps += [self.asks_what_is_left, self.removes]

    def puts(self) -> None:
        tasks = []
        for number in range(self.chance.randint(1, 3)):
            key = f"key {self.chance.randrange(KEYS)}" if self.chance.random() < 0.5 else ""
            name = key.encode() or b"%d.%d" % (self.world.now, number)
            tasks.append(NewTask(name, dedup_key=key))
        try:
            ids = self.chance.choice(self.clients).put(tasks)
        except Unavailable:  # a client with an old list comes to a shard that was removed: in time that can't be
            self.unknown |= {task.payload for task in tasks}
            return
        self.put |= {task.payload for task in tasks}
        for task, id in zip(tasks, ids, strict=True):
            if task.dedup_key:
                self.by_key.setdefault(task.dedup_key, set()).add(id)

    def leases(self) -> None:
        client = self.chance.choice(self.clients)
        trip = client.lease(LEASE_SECONDS, self.chance.randint(1, 4), 0.0)
        settled = client.settle([Settlement.ack(task.token) for task in trip.tasks])
        assert None not in settled
        self.done.update(task.payload for task in trip.tasks)

    def splits(self) -> None:
        asked = SetShards("w", self.chance.randint(1, 4), f"s{self.world.now}")
        self.world.change(lambda cluster: gcm_shards.set_shards(cluster, asked, 7.0, self.chance))

    def hears(self) -> None:
        self.chance.choice(list(self.world.masters.values())).obey()

    def dies(self) -> None:
        self.chance.choice(list(self.world.masters.values())).start(self.world.now)

    def asks_what_is_left(self) -> None:
        for record, one in gcm_shards.closing(self.world.cluster):
            name = shard_name(record.name, one.number)
            answer = self.world.request(name, wire.CountLeft())
            if isinstance(answer, wire.Counted) and not answer.count:
                self.left.append((name, self.world.masters[name].record.spec.log))

    def removes(self) -> None:
        while self.left:
            name, log = self.left.pop()
            number = int(name.split(".")[2])
            self.world.change(partial(gcm_shards.without_shard, queue="w", log=log, number=number, now=8.0))

    def ends(self) -> None:
        self.world.faults = 0.0
        self.world.hear()
        self.clients.append(ShardedQueue("", "w"))
        for client in self.clients:
            while trip := client.lease(LEASE_SECONDS, 5, 0.0).tasks:
                client.settle([Settlement.ack(task.token) for task in trip])
                self.done.update(task.payload for task in trip)

    def check(self) -> None:
        assert set(self.done.values()) <= {1}, "a task was done twice"
        assert self.put <= {*self.done}, "a task was lost"
        assert {*self.done} <= self.put | self.unknown
        assert all(len(ids) == 1 for ids in self.by_key.values()), "a key was two tasks"


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MasterLink", TwinLink)
    monkeypatch.setattr(remote, "BigPayloads", lambda link: None)
    monkeypatch.setattr(remote, "CommitSender", lambda link: None)
    monkeypatch.setattr(sharded, "ThreadPoolExecutor", lambda workers, **named: ThreadPoolExecutor(1))  # in the order drawn


def history(seed: int, shards: int, faults: float) -> Run:
    world = TwinLink.world = ShardWorld(seed, shards)
    run = Run(world)
    world.faults = faults
    for _ in range(STEPS):
        world.chance.choice(run.steps)()
    run.ends()
    run.check()
    return run


def histories(count: int, faults: float = 0.0) -> list[Run]:
    return [history(seed, 4, faults) for seed in range(count)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from((0.0, 0.1, 0.5)))
def test_every_task_is_done_once_whatever_happens_when(seed: int, shards: int, faults: float) -> None:
    history(seed, shards, faults)


def test_the_histories_come_to_what_they_are_about() -> None:
    """Shards are removed, and clients meet closed ones."""
    runs = histories(40, 0.1)
    listed = [run.world.cluster.work_queues["w"].shards for run in runs]
    assert sum(one is not None and one.made - len(one.numbers) > 0 for one in listed) > 10
    assert sum(len(run.put) for run in runs) > 500


def test_without_asking_closed_shards_a_key_would_be_two_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.workqueue.sharded.homes", lambda key, shards: ((), homes(key, shards)[1]))
    with pytest.raises(AssertionError, match=r"a key was two tasks|done twice"):
        histories(200)


def test_without_refusing_at_closed_shards_tasks_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(self: CrashingMaster) -> None:
        self.service.shards, self.service.closed = self.record.spec.shards, False

    monkeypatch.setattr(CrashingMaster, "obey", takes)
    monkeypatch.setattr("roq.workqueue.master.closed.check", lambda closed: None)
    with pytest.raises(AssertionError, match=r"a task was lost|a key was two tasks|done twice"):
        histories(200)
