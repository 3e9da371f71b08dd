"""What is said to be on a host still, and when `roq host evacuate` may say that it is empty. A master that answers is there.

Not covered: logs and ranges (tests/integration/test_evacuation.py).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from gcm.cluster import ClusterState
from gcm.evacuator import RemainsCounter
from gcm.term import LeaderTerm
from roq.cli.host_leave import has_left
from roq.runtime.rpc import RpcServer
from roq.wire import master
from roq.wire.assignment import Leaving
from roq.wire.hosts import HostRemains
from tests.unit.test_evacuation import lost, made, told


@pytest.mark.parametrize("now", list(Leaving))
def test_it_is_empty_only_if_what_was_asked_for_is_still_asked_for(now: Leaving) -> None:
    """Processes have left, and then somebody called it off: the command must not say that the host may be removed."""
    remains = HostRemains("a", now, segments=0 if now is Leaving.EVERYTHING else 7)
    assert has_left(Leaving.EVERYTHING, remains) == (now is Leaving.EVERYTHING)
    assert has_left(Leaving.PROCESSES, remains) == (now is not Leaving.NOTHING)
    assert not has_left(Leaving.EVERYTHING, HostRemains("a", Leaving.EVERYTHING, segments=7))
    assert not has_left(Leaving.PROCESSES, None)


class NoLogs:
    """As much of a term as counting needs."""

    def __init__(self, cluster: ClusterState) -> None:
        self.view = SimpleNamespace(cluster=cluster)

    async def logs(self, prefix: str, *, only_asked: bool) -> dict[str, bytes]:
        return {}


async def remains_of(cluster: ClusterState, name: str) -> HostRemains:
    counter = RemainsCounter(cast(LeaderTerm, NoLogs(cluster)))
    try:
        return await counter.count(name, 0)
    finally:
        counter.close()


@pytest.mark.parametrize("away", [False, True])
async def test_the_masters_say_what_a_lost_or_silent_store_keeps(away: bool) -> None:
    """A lost machine may have the last copies: it is not destroyed because it can't be asked."""
    held: list[str] = []

    async def answer(peer: bytes, request: master.CountHeld) -> master.Counted:
        held.append(request.host)
        return master.Counted(7)

    server = RpcServer("127.0.0.1", 0, master.Request, answer)
    try:
        cluster = made("ab", "b", "b", "b")
        at = cluster.hosts["b"]
        assert at.report is not None
        ports = {one.name: {"clients": server.port} for one in at.report.processes}
        processes = tuple(msgspec.structs.replace(one, ports=ports[one.name]) for one in at.report.processes)
        report = msgspec.structs.replace(at.report, address="127.0.0.1", processes=processes)
        cluster = told(cluster.with_host(replace(at, report=report)), "a")
        remains = await remains_of(lost(cluster, "a") if away else cluster, "a")
        assert (remains.payloads, held, remains.data) == (7, ["a"], True)
    finally:
        server.close()
    emptied = cluster.with_host(replace(cluster.hosts["a"], assigned={}))
    assert (await remains_of(emptied, "a")).payloads == 0
    assert (await remains_of(replace(cluster, work_queues={}), "a")).payloads == 0


async def test_a_master_that_does_not_serve_is_told() -> None:
    cluster = lost(told(made("ab", "b", "b", "b"), "a"), "b")
    remains = await remains_of(cluster, "a")
    assert (remains.payloads, remains.data, remains.left) == (-1, True, False)
    assert any("do not say what it keeps of them" in why and why.endswith(": w") for why in remains.waits)
