"""What is done so that hosts are left: every order in which hosts obey, on every small cluster, ends, and never has less than
there was. Pure functions, no ZooKeeper.

Not covered: whether messages survive it (tests/integration/test_evacuation.py); what stores keep (test_store_leaving.py).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from zlib import crc32

import msgspec
import pytest

from gcm import evacuation, recovery, transactions
from gcm.cluster import STORE_NAME, ClusterState, exchange_name, host_infos, is_running, master_name, monitor_name
from gcm.evacuation import DrainExchange, StepWaits
from gcm.reconcile import assign, lacking_stores
from gcm.reconcile import stamp as stamped
from roq.errors import HostFull, HostNotFound, NoHosts
from roq.wire.assignment import (
    STORES,
    FormerProcess,
    HostReport,
    Leaving,
    ProcessState,
    QueueRecord,
    QueueSettings,
    RunningProcess,
    work_subject,
)
from roq.wire.fleet import MachineRecord, MachineState
from roq.wire.gcm import DrainHost
from roq.wire.work_queue import WorkQueueRecord, WorkQueueSpec
from tests.unit.test_recovery import cluster_of, host

CHANCE = random.Random(7)
QUEUE, WORK = "q", work_subject("w")
STEPS_MAX = 60


def obeyed(cluster: ClusterState, name: str, failing: frozenset[str] = frozenset()) -> ClusterState:
    """The host runs what it shall, each process on the same ports for ever. failing: those that it gives up."""
    at = cluster.hosts[name]
    processes = tuple(
        RunningProcess(
            *(spec.name, spec.kind, spec.queue, spec.exchange),
            ProcessState.FAILED if spec.name in failing else ProcessState.RUNNING,
            1,
            {port: 9000 + crc32(f"{port} of {spec.name}".encode()) % 50_000 for port in ("clients", "kpis", "control")},
        )
        for spec in at.assigned.values()
    )
    report = HostReport(name, f"10.0.0.{name}", "1", 1, at.revision, processes, leaving=at.leaving is Leaving.EVERYTHING)
    return cluster.with_host(replace(at, report=report))


def decided(before: ClusterState, after: ClusterState) -> ClusterState:
    """As a term writes it."""
    return stamped(before, assign(after, (QUEUE, WORK, STORES), before))


def all_obey(cluster: ClusterState) -> ClusterState:
    for _ in range(3):
        for name in cluster.hosts:
            cluster = obeyed(cluster, name)
        cluster = decided(cluster, cluster)
    return cluster


def made(names: str, monitors: str, exchanges: str, masters: str, running: bool = True, slots: int = 8) -> ClusterState:
    """One letter a host: where the Monitors of queue `q`, its Exchanges, and the masters of work queue `w` are, the active ones
    first."""
    empty = cluster_of(*names, exchanges_max=slots)
    settings = QueueSettings(len(monitors))
    places = {f"e{number}": at for number, at in enumerate(exchanges)}
    queue = QueueRecord(QUEUE, settings, running, monitors[0], 1, places, 0.0, "t", tuple(monitors[1:]))
    spec = WorkQueueSpec("log", 1, 1)
    work = WorkQueueRecord("w", spec, len(masters) - 1, masters[0], 1, tuple(masters[1:]), 0.0, "t")
    full = replace(empty, queues={QUEUE: queue}, work_queues={"w": work})
    return all_obey(decided(empty, full))


def told(cluster: ClusterState, name: str, leaving: Leaving = Leaving.EVERYTHING) -> ClusterState:
    return stamped(cluster, transactions.drain_host(cluster, DrainHost(name, leaving is not Leaving.NOTHING, "t", leaving)))


def says(cluster: ClusterState, name: str, *, stopping: bool) -> ClusterState:
    """The host says of itself that it is about to stop, or is back."""
    at = cluster.host(name)
    assert at.registration is not None
    payload = msgspec.structs.replace(at.registration.payload, stopping=stopping)
    return cluster.with_host(replace(at, registration=replace(at.registration, payload=payload)))


def check(cluster: ClusterState, at_first: Counter[str]) -> None:
    """At any moment there runs what ran, as far as there are hosts; and no host has a kind twice."""
    queue, work = cluster.queues[QUEUE], cluster.work_queues["w"]
    assert len({*queue.monitor_hosts}) == len(queue.monitor_hosts)
    assert len({*work.hosts}) == len(work.hosts)
    if queue.running:
        monitors = sum(is_running(cluster, at, monitor_name(QUEUE)) for at in queue.monitor_hosts)
        assert monitors >= at_first["monitors"], "fewer Monitors than there were"
        served = sum(is_running(cluster, at, exchange_name(QUEUE, id)) for id, at in queue.exchanges.items())
        assert served >= at_first["exchanges"], "fewer Exchanges than there were"
    masters = sum(is_running(cluster, at, master_name("w")) for at in work.hosts)
    assert masters >= at_first["masters"], "fewer masters than there were"


def counted(cluster: ClusterState) -> Counter[str]:
    """What is never to be less, where there are hosts enough."""
    staying = sum(not at.draining for at in cluster.hosts.values())
    queue, work = cluster.queues[QUEUE], cluster.work_queues["w"]
    return Counter(
        exchanges=len(queue.exchanges),
        monitors=min(len(queue.monitor_hosts), staying),
        masters=min(len(work.hosts), staying),
    )


def steps(cluster: ClusterState) -> list[tuple[str, ClusterState]]:
    """Every next cluster: one subject gets on, or one host obeys."""
    found = []
    for subject in (QUEUE, WORK):
        match evacuation.step(cluster, subject, random.Random(1)):
            case ClusterState() as after:
                found.append((f"step {subject}", decided(cluster, after)))
            case DrainExchange(queue, exchange, _):
                found.append((f"drain {exchange}", decided(cluster, evacuation.drained(cluster, queue, exchange))))
    for name, at in cluster.hosts.items():
        if at.reported_revision != at.revision:
            found.append((f"{name} obeys", decided(cluster, obeyed(cluster, name))))
    return found


def key(cluster: ClusterState) -> tuple[object, ...]:
    hosts = tuple(
        (sorted(at.assigned), sorted(at.running), at.reported_revision == at.revision) for at in cluster.hosts.values()
    )
    return (cluster.queues[QUEUE], cluster.work_queues["w"], hosts)


def explored(start: ClusterState, at_first: Counter[str]) -> list[ClusterState]:
    """Every state that can be reached is right; those in which nothing is left to do. No way there is longer than STEPS_MAX."""
    seen, ends = set[str](), list[ClusterState]()
    stack = [(start, 0)]
    while stack:
        cluster, depth = stack.pop()
        mark = repr(key(cluster))
        if mark in seen:
            continue
        seen.add(mark)
        assert depth < STEPS_MAX, "it does not end"
        check(cluster, at_first)
        following = steps(cluster)
        if not following:
            ends.append(cluster)
        stack += [(after, depth + 1) for _, after in following]
    assert ends
    return ends


def test_a_host_that_says_it_stops_is_left_and_takes_things_again_when_it_is_back() -> None:
    cluster = says(made("abc", "ab", "ab", "ab"), "a", stopping=True)
    assert not cluster.host("a").takes_more
    for end in explored(cluster, counted(cluster)):
        assert evacuation.processes_left(end, "a", CHANCE).processes == 0
        assert end.host("a").assignment(1).leaving is Leaving.NOTHING, "nobody has ordered that"
        assert says(end, "a", stopping=False).host("a").takes_more


PLACES = [
    ("a", "a", "a"),
    ("ab", "a", "ab"),
    ("ba", "ab", "ba"),
    ("abc", "aa", "abc"),
    ("b", "a", "b"),
    ("b", "ab", "ba"),
]


@pytest.mark.parametrize(("monitors", "exchanges", "masters"), PLACES)
def test_every_order_of_steps_ends_with_nothing_on_the_host(monitors: str, exchanges: str, masters: str) -> None:
    start = made("abc", monitors, exchanges, masters)
    cluster = told(start, "a")
    for end in explored(cluster, counted(cluster)):
        remains = evacuation.processes_left(end, "a", CHANCE)
        assert (remains.processes, remains.waits) == (0, ())
        queue, work = end.queues[QUEUE], end.work_queues["w"]
        assert len(queue.exchanges) == len(exchanges)
        assert len(queue.monitor_hosts) == min(len(monitors), 2)
        assert len(work.hosts) == min(len(masters), 2)
        assert "a" not in {*queue.monitor_hosts, *queue.exchanges.values(), *work.hosts}


@pytest.mark.parametrize(("monitors", "exchanges", "masters"), PLACES)
def test_called_off_anywhere_everything_is_as_many_as_before(monitors: str, exchanges: str, masters: str) -> None:
    """Wherever it stands when it is called off: what is one too many goes, nothing is missing."""
    start = made("abc", monitors, exchanges, masters)
    cluster = told(start, "a")
    at_first = counted(cluster)
    for _ in range(STEPS_MAX):
        for end in explored(told(cluster, "a", Leaving.NOTHING), at_first):
            whole = recovered(end)
            assert len(whole.queues[QUEUE].exchanges) == len(exchanges)
            assert len(whole.queues[QUEUE].monitor_hosts) == len(monitors)
            assert len(whole.work_queues["w"].hosts) == len(masters)
        following = steps(cluster)
        if not following:
            return
        cluster = following[0][1]
    pytest.fail("it does not end")


def recovered(cluster: ClusterState) -> ClusterState:
    """As the repairer makes up for what is missing."""
    for subject in recovery.lacking(cluster):
        cluster = recovery.repair(cluster, subject, CHANCE)
    return cluster


def test_both_hosts_that_leave_are_left_for_the_third() -> None:
    start = made("abc", "ab", "aab", "ba")
    cluster = told(told(start, "a"), "b")
    for end in explored(cluster, counted(cluster)):
        queue, work = end.queues[QUEUE], end.work_queues["w"]
        assert {*queue.monitor_hosts, *queue.exchanges.values(), *work.hosts} == {"c"}
        assert len(queue.exchanges) == 3


def test_a_host_that_dies_meanwhile_leaves_as_many_exchanges() -> None:
    """Recovery takes the Exchange that was about to take the place for it."""
    cluster = obeyed(told(made("abc", "b", "a", "b"), "a"), "a")
    names = {label for label, _ in steps(cluster)}
    assert names == {f"step {QUEUE}"}
    cluster = decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE))
    assert len(cluster.queues[QUEUE].exchanges) == 2
    dead = cluster.with_host(replace(cluster.hosts["a"], registration=None, last_report=cluster.hosts["a"].report, report=None))
    after = recovery.fail_over(dead, QUEUE, CHANCE)
    assert list(after.queues[QUEUE].exchanges) == [transactions.replacement_id(QUEUE, "e0")]


def test_a_stopped_queue_is_written_elsewhere_at_once() -> None:
    cluster = told(made("abc", "ab", "aab", "b", running=False), "a")
    assert evacuation.processes_left(cluster, "a", CHANCE).monitors == 1
    cluster = decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE))
    queue = cluster.queues[QUEUE]
    assert "a" not in {*queue.monitor_hosts, *queue.exchanges.values()}
    assert set(queue.exchanges) == {"e0", "e1", "e2"}
    assert evacuation.processes_left(cluster, "a", CHANCE).processes == 0


def test_without_a_slot_it_waits_and_says_so_and_goes_on_with_one() -> None:
    cluster = told(made("ab", "b", "aab", "b", slots=2), "a")
    answer = evacuation.step(cluster, QUEUE, CHANCE)
    assert isinstance(answer, ClusterState), "one slot is free"
    cluster = all_obey(decided(cluster, answer))
    drain = evacuation.step(cluster, QUEUE, CHANCE)
    assert isinstance(drain, DrainExchange)
    cluster = all_obey(decided(cluster, evacuation.drained(cluster, QUEUE, drain.exchange)))
    waits = evacuation.step(cluster, QUEUE, CHANCE)
    assert isinstance(waits, StepWaits)
    assert "has no other place" in waits.why
    assert evacuation.processes_left(cluster, "a", CHANCE).waits == (waits.why,)
    cluster = cluster.with_host(host("c"))
    assert isinstance(evacuation.step(cluster, QUEUE, CHANCE), ClusterState)


def test_a_monitor_that_is_given_up_where_it_goes_is_told() -> None:
    cluster = told(made("ab", "a", "a", "b"), "a")
    cluster = decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE))
    cluster = obeyed(cluster, "b", frozenset({monitor_name(QUEUE)}))
    waits = evacuation.step(cluster, QUEUE, CHANCE)
    assert isinstance(waits, StepWaits)
    assert f"{monitor_name(QUEUE)} on host b" in waits.why


def test_the_monitor_that_takes_over_is_told_of_the_one_before() -> None:
    cluster = told(made("ab", "ab", "b", "b"), "a")
    after = decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE))
    (former,) = next(spec.former for spec in after.hosts["b"].assigned.values() if spec.name == monitor_name(QUEUE))
    assert (former.host, former.planned, former.port >= 9000) == ("a", True, True)
    assert after.queues[QUEUE].term == 2


def test_its_store_ends_last_and_then_nobody_misses_the_host() -> None:
    cluster = told(made("ab", "b", "b", "b"), "a")
    assert STORE_NAME in cluster.hosts["a"].assigned
    assert not evacuation.processes_left(cluster, "a", CHANCE).left
    assert evacuation.to_empty(cluster) == ["a"]
    busy = told(made("ab", "a", "b", "b"), "a")
    assert evacuation.to_empty(busy) == []
    assert evacuation.emptied(busy, "a") is busy
    cluster = all_obey(decided(cluster, evacuation.emptied(cluster, "a")))
    assert evacuation.processes_left(cluster, "a", CHANCE).left
    assert evacuation.to_empty(cluster) == []
    assert lacking_stores(cluster) == [], "it gets none again while it is left"
    assert lacking_stores(told(cluster, "a", Leaving.NOTHING)) == ["a"]
    gone = cluster.with_host(replace(cluster.hosts["a"], registration=None, report=None))
    assert [info.host for info in host_infos(cluster)] == ["a", "b"]
    assert [info.host for info in host_infos(gone)] == ["b"]


def test_what_can_not_work_is_refused() -> None:
    cluster = made("ab", "a", "aab", "a", slots=3)
    with pytest.raises(HostNotFound):
        evacuation.check_possible(cluster, "x", Leaving.PROCESSES, {})
    evacuation.check_possible(cluster, "a", Leaving.PROCESSES, {})
    with pytest.raises(NoHosts, match="no other host takes"):
        evacuation.check_possible(told(cluster, "b", Leaving.PROCESSES), "a", Leaving.PROCESSES, {})
    narrow = cluster.with_host(msgspec_slots(cluster, "b", 2))
    with pytest.raises(HostFull, match="2 Exchanges are on host 'a', the others have 1 free"):
        evacuation.check_possible(narrow, "a", Leaving.PROCESSES, {})
    with pytest.raises(NoHosts, match="work queue w wants 2 copies, and 1 other hosts"):
        evacuation.check_possible(cluster, "a", Leaving.EVERYTHING, {"log x": 1, "work queue w": 2})
    evacuation.check_possible(cluster, "a", Leaving.PROCESSES, {"work queue w": 2})


def test_to_drain_an_evacuated_host_calls_nothing_off() -> None:
    cluster = told(made("ab", "a", "a", "a"), "a")
    assert told(cluster, "a", Leaving.PROCESSES).hosts["a"].leaving is Leaving.EVERYTHING
    assert told(cluster, "a", Leaving.NOTHING).hosts["a"].leaving is Leaving.NOTHING


def returning(cluster: ClusterState, name: str) -> ClusterState:
    return replace(told(cluster, name), machines={name: MachineRecord(name, MachineState.RETURNING, 0.0)})


@pytest.mark.parametrize(("monitors", "masters"), [("bm", "bm"), ("mb", "mb")])
def test_a_machine_is_not_given_back_with_the_only_backup(monitors: str, masters: str) -> None:
    cluster = returning(made("bm", monitors, "b", masters), "m")
    for subject in (QUEUE, WORK):
        waits = evacuation.step(cluster, subject, CHANCE)
        assert isinstance(waits, StepWaits)
        assert "no other host takes" in waits.why
    roomy = cluster.with_host(host("c"))
    for end in explored(roomy, counted(roomy)):
        assert set(end.queues[QUEUE].monitor_hosts) == set(end.work_queues["w"].hosts) == {"b", "c"}


def test_fewer_monitors_or_masters_than_wanted_are_refused() -> None:
    cluster = made("abc", "abc", "a", "ab")
    wanted = evacuation.seats_wanted(cluster, "a")
    assert wanted == {"the Monitor of q": 3, "the master of w": 2}
    assert evacuation.seats_wanted(cluster, "c") == {"the Monitor of q": 3}
    with pytest.raises(NoHosts, match="the Monitor of q wants 3 copies, and 2 other hosts"):
        evacuation.check_possible(cluster, "a", Leaving.EVERYTHING, wanted)
    evacuation.check_possible(cluster.with_host(host("d")), "a", Leaving.EVERYTHING, wanted)


def lost(cluster: ClusterState, *names: str) -> ClusterState:
    for name in names:
        at = cluster.hosts[name]
        cluster = cluster.with_host(replace(at, registration=None, last_report=at.report, report=None))
    return cluster


def with_successor(leaving: Leaving) -> tuple[ClusterState, str, str]:
    """Exchange e0 on host a, its successor on another one: both run. That one's id and host."""
    cluster = told(made("abcd", "d", "a", "d"), "a")
    cluster = all_obey(decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE)))
    cluster = told(cluster, "a", leaving)
    first = transactions.replacement_id(QUEUE, "e0")
    return cluster, first, cluster.queues[QUEUE].exchanges[first]


@pytest.mark.parametrize("leaving", [Leaving.EVERYTHING, Leaving.NOTHING])
def test_a_successor_whose_host_dies_has_one_and_its_id_is_not_used_again(leaving: Leaving) -> None:
    """NOTHING: it is levelled, or was called off. The successor may live on behind a cut."""
    cluster, first, at = with_successor(leaving)
    if at == "d":
        cluster = told(cluster, "d", Leaving.NOTHING)
    dead = lost(cluster, at)
    after = all_obey(decided(dead, recovery.fail_over(dead, QUEUE, CHANCE)))
    second = transactions.replacement_id(QUEUE, first)
    assert set(after.queues[QUEUE].exchanges) == {"e0", second}
    for end in explored(after, Counter()):
        assert set(end.queues[QUEUE].exchanges) == {second}


def test_both_the_exchange_and_its_successor_are_lost_at_once() -> None:
    cluster, first, at = with_successor(Leaving.EVERYTHING)
    dead = lost(cluster, "a", at)
    after = recovery.fail_over(dead, QUEUE, CHANCE)
    assert list(after.queues[QUEUE].exchanges) == [transactions.replacement_id(QUEUE, first)]


def test_a_new_successor_never_gets_a_former_ones_id() -> None:
    cluster = told(made("abc", "b", "a", "b"), "a")
    queue = cluster.queues[QUEUE]
    first = transactions.replacement_id(QUEUE, "e0")
    former = (FormerProcess(exchange_name(QUEUE, first), "c", first),)
    cluster = replace(cluster, queues={QUEUE: msgspec.structs.replace(queue, former=former)})
    after = evacuation.changed(cluster, QUEUE, CHANCE)
    assert set(after.queues[QUEUE].exchanges) == {"e0", transactions.replacement_id(QUEUE, first)}


def handed_over(cluster: ClusterState) -> ClusterState:
    """Its Monitor has gone to another host."""
    term = cluster.queues[QUEUE].term
    for _ in range(STEPS_MAX):
        cluster = all_obey(decided(cluster, evacuation.changed(cluster, QUEUE, CHANCE)))
        if cluster.queues[QUEUE].term > term:
            return cluster
    pytest.fail("it does not go")


def test_a_planned_end_is_told_on_until_the_term_after_the_next() -> None:
    cluster = handed_over(told(made("abc", "ab", "c", "c"), "a"))
    assert [one.host for one in cluster.queues[QUEUE].former] == ["a"]
    dead = lost(cluster, "c")
    after = recovery.fail_over(dead, QUEUE, CHANCE)
    assert [one.host for one in after.queues[QUEUE].former] == ["a", "c"], "the new Monitor may not have fenced the old one yet"
    queue = cluster.queues[QUEUE]
    planned = tuple(FormerProcess(monitor_name(QUEUE), name, planned=True) for name in "xyz")
    cluster = replace(cluster, queues={QUEUE: msgspec.structs.replace(queue, former=planned, backups=("c",))})
    cluster = told(told(all_obey(decided(cluster, cluster)), "a", Leaving.NOTHING), "b")
    after = handed_over(cluster)
    assert [one.host for one in after.queues[QUEUE].former] == ["z", "b"]


def test_a_hcm_that_does_not_know_of_it_is_told() -> None:
    cluster = told(made("ab", "b", "b", "b"), "a")
    assert evacuation.processes_left(cluster, "a", CHANCE).waits == (), "it has not taken that in yet"
    at = all_obey(cluster).hosts["a"]
    assert evacuation.processes_left(all_obey(cluster), "a", CHANCE).waits == ()
    assert at.report is not None
    old = replace(at, report=msgspec.structs.replace(at.report, leaving=False))
    (why,) = evacuation.processes_left(cluster.with_host(old), "a", CHANCE).waits
    assert "roq-hcm is of an older version" in why


def msgspec_slots(cluster: ClusterState, name: str, slots: int):  # type: ignore[no-untyped-def]
    at = cluster.hosts[name]
    assert at.registration is not None
    payload = msgspec.structs.replace(at.registration.payload, exchanges_max=slots)
    return replace(at, registration=replace(at.registration, payload=payload))


def test_random_clusters_are_left_too() -> None:
    """Larger ones, with hosts that obey late, one random order each."""
    for seed in range(150):
        chance = random.Random(seed)
        names = "abcdef"[: chance.randint(3, 6)]
        monitors = "".join(chance.sample(names, chance.randint(1, 3)))
        masters = "".join(chance.sample(names, chance.randint(1, 3)))
        exchanges = "".join(chance.choice(names) for _ in range(chance.randint(1, 6)))
        cluster = made(names, monitors, exchanges, masters)
        leaving = chance.sample(names, chance.randint(1, len(names) - 2))
        for name in leaving:
            cluster = told(cluster, name)
        at_first = counted(cluster)
        for _ in range(20 * STEPS_MAX):
            check(cluster, at_first)
            following = steps(cluster)
            if not following:
                break
            cluster = chance.choice(following)[1]
        assert not following, f"seed {seed}"
        for name in leaving:
            assert evacuation.processes_left(cluster, name, CHANCE).processes == 0, f"seed {seed}"
        assert len(cluster.queues[QUEUE].exchanges) == len(exchanges)
