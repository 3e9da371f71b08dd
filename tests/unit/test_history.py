"""The cluster's own history: who is told to write it, what is given up first, how it is added up, shown, and compared.

Not covered: real processes (tests/integration/test_history.py), Spark over it (tests/spark/test_pipeline_history.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from gcm import history, transactions
from gcm.cluster import ClusterState, Host, HostRegistration
from gcm.reconcile import assign, assign_all, stamp
from roq.cli.history import HistoryRow, history_view, since_of, state_table
from roq.cli.main import app
from roq.cli.policy import beside
from roq.client.history import ROWS_MAX, STEPS, QueueHistory, Timeline, settled
from roq.coordination.locate import GcmClient
from roq.errors import AccessDenied, FrameError, InvalidName, Unavailable
from roq.ids import is_reserved
from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.scaling.history import DECISIONS_WAITING, KPIS_WAITING, HistoryBatcher, HistoryWriter
from roq.runtime.observe import Counters
from roq.runtime.rpc import RpcServer
from roq.wire import monitor
from roq.wire.assignment import STORES, MonitorAddress, Overflow, ProcessKind, QueueRecord, QueueSettings
from roq.wire.card import CardRole, Grant, Right, new_card
from roq.wire.gcm import CreateQueue, QueueInfo, RecordQueue, RemoveQueue
from roq.wire.hcm import HostPayload
from roq.wire.kpi import (
    HISTORY_DECISIONS,
    HISTORY_KPIS,
    HISTORY_QUEUES,
    Decision,
    ExchangeKpi,
    QueueDecision,
    QueueKpi,
    SubscriberKpi,
    decision_from_json,
)
from roq.wire.policy import Policy
from roq.wire.recording import Record
from roq.wire.rights import check_member

CHANCE = random.Random(5)
BEGIN = 1_790_000_000.0  # a multiple of 5,000 s


def kpi(second: float, *, load: float = 100.0, lost: int = 0, term: int = 1, exchanges: int = 1, lag: float = 0.0) -> QueueKpi:
    found = tuple(ExchangeKpi(str(number), "h", "active", 1, load, load, load, 0.1, 1) for number in range(exchanges))
    reader = SubscriberKpi(9, True, load, load, lag, lag, 2 * lag, lost, 0)
    return QueueKpi("q", BEGIN + second, term, load, 10 * load, load, lost, found, (), (reader,), ())


def decision(second: float, action: str = "scale-out", outcome: str = "", cause: str = "too much") -> QueueDecision:
    return QueueDecision(BEGIN + second, action, cause, outcome=outcome, queue="q")


# --- the GCM ----------------------------------------------------------------------------------------------------------


def cluster_with(*queues: str, record: Record | None = None) -> ClusterState:
    hosts = {name: Host(name, HostRegistration(f"10.0.0.{name}", 1, HostPayload("1", 8))) for name in "ab"}
    cluster = ClusterState(1, hosts)
    for name in queues:
        kept = record or Record() if is_reserved(name) else None
        made = transactions.create_queue(cluster, CreateQueue(name, f"t-{name}", record=kept), 7.0, CHANCE)
        cluster = stamp(cluster, assign(made, (name, STORES), cluster))
    return cluster


def writers(cluster: ClusterState) -> set[str]:
    """Queues whose ScalingProcess is told to write."""
    specs = [spec for host in cluster.hosts.values() for spec in host.assigned.values()]
    assert all(spec.kind is ProcessKind.SCALING for spec in specs if spec.history)
    return {spec.queue for spec in specs if spec.history}


def test_every_queue_but_its_own_is_told_when_both_are_there_and_when_one_goes() -> None:
    assert writers(cluster_with("q", "r", HISTORY_DECISIONS)) == set()
    on = cluster_with("q", "r", *HISTORY_QUEUES)
    assert history.keeps_history(on)
    assert writers(on) == {"q", "r"}
    assert writers(assign_all(on)) == {"q", "r"}
    assert writers(cluster_with(*HISTORY_QUEUES, "later")) == {"later"}
    for off in (
        transactions.remove_queue(on, RemoveQueue(HISTORY_KPIS, "r"), 8.0),
        transactions.stop_queue(on, HISTORY_DECISIONS),
        transactions.record_queue(on, RecordQueue(HISTORY_KPIS, None, "r"), 9.0),
    ):
        assert writers(assign(off, HISTORY_QUEUES, on)) == set()


def test_its_names_are_reserved() -> None:
    cluster = cluster_with("q")
    for name, hint in ((HISTORY_KPIS, "`roq history on` makes it"), ("_roq.mine", "are the cluster's own$")):
        with pytest.raises(InvalidName, match=hint):
            history.check_not_reserved(cluster, name)
    history.check_not_reserved(cluster, "_roq")
    history.check_not_reserved(cluster_with(*HISTORY_QUEUES), HISTORY_KPIS)
    with pytest.raises(InvalidName, match="roq history off"):
        history.check_removable(HISTORY_DECISIONS)
    made = [history.creation(name, "t", Record(days=3)) for name in HISTORY_QUEUES]
    assert len({one.transaction for one in made}) == 2
    assert all(one.record == Record(days=3) for one in made)


def test_no_client_writes_there_whatever_its_rights() -> None:
    everything = new_card("alice", CardRole.CLIENT, bytes(32), (Grant(Right.PUBLISH, "*"), Grant(Right.READ, "*")), 0.0, 1e12)
    check_member(everything, Right.PUBLISH, "orders")
    check_member(everything, Right.READ, HISTORY_KPIS)
    with pytest.raises(AccessDenied, match="nobody else publishes"):
        check_member(everything, Right.PUBLISH, HISTORY_KPIS)
    check_member(new_card("h", CardRole.HOST, bytes(32), (), 0.0, 1e12), Right.PUBLISH, HISTORY_KPIS)


# --- the ScalingProcess -----------------------------------------------------------------------------------------------


def away() -> GcmClient:
    raise Unavailable("nobody leads")


async def test_what_can_not_be_written_waits_the_oldest_goes_and_a_switched_off_one_takes_nothing() -> None:
    counters = Counters()
    writer = HistoryWriter("q", away, counters)
    writer.note_kpi(kpi(0))
    writer.switch(True)
    for second in range(KPIS_WAITING + 3):
        writer.note_kpi(kpi(second))
    for second in range(DECISIONS_WAITING + 2):
        writer.note_decision(Decision(float(second), "hold", "why"))
    assert counters["history_dropped"] == 5
    assert [record.time - BEGIN for record in writer._kpis._waiting] == list(range(3, KPIS_WAITING + 3))  # type: ignore[attr-defined]
    running = asyncio.get_running_loop().create_task(writer.run())
    await asyncio.sleep(0)
    assert len(writer._decisions._waiting) == DECISIONS_WAITING
    assert not running.done()
    writer.switch(False)
    writer.note_kpi(kpi(0))
    assert not writer._kpis._waiting
    assert not writer._decisions._waiting
    running.cancel()


class HistoryCluster:
    """GCM and Monitor of the history's queue, and its Exchange, which may be away. left: its publisher has none."""

    def __init__(self) -> None:
        self._server = RpcServer("127.0.0.1", 0, monitor.Request, self._handle, monitor.NoticeToMonitor, self._notice)
        self.exchange: Forwarder | None = None
        self.left = asyncio.Event()
        self._path = 0

    def begin(self) -> Forwarder:
        """Another life of the Exchange."""
        self._path += 1
        self.exchange = Forwarder("127.0.0.1", 0, 0, f"e/{self._path}", QueueSettings(), Counters())
        return self.exchange

    def end(self) -> None:
        if self.exchange is not None:
            self.exchange.stop()
        self.exchange = None

    def _address(self, exchange: Forwarder) -> monitor.ExchangeAddress:
        return monitor.ExchangeAddress("e", "127.0.0.1", exchange.front_port, 1, self._path)

    async def _handle(self, peer: bytes, request: Any) -> msgspec.Struct:
        if not isinstance(request, monitor.JoinPublisher) or self.exchange is None:
            return monitor.Left()
        return monitor.PublisherWelcome(1, self._path, self._address(self.exchange), Overflow.DROP, 1 << 20)

    def _notice(self, peer: bytes, notice: Any) -> None:
        if isinstance(notice, monitor.PublisherReport) and not notice.exchange:
            self.left.set()
            if self.exchange is not None:
                self._server.notify(peer, monitor.Relocate(1, self._path, self._address(self.exchange)))

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> QueueInfo:
        record = QueueRecord(HISTORY_KPIS, QueueSettings(), True, "h", 1, {}, 0.0)
        return QueueInfo(record, (MonitorAddress("h", "127.0.0.1", self._server.port, 1),), True, Policy())

    def close(self) -> None:
        """As a GcmClient."""

    def stop(self) -> None:
        self.end()
        self._server.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


async def test_kpis_wait_while_the_exchange_of_the_history_is_away_and_the_oldest_go() -> None:
    """In the batcher, not in its publisher, which would keep those of days."""
    cluster, counters = HistoryCluster(), Counters()
    before = cluster.begin()
    batcher = HistoryBatcher(HISTORY_KPIS, "q", lambda: cast(GcmClient, cluster), counters, KPIS_WAITING, None)
    running = asyncio.get_running_loop().create_task(batcher.run())
    try:
        batcher.put(kpi(0))
        await until(lambda: before.traffic.frames_in > 1)  # behind the opening of its path
        cluster.end()
        cluster.left.clear()
        async with asyncio.timeout(10):
            await cluster.left.wait()
        for second in range(KPIS_WAITING + 30):
            batcher.put(kpi(second))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # it has looked at it
        assert counters["history_dropped"] == 30
        after = cluster.begin()
        await until(lambda: after.traffic.frames_in > 0)
        batcher.put(kpi(99))
        await until(lambda: not batcher._waiting)
        assert counters["history_dropped"] == 31
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        cluster.stop()


@pytest.mark.parametrize("queue", [HISTORY_KPIS, "é" * 128])
def test_the_history_has_none_and_what_is_no_topic_has_none(queue: str) -> None:
    writer = HistoryWriter(queue, away, Counters())
    writer.switch(True)
    writer.note_kpi(kpi(0))
    writer.note_decision(Decision(1.0, "hold", "why"))
    assert not writer._kpis._waiting
    assert not writer._decisions._waiting


def test_a_decision_travels_as_json() -> None:
    one = QueueDecision(1.5, "scale-out", "why", "e", "h", ((2**63 + 1, "e"),), "done", queue="q")
    assert decision_from_json(msgspec.json.encode(one)) == one
    with pytest.raises(FrameError):
        decision_from_json(b'{"time": 1.0, "action": "hold", "cause": "why"}')


# --- adding up --------------------------------------------------------------------------------------------------------


def test_steps_can_be_merged() -> None:
    assert all(longer % shorter == 0 for shorter, longer in pairwise(STEPS))


def test_records_become_the_shortest_periods_that_fit() -> None:
    for seconds, step in ((ROWS_MAX, 1), (ROWS_MAX + 1, 5), (150, 5), (151, 10), (3600, 300)):
        timeline = Timeline()
        for second in range(seconds):
            timeline.add(kpi(second, load=float(second)))
        periods = timeline.periods()
        assert {one.seconds for one in periods} == {step}, seconds
        assert [later.begin - one.begin for one, later in pairwise(periods)] == [float(step)] * (len(periods) - 1)
        assert sum(one.records for one in periods) == seconds
        total = sum(one.messages_per_second * one.records for one in periods)
        assert total == pytest.approx(sum(range(seconds)))
        assert periods[-1].messages_per_second_most == seconds - 1


def test_a_gap_shows_and_losses_count_once() -> None:
    timeline = Timeline()
    told = [(0, 7, 1), (1, 9, 1), (2, 9, 1), (10, 1, 2), (11, 4, 2)]  # lost counts from 0 again at another Monitor
    for second, lost, term in told:
        timeline.add(kpi(second, lost=lost, term=term, exchanges=1 + second // 10, lag=second / 10))
    periods = timeline.periods()
    assert [(one.records, one.lost) for one in periods] == [(1, 0), (1, 2), (1, 0), *[(0, 0)] * 7, (1, 1), (1, 3)]
    assert (periods[0].exchanges_least, periods[-1].exchanges_most, periods[-1].lag_seconds) == (1, 2, 1.1)
    assert Timeline().periods() == ()


def test_a_span_of_years_shows_its_end() -> None:
    timeline = Timeline()
    for week in range(100):
        timeline.add(kpi(week * 604_800))
    assert len(timeline.periods()) == ROWS_MAX
    assert timeline.periods()[-1].begin <= BEGIN + 99 * 604_800


def test_a_decision_counts_once_with_its_outcome() -> None:
    done = decision(5, outcome="created")
    assert settled([decision(9, "hold"), decision(5), done, decision(5), done]) == [done, decision(9, "hold")]


# --- showing ----------------------------------------------------------------------------------------------------------


def text(found: object) -> list[str]:
    console = Console(width=200, markup=False, emoji=False, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(found)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_decisions_stand_where_they_were_made() -> None:
    timeline = Timeline()
    for second in (0, 1, 3):
        timeline.add(kpi(second, load=1000.0 * (second + 1), exchanges=1 + second // 3, lag=0.002))
    lines = text(history_view(QueueHistory("q", timeline.periods(), (decision(1.5, outcome="created"), decision(3, "hold")))))
    assert lines[0] == "q: 3 records, a row is 1 s"
    assert lines[2].split() == ["WHEN", "MSG/s", "AT", "MOST", "DELIVERED/s", "EXCHANGES", "LAG", "LOST", "DECISION"]
    rows = [line[21:].split() for line in lines[3:]]
    assert rows[0] == ["1", "k", "████", "1", "k", "1", "k", "1", "2.0", "ms", "0"]
    assert rows[2] == ["scale-out:", "too", "much", "→", "created"]
    assert rows[3] == ["-"] * 6
    assert rows[4][-4:] == ["2", "2.0", "ms", "0"]
    assert rows[5] == ["hold:", "too", "much"]
    assert text(history_view(QueueHistory("q", (), ()))) == ["q: nothing was kept since then"]


def test_its_state_says_what_it_costs() -> None:
    lines = text(state_table([HistoryRow(HISTORY_KPIS, Record(), 3.0, 2048.0), HistoryRow(HISTORY_DECISIONS)]))
    assert "recorded: kept for 7 d" in lines[2]
    assert "2.0 KiB/s" in lines[2]
    assert lines[2].endswith("168.8 MiB")
    assert lines[3].split()[:2] == [HISTORY_DECISIONS, "off"]


@pytest.mark.parametrize("wrong", ["last", "p1.abc", "sometime"])
def test_a_history_begins_at_a_time(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        since_of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        ("queue", "show", "q", "--since", "1h"),
        ("policy", "replay", "--queue", "q"),
        ("policy", "replay", "p.toml", "--queue", "q", "--policy", "p.toml"),
        ("policy", "replay", "k.jsonl"),
        ("policy", "replay", "k.jsonl", "--policy", "p.toml", "--since", "1d"),
        ("queue", "read", "q", "--arrow", "f", "--json"),
        ("history", "on", "--days", "-1"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, list(wrong)).exit_code == 2


# --- comparing --------------------------------------------------------------------------------------------------------


def test_decisions_of_two_policies_stand_beside_each_other() -> None:
    taken = [decision(1, outcome="created"), decision(7, "scale-in", "removed")]
    would = [Decision(BEGIN + 1, "scale-out", "another cause"), Decision(BEGIN + 5, "rebalance", "why")]
    found = beside(taken, would)
    assert [(one.time - BEGIN, one.action, one.taken, one.would, one.outcome) for one in found] == [
        (1, "scale-out", True, True, "created"),
        (5, "rebalance", False, True, ""),
        (7, "scale-in", True, False, "removed"),
    ]
