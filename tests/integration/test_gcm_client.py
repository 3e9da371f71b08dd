"""A client of the leading GCM that has nothing to ask keeps no connection, and has one again when it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roq.coordination import locate
from roq.coordination.locate import GcmClient
from roq.runtime import security
from roq.runtime.rpc import RpcServer
from roq.runtime.security import Security, process_security, write_secret
from roq.tools.authority import Authority
from roq.wire import gcm
from roq.wire.card import CardRole
from tests.harness.cards import as_holder

LOCAL = "127.0.0.1"
IDLE_SECONDS = 0.2
BOUND_SECONDS = 10.0


class Cluster:
    """Leaders, one of whom is named by ZooKeeper. looks: how often it was asked."""

    def __init__(self) -> None:
        self.leaders: list[RpcServer] = []
        self.looks = 0
        self.held: asyncio.Event | None = None  # answers wait for it

    def lead(self) -> RpcServer:
        """Another one leads from now on."""
        self.leaders.append(RpcServer(LOCAL, 0, gcm.Request, self._handle, allow=lambda card, request: None))
        return self.leaders[-1]

    async def _handle(self, peer: bytes, request: gcm.Request) -> gcm.Hosts:
        if self.held is not None:
            await self.held.wait()
        return gcm.Hosts(())

    async def named(self, zookeeper: str, timeout_seconds: float) -> gcm.LeaderAddress:
        self.looks += 1
        return gcm.LeaderAddress(1, LOCAL, self.leaders[-1].port, 0)


@contextmanager
def secured(by: Security) -> Iterator[None]:
    """Servers that are made meanwhile let in who shows a card."""
    before = security._process
    security._process = security._ProcessCard(by, looked=True)
    try:
        yield
    finally:
        security._process = before


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    monkeypatch.setattr(locate, "read_leader", cluster.named)
    monkeypatch.setattr(locate, "IDLE_SECONDS", IDLE_SECONDS)
    yield cluster
    for leader in cluster.leaders:
        leader.close()


def connections(server: RpcServer) -> int:
    return len(server._router.peers)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.quick
async def test_who_is_idle_is_not_connected_and_comes_back_without_zookeeper(cluster: Cluster) -> None:
    leader, client = cluster.lead(), GcmClient(f"{LOCAL}:1")
    for _ in range(3):
        assert await client.request(gcm.ListHosts(), gcm.Hosts) == gcm.Hosts(())
        assert connections(leader) == 1
        await until(lambda: connections(leader) == 0)
    assert cluster.looks == 1
    client.close()


async def test_who_was_idle_while_another_one_began_to_lead_finds_it(cluster: Cluster) -> None:
    before, client = cluster.lead(), GcmClient(f"{LOCAL}:1")
    await client.request(gcm.ListHosts(), gcm.Hosts)
    await until(lambda: connections(before) == 0)
    before.close()
    after = cluster.lead()
    assert await client.request(gcm.ListHosts(), gcm.Hosts) == gcm.Hosts(())
    assert (connections(after), cluster.looks) == (1, 2)
    client.close()


async def test_who_is_refused_where_the_leader_was_asks_who_leads(cluster: Cluster, tmp_path: Path) -> None:
    """The one before has a wrong clock, or knows no newer authority; a connection that stays is told who leads instead."""
    authority = Authority.init(tmp_path / "authority.json")
    card = tmp_path / "alice.card"
    write_secret(card, authority.issue("alice", CardRole.CLIENT))
    gcm_card = authority.issue("gcm-1", CardRole.GCM)
    wrong = Security(gcm_card)
    with secured(wrong):
        before = cluster.lead()
    with secured(Security(gcm_card)):
        after = cluster.lead()
    cluster.leaders.reverse()
    with as_holder(card):
        client = GcmClient(f"{LOCAL}:1")
        await client.request(gcm.ListHosts(), gcm.Hosts)
        await until(lambda: connections(before) == 0)
        wrong._clock = lambda: time.time() + 100 * 365 * 24 * 3600
        cluster.leaders.reverse()
        both = (client.request(gcm.ListHosts(), gcm.Hosts) for _ in range(2))
        assert await asyncio.gather(*both) == [gcm.Hosts(())] * 2
        assert (connections(after), cluster.looks) == (1, 2)
        client.close()


async def test_whose_card_is_over_stays_connected(cluster: Cluster, tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    card = tmp_path / "alice.card"
    write_secret(card, authority.issue("alice", CardRole.CLIENT))
    with secured(Security(authority.issue("gcm-1", CardRole.GCM))):
        leader = cluster.lead()
    with as_holder(card):
        client = GcmClient(f"{LOCAL}:1")
        await client.request(gcm.ListHosts(), gcm.Hosts)
        own = process_security()
        assert own is not None
        own._clock = lambda: time.time() + 100 * 365 * 24 * 3600
        await asyncio.sleep(2 * IDLE_SECONDS)  # nothing happens, which nobody tells
        assert connections(leader) == 1
        own._clock = time.time
        await until(lambda: connections(leader) == 0)
        client.close()


async def test_who_waits_for_an_answer_is_not_idle(cluster: Cluster) -> None:
    leader, client = cluster.lead(), GcmClient(f"{LOCAL}:1")
    cluster.held = asyncio.Event()
    answer = asyncio.ensure_future(client.request(gcm.ListHosts(), gcm.Hosts))
    done, _ = await asyncio.wait([answer], timeout=4 * IDLE_SECONDS)
    assert not done
    cluster.held.set()
    assert await answer == gcm.Hosts(())
    assert (connections(leader), cluster.looks) == (1, 1), "nothing was asked again"
    await until(lambda: connections(leader) == 0)
    client.close()
    await asyncio.sleep(0)
    assert client._resting is None or client._resting.cancelled()
