"""The cluster in parts: each fits, together they are the cluster of one moment whatever changes meanwhile, or it is begun anew.

Not covered: over the network (tests/integration/test_cluster_parts.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import pytest

from benchmarks.at_scale.decisions import cluster_of
from gcm import parts, snapshots, transactions, work_queues
from gcm.cluster import ClusterState, view
from gcm.reconcile import assign
from gcm.snapshots import SNAPSHOTS_MAX, Snapshots
from roq.coordination import parts as client_parts
from roq.coordination.locate import GcmClient
from roq.coordination.parts import TRIES, last_place, read_cluster, read_hosts, read_queues, read_work_queues
from roq.errors import IncompatibleVersion, Unavailable
from roq.wire import gcm
from roq.wire.assignment import work_subject
from roq.wire.gcm import CreateQueue, CreateWorkQueue
from roq.wire.parts import PartRequest

CHANCE = random.Random(5)
LEADER = "10.0.0.9:5500"


def with_queue(cluster: ClusterState, name: str) -> ClusterState:
    return transactions.create_queue(cluster, CreateQueue(name, f"t-{name}"), 0.0, CHANCE)


def with_everything() -> ClusterState:
    """Also work queues, one of which has shards, a name that sorts as a place might, and a host nobody is shown."""
    cluster = with_queue(cluster_of(7, 40), "work!")
    for name, shards in (("q-1", None), ("w", 3)):
        cluster = work_queues.create(cluster, CreateWorkQueue(name, f"t-{name}", shards=shards), 0.0, CHANCE)
        cluster = assign(cluster, (work_subject(name),), cluster)
    gone = replace(cluster.host("host-7"), registration=None, report=None, assigned={})
    return cluster.with_host(gone)


class Leader(GcmClient):
    """Answers as the GCM does, over what the wire makes of it. before(number): is called before each answer."""

    def __init__(self, cluster: ClusterState, before: Callable[[Leader, int], None] = lambda leader, number: None) -> None:
        super().__init__("127.0.0.1:1")
        times = count(1)
        self.cluster, self.snapshots, self._before = cluster, Snapshots(LEADER, lambda: float(next(times))), before
        self.asked, self.told = list[Any](), list[Any]()

    async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
        self._before(self, len(self.asked))
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=type(body))
        self.asked.append(request)
        assert isinstance(request, gcm.GetCluster | gcm.ListHosts | gcm.ListQueues | gcm.ListWorkQueues)
        answer = msgspec.msgpack.encode(self.snapshots.answer(self.cluster, request))
        self.told.append(msgspec.msgpack.decode(answer, type=expect))
        return self.told[-1]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 3_000)
    monkeypatch.setattr(client_parts, "delays", lambda *_: iter(lambda: 0.0, None))


# --- cutting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 500, 3_000, 10_000, 10_000_000])
async def test_the_parts_together_are_the_cluster_and_each_fits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", size)
    leader = Leader(with_everything())
    whole = view(leader.cluster, LEADER, 1.0)
    assert await read_cluster(leader, 1.0) == whole
    for part in leader.told:
        infos = (*part.hosts, *part.queues, *part.work_queues)
        assert infos, "none is empty"
        assert sum(len(msgspec.msgpack.encode(info)) for info in infos) <= size or len(infos) == 1
    assert [part.more for part in leader.told] == [True] * (len(leader.told) - 1) + [False]
    assert await read_hosts(leader, 1.0) == [*whole.hosts]
    assert await read_queues(leader, 1.0) == [*whole.queues]
    assert await read_work_queues(leader, 1.0) == [*whole.work_queues]


async def test_an_empty_cluster_has_one_part() -> None:
    leader = Leader(ClusterState(3))
    assert await read_cluster(leader, 1.0) == gcm.ClusterView(3, LEADER, 1.0, (), ())
    assert await read_queues(leader, 1.0) == []
    assert len(leader.asked) == 2


def test_places_are_in_the_order_in_which_everything_is_told() -> None:
    told, places, request = Snapshots(LEADER, lambda: 0.0), list[str](), gcm.GetCluster("", "")
    cluster = with_everything()
    while True:
        part = told.answer(cluster, request)
        assert isinstance(part, gcm.ClusterView)
        places.append(last_place(part))
        if not part.more:
            break
        request = gcm.GetCluster(places[-1], part.snapshot)
    assert len(places) > 4
    assert places == sorted(set(places))


# --- of one moment ---------------------------------------------------------------------------------------------------------


async def test_what_changes_between_two_parts_is_not_seen() -> None:
    def changing(leader: Leader, number: int) -> None:
        leader.cluster = with_queue(leader.cluster, f"new-{number}") if number else leader.cluster

    first = with_everything()
    leader = Leader(first, changing)
    found = await read_cluster(leader, 1.0)
    assert found == view(first, LEADER, 1.0), "also its time: deltas go on from there"
    assert len({part.snapshot for part in leader.told}) == 1
    assert {one.record.name for one in await read_queues(leader, 1.0)} >= {"new-1", "new-2"}, "who asks next sees it"


async def test_the_next_leader_is_asked_from_the_beginning() -> None:
    def another(leader: Leader, number: int) -> None:
        if number == 2:
            leader.cluster = replace(with_queue(leader.cluster, "new"), epoch=leader.cluster.epoch + 1)
            leader.snapshots = Snapshots("10.0.0.8:5500", lambda: 9.0)

    leader = Leader(with_everything(), another)
    found = await read_cluster(leader, 1.0)
    assert found == view(leader.cluster, "10.0.0.8:5500", 9.0)
    assert (leader.told[2].snapshot, leader.told[2].hosts, leader.asked[3]) == ("", (), gcm.GetCluster("", ""))


async def test_a_leader_of_the_next_term_keeps_no_snapshot_of_the_last() -> None:
    def again(leader: Leader, number: int) -> None:
        if number == 2:
            leader.cluster = replace(leader.cluster, epoch=leader.cluster.epoch + 1)

    leader = Leader(with_everything(), again)
    assert (await read_cluster(leader, 1.0)).epoch == leader.cluster.epoch


def others_read(leader: Leader, many: int) -> None:
    """So many others begin to read, each another cluster."""
    for _ in range(many):
        leader.cluster = replace(leader.cluster)
        leader.snapshots.answer(leader.cluster, gcm.GetCluster("", ""))


async def test_who_is_overtaken_by_many_begins_anew_and_gives_up_when_that_happens_each_time() -> None:
    def now_and_then(leader: Leader, number: int) -> None:
        if number in (2, 5):
            others_read(leader, SNAPSHOTS_MAX)

    leader = Leader(with_everything(), now_and_then)
    assert (await read_cluster(leader, 1.0)).queues == view(leader.cluster, LEADER, 0.0).queues
    assert sum(request.after == "" for request in leader.asked) == 3
    always = Leader(with_everything(), lambda leader, number: others_read(leader, SNAPSHOTS_MAX))
    with pytest.raises(Unavailable, match=f"before all were read, {TRIES} times"):
        await read_cluster(always, 1.0)
    assert len(always.asked) == 2 * TRIES


async def test_whoever_goes_on_is_kept_and_who_has_read_all_makes_room() -> None:
    leader = Leader(with_everything(), lambda leader, number: others_read(leader, SNAPSHOTS_MAX - 2))
    await read_cluster(leader, 1.0)
    assert len({part.snapshot for part in leader.told}) == 1
    kept = leader.snapshots._kept
    assert len(kept) == SNAPSHOTS_MAX
    assert next(iter(kept)) == leader.told[0].snapshot, "goes next"


def test_a_part_is_made_once_however_many_ask_for_it() -> None:
    cluster, told = with_everything(), Snapshots(LEADER, lambda: 0.0)
    first, second = (told.answer(cluster, gcm.ListQueues("", "")) for _ in range(2))
    assert isinstance(first, gcm.Queues)
    assert isinstance(second, gcm.Queues)
    assert first.queues is second.queues
    others = told.answer(replace(cluster), gcm.ListQueues("", ""))
    assert isinstance(others, gcm.Queues)
    assert others.snapshot != first.snapshot
    assert told._kept[first.snapshot]._told is None, "what few still ask for is not held"


# --- other versions --------------------------------------------------------------------------------------------------------


REQUESTS = (gcm.GetCluster, gcm.ListHosts, gcm.ListQueues, gcm.ListWorkQueues)


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_program_of_0_1_is_told_all_at_once_or_why_not(kind: type[PartRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = msgspec.convert([kind.__name__], kind)
    assert asked == kind(None, "")
    assert isinstance(asked, gcm.GetCluster | gcm.ListHosts | gcm.ListQueues | gcm.ListWorkQueues)
    cluster, told = with_everything(), Snapshots(LEADER, lambda: 1.0)
    whole = view(cluster, LEADER, 1.0)
    answer: Any = told.answer(cluster, asked)
    assert not answer.more
    for name in {"hosts", "queues", "work_queues"} & {*answer.__struct_fields__}:
        assert getattr(answer, name) == getattr(whole, name)
    monkeypatch.setattr(snapshots, "CONTROL_BYTES_MAX", snapshots.HEAD_BYTES + 500)
    with pytest.raises(IncompatibleVersion, match="which does not ask in parts: upgrade it"):
        told.answer(cluster, asked)


async def test_a_gcm_of_0_1_tells_all_at_once_whatever_is_asked() -> None:
    class Older(Leader):
        async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
            told = msgspec.to_builtins(await super().request(msgspec.convert([type(body).__name__], type(body)), expect))
            return msgspec.convert(told[:-2], expect)

    leader = Older(with_everything())
    assert await read_cluster(leader, 1.0) == view(leader.cluster, LEADER, 1.0)
    assert await read_hosts(leader, 1.0) == [*view(leader.cluster, LEADER, 1.0).hosts]
    assert len(leader.asked) == 2
