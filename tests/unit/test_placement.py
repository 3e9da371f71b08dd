"""Placement and what the GCM decides: pure functions, no ZooKeeper."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from gcm import transactions
from gcm.cluster import ClusterState, Host, HostRegistration, exchange_name, queue_info
from gcm.placement import place, place_exchange
from gcm.reconcile import assign, assign_all, changes, stamp
from roq.coordination.link import Create, Delete, SetData
from roq.errors import (
    ExchangeNotFound,
    HostFull,
    HostNotFound,
    InvalidConfiguration,
    LastExchange,
    NoHosts,
    NotReady,
    ProcessFailed,
    QueueConflict,
    QueueNotFound,
    QueueStopped,
)
from roq.wire.assignment import HostReport, Overflow, ProcessKind, ProcessState, QueueSettings, RunningProcess
from roq.wire.gcm import CreateExchange, CreateQueue, DrainHost, RemoveExchange, RemoveQueue, SetPolicy
from roq.wire.hcm import HostPayload
from roq.wire.policy import Policy, QueueRule

BUSY = Policy(queue=QueueRule(max_publishers_per_exchange=2))


def host(name: str, exchanges_max: int = 8) -> Host:
    return Host(name, HostRegistration(f"10.0.0.{len(name)}", 1, HostPayload("1", exchanges_max)))


def cluster_of(*hosts: Host) -> ClusterState:
    return ClusterState(epoch=1, hosts={entry.name: entry for entry in hosts})


def created(cluster: ClusterState, name: str, where: str = "", seed: int = 1, **settings: object) -> ClusterState:
    request = CreateQueue(name, f"t-{name}", QueueSettings(**settings), where)  # type: ignore[arg-type]
    after = transactions.create_queue(cluster, request, 7.0, random.Random(seed))
    return stamp(cluster, assign(after, [name], cluster))


def obey(cluster: ClusterState, name: str, port: int = 7000, state: ProcessState = ProcessState.RUNNING) -> ClusterState:
    """The host reports exactly what it was assigned."""
    at = cluster.hosts[name]
    processes = tuple(
        RunningProcess(spec.name, spec.kind, spec.queue, spec.exchange, state, 1, {"clients": port, "kpis": port + 1})
        for spec in at.assigned.values()
    )
    return cluster.with_host(replace(at, report=HostReport(name, "10.9.9.9", "1", cluster.epoch, at.revision, processes)))


# --- placement ---------------------------------------------------------------------------------------------------------


def test_automatic_placement_spreads_queues_evenly() -> None:
    cluster = cluster_of(host("a", 100), host("b", 100), host("c", 100))
    for number in range(30):
        cluster = created(cluster, f"q{number}", seed=number)
    assert [entry.monitors for entry in cluster.hosts.values()] == [10, 10, 10]


def test_equal_hosts_are_chosen_at_random() -> None:
    """Defect 6 of the original: `(int) Math.random() % n` always chose the first host."""
    cluster = cluster_of(*(host(f"h{number}") for number in range(5)))
    chance = random.Random(3)
    chosen = Counter(place(cluster, "", chance).name for _ in range(1000))
    assert set(chosen) == set(cluster.hosts)
    assert min(chosen.values()) > 120


def test_fewest_monitors_come_before_free_slots() -> None:
    cluster = created(cluster_of(host("large", 100), host("small", 4)), "q", "large")
    assert place(cluster, "", random.Random()).name == "small"
    assert place_exchange(cluster, "", random.Random()).name == "large"


def test_full_draining_and_lost_hosts_take_nothing() -> None:
    full = created(cluster_of(host("full", 1)), "q").hosts["full"]
    draining = replace(host("draining"), draining_wanted=True)
    by_itself = replace(host("by-itself"), registration=HostRegistration("x", 1, HostPayload("1", 8, draining=True)))
    lost = Host("lost")
    cluster = cluster_of(full, draining, by_itself, lost)
    with pytest.raises(HostFull, match="3 hosts"):
        place(cluster, "", random.Random())
    for name in ("full", "draining", "by-itself"):
        with pytest.raises(HostFull, match=name):
            place(cluster, name, random.Random())
    for name in ("lost", "unknown"):
        with pytest.raises(HostNotFound, match=name):
            place(cluster, name, random.Random())
    with pytest.raises(NoHosts):
        place(cluster_of(lost), "", random.Random())


# --- queues ------------------------------------------------------------------------------------------------------------


def test_creation_is_idempotent_by_name_and_refuses_other_settings() -> None:
    cluster = created(cluster_of(host("a")), "orders, all")
    assert created(cluster, "orders, all") is cluster or created(cluster, "orders, all") == cluster
    with pytest.raises(QueueConflict):
        created(cluster, "orders, all", overflow=Overflow.BLOCK)


def test_created_queue_has_three_processes_on_one_host() -> None:
    cluster = created(cluster_of(host("a"), host("b")), "q", "b")
    assert not cluster.hosts["a"].assigned
    kinds = [spec.kind for spec in cluster.hosts["b"].assigned.values()]
    assert kinds == [ProcessKind.MONITOR, ProcessKind.SCALING, ProcessKind.EXCHANGE]
    assert cluster.hosts["b"].revision == 1


def test_more_replicas_than_hosts_are_accepted_and_recorded() -> None:
    assert created(cluster_of(host("a")), "q", replication=3).queues["q"].settings.replication == 3


@pytest.mark.parametrize("settings", [QueueSettings(replication=0), QueueSettings(max_frame_bytes=10)])
def test_impossible_settings(settings: QueueSettings) -> None:
    with pytest.raises(InvalidConfiguration):
        transactions.check_settings(settings)


def test_ready_when_all_run_as_reported_by_a_live_host() -> None:
    cluster = created(cluster_of(host("a")), "q")
    assert not queue_info(cluster, cluster.queues["q"]).ready
    cluster = obey(cluster, "a")
    info = queue_info(cluster, cluster.queues["q"])
    assert info.ready
    assert [(at.address, at.clients, at.kpis) for at in info.monitors] == [("10.9.9.9", 7000, 7001)]
    lost = cluster.with_host(replace(cluster.hosts["a"], registration=None))
    assert not queue_info(lost, lost.queues["q"]).ready


def test_removed_name_waits_until_its_old_processes_are_gone() -> None:
    cluster = obey(created(cluster_of(host("a")), "q"), "a")
    request = RemoveQueue("q", "remove")
    removed = transactions.remove_queue(cluster, request, 8.0)
    entry = removed.transactions["remove"]
    removed = stamp(cluster, assign(removed, ["q"], cluster))
    revisions = {"a": removed.hosts["a"].revision}
    assert not removed.hosts["a"].assigned
    assert not transactions.none_left(removed, entry, entry.subject, revisions)
    with pytest.raises(NotReady):
        created(removed, "q")
    assert transactions.remove_queue(removed, request, 9.0) is removed  # the same again
    with pytest.raises(QueueNotFound):
        transactions.remove_queue(removed, RemoveQueue("q", "other"), 9.0)
    gone = obey(removed, "a")
    assert transactions.none_left(gone, entry, entry.subject, revisions)
    assert created(gone, "q").queues["q"]


def test_report_of_an_older_assignment_proves_nothing() -> None:
    cluster = obey(created(cluster_of(host("a")), "q"), "a")
    processes = [("a", "monitor/q")]
    assert transactions.all_run(cluster, processes, {"a": 1})
    assert not transactions.all_run(cluster, processes, {"a": 2})
    with pytest.raises(ProcessFailed, match="monitor/q on host a"):
        transactions.all_run(obey(cluster, "a", state=ProcessState.FAILED), processes, {"a": 1})


def test_stop_and_start_under_the_next_term() -> None:
    cluster = created(cluster_of(host("a")), "q")
    stopped = stamp(cluster, assign(transactions.stop_queue(cluster, "q"), ["q"], cluster))
    assert not stopped.hosts["a"].assigned
    assert transactions.stop_queue(stopped, "q") is stopped
    with pytest.raises(QueueStopped):
        transactions.create_exchange(stopped, CreateExchange("q", "t"), 1.0, random.Random())
    started = stamp(stopped, assign(transactions.start_queue(stopped, "q"), ["q"], stopped))
    assert [spec.term for spec in started.hosts["a"].assigned.values()] == [2, 2, 2]
    assert transactions.start_queue(started, "q") is started


# --- Exchanges, policies, hosts ----------------------------------------------------------------------------------------


def test_exchange_away_from_its_monitor_knows_the_monitors_ports() -> None:
    cluster = created(cluster_of(host("a"), host("b")), "q", "a")
    request = CreateExchange("q", "t1", "b")
    after = transactions.create_exchange(cluster, request, 1.0, random.Random())
    name = exchange_name("q", transactions.exchange_id("q", "t1"))
    early = assign(after, ["q"], cluster)
    assert name not in early.hosts["b"].assigned  # nobody knows the Monitor's ports yet
    known = assign(obey(early, "a", 7000), ["q"], early)
    address = known.hosts["b"].assigned[name].monitor
    assert address is not None
    assert address.clients == 7000
    moved = assign(obey(known, "a", 7100), ["q"], known)
    address = moved.hosts["b"].assigned[name].monitor
    assert address is not None
    assert address.clients == 7100
    silent = assign(obey(moved, "a", state=ProcessState.STARTING), ["q"], moved)
    assert silent.hosts["b"].assigned == moved.hosts["b"].assigned  # while the Monitor restarts
    assert transactions.create_exchange(silent, request, 2.0, random.Random()) is silent


def test_exchanges_are_removed_down_to_the_last() -> None:
    cluster = created(cluster_of(host("a")), "q")
    (first,) = cluster.queues["q"].exchanges
    with pytest.raises(LastExchange):
        transactions.remove_exchange(cluster, RemoveExchange("q", first, "r"), 1.0)
    with pytest.raises(ExchangeNotFound):
        transactions.remove_exchange(cluster, RemoveExchange("q", "nonsense", "r"), 1.0)
    cluster = transactions.create_exchange(cluster, CreateExchange("q", "t"), 1.0, random.Random())
    after = transactions.remove_exchange(cluster, RemoveExchange("q", first, "r"), 1.0)
    assert list(after.queues["q"].exchanges) == [transactions.exchange_id("q", "t")]
    assert transactions.remove_exchange(after, RemoveExchange("q", first, "r"), 2.0) is after


def test_policy_reaches_the_scaling_process() -> None:
    cluster = created(cluster_of(host("a")), "q")
    for policy in (BUSY, None):
        after = assign(transactions.set_policy(cluster, SetPolicy("q", policy, "t")), ["q"], cluster)
        assert after.hosts["a"].assigned["scaling/q"].policy == policy
        assert after.policy("q") == (policy or Policy())
        cluster = after


def test_draining_is_a_change_of_the_assignment() -> None:
    cluster = cluster_of(host("a"))
    after = stamp(cluster, transactions.drain_host(cluster, DrainHost("a", True, "t")))
    assert after.hosts["a"].assignment(1).draining
    assert after.hosts["a"].revision == 1
    with pytest.raises(HostNotFound):
        transactions.drain_host(cluster, DrainHost("x", True, "t"))


# --- writing -----------------------------------------------------------------------------------------------------------


def test_difference_of_two_clusters_as_operations() -> None:
    empty = cluster_of(host("a"))
    one = created(empty, "q")
    assert [(type(op), op.path) for op in changes(empty, one)] == [
        (Create, "transactions/queue/t-q"),
        (Create, "queues/q"),
        (Create, "hcm-state/a/assignment"),
    ]
    none = stamp(one, assign(transactions.without_queue(one, "q"), ["q"], one))
    assert [(type(op), op.path) for op in changes(one, none)] == [
        (Delete, "transactions/queue/t-q"),
        (Delete, "queues/q"),
        (SetData, "hcm-state/a/assignment"),
    ]
    assert not changes(one, one)


def test_new_leader_repairs_every_assignment() -> None:
    whole = created(created(cluster_of(host("a"), host("b")), "q1", "a"), "q2", "b")
    torn = whole.with_host(replace(whole.hosts["a"], assigned={})).with_host(
        replace(whole.hosts["b"], assigned={**whole.hosts["a"].assigned, **whole.hosts["b"].assigned})
    )
    repaired = assign_all(torn)
    assert {name: entry.assigned for name, entry in repaired.hosts.items()} == {
        name: entry.assigned for name, entry in whole.hosts.items()
    }
    assert assign_all(whole).hosts == whole.hosts
