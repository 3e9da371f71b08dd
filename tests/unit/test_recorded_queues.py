"""What the GCM decides and does about recorded queues: created, switched on and off, described, removed with their tapes.

Not covered: ZooKeeper and hosts (tests/integration/test_gcm_recording.py); what is written to tapes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import pytest

from gcm import background, parts, transactions, work_queues
from gcm.background import Finisher, erase
from gcm.cluster import Action, ClientTransaction, ClusterState, Host, HostRegistration, store_endpoints
from gcm.handlers import Handlers
from gcm.reconcile import assign, lacking_stores, stamp
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.election import Fence
from roq.coordination.link import Delete, Node, NoNode, Op
from roq.errors import (
    InvalidConfiguration,
    LogUnavailable,
    NoHosts,
    NotLeader,
    NotRecorded,
    QueueConflict,
    QueueNotFound,
    Unavailable,
    UnknownFormat,
    ZooKeeperUnavailable,
)
from roq.log.replicated.stores import StaticDirectory
from roq.runtime.observe import Counters
from roq.wire import gcm as wire
from roq.wire import store
from roq.wire.assignment import STORES, HostReport, ProcessKind, ProcessState, RunningProcess, from_json, to_json
from roq.wire.gcm import CreateExchange, CreateQueue, CreateWorkQueue, RecordQueue, RemoveQueue, RemoveWorkQueue
from roq.wire.hcm import HostPayload
from roq.wire.options import CreateMissing
from roq.wire.recording import Record, Recording, tape_log, tapes_of, tapes_prefix

CHANCE = random.Random(5)
WEEK, DAY = Record(), Record(days=1, copies=2)
TAPES = tapes_of("q", "t-q")


def cluster_of(*names: str) -> ClusterState:
    """Live hosts, an address each."""
    return ClusterState(1, {name: Host(name, HostRegistration(f"10.0.0.{name}", 1, HostPayload("1", 8))) for name in names})


def written(before: ClusterState, after: ClusterState, *subjects: str) -> ClusterState:
    """As a term does: the assignments follow, and get revisions."""
    return stamp(before, assign(after, subjects, before))


def created(cluster: ClusterState, record: Record | None = None, transaction: str = "t-q") -> ClusterState:
    request = CreateQueue("q", transaction, host="a", record=record)
    return written(cluster, transactions.create_queue(cluster, request, 7.0, CHANCE), "q", STORES)


def recorded(cluster: ClusterState, record: Record | None) -> ClusterState:
    return written(cluster, transactions.record_queue(cluster, RecordQueue("q", record, "r"), 9.0), "q", STORES)


def obey(cluster: ClusterState, *names: str, store: ProcessState = ProcessState.RUNNING) -> ClusterState:
    """The hosts report what they were assigned."""
    for name in names:
        at = cluster.hosts[name]
        processes = tuple(
            RunningProcess(
                *(spec.name, spec.kind, spec.queue, spec.exchange),
                store if spec.kind is ProcessKind.STORE else ProcessState.RUNNING,
                *(1, {"clients": 7000 + number, "kpis": 8000 + number}),
            )
            for number, spec in enumerate(at.assigned.values())
        )
        report = HostReport(name, f"10.0.0.{name}", "1", cluster.epoch, at.revision, processes)
        cluster = cluster.with_host(replace(at, report=report))
    return cluster


def lost(cluster: ClusterState, name: str) -> ClusterState:
    at = cluster.hosts[name]
    return cluster.with_host(replace(at, registration=None, report=None, last_report=at.report))


def has(cluster: ClusterState) -> tuple[Record | None, bool]:
    return cluster.queues["q"].record, cluster.queues["q"].recorded


def told(cluster: ClusterState) -> dict[ProcessKind, Recording | None]:
    """What the queue's processes are told."""
    specs = [spec for host in cluster.hosts.values() for spec in host.assigned.values() if spec.queue == "q"]
    return {spec.kind: spec.recording for spec in specs}


# --- created, switched on and off -------------------------------------------------------------------------------------


def test_a_queue_is_created_recorded_and_its_exchanges_alone_are_told() -> None:
    cluster = created(cluster_of("a", "b"), WEEK)
    assert has(cluster) == (WEEK, True)
    nobody = dict.fromkeys((ProcessKind.MONITOR, ProcessKind.SCALING))
    assert told(cluster) == {**nobody, ProcessKind.EXCHANGE: Recording(WEEK, TAPES, on=True)}
    assert told(created(cluster_of("a"))) == {**nobody, ProcessKind.EXCHANGE: None}


def test_creating_it_again_needs_what_there_is_or_nothing() -> None:
    cluster = created(cluster_of("a", "b"), DAY)
    for record in (None, DAY):
        assert created(cluster, record, "t2").queues == cluster.queues
    with pytest.raises(QueueConflict, match=r"is recorded with days 1, .* copies 2, ack 0, asked for: days 7\.0, .* copies 0"):
        created(cluster, WEEK)
    with pytest.raises(QueueConflict, match=r"'q' exists and is not recorded, asked for: days 7\.0"):
        created(created(cluster_of("a")), WEEK)
    off = recorded(cluster, None)
    assert has(created(off, DAY)) == (DAY, False)


def test_recording_is_switched_on_changed_and_off_while_the_queue_runs() -> None:
    cluster = created(cluster_of("a", "b"))
    seen = []
    for record in (None, WEEK, WEEK, DAY, None, None, WEEK):
        cluster = recorded(cluster, record)
        seen.append(has(cluster))
        assert transactions.record_queue(cluster, RecordQueue("q", record, "again"), 9.0) is cluster
    assert seen == [(None, False), (WEEK, True), (WEEK, True), (DAY, True), (DAY, False), (DAY, False), (WEEK, True)]
    assert told(cluster)[ProcessKind.EXCHANGE] == Recording(WEEK, TAPES, on=True)
    assert told(recorded(cluster, None))[ProcessKind.EXCHANGE] == Recording(WEEK, TAPES, on=False)
    with pytest.raises(QueueNotFound):
        transactions.record_queue(cluster, RecordQueue("other", None, "t"), 9.0)


def test_it_is_known_since_when_a_queue_is_recorded_again() -> None:
    def since(cluster: ClusterState) -> float:
        return transactions.record_of(cluster, "q").recorded_since

    cluster = created(cluster_of("a", "b"), WEEK)
    assert since(cluster) == 0.0, "from its beginning"
    for at, record in ((20.0, DAY), (30.0, None)):
        cluster = transactions.record_queue(cluster, RecordQueue("q", record, "r"), at)
        assert since(cluster) == 0.0
    for at in (40.0, 50.0):
        cluster = transactions.record_queue(cluster, RecordQueue("q", DAY, "r"), at)
        assert since(cluster) == 40.0


@pytest.mark.parametrize("change", [created, lambda cluster, record: recorded(created(cluster), record)])
def test_more_copies_than_hosts_and_impossible_ones_are_refused(change: Callable[[ClusterState, Record], ClusterState]) -> None:
    cluster = cluster_of("a", "b")
    for record in (Record(copies=3), Record(ack=3)):
        with pytest.raises(NoHosts, match="3 copies of each message need as many hosts, 2 are there"):
            change(cluster, record)
    with pytest.raises(InvalidConfiguration, match="days"):
        change(cluster, Record(days=-1))
    assert has(change(cluster, Record(copies=2, ack=2))) == (Record(copies=2, ack=2), True)


def test_a_lost_host_keeps_nobody_from_asking_for_what_is_so_already() -> None:
    cluster = lost(created(cluster_of("a", "b"), DAY), "b")
    assert transactions.record_queue(cluster, RecordQueue("q", DAY, "again"), 9.0) is cluster
    assert has(created(cluster, DAY)) == (DAY, True)


# --- stores -----------------------------------------------------------------------------------------------------------


def test_every_host_runs_a_store_once_a_queue_is_recorded_and_from_then_on() -> None:
    cluster = created(cluster_of("a", "b"))
    assert lacking_stores(cluster) == []
    cluster = recorded(cluster, WEEK)
    assert all("store" in host.assigned for host in cluster.hosts.values())
    late = cluster.with_host(Host("c", HostRegistration("10.0.0.c", 1, HostPayload("1", 8))))
    off = transactions.record_queue(late, RecordQueue("q", None, "r"), 9.0)
    assert lacking_stores(late) == lacking_stores(off) == ["c"]


def test_a_queue_is_kept_once_stores_run_for_its_copies_or_on_all_hosts() -> None:
    cluster = created(cluster_of("a", "b", "c", "d"), WEEK)
    kept = [transactions.keeps(obey(cluster, *names), cluster.queues["q"]) for names in ("", "a", "ab", "abc", "abcd")]
    assert kept == [False, False, False, True, True]
    assert not transactions.keeps(obey(cluster, *"abcd", store=ProcessState.STARTING), cluster.queues["q"])
    assert transactions.keeps(lost(lost(obey(cluster, *"ab"), "c"), "d"), cluster.queues["q"])
    off = recorded(cluster, None)
    assert transactions.keeps(off, off.queues["q"])
    plain = created(cluster_of("a"))
    assert transactions.keeps(plain, plain.queues["q"])


def test_a_host_that_drains_and_has_no_store_is_not_waited_for() -> None:
    cluster = cluster_of("a", "b")
    cluster = created(cluster.with_host(replace(cluster.hosts["b"], draining_wanted=True)), WEEK)
    assert "store" not in cluster.hosts["b"].assigned
    assert transactions.keeps(obey(cluster, "a", "b"), cluster.queues["q"])


def test_stores_are_known_by_what_hosts_last_told() -> None:
    cluster = obey(created(cluster_of("a", "b", "c", "d"), WEEK), "a", "b")
    cluster = obey(lost(cluster, "b"), "c", store=ProcessState.STARTING)
    ports = {name: list(cluster.hosts[name].assigned).index("store") + 7000 for name in "abc"}
    assert store_endpoints(cluster) == {name: f"tcp://10.0.0.{name}:{port}" for name, port in ports.items()}


# --- described --------------------------------------------------------------------------------------------------------


def handlers(cluster: ClusterState, logs: dict[str, bytes]) -> tuple[Handlers, Mock]:
    """Of a leader who sees this cluster, and finds these logs in ZooKeeper."""
    serving = Mock()
    serving.term.view.cluster = cluster
    serving.term.logs = AsyncMock(return_value=logs)
    return Handlers(Mock(serving=lambda: serving), "gcm", 1.0, CHANCE), serving.term


async def test_no_queue_is_made_in_the_place_of_one_that_cannot_be_read() -> None:
    cluster = created(cluster_of("a", "b"), DAY)
    leader, term = handlers(replace(cluster, queues={}, unreadable=frozenset({"q"})), {})
    term.view.until, term.change = AsyncMock(), AsyncMock(side_effect=AssertionError("changed"))
    for request in (wire.CreateQueue("q", "again"), CreateMissing("q", "again")):
        with pytest.raises(UnknownFormat, match="damaged"):
            await leader.handle(b"", request)


async def test_the_whole_is_made_once_however_many_ask_for_it() -> None:
    cluster = obey(created(cluster_of("a", "b"), DAY), "a", "b")
    leader, term = handlers(cluster, {})
    first, second = [await leader.handle(b"", wire.GetCluster()) for _ in range(2)]
    assert isinstance(first, wire.ClusterView)
    assert isinstance(second, wire.ClusterView)
    assert second.queues is first.queues
    assert second.time > first.time, "as of now: deltas go on from there"
    term.view.cluster = recorded(transactions.stop_queue(cluster, "q"), None)
    third = await leader.handle(b"", wire.GetCluster())
    assert isinstance(third, wire.ClusterView)
    assert [one.record.running for one in third.queues] == [False]


async def test_tapes_are_told_with_their_exchanges_and_the_stores() -> None:
    cluster = obey(created(cluster_of("a", "b"), DAY), "a", "b")
    (first,) = cluster.queues["q"].exchanges
    logs = {tape_log(TAPES, first): b"one", tape_log(TAPES, "gone"): b"two"}
    leader, term = handlers(cluster, logs)
    found = await leader.handle(b"", wire.DescribeTapes("q"))
    views = (
        wire.TapeView(tape_log(TAPES, first), first, True, b"one"),
        wire.TapeView(tape_log(TAPES, "gone"), "gone", False, b"two"),
    )
    assert found == wire.Tapes(TAPES, DAY, True, views, store_endpoints(cluster), cluster.queues["q"].transaction)
    assert len(found.stores) == 2
    term.logs.assert_awaited_once_with(tapes_prefix(TAPES), only_asked=True)
    stopped = recorded(transactions.stop_queue(cluster, "q"), None)
    leader, _ = handlers(stopped, logs)
    again = await leader.handle(b"", wire.DescribeTapes("q"))
    assert isinstance(again, wire.Tapes)
    assert (again.recorded, [view.live for view in again.views]) == (False, [False, False])


async def test_many_tapes_are_told_in_parts_to_who_asks_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 10)
    cluster = obey(created(cluster_of("a", "b"), DAY), "a", "b")
    logs = {tape_log(TAPES, name): b"123456" for name in "efg"}
    leader, _ = handlers(cluster, logs)
    whole = await leader.handle(b"", wire.DescribeTapes("q"))
    assert isinstance(whole, wire.Tapes)
    assert ([view.exchange for view in whole.views], whole.more) == (["e", "f", "g"], False)
    told, after, more = list[wire.TapeView](), "", True
    while more:
        part = await leader.handle(b"", wire.DescribeTapes("q", after))
        assert isinstance(part, wire.Tapes)
        told += part.views
        after, more = part.views[-1].log, part.more
        assert part.stores == whole.stores
    assert tuple(told) == whole.views


async def test_an_exchange_that_was_just_made_is_told_as_one_that_lives() -> None:
    before = created(cluster_of("a"), WEEK)
    after = transactions.create_exchange(before, CreateExchange("q", "x"), 1.0, CHANCE)
    fresh = transactions.exchange_id("q", "x")
    leader, term = handlers(before, {})

    async def logs(_: str, *, only_asked: bool) -> dict[str, bytes]:
        term.view.cluster = after
        return {tape_log(TAPES, fresh): b""}

    term.logs = logs
    found = await leader.handle(b"", wire.DescribeTapes("q"))
    assert isinstance(found, wire.Tapes)
    assert [(view.exchange, view.live) for view in found.views] == [(fresh, True)]


async def test_what_has_no_tapes_says_why() -> None:
    leader, term = handlers(created(cluster_of("a")), {})
    with pytest.raises(NotRecorded, match="queue 'q' is not recorded: `roq queue record`"):
        await leader.handle(b"", wire.DescribeTapes("q"))
    with pytest.raises(QueueNotFound):
        await leader.handle(b"", wire.DescribeTapes("other"))
    term.logs.assert_not_awaited()


# --- removed ----------------------------------------------------------------------------------------------------------


class ZooKeeperTwin:
    """What a term asks of its session, with nothing but logs in it. silent: it does not answer."""

    def __init__(self, *logs: str) -> None:
        self.logs = {log: f"of {log}".encode() for log in logs}
        self.silent = False
        self.watch_data = self.watch_children = Mock()

    async def children(self, path: str) -> list[str]:
        assert path == paths.LOGS
        if self.silent:
            raise ZooKeeperUnavailable("no answer")
        return [*self.logs, "removed meanwhile"]

    async def get(self, path: str) -> Node | None:
        data = self.logs.get(path.removeprefix("logs/"))
        return Node(data, 0, 1, 1, 0) if data is not None else None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [await self.get(path) for path in paths]

    async def multi(self, operations: tuple[Op, ...]) -> None:
        for one in operations:
            if isinstance(one, Delete) and one.path.startswith("logs/") and self.logs.pop(one.path[5:], None) is None:
                raise NoNode("no such node", one.path)


@asynccontextmanager
async def term_of(zookeeper: ZooKeeperTwin, cluster: ClusterState) -> AsyncIterator[LeaderTerm]:
    session: Any = zookeeper
    term = LeaderTerm(session, Fence(1, 1), cluster, Counters())
    yield term
    await term.end(None)


async def test_a_term_reads_the_logs_of_a_prefix_and_is_over_if_it_can_not() -> None:
    zookeeper = ZooKeeperTwin("tape.b.2", "tape.a.1", "tape.b.1", "0123")
    async with term_of(zookeeper, cluster_of("a")) as term:
        assert await term.logs("tape.b.") == {"tape.b.1": b"of tape.b.1", "tape.b.2": b"of tape.b.2"}
        assert await term.logs("removed") == {}
        zookeeper.silent = True
        with pytest.raises(Unavailable, match="logs could not be read: no answer"):
            await term.logs("tape.b.", only_asked=True)
        assert not term.ended.done()
        with pytest.raises(NotLeader, match="logs could not be read: no answer"):
            await term.logs("tape.b.")
        assert term.ended.done()


class StoresTwin:
    """The stores' part of an erasure. held: names of segments (with a ~) and blobs, by host."""

    held: ClassVar[dict[str, set[str]]] = {}

    def __init__(self, directory: StaticDirectory) -> None:
        self.directory = directory

    async def segments(self, host: str, prefix: str) -> list[str]:
        if host == "silent":
            raise LogUnavailable("no answer")
        return [name for name in sorted(self.held[host]) if "~" in name and name.startswith(prefix)]

    async def inventory(self, host: str, prefix: str) -> list[store.BlobView]:
        return [store.BlobView(name, 1, 0.0) for name in sorted(self.held[host]) if "~" not in name and name.startswith(prefix)]

    async def request(self, host: str, request: store.DeleteSegment | store.DeleteBlob, _: type) -> None:
        self.held[host].remove(request.segment if isinstance(request, store.DeleteSegment) else request.blob)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    monkeypatch.setattr(background, "Stores", StoresTwin)
    monkeypatch.setattr(StoresTwin, "held", {})
    return StoresTwin.held


def removed(cluster: ClusterState) -> ClusterState:
    """Its hosts have stopped all that was of it."""
    after = written(cluster, transactions.remove_queue(cluster, RemoveQueue("q", "r"), 8.0), "q", STORES)
    return obey(after, "a", "b")


def test_a_removal_tells_the_next_leader_which_tapes_there_were() -> None:
    cluster = created(cluster_of("a", "b"), WEEK)
    entry = removed(recorded(cluster, None)).transactions["r"]
    assert entry.tapes == tapes_prefix(TAPES)
    assert from_json(to_json(entry), ClientTransaction) == entry
    assert removed(created(cluster_of("a", "b"))).transactions["r"].tapes == ""
    old = b'{"id":"r","action":"remove-queue","queue":"q","hosts":["a"],"created":7.0,"exchange":"","log":""}'
    assert from_json(old, ClientTransaction) == ClientTransaction("r", Action.REMOVE_QUEUE, "q", ("a",), 7.0)


async def test_a_removed_queue_takes_its_tapes_with_it(held: dict[str, set[str]]) -> None:
    """Also one whose log is gone already, as the leader before did that; nothing of any other log."""
    others = {"tape.other.1~1.0", "0123~1.0", "0123/blob"}
    mine = {f"{tape_log(TAPES, 'e1')}~1.0", f"{tape_log(TAPES, 'e1')}~2.1", f"{tape_log(TAPES, 'forgotten')}~1.0"}
    held |= {"a": {*others, *mine}, "b": {*mine, f"{tape_log(TAPES, 'e1')}/snapshot"}}
    zookeeper = ZooKeeperTwin(tape_log(TAPES, "e1"), tape_log(TAPES, "e2"), "tape.other.1", "0123")
    async with term_of(zookeeper, removed(obey(created(cluster_of("a", "b"), WEEK), "a", "b"))) as term:
        finisher = Finisher(term)
        await finisher.settle("r", 5.0)
        assert set(zookeeper.logs) == {"tape.other.1", "0123"}
        async with asyncio.timeout(5.0):
            while held["b"] or held["a"] != others:
                await asyncio.sleep(0)
        await finisher.stop()


async def test_a_removed_work_queue_takes_its_log_with_it(held: dict[str, set[str]]) -> None:
    cluster = cluster_of("a", "b")
    cluster = work_queues.create(cluster, CreateWorkQueue("w", "t-w"), 7.0, CHANCE)
    log = cluster.work_queues["w"].spec.log
    cluster = written(cluster, work_queues.remove(cluster, RemoveWorkQueue("w", "r"), 8.0), STORES)
    cluster = obey(created(cluster, WEEK), "a", "b")
    held |= {name: {f"{log}~1.0", f"{log}/payload", f"{log}0~1.0", "tape.t.e~1.0"} for name in "ab"}
    zookeeper = ZooKeeperTwin(log, f"{log}0")
    async with term_of(zookeeper, cluster) as term:
        finisher = Finisher(term)
        await finisher.settle("r", 5.0)
        assert set(zookeeper.logs) == {f"{log}0"}
        async with asyncio.timeout(5.0):
            while len(held["a"]) + len(held["b"]) > 4:
                await asyncio.sleep(0)
        await finisher.stop()
    assert held == {name: {f"{log}0~1.0", "tape.t.e~1.0"} for name in "ab"}


async def test_a_store_that_is_silent_or_does_not_run_keeps_its_part(held: dict[str, set[str]]) -> None:
    cluster = obey(created(cluster_of("a", "b", "silent"), WEEK), "a", "b", "silent")
    cluster = obey(cluster, "b", store=ProcessState.STARTING)
    held |= {name: {"tape.t.e~1.0"} for name in ("a", "b", "silent")}
    await erase(cluster, "tape.t.")
    assert held == {"a": set(), "b": {"tape.t.e~1.0"}, "silent": {"tape.t.e~1.0"}}
