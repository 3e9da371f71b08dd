"""Who is a follower, and who may hold ranges: joins are gathered, restarts forgiven, losses not."""

from __future__ import annotations

from dataclasses import replace

from gcm.cluster import ClusterState, Host, HostRegistration
from gcm.followers import JOIN_SECONDS, RESTART_SECONDS, SETTLE_SECONDS, FollowerMembership, endpoints
from roq.shuffle.node.server import REPORT_SECONDS
from roq.shuffle.record import FollowerHosts
from roq.wire.assignment import HostReport, ProcessKind, ProcessState, RunningProcess
from roq.wire.hcm import HostPayload


def host(name: str, *, runs: bool = True, alive: bool = True, port: int = 7000, draining: bool = False) -> Host:
    state = ProcessState.RUNNING if runs else ProcessState.STARTING
    ports = {"clients": 6000, "shuffle": port} if port else {"clients": 6000}
    store = RunningProcess("store", ProcessKind.STORE, "", "", state, 1, ports)
    registration = HostRegistration("127.0.0.1", 1, HostPayload("one", 4)) if alive else None
    report = HostReport(name, "127.0.0.1", "one", 1, 1, (store,)) if alive else None
    return Host(name, registration, draining_wanted=draining, report=report)


def cluster(*hosts: Host) -> ClusterState:
    return replace(ClusterState(), hosts={each.name: each for each in hosts})


def names(hosts: FollowerHosts) -> tuple[str, str]:
    return "".join(sorted(hosts.running)), "".join(sorted(hosts.members))


def test_followers_are_hosts_whose_store_runs_and_takes_part() -> None:
    known = cluster(host("a"), host("b", runs=False), host("c", alive=False), host("d", port=0))
    assert endpoints(known) == {"a": "tcp://127.0.0.1:7000"}


def test_at_the_beginning_all_that_run_are_members_and_nobody_is_lost() -> None:
    membership = FollowerMembership(100.0)
    hosts, seconds = membership.hosts(cluster(host("a"), host("b", runs=False)), 100.0)
    assert (names(hosts), hosts.settled, seconds) == (("a", "a"), False, SETTLE_SECONDS)
    hosts, seconds = membership.hosts(cluster(host("a"), host("b")), 100.0 + SETTLE_SECONDS)
    assert (names(hosts), hosts.settled, seconds) == (("ab", "a"), True, JOIN_SECONDS)


def test_joining_hosts_are_gathered_and_a_restart_is_no_loss() -> None:
    membership = FollowerMembership(0.0)
    now = SETTLE_SECONDS
    membership.hosts(cluster(host("a")), now)
    membership.admit(cluster(host("a")), now)
    assert names(membership.hosts(cluster(host("a"), host("b")), now)[0]) == ("ab", "a")
    now += JOIN_SECONDS
    assert names(membership.hosts(cluster(host("a"), host("b")), now)[0]) == ("ab", "ab")
    hosts, seconds = membership.hosts(cluster(host("a"), host("b", runs=False)), now + 1)
    assert (names(hosts), seconds) == (("a", "ab"), RESTART_SECONDS - 1)
    hosts, seconds = membership.hosts(cluster(host("a"), host("b", runs=False)), now + RESTART_SECONDS)
    assert (names(hosts), seconds) == (("a", "a"), None)


def test_a_lost_host_is_lost_at_once_and_a_draining_one_gives_but_takes_nothing() -> None:
    membership = FollowerMembership(0.0)
    membership.admit(cluster(host("a"), host("b")), 0.0)
    assert names(membership.hosts(cluster(host("a"), host("b", alive=False)), 60.0)[0]) == ("a", "a")
    assert names(membership.hosts(cluster(host("a", draining=True)), 61.0)[0]) == ("a", "")


def test_who_runs_and_is_no_member_yet_is_joining_unless_it_drains() -> None:
    membership = FollowerMembership(0.0)
    membership.admit(cluster(host("a")), 0.0)
    now = SETTLE_SECONDS
    membership.hosts(cluster(host("a")), now)
    hosts, _ = membership.hosts(cluster(host("a"), host("b"), host("c", draining=True)), now)
    assert (names(hosts), hosts.joining) == (("abc", "a"), frozenset("b"))
    membership.hosts(cluster(host("a", alive=False), host("b")), now + JOIN_SECONDS)
    hosts, _ = membership.hosts(cluster(host("a"), host("b")), now + 60)
    assert (names(hosts), hosts.joining) == (("ab", "b"), frozenset("a")), "it is back, perhaps with all it had"


def test_what_a_former_leader_told_is_used_before_anything_is_done_on_a_loss() -> None:
    assert REPORT_SECONDS <= SETTLE_SECONDS
