"""What the GCM decides about a work queue's copies when hosts join and leave. Pure; the log's side: test_replicated_log.py."""

from __future__ import annotations

import random
from dataclasses import replace

from gcm import recovery, work_queues
from gcm.cluster import ClusterState, Host, HostRegistration
from roq.wire.assignment import HostReport, ProcessKind, ProcessState, RunningProcess, work_subject
from roq.wire.gcm import CreateWorkQueue
from roq.wire.hcm import HostPayload

CHANCE = random.Random(7)


def with_hosts(cluster: ClusterState, *names: str, store: ProcessState = ProcessState.RUNNING) -> ClusterState:
    """These hosts, each with a store, are the ones that live."""
    hosts = {}
    for name in names:
        process = RunningProcess("store", ProcessKind.STORE, "", "", store, 1, {"clients": 7000})
        report = HostReport(name, "10.0.0.1", "1", cluster.epoch, 1, (process,))
        hosts[name] = Host(name, HostRegistration("10.0.0.1", 1, HostPayload("1", 8)), report=report)
    return replace(cluster, hosts=hosts)


def created(cluster: ClusterState, name: str, write_quorum: int = 0, ack_quorum: int = 0) -> ClusterState:
    request = CreateWorkQueue(name, f"of {name}", None, write_quorum, ack_quorum, 0)
    return work_queues.create(cluster, request, 1.0, CHANCE)


def quorums(cluster: ClusterState, name: str) -> tuple[int, int]:
    spec = cluster.work_queues[name].spec
    return spec.write_quorum, spec.ack_quorum


def repaired(cluster: ClusterState) -> ClusterState:
    """As the repairer does."""
    for subject in recovery.lacking(cluster):
        cluster = recovery.repair(cluster, subject, CHANCE)
    assert recovery.lacking(cluster) == []
    return cluster


def test_quorums_nobody_chose_grow_with_the_stores_and_never_shrink() -> None:
    cluster = created(with_hosts(ClusterState(epoch=1), "a"), "q")
    log = cluster.work_queues["q"].spec.log
    seen = []
    for names in ("a", "ab", "abc", "abcdef", "ab"):
        cluster = repaired(with_hosts(cluster, *names))
        seen.append(quorums(cluster, "q"))
    assert seen == [(1, 1), (2, 2), (3, 2), (3, 2), (3, 2)]
    assert cluster.work_queues["q"].spec.log == log


def test_quorums_that_were_chosen_stay() -> None:
    cluster = created(created(with_hosts(ClusterState(epoch=1), "a", "b"), "written", write_quorum=1), "acked", ack_quorum=2)
    before = quorums(cluster, "written"), quorums(cluster, "acked")
    cluster = repaired(with_hosts(cluster, *"abcd"))
    assert (quorums(cluster, "written"), quorums(cluster, "acked")) == before == ((1, 1), (2, 2))


def test_a_host_counts_when_its_store_runs() -> None:
    cluster = with_hosts(created(with_hosts(ClusterState(epoch=1), "a"), "q"), *"abc", store=ProcessState.STARTING)
    assert work_subject("q") not in recovery.lacking(cluster)
