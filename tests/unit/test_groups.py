"""Groups of recorded queues as the GCM decides about them, and what a client asks: names, sources, rights, removal.

Not covered: ZooKeeper, hosts, and messages (tests/integration/test_groups.py); what fills a group.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

import roq
from gcm import transactions, work_queues
from gcm.background import Finisher
from gcm.cluster import ClientTransaction, ClusterState
from gcm.reconcile import assign_all, changes, stamp
from roq import blocking
from roq.client.group import group_source
from roq.errors import (
    AccessDenied,
    GroupNotFound,
    InvalidConfiguration,
    InvalidFilter,
    InvalidName,
    InvalidPosition,
    InvalidTopic,
    NotRecorded,
    QueueNotFound,
    WorkQueueConflict,
    WorkQueueNotFound,
)
from roq.ids import NAME_CHARACTERS_MAX, group_name
from roq.wire import gcm, rights
from roq.wire.assignment import STORES, ProcessKind, from_json, to_json, work_subject
from roq.wire.card import Card, CardRole, Grant, Right, new_card
from roq.wire.gcm import CreateWorkQueue, RecordQueue, RemoveQueue, RemoveWorkQueue
from roq.wire.recording import Record, TapePosition, tapes_of, tapes_prefix
from roq.wire.task import LeasedTask
from roq.wire.work_queue import GroupOrder, GroupSource, TaskSettings, WorkQueueRecord
from roq.workqueue.address import parse, queue_address
from roq.workqueue.lease_keeper import HeldTask
from tests.unit.test_recorded_queues import ZooKeeperTwin, cluster_of, created, handlers, held, obey, term_of, written

CHANCE = random.Random(6)
TAPES = tapes_of("q", "t-q")
NAME = "q@billing"
NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
__all__ = ["held"]  # a fixture


def source(**fields: Any) -> GroupSource:
    return GroupSource("q", **fields)


def asked(
    cluster: ClusterState, wanted: GroupSource | None, name: str = NAME, transaction: str = "t-g", **fields: Any
) -> ClusterState:
    """What a client asks, as a leader does it."""
    request = CreateWorkQueue(name, transaction, source=wanted, **fields)
    work_queues.check(request)
    return written(cluster, work_queues.create(cluster, request, 7.0, CHANCE), work_subject(name), STORES)


@pytest.fixture
def recorded() -> ClusterState:
    return created(cluster_of("a", "b"), Record())


def group(cluster: ClusterState, name: str = NAME) -> WorkQueueRecord:
    return cluster.work_queues[name]


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_group_is_named_by_its_queue_and_itself() -> None:
    assert group_name("orders", "billing") == "orders@billing"
    assert group_name("a@b", "c") == "a@b@c"
    for queue, name in (("q", ""), ("", "g"), ("q", "a@b"), ("q", "a/b"), ("q", " g"), ("q", ".."), ("q/r", "g")):
        with pytest.raises(InvalidName):
            group_name(queue, name)
    long = "g" * (NAME_CHARACTERS_MAX - 2)
    assert len(group_name("q", long)) == NAME_CHARACTERS_MAX
    with pytest.raises(InvalidName, match="at most 100 characters, got 101"):
        group_name("q", f"{long}g")


def test_its_address_reads_well_and_is_read_back() -> None:
    address = queue_address("zk:2181/RoQ", "orders@billing")
    assert address == "roq://zk:2181/RoQ/orders@billing"
    assert parse(address) == parse(address.replace("@", "%40"))
    assert parse(address).path == "orders@billing"


def test_no_other_work_queue_has_a_name_like_that(recorded: ClusterState) -> None:
    for name in (NAME, "@", "other@x"):
        with pytest.raises(GroupNotFound, match="create_group or `roq queue group create` makes one"):
            asked(recorded, None, name)
    for name in ("q", "q@", "q@a@b", "r@billing", "billing", "qq@billing"):
        with pytest.raises(InvalidName):
            asked(recorded, source(), name)
    there = asked(recorded, source())
    assert asked(there, None).work_queues == there.work_queues, "it is opened like any other"


# --- created ----------------------------------------------------------------------------------------------------------


def test_a_group_is_a_work_queue_whose_hosts_know_where_its_tasks_come_from(recorded: ClusterState) -> None:
    cluster = asked(recorded, source(topics=("eu.>", "asia", "eu.>"), order=GroupOrder.NONE, where="price > 1"))
    kept = GroupSource("q", TAPES, ("asia", "eu.>"), GroupOrder.NONE, "earliest", "price > 1")
    assert group(cluster).spec.source == kept
    assert group(cluster).spec.settings == TaskSettings()
    specs = [spec for host in cluster.hosts.values() for spec in host.assigned.values() if spec.kind is ProcessKind.MASTER]
    assert [(spec.queue, spec.work) for spec in specs] == [(NAME, group(cluster).spec)] * 2
    assert from_json(to_json(group(cluster)), WorkQueueRecord) == group(cluster)
    assert group(asked(recorded, source(topics=()))).spec.source == GroupSource("q", TAPES, (">",))


def test_only_of_a_queue_that_has_tapes(recorded: ClusterState) -> None:
    with pytest.raises(QueueNotFound, match="no queue is named 'r'"):
        asked(recorded, GroupSource("r"), "r@billing")
    with pytest.raises(NotRecorded, match="'q' is not recorded and can't have groups: `roq queue record` switches that on"):
        asked(created(cluster_of("a")), source())
    off = transactions.record_queue(recorded, RecordQueue("q", None, "r"), 9.0)
    assert NAME in asked(off, source()).work_queues, "what was recorded is there until it expires"
    stopped = transactions.stop_queue(recorded, "q")
    assert NAME in asked(stopped, source()).work_queues


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (source(topics=("",)), InvalidTopic),
        (source(topics=("a.>.b",)), InvalidTopic),
        (source(topics=tuple(f"t{number}" for number in range(101))), InvalidConfiguration),
        (source(where="price >"), InvalidFilter),
        (source(start="live"), InvalidConfiguration),
        (source(start="2026-11-26T10:00:00"), InvalidConfiguration),
        (source(start=""), InvalidConfiguration),
        (source(start="p1.!"), InvalidPosition),
        (source(start=str(TapePosition("another", {}))), InvalidPosition),
    ],
)
def test_what_could_not_be_filled_is_refused(recorded: ClusterState, wanted: GroupSource, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        asked(recorded, wanted)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "start", ["earliest", "2026-11-26T10:00:00+00:00", str(TapePosition(TAPES, {"e": 3}))], ids=lambda start: start[:8]
)
def test_where_it_may_begin(recorded: ClusterState, start: str) -> None:
    found = group(asked(recorded, source(start=start))).spec.source
    assert found is not None
    assert found.start == start


def test_asked_for_again_it_must_be_the_same_but_for_its_start(recorded: ClusterState) -> None:
    cluster = asked(recorded, source(topics=("eu.>",)), settings=TaskSettings(max_attempts=3))
    starts = "2026-11-26T10:00:00+00:00", str(TapePosition("other", {}))
    for again in (source(topics=("eu.>",), start=starts[0]), source(topics=("eu.>", "eu.>"), start=starts[1])):
        assert asked(cluster, again, transaction="t2").work_queues == cluster.work_queues
    for wanted, told in (
        (source(topics=("eu.>",), order=GroupOrder.NONE), "group 'q@billing' exists with order topic, not none$"),
        (source(topics=("eu.>", "us.>")), "exists with topics eu.>, not eu.> us.>$"),
        (source(topics=("eu.>",), where="a == 1"), "exists with where '', not 'a == 1'$"),
        (source(order=GroupOrder.NONE), "order topic, not none, topics eu.>, not >$"),
    ):
        with pytest.raises(WorkQueueConflict, match=told):
            asked(cluster, wanted, transaction="t2")
    with pytest.raises(WorkQueueConflict, match="max_attempts 3, not 0"):
        asked(cluster, source(topics=("eu.>",)), settings=TaskSettings(), transaction="t2")


def test_a_member_that_says_nothing_takes_the_group_as_it_is(recorded: ClusterState) -> None:
    cluster = asked(recorded, source(topics=("eu.>",), order=GroupOrder.NONE, where="a == 1"))
    assert asked(cluster, source(), asked=(), transaction="t2").work_queues == cluster.work_queues
    same = source(topics=("eu.>",), order=GroupOrder.NONE)
    assert asked(cluster, same, asked=("topics", "order"), transaction="t2").work_queues == cluster.work_queues
    with pytest.raises(WorkQueueConflict, match=r"exists with order none, not topic$"):
        asked(cluster, source(), asked=("order",), transaction="t2")


def test_what_was_made_before_there_were_groups_is_none(recorded: ClusterState) -> None:
    old = msgspec.structs.replace(group(asked(recorded, source())), name=NAME)
    old = msgspec.structs.replace(old, spec=msgspec.structs.replace(old.spec, source=None))
    cluster = replace(recorded, work_queues={NAME: old})
    assert asked(cluster, None).work_queues == cluster.work_queues
    with pytest.raises(WorkQueueConflict, match="group 'q@billing' exists with tasks that were put, not messages of queue 'q'"):
        asked(cluster, source())


def test_a_queue_has_so_many_groups_and_no_more(recorded: ClusterState) -> None:
    one = group(asked(recorded, source()))
    full = {f"q@{number}": msgspec.structs.replace(one, name=f"q@{number}") for number in range(work_queues.GROUPS_MAX)}
    with pytest.raises(InvalidConfiguration, match="'q' has 1000 groups, and there can't be more: remove one first"):
        asked(replace(recorded, work_queues=full), source())


async def test_the_groups_of_a_queue_are_told(recorded: ClusterState) -> None:
    cluster = asked(asked(recorded, source()), source(), "q@archive", "t-a")
    cluster = asked(cluster, None, "work", "t-w")
    cluster = written(cluster, transactions.create_queue(cluster, gcm.CreateQueue("q@x", "t-x"), 7.0, CHANCE), "q@x")
    leader, _ = handlers(cluster, {})
    found = await leader.handle(b"", gcm.ListGroups("q"))
    assert isinstance(found, gcm.WorkQueues)
    assert [info.record for info in found.work_queues] == [group(cluster, "q@archive"), group(cluster)]
    assert await leader.handle(b"", gcm.ListGroups("q@x")) == gcm.WorkQueues(())
    with pytest.raises(QueueNotFound):
        await leader.handle(b"", gcm.ListGroups("r"))


# --- removed ----------------------------------------------------------------------------------------------------------


def removed(cluster: ClusterState) -> ClusterState:
    return written(cluster, transactions.remove_queue(cluster, RemoveQueue("q", "r"), 8.0), "q", STORES)


def with_two_groups(cluster: ClusterState) -> ClusterState:
    """And a work queue that is none, and a group of another queue."""
    cluster = written(
        cluster, transactions.create_queue(cluster, gcm.CreateQueue("r", "t-r", record=Record()), 7.0, CHANCE), "r"
    )
    cluster = asked(asked(cluster, source()), source(), "q@archive", "t-a")
    return asked(asked(cluster, None, "q", "t-w"), GroupSource("r"), "r@billing", "t-b")


def masters(cluster: ClusterState) -> set[str]:
    specs = [spec for host in cluster.hosts.values() for spec in host.assigned.values()]
    return {spec.queue for spec in specs if spec.kind is ProcessKind.MASTER}


def test_groups_go_with_their_queue_in_one_change(recorded: ClusterState) -> None:
    before = with_two_groups(recorded)
    logs = {name: group(before, name).spec.log for name in (NAME, "q@archive")}
    after = removed(before)
    assert set(after.work_queues) == masters(after) == {"q", "r@billing"}
    entry = after.transactions["r"]
    assert (entry.groups, entry.tapes) == (logs, tapes_prefix(TAPES))
    assert set(entry.hosts) == {"a", "b"}
    assert set(after.transactions) == {"t-r", "t-w", "t-b", "r"}, "what was being created for them is forgotten, too"
    assert from_json(to_json(entry), ClientTransaction) == entry
    paths = [operation.path for operation in changes(before, stamp(before, after))]
    assert {"queues/q", f"work-queues/{NAME}", "work-queues/q@archive", "transactions/queue/r"} <= {*paths}
    assert paths.index("transactions/queue/r") < paths.index("queues/q") < paths.index(f"work-queues/{NAME}")


def test_a_group_that_was_made_in_the_same_write_goes_too(recorded: ClusterState) -> None:
    """The leader decides many requests at once: who asked for the removal did not know of it."""
    request = CreateWorkQueue(NAME, "t-g", source=source())
    between = written(recorded, work_queues.create(recorded, request, 7.0, CHANCE), work_subject(NAME), STORES)
    assert masters(between) == {NAME}
    after = removed(between)
    assert (masters(after), dict(after.work_queues)) == (set(), {})


def test_a_queue_that_is_stopped_or_not_recorded_any_more_keeps_its_groups(recorded: ClusterState) -> None:
    cluster = asked(recorded, source())
    for later in (transactions.stop_queue(cluster, "q"), transactions.record_queue(cluster, RecordQueue("q", None, "r"), 9.0)):
        assert later.work_queues == cluster.work_queues
        assert masters(written(cluster, later, "q")) == {NAME}


def test_a_group_is_removed_like_any_work_queue(recorded: ClusterState) -> None:
    with pytest.raises(GroupNotFound, match="no group is named 'q@billing'"):
        work_queues.remove(recorded, RemoveWorkQueue(NAME, "r"), 8.0)
    with pytest.raises(WorkQueueNotFound, match="no work queue is named 'w'"):
        work_queues.remove(recorded, RemoveWorkQueue("w", "r"), 8.0)
    cluster = asked(recorded, source())
    after = work_queues.remove(cluster, RemoveWorkQueue(NAME, "r"), 8.0)
    assert after.transactions["r"].log == group(cluster).spec.log
    assert dict(after.work_queues) == {}
    assert after.queues == cluster.queues
    again = asked(after, source(), transaction="t2")
    assert group(again).spec.log != group(cluster).spec.log


async def test_the_logs_of_groups_go_behind_their_processes(recorded: ClusterState, held: dict[str, set[str]]) -> None:
    before = obey(with_two_groups(recorded), "a", "b")
    logs = {name: record.spec.log for name, record in before.work_queues.items()}
    mine = {logs[NAME], logs["q@archive"]}
    held |= {host: {f"{log}{part}" for log in logs.values() for part in ("~1.0", "/snapshot")} for host in "ab"}
    zookeeper = ZooKeeperTwin(*logs.values())
    cluster = removed(before)
    async with term_of(zookeeper, cluster) as term:
        finisher = Finisher(term)
        await asyncio.sleep(0)
        assert set(zookeeper.logs) == {*logs.values()}, "their masters run yet"
        told = obey(cluster, "a", "b")
        term.view.cluster = replace(term.view.cluster, hosts=told.hosts)
        term.view._wake(list(term.view._waiters))
        await finisher.settle("r", 5.0)
        assert set(zookeeper.logs) == {*logs.values()} - mine
        async with asyncio.timeout(5.0):
            while any(name.startswith(tuple(mine)) for names in held.values() for name in names):
                await asyncio.sleep(0)
        await finisher.stop()
    assert held == {
        host: {f"{logs[name]}{part}" for name in ("q", "r@billing") for part in ("~1.0", "/snapshot")} for host in "ab"
    }


async def test_a_group_that_a_dead_leader_left_behind_goes_too(recorded: ClusterState, held: dict[str, set[str]]) -> None:
    """It wrote a part of a large change: the transaction and the queue, not yet the group."""
    before = asked(recorded, source())
    log = group(before).spec.log
    after = removed(before)
    half = assign_all(replace(after, work_queues=before.work_queues, hosts=before.hosts))
    half = obey(stamp(before, half), "a", "b")
    assert masters(half) == {NAME}, "as the next leader finds it"
    held |= {"a": set(), "b": set()}
    zookeeper = ZooKeeperTwin(log)
    async with term_of(zookeeper, half) as term:
        finisher = Finisher(term)
        async with asyncio.timeout(5.0):
            while term.view.cluster.work_queues:
                await asyncio.sleep(0)
        assert masters(term.view.cluster) == set()
        term.view.cluster = replace(term.view.cluster, hosts=obey(term.view.cluster, "a", "b").hosts)
        term.view._wake(list(term.view._waiters))
        await finisher.settle("r", 5.0)
        assert zookeeper.logs == {}
        await finisher.stop()


def test_a_group_of_a_former_queue_says_so(recorded: ClusterState) -> None:
    orphan = asked(recorded, source()).work_queues
    fresh = replace(created(cluster_of("a", "b"), Record(), "t-new"), work_queues=orphan)
    with pytest.raises(WorkQueueConflict, match="exists with messages of a former queue 'q': remove this group first"):
        asked(fresh, source(), transaction="t2")


# --- rights -----------------------------------------------------------------------------------------------------------


def card(*grants: tuple[Right, str]) -> Card:
    return new_card("alice", CardRole.CLIENT, bytes(32), [Grant(*grant) for grant in grants], 0.0, 1e12)


@pytest.mark.parametrize(
    ("grants", "creates", "opens"),
    [
        ([], False, False),
        ([(Right.SUBSCRIBE, "q")], False, False),
        ([(Right.SUBSCRIBE, "*")], False, True),
        ([(Right.ADMIN, NAME)], False, True),
        ([(Right.ADMIN, "q"), (Right.SUBSCRIBE, "q")], False, False),
        ([(Right.ADMIN, NAME), (Right.SUBSCRIBE, NAME)], False, True),
        ([(Right.ADMIN, "q@*"), (Right.SUBSCRIBE, "q")], True, True),
        ([(Right.ADMIN, NAME), (Right.READ, "q")], True, True),
        ([(Right.ADMIN, "*"), (Right.LEASE, "q")], False, True),
        ([(Right.LEASE, NAME)], False, True),
        ([(Right.LEASE, "q.*")], False, False),
        ([(Right.LEASE, "q@arch*"), (Right.DESCRIBE, "q")], False, False),
    ],
)
def test_who_may_make_a_group_and_who_may_open_it(grants: list[tuple[Right, str]], creates: bool, opens: bool) -> None:
    request = CreateWorkQueue(NAME, "t", source=source())
    allowed = []
    for exists in (False, True):
        try:
            rights.check_creation(card(*grants), request, exists)
        except AccessDenied:
            allowed.append(False)
        else:
            allowed.append(True)
    assert allowed == [creates, opens]


def test_the_source_says_whom_it_needs() -> None:
    with pytest.raises(AccessDenied, match="alice needs the right `subscribe` or `read` to 'q'"):
        rights.check_creation(card((Right.ADMIN, "*")), CreateWorkQueue(NAME, "t", source=source()), exists=False)
    rights.check_creation(card((Right.ADMIN, "w")), CreateWorkQueue("w", "t"), exists=False)
    rights.for_names(rights.GCM)(card((Right.SUBSCRIBE, "q")), gcm.ListGroups("q"))
    with pytest.raises(AccessDenied):
        rights.for_names(rights.GCM)(card((Right.LEASE, NAME)), gcm.ListGroups("q"))


def test_a_groups_master_may_read_tapes() -> None:
    host = new_card("host-1", CardRole.HOST, bytes(32), [], 0.0, 1e12)
    rights.for_names(rights.GCM)(host, gcm.DescribeTapes("q"))


# --- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("earliest", "earliest"),
        (timedelta(hours=2), "2026-11-26T10:00:00+00:00"),
        (datetime(2026, 11, 26, 9, tzinfo=timezone(timedelta(hours=1))), "2026-11-26T08:00:00+00:00"),
        (TapePosition(TAPES, {"e": 3}), str(TapePosition(TAPES, {"e": 3}))),
        (str(TapePosition(TAPES, {})), str(TapePosition(TAPES, {}))),
    ],
    ids=str,
)
def test_a_start_is_kept_as_a_text_that_means_the_same_everywhere(start: Any, text: str) -> None:
    asked_for = group_source("q", ("a", "b.>"), "none", start, "x == 1", NOW)
    assert asked_for == GroupSource("q", "", ("a", "b.>"), GroupOrder.NONE, text, "x == 1")
    work_queues.check(CreateWorkQueue(NAME, "t", source=asked_for))


def test_a_time_without_a_zone_is_local() -> None:
    naive = datetime(2026, 11, 26, 9)
    (text,) = {group_source("q", (), "topic", start, "", NOW).start for start in (naive, naive.astimezone())}
    assert text.endswith("+00:00")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"order": "random"}, InvalidConfiguration),
        ({"order": ""}, InvalidConfiguration),
        ({"start": "live"}, InvalidConfiguration),
        ({"start": 5}, InvalidConfiguration),
        ({"start": timedelta(days=10**6)}, InvalidConfiguration),
        ({"topics": ("a.>.b",)}, InvalidTopic),
        ({"where": "price >"}, InvalidFilter),
    ],
    ids=str,
)
def test_a_mistake_is_told_before_anybody_is_asked(fields: dict[str, Any], error: type[Exception]) -> None:
    right = {"queue": "q", "topics": (), "order": "topic", "start": "earliest", "where": "", "now": NOW}
    group_source(**right)  # type: ignore[arg-type]
    with pytest.raises(error):
        group_source(**{**right, **fields})


@pytest.mark.parametrize("connect", [roq.connect, blocking.connect])
def test_what_only_the_other_kind_of_subscriber_has_is_refused(connect: Any) -> None:
    cluster = connect("127.0.0.1:1")
    for fields in ({"order": "none"}, {"count": 2}, {"lease_seconds": 5.0}):
        with pytest.raises(InvalidConfiguration, match="group= names it"):
            cluster.subscriber("q", **fields)
        cluster.subscriber("q", group="g", **fields)
    for alone in ({"follow": False}, {"follow": "stored"}, {"on_lost": print}, {"durable": "d"}):
        with pytest.raises(InvalidConfiguration, match="for lone subscribers"):
            cluster.subscriber("q", group="g", **alone)
        cluster.subscriber("q", **alone)
    for wrong in ({"lease_seconds": 0.0}, {"count": 0}, {"start": "live"}):
        with pytest.raises(InvalidConfiguration):
            cluster.subscriber("q", group="g", **wrong)
    with pytest.raises(InvalidName):
        cluster.subscriber("q", group="a@b")


def test_a_groups_task_is_a_message_and_another_is_none() -> None:
    leased = LeasedTask(f"{2**63 + 5:016x}-77", "t", b"p", 1, 0, 1_700_000_000_123, 0, "eu.paris")
    message = HeldTask(leased, 60.0, 0.0)
    assert (message.topic, message.publisher, message.sequence) == ("eu.paris", 2**63 + 5, 77)
    assert message.timestamp == 1_700_000_000_123_000_000
    other = HeldTask(msgspec.structs.replace(leased, id="a task of a folder", topic=""), 60.0, 0.0)
    assert (other.topic, other.publisher, other.sequence) == ("", 0, 0)
