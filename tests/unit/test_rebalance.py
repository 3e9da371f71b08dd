"""What moves by itself so that hosts are level: it ends, never swings, begins nothing while there is something better to do.

Not covered: how a move goes on (test_evacuation.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gcm import evacuation, rebalance
from gcm.cluster import Action, ClientTransaction, ClusterState, HostRecovery
from gcm.evacuation import DrainExchange
from gcm.reconcile import assign, stamp
from roq.wire.assignment import Leaving, QueueRecord, QueueSettings, work_subject
from roq.wire.fleet import FleetLimits, FleetRecord, MachineRecord, MachineState
from roq.wire.options import ClusterOptions
from roq.wire.work_queue import WorkQueueRecord, WorkQueueSpec
from tests.unit.test_evacuation import obeyed, told
from tests.unit.test_recovery import cluster_of, host

CHANCE = random.Random(3)
MOVES_MAX = 300


def settled(cluster: ClusterState) -> ClusterState:
    """Everything is assigned and runs."""
    subjects = tuple(cluster.records())
    for _ in range(3):
        cluster = stamp(cluster, assign(cluster, subjects, cluster))
        for name in cluster.hosts:
            cluster = obeyed(cluster, name)
    return cluster


def filled(cluster: ClusterState, queues: int, works: int, exchanges: int, chance: random.Random, among: str) -> ClusterState:
    """With these many queues and work queues, all on hosts of `among`."""
    names = [name for name in cluster.hosts if name in among]
    made = {}
    for number in range(queues):
        at = chance.choice(names)
        others = [name for name in names if name != at]
        backups = tuple(chance.sample(others, min(len(others), chance.randint(0, 1))))
        places = {f"e{number}-{each}": chance.choice(names) for each in range(exchanges)}
        settings = QueueSettings(1 + len(backups))
        made[f"q{number}"] = QueueRecord(f"q{number}", settings, True, at, 1, places, 0.0, "t", backups)
    spec = WorkQueueSpec("log", 1, 1)
    work = {f"w{n}": WorkQueueRecord(f"w{n}", spec, 0, chance.choice(names), 1, (), 0.0, "t") for n in range(works)}
    return settled(replace(cluster, queues=made, work_queues=work))


def levelled(cluster: ClusterState, moves_max: int = MOVES_MAX) -> tuple[ClusterState, int]:
    """Until nothing moves any more, and how many moves that took."""
    for count in range(moves_max):
        move = rebalance.next_move(cluster)
        if move is None:
            return cluster, count
        before = cluster
        cluster = settled(rebalance.begun(cluster, move, (), CHANCE))
        assert cluster.records() != before.records(), "a move was decided, and not begun"
        assert len(evacuation.subjects(cluster)) <= rebalance.MOVES_AT_ONCE
        while (what := evacuation.step(cluster, move.subject, CHANCE)) is not None:
            assert isinstance(what, ClusterState | DrainExchange)
            if isinstance(what, DrainExchange):
                what = evacuation.drained(cluster, what.queue, what.exchange)
            cluster = settled(stamp(cluster, assign(what, (move.subject,), cluster)))
    pytest.fail(f"it moves on after {moves_max} moves")


def gap(cluster: ClusterState, load: rebalance.Load) -> int:
    loads = [load(at) for at in cluster.hosts.values()]
    return max(loads) - min(loads)


def test_after_a_cold_start_what_the_first_host_got_is_shared() -> None:
    cluster = filled(cluster_of("a", exchanges_max=40), 12, 6, 2, random.Random(1), "a")
    cluster = cluster.with_host(host("b", 40)).with_host(host("c", 40))
    assert (cluster.hosts["a"].exchanges, rebalance.seats(cluster.hosts["a"])) == (24, 18)
    after, moves = levelled(cluster)
    assert gap(after, rebalance.slots_used) < rebalance.GAP_MIN
    assert gap(after, rebalance.seats) < rebalance.GAP_MIN
    assert sum(at.exchanges for at in after.hosts.values()) == 24
    assert sum(map(rebalance.seats, after.hosts.values())) == 18
    assert moves <= 24 + 18
    assert levelled(after) == (after, 0), "it is at rest"


@pytest.mark.parametrize("seed", range(25))
def test_any_cluster_comes_to_rest_and_every_move_makes_it_more_level(seed: int) -> None:
    chance = random.Random(seed)
    names = "abcdef"[: chance.randint(2, 6)]
    among = names[: chance.randint(1, len(names))]
    cluster = filled(cluster_of(*names, exchanges_max=60), chance.randint(1, 8), chance.randint(0, 6), 3, chance, among)
    count = {name: (len(record.exchanges), len(record.monitor_hosts)) for name, record in cluster.queues.items()}
    after, _ = levelled(cluster)
    assert gap(after, rebalance.slots_used) <= max(gap(cluster, rebalance.slots_used), rebalance.GAP_MIN)
    assert gap(after, rebalance.seats) <= max(gap(cluster, rebalance.seats), rebalance.GAP_MIN)
    assert {name: (len(record.exchanges), len(record.monitor_hosts)) for name, record in after.queues.items()} == count
    assert all(len(record.hosts) == 1 for record in after.work_queues.values())


def test_nothing_moves_for_little() -> None:
    two = cluster_of("a", "b", exchanges_max=40)
    assert rebalance.next_move(filled(two, 1, 1, 2, random.Random(1), "a")) is None
    many = filled(cluster_of("a", exchanges_max=99), 20, 0, 1, random.Random(1), "a")
    full = filled(cluster_of("b", exchanges_max=99), 17, 0, 1, random.Random(1), "b")
    renamed = {f"r{name}": replace_name(record, f"r{name}") for name, record in full.queues.items()}
    both = ClusterState(hosts={**many.hosts, **cluster_of("b", exchanges_max=99).hosts}, queues={**many.queues, **renamed})
    both = settled(both)
    assert both.hosts["a"].exchanges - both.hosts["b"].exchanges == rebalance.GAP_MIN
    assert rebalance.next_move(both) is None, "3 of 20 are less than a fifth"


def replace_name(record: QueueRecord, name: str) -> QueueRecord:
    return QueueRecord(name, record.settings, True, record.monitor_host, 1, {f"{name}-e": record.monitor_host}, 0.0, "t")


def test_it_waits_while_there_is_something_else_to_do() -> None:
    cluster = filled(cluster_of("a", exchanges_max=40), 6, 0, 1, random.Random(1), "a")
    cluster = cluster.with_host(host("b", 40)).with_host(host("c", 40))
    move = rebalance.next_move(cluster)
    assert move is not None
    assert "a runs 6 Exchanges" in move.why
    off = replace(cluster, options=ClusterOptions(rebalance=False))
    recovering = replace(cluster, recoveries={"x": HostRecovery("x", 1, 0.0)})
    creating = replace(cluster, transactions={"t": ClientTransaction("t", Action.CREATE_QUEUE, "q", (), 0.0)})
    leaving = told(cluster, "a", Leaving.PROCESSES)
    assert [rebalance.next_move(one) for one in (off, recovering, creating, leaving)] == [None] * 4
    other = rebalance.next_move(cluster, {(move.subject, move.target)})
    assert other is not None
    assert (other.subject, other.target) != (move.subject, move.target), "what was tried lately is not tried again"


def test_a_host_that_stays_drained_and_empty_keeps_nothing_from_moving() -> None:
    cluster = filled(cluster_of("a", exchanges_max=40), 6, 0, 1, random.Random(1), "a")
    cluster = cluster.with_host(host("b", 40)).with_host(host("c", 40))
    move = rebalance.next_move(told(cluster, "c", Leaving.PROCESSES))
    assert move is not None
    assert move.target == "b"


def test_an_empty_machine_that_need_not_be_there_is_filled_by_those_who_ask_alone() -> None:
    """Else it would never be idle for long, and be paid for ever."""
    cluster = filled(cluster_of("a", exchanges_max=8), 1, 0, 5, random.Random(1), "a").with_host(host("m", 8))
    machines = {"m": MachineRecord("m", MachineState.SERVING, 0.0)}
    wanted = rebalance.next_move(replace(cluster, machines=machines, fleet=FleetRecord("f", FleetLimits(least=1, most=1))))
    spare = replace(cluster, machines=machines, fleet=FleetRecord("f", FleetLimits(least=0, most=1)))
    assert wanted is not None
    assert (wanted.source, wanted.target) == ("a", "m")
    assert rebalance.next_move(spare) is None
    other = rebalance.next_move(spare.with_host(host("o", 8)))
    assert other is not None
    assert other.target == "o", "others are filled meanwhile"


def test_a_move_that_is_no_longer_right_is_not_begun() -> None:
    cluster = filled(cluster_of("a", exchanges_max=40), 6, 0, 1, random.Random(1), "a").with_host(host("b", 40))
    move = rebalance.next_move(cluster)
    assert move is not None
    off = replace(cluster, options=ClusterOptions(rebalance=False))
    assert rebalance.begun(off, move, (), CHANCE) is off
    gone = replace(cluster, queues={name: one for name, one in cluster.queues.items() if name != move.subject})
    assert rebalance.begun(gone, move, (), CHANCE) is gone


def test_a_master_goes_as_a_monitor_does() -> None:
    cluster = filled(cluster_of("a"), 0, 4, 0, random.Random(1), "a").with_host(host("b"))
    move = rebalance.next_move(cluster)
    assert move is not None
    assert (move.source, move.target, move.exchange) == ("a", "b", "")
    after, moves = levelled(cluster)
    assert moves == 1 or gap(after, rebalance.seats) < rebalance.GAP_MIN
    assert {work_subject(name) for name in after.work_queues} == set(after.records())
