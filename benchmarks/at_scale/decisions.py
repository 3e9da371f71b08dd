"""What the leading GCM computes for one creation, one report and one broadcast, by the size of the cluster: its own code over
values in memory, nothing waits. Processor time of one core, so that a machine that does other things as well disturbs little.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from gcm.cluster import ClusterState, Host, HostRegistration, view
from gcm.evacuation import subjects
from gcm.rebalance import next_move
from gcm.reconcile import assign, assign_all, changes, stamp
from gcm.recovery import finished, lacking, lost_hosts
from gcm.topology import Stamp, delta
from gcm.transactions import create_exchange, create_queue, end, exchange_id
from hcm.machine import ROLES
from roq.wire.assignment import HostReport, ProcessState, QueueRecord, QueueSettings, RunningProcess
from roq.wire.gcm import CreateExchange, CreateQueue
from roq.wire.hcm import HostPayload

REPEATS, FEW = 30, 3
EXCHANGES_MAX = 1_000


class Decisions(msgspec.Struct, frozen=True):
    """Milliseconds of processor time. create: one creation decided, and what is written for it. look: the leader's own, once a
    second while something changes. begin: every assignment compared, at the start of a term. whole: of the cluster, made and
    encoded. delta: the same of one Exchange more."""

    hosts: int
    queues: int
    create_ms: float
    look_ms: float
    begin_ms: float
    whole_ms: float
    whole_bytes: int
    delta_ms: float
    delta_bytes: int


def cluster_of(hosts: int, queues: int) -> ClusterState:
    """Everything runs, evenly spread: hosts `host-1` and on; queues `q-0` and on, with a process of each kind."""
    names = [f"host-{number}" for number in range(1, hosts + 1)]
    records = {}
    for number in range(queues):
        at = names[number % hosts]
        record = QueueRecord(f"q-{number}", QueueSettings(), True, at, 1, {f"{number:016x}": at}, 0.0, f"t-{number}")
        records[record.name] = record
    there = {name: Host(name, HostRegistration("127.0.0.1", 1, HostPayload("i", EXCHANGES_MAX))) for name in names}
    cluster = assign_all(ClusterState(0, there, records))
    return replace(cluster, hosts={name: reported(replace(host, revision=1)) for name, host in cluster.hosts.items()})


def reported(host: Host) -> Host:
    """Runs what it shall."""
    running = tuple(
        RunningProcess(
            *(spec.name, spec.kind, spec.queue, spec.exchange, ProcessState.RUNNING, 4711),
            {role: 7000 + number for number, role in enumerate(ROLES[spec.kind])},
        )
        for spec in host.assigned.values()
    )
    return replace(host, report=HostReport(host.name, "127.0.0.1", "i", 0, host.revision, running))


def decisions(hosts: int, queues: int) -> Decisions:
    """All of them for one size."""
    cluster, chance = cluster_of(hosts, queues), random.Random(1)
    numbers = iter(range(queues, queues + 1_000_000))

    def create() -> None:
        nonlocal cluster
        request = CreateQueue(f"q-{(number := next(numbers))}", f"t-{number}")
        after = stamp(cluster, assign(create_queue(cluster, request, 0.0, chance), [request.name], cluster))
        changes(cluster, after)
        cluster = end(after, request.transaction)

    def look() -> None:
        lost_hosts(cluster)
        lacking(cluster)
        finished(cluster)
        subjects(cluster)
        next_move(cluster)

    def whole() -> bytes:
        return msgspec.msgpack.encode(view(cluster, "127.0.0.1:5500", 0.0))

    request = CreateExchange("q-0", "e")
    before = cluster
    wanted = stamp(before, assign(create_exchange(before, request, 0.0, chance), ["q-0"], before))
    at = wanted.queues["q-0"].exchanges[exchange_id("q-0", "e")]
    one_more = wanted.with_host(reported(wanted.host(at)))

    def changed() -> bytes:
        return msgspec.msgpack.encode(delta(before, 0.0, one_more, Stamp("127.0.0.1:5500", 1.0)))

    return Decisions(
        hosts=hosts,
        queues=queues,
        create_ms=_ms(create, REPEATS),
        look_ms=_ms(look, FEW),
        begin_ms=_ms(lambda: assign_all(cluster), FEW),
        whole_ms=_ms(whole, FEW),
        whole_bytes=len(whole()),
        delta_ms=_ms(changed, REPEATS),
        delta_bytes=len(changed()),
    )


def _ms(work: Callable[[], object], repeats: int) -> float:
    begun = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - begun) * 1000 / repeats
