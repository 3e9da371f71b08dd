"""What the GCM decides when hosts are lost and join: pure functions, no ZooKeeper."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from gcm import recovery, transactions
from gcm.cluster import Action, ClientTransaction, ClusterState, Host, HostRegistration, exchange_name, queue_info
from gcm.reconcile import assign, assign_all, changes, stamp
from roq.coordination import paths
from roq.coordination.link import Create, Delete
from roq.wire.assignment import (
    LEASE_UNKNOWN_SECONDS,
    FormerProcess,
    HostReport,
    MonitorRole,
    ProcessKind,
    ProcessSpec,
    ProcessState,
    QueueRecord,
    QueueSettings,
    RunningProcess,
    from_json,
    to_json,
)
from roq.wire.gcm import CreateExchange, CreateQueue
from roq.wire.hcm import HostPayload

CHANCE = random.Random(5)


def host(name: str, exchanges_max: int = 8) -> Host:
    return Host(name, HostRegistration(f"10.0.0.{name}", 1, HostPayload("1", exchanges_max)))


def cluster_of(*names: str, exchanges_max: int = 8) -> ClusterState:
    return ClusterState(epoch=1, hosts={name: host(name, exchanges_max) for name in names})


def written(before: ClusterState, after: ClusterState, *queues: str) -> ClusterState:
    """As a term does: the assignments follow, and get revisions."""
    return stamp(before, assign(after, queues, before))


def obey(cluster: ClusterState, *names: str, states: dict[str, ProcessState] | None = None) -> ClusterState:
    """The hosts report what they were assigned, every process on ports of its own."""
    for name in names:
        at = cluster.hosts[name]
        processes = tuple(
            RunningProcess(
                *(spec.name, spec.kind, spec.queue, spec.exchange, (states or {}).get(spec.name, ProcessState.RUNNING), 1),
                {"clients": 7000 + 2 * number, "kpis": 7001 + 2 * number},
            )
            for number, spec in enumerate(at.assigned.values())
        )
        report = HostReport(name, f"10.0.0.{name}", "1", cluster.epoch, at.revision, processes)
        cluster = cluster.with_host(replace(at, report=report))
    return cluster


def settle(cluster: ClusterState, *queues: str) -> ClusterState:
    """Everybody obeys and the addresses get around."""
    alive = [name for name, at in cluster.hosts.items() if at.alive]
    for _ in range(3):
        cluster = obey(cluster, *alive)
        cluster = written(cluster, cluster, *queues)
    return obey(cluster, *alive)


def created(cluster: ClusterState, name: str, where: str, replication: int = 1) -> ClusterState:
    request = CreateQueue(name, f"t-{name}", QueueSettings(replication), where)
    after = written(cluster, transactions.create_queue(cluster, request, 7.0, random.Random(1)), name)
    return settle(transactions.end(after, f"t-{name}"), name)


def with_exchange(cluster: ClusterState, queue: str, where: str, transaction: str = "x") -> ClusterState:
    request = CreateExchange(queue, transaction, where)
    after = transactions.create_exchange(cluster, request, 1.0, random.Random())
    return settle(transactions.end(written(cluster, after, queue), transaction), queue)


def lose(cluster: ClusterState, *names: str) -> ClusterState:
    for name in names:
        at = cluster.hosts[name]
        cluster = cluster.with_host(replace(at, registration=None, report=None, last_report=at.report or at.last_report))
    return cluster


def recover(cluster: ClusterState, *, steps: int = 2) -> ClusterState:
    """All queues, as the repairer does; steps 1: dies before the replication factor is restored."""
    for queues in recovery.lost_hosts(cluster).values():
        for queue in queues:
            cluster = written(cluster, recovery.fail_over(cluster, queue, CHANCE), queue)
    for queue in recovery.lacking(cluster) if steps > 1 else ():
        cluster = written(cluster, recovery.repair(cluster, queue, CHANCE), queue)
    return cluster


def monitors_of(cluster: ClusterState, queue: str) -> dict[str, ProcessSpec]:
    """Assigned Monitors by host, lost hosts included."""
    name = f"{ProcessKind.MONITOR}/{queue}"
    return {at.name: at.assigned[name] for at in cluster.hosts.values() if name in at.assigned}


def check(cluster: ClusterState, *, whole: bool = True) -> None:
    """C3 and C4: on live hosts one active Monitor, R - 1 backups elsewhere, one ScalingProcess, each Exchange once, no more."""
    names = Counter(name for at in cluster.hosts.values() for name in at.assigned)
    assert not any(at.assigned for at in cluster.hosts.values() if not at.alive)
    for queue, record in cluster.queues.items():
        monitors = monitors_of(cluster, queue)
        roles = [spec.role for spec in monitors.values()]
        assert monitors[record.monitor_host].role is MonitorRole.ACTIVE
        assert roles.count(MonitorRole.ACTIVE) == 1
        assert set(monitors) == {*record.monitor_hosts}
        if whole:
            assert len(monitors) == record.settings.replication
        assert all(spec.term == record.term for spec in monitors.values())
        assert f"scaling/{queue}" in cluster.hosts[record.monitor_host].assigned
        assert names[f"scaling/{queue}"] == 1
        for exchange, where in record.exchanges.items():
            assert names[exchange_name(queue, exchange)] == 1
            assert exchange_name(queue, exchange) in cluster.hosts[where].assigned
    assert names.total() == sum(
        2 + len(record.backups) + len(record.exchanges) for record in cluster.queues.values() if record.running
    )


# --- creation ----------------------------------------------------------------------------------------------------------


def test_monitors_of_a_queue_are_on_distinct_hosts_and_know_each_other() -> None:
    cluster = created(cluster_of("a", "b", "c", "d"), "q", "a", 3)
    check(cluster)
    record = cluster.queues["q"]
    for spec in monitors_of(cluster, "q").values():
        assert [address.host for address in spec.monitors] == ["a", *record.backups]
        assert [address.role for address in spec.monitors] == [MonitorRole.ACTIVE, MonitorRole.BACKUP, MonitorRole.BACKUP]
    assert queue_info(cluster, record).monitors == monitors_of(cluster, "q")["a"].monitors


def test_as_many_replicas_as_there_are_hosts_and_the_rest_when_one_joins() -> None:
    cluster = created(cluster_of("a", "b"), "q", "a", 3)
    assert cluster.queues["q"].backups == ("b",)
    assert recovery.lacking(cluster) == []
    cluster = cluster.with_host(replace(host("drained"), draining_wanted=True))
    assert recovery.lacking(cluster) == []
    cluster = recover(cluster.with_host(host("c")))
    assert cluster.queues["q"].backups == ("b", "c")
    check(settle(cluster, "q"))


def test_a_queue_of_one_monitor_is_written_once() -> None:
    cluster = created(cluster_of("a"), "q", "a")
    assert cluster.hosts["a"].revision == 1
    assert monitors_of(cluster, "q")["a"].monitors == ()


def test_restarting_monitor_changes_no_assignment() -> None:
    cluster = with_exchange(created(cluster_of("a", "b", "c"), "q", "a", 2), "q", "c")
    for state in (ProcessState.STARTING, ProcessState.FAILED):
        down = obey(cluster, "a", states={"monitor/q": state})
        assert not changes(down, written(down, down, "q"))


def test_given_up_backup_goes_to_another_host_if_there_is_one() -> None:
    cluster = created(cluster_of("a", "b"), "q", "a", 2)
    failed = obey(cluster, "b", states={"monitor/q": ProcessState.FAILED})
    assert transactions.serves(failed, failed.queues["q"], {})
    assert not changes(failed, recover(failed))
    cluster = recover(failed.with_host(host("c")))
    assert cluster.queues["q"].backups == ("c",)
    assert not cluster.hosts["b"].assigned


# --- loss --------------------------------------------------------------------------------------------------------------


def test_lost_active_monitor_is_replaced_by_a_running_backup() -> None:
    cluster = with_exchange(created(cluster_of("a", "b", "c", "d"), "q", "a", 3), "q", "d")
    first, second = cluster.queues["q"].backups
    cluster = obey(cluster, first, states={"monitor/q": ProcessState.STARTING})
    lost = next(iter(cluster.queues["q"].exchanges))
    after = recover(lose(cluster, "a"), steps=1)
    record = after.queues["q"]
    assert (record.monitor_host, record.term, record.backups) == (second, 2, (first,))
    assert lost not in record.exchanges
    assert len(record.exchanges) == 2
    check(after, whole=False)  # the new Monitor's ports are known, so that all Exchanges are assigned in the same write
    for spec in (spec for at in after.hosts.values() for spec in at.assigned.values() if spec.kind is ProcessKind.EXCHANGE):
        assert spec.term == 2
        assert spec.monitor is None or (spec.monitor.host, spec.monitor.term) == (second, 2)
    whole = settle(recover(after), "q")
    check(whole)
    assert {*whole.queues["q"].monitor_hosts} == {"b", "c", "d"}


def test_recovery_is_idempotent_and_may_stop_anywhere() -> None:
    cluster = created(created(cluster_of("a", "b", "c", "d"), "q1", "a", 3), "q2", "b", 3)
    lost = lose(cluster, "a")
    half = written(lost, recovery.fail_over(lost, "q1", CHANCE), "q1")
    for start in (lost, half, recover(lost, steps=1), recover(lost)):
        done = settle(recover(start), "q1", "q2")
        check(done)
        assert done.queues["q1"].term == 2
        assert done.queues["q2"].term == 1
        assert not changes(done, recover(done))
        assert assign_all(done).hosts == done.hosts
        assert recovery.lost_hosts(done) == {}


def test_the_new_monitor_knows_what_may_live_on_at_the_lost_host() -> None:
    cluster = with_exchange(created(cluster_of("a", "b", "c"), "q", "a"), "q", "c")
    [old, kept] = cluster.queues["q"].exchanges
    last = cluster.hosts["a"].report
    assert last is not None
    processes = tuple(msgspec.structs.replace(one, ports={**one.ports, "control": 9}) for one in last.processes)
    told = msgspec.structs.replace(last, processes=processes, lease_seconds=8.0)
    after = recover(lose(cluster.with_host(replace(cluster.hosts["a"], report=told)), "a"))
    exchange = FormerProcess(f"exchange/q/{old}", "a", old, "10.0.0.a", 9, 8.0)
    monitor = FormerProcess("monitor/q", "a", "", "10.0.0.a", 9, 8.0)
    assert {*after.queues["q"].former} == {exchange, monitor}
    [spec] = monitors_of(after, "q").values()
    assert {*spec.former} == {exchange, monitor}
    assert kept in after.queues["q"].exchanges
    again = recover(lose(settle(after, "q"), after.queues["q"].monitor_host))
    assert {exchange, monitor} < {*again.queues["q"].former}, "nobody has seen the end of those"
    back = replace(again, hosts={**again.hosts, "a": host("a")})
    assert not {"a"} & {one.host for one in next(iter(monitors_of(assign_all(back), "q").values())).former}, "it stopped them"


def test_of_a_host_that_never_reported_the_lease_is_waited_for() -> None:
    cluster = created(cluster_of("a", "b"), "q", "a")
    cluster = cluster.with_host(replace(cluster.hosts["a"], report=None))
    after = recover(lose(cluster, "a"))
    assert {(one.port, one.lease_seconds) for one in after.queues["q"].former} == {(0, LEASE_UNKNOWN_SECONDS)}


def reported(cluster: ClusterState, name: str, process: str) -> bool:
    report = cluster.hosts[name].last_report
    return report is not None and process in {one.name for one in report.processes}


def test_what_a_lost_host_was_told_to_run_and_has_not_reported_yet_may_live_on() -> None:
    """Two hosts are lost one soon after the other: what replaced the first one's part had reported to the Monitor only."""
    cluster = with_exchange(created(cluster_of("a", "b", "c"), "q", "a"), "q", "b")
    [moved] = [id for id, at in cluster.queues["q"].exchanges.items() if at == "b"]
    after = recover(lose(cluster, "b"))
    [replacing] = after.queues["q"].exchanges.keys() - cluster.queues["q"].exchanges.keys()
    second = after.queues["q"].exchanges[replacing]
    assert not reported(after, second, exchange_name("q", replacing))
    again = recover(lose(after, second))
    lives = {(one.exchange, one.host): one.lease_seconds for one in again.queues["q"].former if one.exchange}
    assert (moved, "b") in lives
    assert lives[(replacing, second)] == LEASE_UNKNOWN_SECONDS


def test_what_a_lost_host_took_in_and_never_ran_is_not_waited_for() -> None:
    cluster = with_exchange(created(cluster_of("a", "b", "c"), "q", "a"), "q", "b")
    [failed] = [id for id, at in cluster.queues["q"].exchanges.items() if at == "b"]
    report = cluster.hosts["b"].report
    assert report is not None
    others = tuple(one for one in report.processes if one.exchange != failed)
    cluster = cluster.with_host(replace(cluster.hosts["b"], report=msgspec.structs.replace(report, processes=others)))
    assert failed not in {one.exchange for one in recover(lose(cluster, "b")).queues["q"].former}


def test_an_exchange_that_ran_before_its_creation_was_answered_is_replaced_by_another_one() -> None:
    """Under the same name, the Monitor would take the new process for another life of the old one, which may live on."""
    cluster = created(cluster_of("a", "b", "c"), "q", "a")
    cluster = written(cluster, transactions.create_exchange(cluster, CreateExchange("q", "x", "b"), 1.0, CHANCE), "q")
    id = cluster.transactions["x"].exchange
    ran = recover(lose(settle(cluster, "q"), "b"))
    assert id not in ran.queues["q"].exchanges
    assert [(one.exchange, one.host) for one in ran.queues["q"].former] == [(id, "b")]
    never = recover(lose(cluster, "b"))
    assert never.queues["q"].exchanges[id] in ("a", "c"), "the request is answered with what it asked for"


def test_records_of_before_and_after_know_each_other() -> None:
    """A record without lost processes is written as before, and one without the field is read."""
    record = QueueRecord("q", QueueSettings(), True, "a", 1, {"e": "a"}, 1.0)
    older = to_json(record).replace(b',"former":[]', b"")
    assert from_json(older, QueueRecord) == record


def test_without_a_backup_a_new_monitor_is_placed_and_exchanges_start_beside_it() -> None:
    cluster = with_exchange(created(cluster_of("a", "b"), "q", "a"), "q", "a")
    after = recover(lose(cluster, "a"))
    record = after.queues["q"]
    assert (record.monitor_host, record.term, {*record.exchanges.values()}) == ("b", 2, {"b"})
    check(after)


def test_lost_backup_is_replaced_and_the_term_stays() -> None:
    cluster = created(cluster_of("a", "b", "c", "d"), "q", "a", 3)
    gone = cluster.queues["q"].backups[0]
    after = settle(recover(lose(cluster, gone)), "q")
    check(after)
    assert after.queues["q"].term == 1
    assert gone not in {address.host for address in monitors_of(after, "q")["a"].monitors}


def test_what_cant_be_placed_stays_until_there_is_room() -> None:
    cluster = created(cluster_of("a", "b", exchanges_max=1), "q", "a", 2)
    cluster = created(cluster, "other", "b")
    (lost,) = cluster.queues["q"].exchanges
    after = recover(lose(cluster, "a"))
    record = after.queues["q"]
    assert (record.monitor_host, record.exchanges) == ("b", {lost: "a"})
    assert [*after.hosts["a"].assigned] == [exchange_name("q", lost)]
    assert recovery.lost_hosts(after) == {"a": ["q"]}
    assert not changes(after, recover(after))
    joined = settle(recover(after.with_host(host("c"))), "q")
    assert [*joined.queues["q"].exchanges.values()] == ["c"]
    check(joined)
    back = after.with_host(replace(after.hosts["a"], registration=cluster.hosts["a"].registration))
    assert recovery.lost_hosts(back) == {}  # it runs that one Exchange again, under the new Monitor
    address = back.hosts["a"].assigned[exchange_name("q", lost)].monitor
    assert address is not None
    assert (address.host, address.term) == ("b", 2)


def test_only_host_lost_changes_nothing() -> None:
    cluster = lose(created(cluster_of("a"), "q", "a", 2), "a")
    assert not changes(cluster, recover(cluster))


def test_slots_are_never_used_twice() -> None:
    cluster = cluster_of("a", "b", "c", exchanges_max=2)
    cluster = with_exchange(created(cluster, "q", "a", 2), "q", "a")
    cluster = created(created(cluster, "r", "b"), "s", "c")
    after = settle(recover(lose(cluster, "a")), "q", "r", "s")
    check(after)
    assert [after.hosts[name].exchanges for name in "bc"] == [2, 2]


def test_exchange_that_is_being_created_keeps_its_name() -> None:
    cluster = created(cluster_of("a", "b", "c"), "q", "a", 2)
    request = CreateExchange("q", "x", "c")
    cluster = written(cluster, transactions.create_exchange(cluster, request, 1.0, random.Random()), "q")
    id = transactions.exchange_id("q", "x")
    after = recover(lose(cluster, "c"))
    where = after.queues["q"].exchanges[id]
    assert where in ("a", "b")
    assert after.transactions["x"] == ClientTransaction("x", Action.CREATE_EXCHANGE, "q", (where,), 1.0, id)


def test_stopped_queue_moves_and_starts_nothing() -> None:
    cluster = created(cluster_of("a", "b", "c"), "q", "a", 2)
    cluster = written(cluster, transactions.stop_queue(cluster, "q"), "q")
    after = recover(lose(cluster, "a"))
    assert not any(at.assigned for at in after.hosts.values())
    assert "a" not in after.hosts_of(after.queues["q"])
    check(settle(written(after, transactions.start_queue(after, "q"), "q"), "q"))


@pytest.mark.parametrize("seed", range(30))
def test_any_sequence_of_losses_and_returns_ends_whole(seed: int) -> None:
    chance = random.Random(seed)
    cluster = cluster_of(*"abcdef", exchanges_max=30)
    queues = [f"q{number}" for number in range(6)]
    for number, queue in enumerate(queues):
        cluster = created(cluster, queue, chance.choice("abcdef"), 1 + number % 4)
    cluster = with_exchange(with_exchange(cluster, "q1", "c"), "q3", "d")
    for _ in range(12):
        name = chance.choice("abcdef")
        at = cluster.hosts[name]
        if at.alive and sum(one.alive for one in cluster.hosts.values()) > 4:
            cluster = lose(cluster, name)
        elif not at.alive:
            cluster = cluster.with_host(replace(host(name, 30), assigned=at.assigned, revision=at.revision))
        cluster = recover(cluster, steps=chance.choice((1, 2)))
        if chance.random() < 0.7:
            cluster = settle(cluster, *queues)
    cluster = settle(recover(settle(cluster, *queues)), *queues)
    check(cluster)


# --- the record of a recovery ------------------------------------------------------------------------------------------


def test_recovery_is_recorded_until_nothing_is_left() -> None:
    cluster = created(cluster_of("a", "b"), "q", "a", 2)
    lost = lose(cluster, "a")
    begun = recovery.begin(lost, recovery.lost_hosts(lost), 9.0)
    assert recovery.begin(begun, ["a"], 10.0) is begun
    path = paths.transaction(paths.TransactionKind.HOST, "a")
    assert [(type(op), op.path) for op in changes(lost, begun)] == [(Create, path)]
    assert recovery.finished(begun) == []
    done = recover(begun)
    assert recovery.finished(done) == ["a"]
    ended = recovery.end(done, ["a"])
    assert [(type(op), op.path) for op in changes(done, ended)] == [(Delete, path)]
    back = begun.with_host(cluster.hosts["a"])
    assert recovery.finished(back) == ["a"]


def test_records_of_an_older_version_are_read() -> None:
    old = b"""{"name":"q","settings":{"replication":2},"running":true,"monitor_host":"a","term":1,"exchanges":{},"created":1}"""
    record = from_json(old, QueueRecord)
    assert record.backups == ()
    assert record.monitor_hosts == ("a",)
    spec = from_json(b'{"kind":"monitor","queue":"q","monitor":{"host":"a","address":"x","clients":1,"kpis":2}}', ProcessSpec)
    assert (spec.role, spec.monitors) == (MonitorRole.ACTIVE, ())
    assert spec.monitor is not None
    assert spec.monitor.role is MonitorRole.ACTIVE
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ProcessSpec) == spec
