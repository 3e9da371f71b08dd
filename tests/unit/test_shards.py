"""What the GCM makes of shards, and what a master says once its shard is closed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from gcm import shard_keeper, shards, work_queues
from gcm.cluster import ClusterState, work_queue_info, work_queue_infos
from gcm.shard_keeper import ShardKeeper
from gcm.term import LeaderTerm
from roq.errors import AccessDenied, HostFull, IncompatibleVersion, InvalidConfiguration, InvalidName, WorkQueueNotFound
from roq.runtime.rpc import RpcPool
from roq.wire import master as wire
from roq.wire.assignment import STORES, work_subject
from roq.wire.card import CardRole, Grant, Right, new_card
from roq.wire.gcm import CreateWorkQueue, RemoveWorkQueue, WorkQueueInfo
from roq.wire.rights import allow_at_master
from roq.wire.shards import SHARDED_NAME_MAX, SHARDS_MAX, ClosingShard, SetShards, ShardList, shard_name
from roq.wire.task import Settlement, TaskToPut
from roq.wire.work_queue import MasterAddress
from tests.unit.test_master_service import Rig
from tests.unit.test_recorded_queues import cluster_of, written

CHANCE = random.Random(3)


def changed(cluster: ClusterState, after: ClusterState) -> ClusterState:
    return written(cluster, after, work_subject("w"), STORES)


def made(count: int, *hosts: str) -> ClusterState:
    cluster = cluster_of(*(hosts or ("a", "b", "c")))
    return changed(cluster, shards.create(cluster, CreateWorkQueue("w", "t", shards=count), 7.0, CHANCE))


def with_shards(cluster: ClusterState, count: int, transaction: str = "s", now: float = 9.0) -> ClusterState:
    return changed(cluster, shards.set_shards(cluster, SetShards("w", count, transaction), now, CHANCE))


def masters(cluster: ClusterState) -> dict[str, bool]:
    """Those that are assigned, and whether they are to take no more tasks."""
    specs = [spec for host in cluster.hosts.values() for spec in host.assigned.values() if spec.work is not None]
    return {spec.queue: spec.work.closed for spec in specs if spec.work is not None}


# --- the GCM ----------------------------------------------------------------------------------------------------------------


def test_shards_are_made_in_one_write_each_with_a_log_and_masters_of_its_own() -> None:
    cluster = made(4)
    names = [shard_name("w", number) for number in range(4)]
    assert {*masters(cluster)} == {*names} == {*cluster.work_queues}
    assert cluster.work_queues["w"].shards == ShardList(7, (0, 1, 2, 3), (0, 1, 2, 3), (), 4)
    assert len({record.spec.log for record in cluster.work_queues.values()}) == 4
    placed = Counter(host for record in cluster.work_queues.values() for host in record.hosts)
    assert max(placed.values()) - min(placed[host] for host in cluster.hosts) <= 1, (
        "masters and standbys are spread over the hosts"
    )
    assert [info.record.name for info in work_queue_infos(cluster)] == ["w"]
    assert [info.record.name for info in work_queue_info(cluster, cluster.work_queues["w"]).shards] == names[1:]


def test_a_queue_of_one_is_what_it_always_was() -> None:
    cluster = made(1)
    assert cluster.work_queues["w"].shards is None
    assert cluster.work_queues["w"].spec.shards == 0


def test_a_split_keeps_the_keys_where_they_are_and_a_merge_closes_the_newest() -> None:
    cluster = with_shards(with_shards(made(2), 4), 1, "m")
    closing = tuple(ClosingShard(number, 9.0) for number in (1, 2, 3))
    assert cluster.work_queues["w"].shards == ShardList(10, (0,), (0, 1), closing, 4)
    assert masters(cluster) == {"w": False, **{shard_name("w", number): True for number in (1, 2, 3)}}
    again = with_shards(cluster, 2, "n")
    assert again.work_queues["w"].shards == ShardList(11, (0, 4), (0, 1), closing, 5), "a number is used once"
    assert with_shards(again, 2, "n").work_queues == again.work_queues


def test_an_empty_shard_is_removed_once_and_only_if_it_is_the_one_that_was_asked() -> None:
    cluster = with_shards(made(2), 1)
    log = cluster.work_queues[shard_name("w", 1)].spec.log
    for wrong in (("w", "other", 1), ("x", log, 1), ("w", log, 2)):
        assert shards.without_shard(cluster, *wrong, 9.0) is cluster
    removed = changed(cluster, shards.without_shard(cluster, "w", log, 1, 9.0))
    assert removed.work_queues["w"].shards == ShardList(10, (0,), (0,), (), 2)
    assert {*masters(removed)} == {"w"} == {*removed.work_queues}
    assert [entry.log for entry in removed.transactions.values() if entry.queue == shard_name("w", 1)] == [log]
    assert shards.without_shard(removed, "w", log, 1, 9.0) is removed
    open_one = made(2)
    assert shards.without_shard(open_one, "w", open_one.work_queues[shard_name("w", 1)].spec.log, 1, 9.0) is open_one


def test_shards_go_with_their_queue() -> None:
    cluster = with_shards(made(3), 2)
    logs = {name: record.spec.log for name, record in cluster.work_queues.items() if name != "w"}
    after = changed(cluster, work_queues.remove(cluster, RemoveWorkQueue("w", "r"), 9.0))
    assert (after.work_queues, masters(after)) == ({}, {})
    assert after.transactions["r"].groups == logs


def test_what_a_leader_left_half_written_is_completed() -> None:
    """A change that is too large for one write goes in parts: records of shards may be missing."""
    cluster = with_shards(made(4), 3)
    left = {name: one for name, one in cluster.work_queues.items() if name not in (shard_name("w", 2), shard_name("w", 3))}
    half = ClusterState(1, cluster.hosts, work_queues=left)
    assert shards.lacking(half) == ["w"]
    whole = changed(half, shards.completed(half, "w", 9.0, CHANCE))
    listed = whole.work_queues["w"].shards
    assert listed is not None
    assert (listed.open, listed.closing) == ((0, 1, 2), ())
    assert shards.lacking(whole) == []
    assert shards.completed(whole, "w", 9.0, CHANCE) is whole


def forgotten(cluster: ClusterState) -> ClusterState:
    """As a leader of 0.1 leaves it, which writes the record of the queue without what it does not know."""
    record = cluster.work_queues["w"]
    spec = msgspec.structs.replace(record.spec, shards=0)
    return changed(
        cluster,
        replace(cluster, work_queues={**cluster.work_queues, "w": msgspec.structs.replace(record, spec=spec, shards=None)}),
    )


def logs_of(cluster: ClusterState) -> dict[str, str]:
    return {name: record.spec.log for name, record in cluster.work_queues.items()}


def test_a_list_that_an_older_leader_forgot_is_had_from_the_shards_themselves() -> None:
    cluster = with_shards(with_shards(made(3), 5), 4, "m")
    before, lost = cluster.work_queues["w"].shards, forgotten(cluster)
    assert before is not None
    assert shards.lacking(lost) == ["w"]
    healed = changed(lost, shards.completed(lost, "w", 20.0, CHANCE))
    closing = (ClosingShard(4, 20.0),)
    assert healed.work_queues["w"].shards == msgspec.structs.replace(before, version=20, closing=closing)
    assert (logs_of(healed), shards.lacking(healed)) == (logs_of(cluster), [])
    assert masters(healed) == masters(cluster)
    for count in (4, 6, 2):  # whoever asks before the leader looks
        after = with_shards(lost, count, now=20.0)
        assert logs_of(after).items() >= logs_of(cluster).items(), "no shard is made where one is"
        listed = after.work_queues["w"].shards
        assert listed is not None
        assert len(listed.open) == count
        assert listed.version > before.version
    gone = changed(lost, work_queues.remove(lost, RemoveWorkQueue("w", "r"), 9.0))
    assert (gone.work_queues, masters(gone)) == ({}, {})


def test_shards_that_an_older_leader_left_of_a_removed_queue_are_not_those_of_the_next_one() -> None:
    cluster = made(3)
    left = {name: one for name, one in cluster.work_queues.items() if name != "w"}
    orphaned = changed(cluster, replace(cluster, work_queues=left))
    single = changed(orphaned, shards.create(orphaned, CreateWorkQueue("w", "t2", shards=1), 8.0, CHANCE))
    assert shards.lacking(single) == []
    assert shards.completed(single, "w", 9.0, CHANCE) is single
    several = changed(orphaned, shards.create(orphaned, CreateWorkQueue("w", "t2", shards=3), 8.0, CHANCE))
    assert several.work_queues["w"].shards == ShardList(8, (0, 3, 4), (0, 3, 4), (), 5)
    assert logs_of(several).items() >= {name: one.spec.log for name, one in left.items()}.items()


def test_a_queue_that_is_made_anew_has_a_later_list_than_the_former_one() -> None:
    """Clients that had the former one open go by the version."""
    former = with_shards(with_shards(made(2), 3), 4)
    removed = changed(former, work_queues.remove(former, RemoveWorkQueue("w", "r"), 20.0))
    anew = changed(removed, shards.create(removed, CreateWorkQueue("w", "t2", shards=2), 21.0, CHANCE))
    split = changed(anew, shards.create(removed, CreateWorkQueue("w", "t2", shards=1), 21.0, CHANCE))
    split = changed(split, shards.set_shards(split, SetShards("w", 2, "s"), 22.0, CHANCE))
    before = former.work_queues["w"].spec.shards
    assert [one.work_queues["w"].spec.shards > before for one in (anew, split)] == [True, True]


# --- who removes them ---------------------------------------------------------------------------------------------------------


class RefusingTerm:
    """A leader's term whose first changes are refused: a batch was too large for one write."""

    def __init__(self, cluster: ClusterState, refused: int) -> None:
        self.cluster, self.refused, self.changes = cluster, refused, 0
        self.on_change: list[object] = []
        self.view = self.tasks = self

    async def change(self, decide: Callable[[ClusterState], ClusterState], *subjects: str) -> None:
        self.changes += 1
        if self.changes <= self.refused:
            raise HostFull
        self.cluster = changed(self.cluster, decide(self.cluster))


class EmptyMasters:
    async def request(self, endpoint: str, request: msgspec.Struct, expect: type) -> object:
        return wire.Counted(0)

    def close(self) -> None: ...


async def test_a_removal_that_is_refused_for_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_keeper, "LOOK_SECONDS", 0.01)
    addressed = MasterAddress("a", "127.0.0.1", 1, 1, active=True)
    monkeypatch.setattr(shard_keeper, "work_queue_info", lambda cluster, record: WorkQueueInfo(record, (addressed,), True))
    term = RefusingTerm(with_shards(made(3), 1), 3)
    keeper = ShardKeeper(cast(LeaderTerm, term), 0.0)
    keeper._masters = cast(RpcPool, EmptyMasters())
    keeper._next.within(0)
    running = asyncio.create_task(keeper._run())
    async with asyncio.timeout(10):
        while {*term.cluster.work_queues} != {"w"}:
            await asyncio.sleep(0.01)
            assert not running.done()
    assert term.changes == 5, "three were refused"
    running.cancel()


def test_a_shard_that_closes_for_long_is_asked_now_and_then() -> None:
    assert [shard_keeper.pause(seconds) for seconds in (0.0, 60.0, 600.0, 1e6)] == [2.0, 2.0, 20.0, 60.0]


def test_who_can_have_no_shards_is_told() -> None:
    cluster = made(2)
    with pytest.raises(WorkQueueNotFound):
        shards.set_shards(cluster, SetShards("x", 2, "s"), 9.0, CHANCE)
    for count in (0, SHARDS_MAX + 1):
        with pytest.raises(InvalidConfiguration, match=f"1 to {SHARDS_MAX}"):
            with_shards(cluster, count)
    for name, error in (("q@g", InvalidConfiguration), ("_roq.x", InvalidConfiguration), ("n" * 90, InvalidName)):
        with pytest.raises(error):
            shards.check(name, 2)
    shards.check("n" * SHARDED_NAME_MAX, SHARDS_MAX)
    assert len(shard_name("n" * SHARDED_NAME_MAX, 10**6)) <= 100
    with pytest.raises(InvalidName, match="the cluster's own"):
        shards.create(cluster, CreateWorkQueue(shard_name("w", 7), "t7", shards=0), 9.0, CHANCE)


def test_a_program_that_knows_no_shards_gets_a_queue_of_one_only() -> None:
    old = CreateWorkQueue("w", "t2")
    with pytest.raises(IncompatibleVersion, match="has 2 shards"):
        shards.create(made(2), old, 9.0, CHANCE)
    for cluster in (made(1), with_shards(made(1), 1)):
        assert shards.create(cluster, old, 9.0, CHANCE) is cluster


def test_a_right_to_a_queue_is_one_to_its_shards() -> None:
    card = new_card("me", CardRole.CLIENT, bytes(32), [Grant(Right.PUT, "w")], 0.0, 1e12)
    put = wire.Put(1, 1, [])
    allow_at_master(shard_name("w", 3))(card, put)
    with pytest.raises(AccessDenied, match="'x'"):
        allow_at_master(shard_name("x", 3))(card, put)


# --- the master of a closed shard -------------------------------------------------------------------------------------------


def test_a_closed_shard_says_what_it_took_and_refuses_the_rest() -> None:
    rig = Rig()
    first = [TaskToPut(b"a", dedup_key="k"), TaskToPut(b"b")]
    rig.ask(wire.Put(5, 1, first))
    rig.commit()
    rig.service.closed, rig.service.shards = True, 4
    repeated = rig.ask(wire.Put(5, 1, first))
    mixed = rig.ask(wire.Put(5, 2, [TaskToPut(b"b"), TaskToPut(b"c"), TaskToPut(b"a", dedup_key="k")]))
    keys = rig.ask(wire.FindKeys(["k", "l"]))
    answers = rig.commit()
    assert answers[repeated] == wire.TasksAdded([], [0, 1], [], 4)
    assert answers[mixed] == wire.TasksAdded([(2, f"{5:016x}-1")], [0], [1], 4)
    assert answers[keys] == wire.KeysFound([f"{5:016x}-1", None])
    assert rig.service.fold.ready.count == 2


def test_it_says_that_nothing_is_left_when_the_last_key_is_forgotten() -> None:
    rig = Rig()
    rig.ask(wire.Put(5, 1, [TaskToPut(b"a", dedup_key="k"), TaskToPut(b"b", delay_ms=10)]))
    early = rig.ask(wire.CountLeft())
    assert "does not know yet" in str(rig.commit()[early])
    rig.service.closed = True

    def left() -> object:
        id = rig.ask(wire.CountLeft())
        return rig.commit()[id]

    assert left() == wire.Counted(3)
    rig.now += 10
    lease = rig.ask(wire.Lease(7, 1, 0, 60_000, 9, 0, []))
    leases = rig.commit()[lease]
    assert isinstance(leases, wire.Leases)
    rig.ask(wire.SettleAll(7, 0, [Settlement.ack(leases.tasks[0].token), Settlement.reject(leases.tasks[1].token, "no")]))
    rig.commit()
    assert left() == wire.Counted(2), "a dead letter, and the key"
    rig.ask(wire.RemoveLetters(None))
    rig.commit()
    rig.now += 300_000
    assert left() == wire.Counted(0)


def test_waits_are_ended_for_who_asks() -> None:
    rig = Rig()
    first, second = (rig.ask(wire.Lease(7, nonce, 0, 60_000, 1, 5_000, [])) for nonce in (1, 2))
    other = rig.ask(wire.Lease(8, 1, 0, 60_000, 1, 5_000, []))
    rig.commit()
    ended = rig.ask(wire.EndWaits(7, [1, 2, 3]))
    answers = rig.commit()
    assert answers[ended] == wire.Counted(2)
    assert answers[first] == answers[second] == wire.Leases([], [])
    rig.ask(wire.Put(5, 1, [TaskToPut(b"a")]))
    found = rig.commit()[other]
    assert isinstance(found, wire.Leases)
    assert len(found.tasks) == 1
