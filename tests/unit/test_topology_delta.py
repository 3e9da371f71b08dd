"""Deltas of the topology: what they tell is what has changed and no more, and who applies them has the cluster as it is.

Not covered: who broadcasts them (tests/integration/test_topology.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from benchmarks.at_scale.decisions import cluster_of, reported
from gcm import process, topology, transactions, work_queues
from gcm.cluster import ClusterState, view, work_queue_info
from gcm.process import TopologyBroadcast
from gcm.reconcile import assign, stamp
from gcm.topology import Stamp, TouchedNames, delta
from roq.client import broadcasts
from roq.client.broadcasts import DELTA_BYTES_KEPT, DELTAS_KEPT, SILENCE_SECONDS, VIEW_SECONDS, Deltas, FollowedView
from roq.config import GcmConfig
from roq.errors import NotLeader
from roq.runtime.links import SubscriberLink
from roq.wire.assignment import work_subject
from roq.wire.gcm import (
    BROADCAST_TOPIC,
    ClusterView,
    CreateExchange,
    CreateQueue,
    CreateWorkQueue,
    DrainHost,
    LeaderAddress,
    RemoveQueue,
    SetPolicy,
    WorkQueueInfo,
)
from roq.wire.policy import Bounds, Policy
from roq.wire.topology import CHANGES_TOPIC, TopologyDelta, applied
from roq.wire.work_queue import WorkQueueRecord

CHANCE = random.Random(3)
Change = Callable[[ClusterState], ClusterState]


def seen(cluster: ClusterState, time: float = 0.0) -> ClusterView:
    return view(cluster, "10.0.0.9:5500", time)


def told(before: ClusterState, after: ClusterState, since: float = 0.0, time: float = 1.0) -> TopologyDelta:
    """As it comes over the wire."""
    made = msgspec.msgpack.encode(delta(before, since, after, Stamp("10.0.0.9:5500", time)))
    return msgspec.msgpack.decode(made, type=TopologyDelta)


def wanted(change: Change, *subjects: str) -> Change:
    """As a term writes it."""
    return lambda now: stamp(now, assign(change(now), subjects, now))


def obeyed(cluster: ClusterState) -> ClusterState:
    """Every host has told what it runs; nothing is anew of one that has nothing new to tell."""
    hosts = {
        name: reported(host) if host.registration is not None and host.reported_revision != host.revision else host
        for name, host in cluster.hosts.items()
    }
    return replace(cluster, hosts=hosts)


def lost(name: str) -> Change:
    return lambda now: now.with_host(replace(now.host(name), registration=None, report=None, last_report=now.host(name).report))


def loaded(name: str) -> Change:
    def change(now: ClusterState) -> ClusterState:
        registration = now.host(name).registration
        assert registration is not None
        payload = msgspec.structs.replace(registration.payload, cpu_fraction=0.7)
        return now.with_host(replace(now.host(name), registration=replace(registration, payload=payload)))

    return change


POLICY = Policy(bounds=Bounds(max_exchanges=7))
CHANGES: dict[str, Change] = {
    "a queue is created": wanted(lambda now: transactions.create_queue(now, CreateQueue("new", "t"), 0.0, CHANCE), "new"),
    "an Exchange is added": wanted(
        lambda now: transactions.create_exchange(now, CreateExchange("q-1", "e"), 0.0, CHANCE), "q-1"
    ),
    "a queue is removed": wanted(lambda now: transactions.remove_queue(now, RemoveQueue("q-2", "r"), 0.0), "q-2"),
    "a queue stops": wanted(lambda now: transactions.stop_queue(now, "q-3"), "q-3"),
    "a policy is set": wanted(lambda now: transactions.set_policy(now, SetPolicy("q-4", POLICY, "p")), "q-4"),
    "a work queue is created": wanted(
        lambda now: work_queues.create(now, CreateWorkQueue("w", "t"), 0.0, CHANCE), work_subject("w")
    ),
    "hosts obey": obeyed,
    "a host is drained": lambda now: transactions.drain_host(now, DrainHost("host-4", True, "d")),
    "a host is lost": lost("host-5"),
    "a host that runs nothing is lost": lambda now: lost("host-6")(now.with_host(replace(now.host("host-6"), assigned={}))),
    "a host is forgotten": lambda now: replace(now, hosts={name: one for name, one in now.hosts.items() if name != "host-7"}),
    "a host has more load": loaded("host-1"),
    "nothing": lambda now: now,
}


@pytest.mark.parametrize("seed", range(20))
def test_who_applies_deltas_has_the_cluster_as_it_is(seed: int) -> None:
    chance, names = random.Random(seed), [*CHANGES]
    chance.shuffle(names)
    cluster = cluster_of(10, 30)
    known, behind = seen(cluster), cluster
    for number, name in enumerate(names):
        cluster = CHANGES[name](cluster)
        if chance.random() < 0.7:  # else this change and the next are told together
            known = applied(known, told(behind, cluster, time=float(number)))
            behind = cluster
            assert known == seen(cluster, float(number)), name


@pytest.mark.parametrize("name", CHANGES)
def test_a_delta_has_no_more_than_what_changed(name: str) -> None:
    cluster = cluster_of(10, 300)
    after = CHANGES[name](cluster)
    found = told(cluster, after)
    assert len(found.hosts) + len(found.hosts_gone) + len(found.loads) <= 3
    on_one_host = 30 if name.endswith(("lost", "forgotten")) else 1
    assert len(found.queues) + len(found.queues_gone) <= on_one_host
    assert bool(found.loads) == (name == "a host has more load")


def test_an_exchange_costs_as_much_in_a_large_cluster_as_in_a_small_one() -> None:
    sizes = []
    for queues in (20, 2_000):
        before = cluster_of(queues // 10, queues)
        after = obeyed(CHANGES["an Exchange is added"](before))
        sizes.append(len(msgspec.msgpack.encode(told(before, after))))
    assert sizes[1] < 1.2 * sizes[0]


def with_work_queues(many: int) -> ClusterState:
    cluster = cluster_of(10, 10)
    for number in range(many):
        cluster = work_queues.create(cluster, CreateWorkQueue(f"w-{number}", f"t-{number}"), 0.0, CHANCE)
    return obeyed(stamp(cluster, assign(cluster, tuple(map(work_subject, cluster.work_queues)), cluster)))


def test_a_master_that_moved_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_work_queues(100)
    host = next(one for one in cluster.hosts.values() if one.masters)
    moved = cluster.with_host(replace(host, report=reported(host).report))
    looked = list[str]()

    def noted(now: ClusterState, record: WorkQueueRecord) -> WorkQueueInfo:
        looked.append(record.name)
        return work_queue_info(now, record)

    monkeypatch.setattr(topology, "work_queue_info", noted)
    name = next(iter(cluster.work_queues))
    record = msgspec.structs.replace(cluster.work_queues[name], term=2)
    told(cluster, replace(moved, work_queues={**cluster.work_queues, name: record}))
    assert len(looked) < 40, "those on the host that told its processes anew, not all"


# --- followed --------------------------------------------------------------------------------------------------------------

STEPS = [cluster_of(2, 2)]
for created in ("a", "b", "c"):
    request = CreateQueue(created, created)
    STEPS.append(wanted(lambda now, r=request: transactions.create_queue(now, r, 0.0, CHANCE), created)(STEPS[-1]))  # type: ignore[misc]
DELTAS = [told(*pair, float(number), number + 1.0) for number, pair in enumerate(pairwise(STEPS))]


def names_of(followed: FollowedView) -> set[str] | None:
    return {one.record.name for one in followed.view.queues} - {"q-0", "q-1"} if followed.view is not None else None


@pytest.mark.parametrize(
    ("asked", "taken", "names"),
    [
        (0.0, [0, 1, 2], {"a", "b", "c"}),
        (0.5, [0], {"a"}),  # it was asked between two: the first has what came since, and more
        (1.0, [0, 1], {"a", "b"}),  # what was told before is in it
        (0.0, [1], None),  # one is missing
        (0.0, [0, 2], None),
        (3.0, [0, 1, 2], {"a", "b", "c"}),
    ],
)
def test_a_view_follows_deltas_from_when_it_was_asked(asked: float, taken: list[int], names: set[str] | None) -> None:
    followed = FollowedView()
    followed.begin(seen(STEPS[int(asked)], asked), 0.0)
    for number in taken:
        followed.take(DELTAS[number], 0.0)
    assert names_of(followed) == names


BACK_AND_FORTH: dict[str, tuple[Change, Change]] = {
    "a queue comes and goes": (CHANGES["a queue is created"], lambda now: transactions.without_queue(now, "new")),
    "a work queue comes and goes": (
        CHANGES["a work queue is created"],
        lambda now: transactions.without_work_queues(now, "w"),
    ),
    "a queue goes and comes": (
        lambda now: replace(now, queues={name: one for name, one in now.queues.items() if name != "q-1"}),
        lambda now: replace(now, queues={**now.queues, "q-1": cluster_of(4, 4).queues["q-1"]}),
    ),
    "a host is drained for a moment": (
        CHANGES["a host is drained"],
        lambda now: transactions.drain_host(now, DrainHost("host-4", False, "u")),
    ),
    "a host has more load for a moment": (
        loaded("host-1"),
        lambda now: now.with_host(replace(now.host("host-1"), registration=cluster_of(10, 30).host("host-1").registration)),
    ),
    "a host is lost for a moment": (lost("host-5"), lambda now: now.with_host(cluster_of(10, 30).host("host-5"))),
}


@pytest.mark.parametrize("name", BACK_AND_FORTH)
def test_who_asks_while_something_is_so_for_a_moment_hears_that_it_is_no_more(name: str) -> None:
    there, back = BACK_AND_FORTH[name]
    first = cluster_of(10, 30)
    between = there(first)
    last = back(between)
    touched = TouchedNames()
    touched.note(first, between)
    touched.note(between, last)
    followed = FollowedView()
    followed.begin(seen(between, 2.0), 0.0)
    assert seen(between) != seen(last), "there was something to miss"
    followed.take(delta(first, 1.0, last, Stamp("10.0.0.9:5500", 3.0), touched), 0.0)
    assert followed.view == seen(last, 3.0)


async def test_a_leader_tells_what_came_and_went_between_two_broadcasts() -> None:
    first = cluster_of(10, 30)
    deltas, times = Deltas(), count(1)
    broadcast = TopologyBroadcast("127.0.0.1", 0, 0.5, lambda: first, lambda: Stamp("10.0.0.9:5500", float(next(times))))
    link = SubscriberLink(f"tcp://127.0.0.1:{broadcast.port}", [CHANGES_TOPIC], deltas.told)
    telling = asyncio.create_task(broadcast.run())
    try:
        async with asyncio.timeout(10):
            await deltas.came.wait()
            assert [one.queues_gone for one in deltas.take()] == [()]
            between = CHANGES["a queue is created"](first)
            broadcast.changed(first, between)
            broadcast.changed(between, first)
            await deltas.came.wait()
            assert [one.queues_gone for one in deltas.take()] == [("new",)]
            await deltas.came.wait()
            assert [one.queues_gone for one in deltas.take()] == [()], "once"
    finally:
        telling.cancel()
        link.close()
        broadcast.close()


async def test_a_whole_that_is_too_large_is_told_to_nobody_but_changes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever got it would end its connection."""
    monkeypatch.setattr(process, "CONTROL_BYTES_MAX", 3_000)
    heard = list[bytes]()
    cluster, came = cluster_of(1, 1), asyncio.Event()

    def hear(messages: list[list[bytes]]) -> None:
        heard.extend(parts[0] for parts in messages)
        came.set()

    broadcast = TopologyBroadcast("127.0.0.1", 0, 0.05, lambda: cluster, lambda: Stamp("10.0.0.9:5500", 1.0))
    link = SubscriberLink(f"tcp://127.0.0.1:{broadcast.port}", [CHANGES_TOPIC, BROADCAST_TOPIC], hear)
    telling = asyncio.create_task(broadcast.run())
    try:
        async with asyncio.timeout(10):
            while BROADCAST_TOPIC not in heard:
                came.clear()
                await came.wait()
            cluster = cluster_of(10, 100)
            await _heard_next(came, 3)
            heard.clear()
            await _heard_next(came, 3)
            assert {*heard} == {CHANGES_TOPIC}
    finally:
        telling.cancel()
        link.close()
        broadcast.close()


async def _heard_next(came: asyncio.Event, times: int) -> None:
    for _ in range(times):
        came.clear()
        await came.wait()


def test_another_term_is_asked_for_and_an_older_one_is_not_believed() -> None:
    followed = FollowedView()
    followed.begin(seen(replace(STEPS[1], epoch=2), 1.0), 0.0)
    followed.take(DELTAS[1], 0.0)
    assert names_of(followed) == {"a"}
    followed.take(msgspec.structs.replace(DELTAS[1], epoch=3), 0.0)
    assert followed.view is None


def test_a_clock_that_steps_back_is_found_out() -> None:
    followed = FollowedView()
    followed.begin(seen(STEPS[1], 100.0), 0.0)
    followed.take(DELTAS[1], 1.0)
    assert names_of(followed) == {"a"}, "it may have been told before"
    followed.take(DELTAS[2], VIEW_SECONDS + 1.0)
    assert followed.view is None, "it was told after, whatever its time"


class NobodyLeads:
    """A connection whose questions are refused at once. asked: when each was."""

    closed = False

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def request(self, *_: object) -> ClusterView:
        self.asked.append(time.monotonic())
        raise NotLeader


async def test_who_has_to_ask_again_waits_a_moment_however_many_deltas_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    monkeypatch.setattr(broadcasts, "SPREAD_SECONDS", 0.1)
    client: Any = NobodyLeads()
    deltas = Deltas()
    views = broadcasts._views(client, LeaderAddress(1, "127.0.0.1", 1, 1), deltas)
    following = asyncio.create_task(anext(views))
    async with asyncio.timeout(10):
        while len(client.asked) < 3:
            deltas.told([[b"changes", msgspec.msgpack.encode(DELTAS[0])]])
            await asyncio.sleep(0.001)
    following.cancel()
    assert all(later - earlier >= 0.09 for earlier, later in pairwise(client.asked))


def test_a_leader_is_never_silent_for_so_long_that_all_ask_whether_it_leads() -> None:
    assert GcmConfig(zookeeper="127.0.0.1:2181").broadcast_seconds < SILENCE_SECONDS
    with pytest.raises(ValidationError, match="broadcast_seconds"):
        GcmConfig(zookeeper="127.0.0.1:2181", broadcast_seconds=SILENCE_SECONDS)


def test_a_slow_reader_keeps_so_many_bytes() -> None:
    deltas, since = Deltas(), DELTAS_KEPT // 5
    for number in range(since):
        large = msgspec.msgpack.encode(TopologyDelta(1, float(number), number + 1.0, "x" * (DELTA_BYTES_KEPT // 4)))
        deltas.told([[b"changes", large]])
    taken = deltas.take()
    assert [one.since for one in taken] == [since - 3.0, since - 2.0, since - 1.0], "the newest that fit"


async def test_a_slow_reader_keeps_some_deltas_and_finds_that_others_are_missing() -> None:
    deltas = Deltas()
    told_of = DELTAS_KEPT + 10
    for number in range(told_of):
        body = msgspec.msgpack.encode(TopologyDelta(1, float(number), number + 1.0, ""))
        deltas.told([[b"changes", body]])
    assert deltas.came.is_set()
    followed = FollowedView()
    followed.begin(seen(STEPS[0], 0.0), 0.0)
    taken = deltas.take()
    assert [one.since for one in taken] == list(range(10, told_of))
    for one in taken:
        followed.take(one, 0.0)
    assert followed.view is None
    deltas.told([[b"changes", b"\xc1"]])
    assert deltas.take() == [], "what can't be read is missing"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await deltas.came.wait()
