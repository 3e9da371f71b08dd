"""Cards and keys of a cluster change while messages flow: nothing is lost, nobody is shut out who should not be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.security import make_digest_acl  # type: ignore[import-untyped]

import roq
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import AccessDenied
from roq.runtime.security import write_secret
from roq.tools.authority import Authority
from roq.tools.local.cluster import LocalCluster
from roq.wire.card import CardRole, Grant, Right
from tests.harness.cards import as_holder
from tests.harness.direct_kazoo import close, connected
from tests.harness.traffic import Traffic
from tests.integration.coordinator_rig import RunningCoordinator
from tests.integration.secured_rig import look_around, use

START_SECONDS = 60.0
ALL = [Grant(right, "*") for right in Right]


@pytest.mark.timeout(120)
async def test_keys_are_rotated_twice_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    """The authority's, the servers', those of GCM and hosts; a program goes on with the card of before, and one with a new one
    gets in. What runs on a host is restarted with its new card."""
    with as_holder(None):
        async with LocalCluster(tmp_path, hosts=2, secured=True) as local:
            assert local.card is not None
            async with roq.connect(local.zookeeper) as connected:
                await connected.create_queue("traffic", overflow="block", replication=2)
                await connected.create_queue("orders")
                async with Traffic(connected, "traffic") as traffic:
                    for number in range(2):
                        await rotated(local, traffic)
                        late = tmp_path / f"late-{number}.card"
                        write_secret(late, Authority.load(tmp_path / "authority.json").issue("late", CardRole.CLIENT, ALL))
                        with as_holder(late):
                            await use(local.zookeeper)
                        await closed(local.zookeeper, local.directory / "cards" / "host-1.card")
                assert traffic.received == list(range(1, traffic.published + 1)), "lost, repeated or reordered"
                assert not traffic.lost


async def rotated(local: LocalCluster, traffic: Traffic) -> None:
    """New keys, and new cards of all daemons, one after the other."""
    authority = Authority.load(local.directory / "authority.json")
    authority.rotate()
    for name, daemons in (("host-1", local.hosts), ("host-2", local.hosts), ("gcm-1", local.gcms)):
        before = {one.pid for one in local.processes() if one.owner == name}
        await daemons[name].kill()
        write_secret(local.directory / "cards" / f"{name}.card", authority.issue(name, role_of(name)))
        await daemons[name].start(START_SECONDS)
        await local.settled(START_SECONDS)
        async with asyncio.timeout(START_SECONDS):
            while before & {one.pid for one in local.processes() if one.owner == name}:
                await asyncio.sleep(0.05)
        await traffic.flowing()


@pytest.mark.timeout(180)
async def test_a_cluster_is_given_cards_while_messages_flow(tmp_path: Path) -> None:
    """One daemon after the other takes who has a card and who has none; then programs are given theirs; then one daemon after
    the other takes nobody without. A tree that everybody may write is closed."""
    authority = Authority.init(tmp_path / "authority.json")
    with as_holder(None):
        async with LocalCluster(tmp_path / "cluster", hosts=2) as local:
            async with roq.connect(local.zookeeper) as connected:
                await connected.create_queue("traffic", overflow="block", replication=2)
                await connected.create_queue("orders")
                async with Traffic(connected, "traffic") as before:
                    await restarted(local, before, lambda name: ("--security", "mixed", *card_flags(authority, name)))
                    await use(local.zookeeper)
            write_secret(tmp_path / "all.card", authority.issue("all", CardRole.CLIENT, ALL))
            with as_holder(tmp_path / "all.card"):
                async with roq.connect(local.zookeeper) as connected, Traffic(connected, "traffic") as after:
                    await restarted(local, after, lambda name: card_flags(authority, name))
                    await use(local.zookeeper)
                    await closed(local.zookeeper, tmp_path / "host-1.card")
                for traffic in (before, after):
                    assert traffic.received == list(range(1, traffic.published + 1)), "lost, repeated or reordered"
                    assert not traffic.lost
            with pytest.raises(AccessDenied, match="only who shows a card"):
                async with roq.connect(local.zookeeper):
                    pass
            await look_around(local.zookeeper)


def role_of(name: str) -> CardRole:
    return CardRole.GCM if name.startswith("gcm") else CardRole.HOST


def card_flags(authority: Authority, name: str) -> tuple[str, str]:
    path = authority.path.parent / f"{name}.card"
    if not path.exists():
        write_secret(path, authority.issue(name, role_of(name)))
    return "--card", str(path)


async def restarted(local: LocalCluster, traffic: Traffic, flags: Callable[[str], tuple[str, ...]]) -> None:
    """Every daemon, one after the other, with these flags of security; hosts before GCMs."""
    for name, daemon in (*local.hosts.items(), *local.gcms.items()):
        before = {one.pid for one in local.processes() if one.owner == name}
        await daemon.kill()
        command = daemon._command
        at = command.index("--security") if "--security" in command else command.index("--card")
        del command[at : at + (4 if command[at + 1] == "mixed" else 2)]
        command += flags(name)
        await daemon.start(START_SECONDS)
        async with asyncio.timeout(START_SECONDS):
            while before & {one.pid for one in local.processes() if one.owner == name}:
                await asyncio.sleep(0.05)
        await traffic.flowing()


async def closed(zookeeper: str, card: Path) -> None:
    """Until all nodes are members' alone, by their password of today."""
    with as_holder(card):
        session = await Session.connect(zookeeper)
        try:
            async with asyncio.timeout(START_SECONDS):
                while await session.is_open() or await session.is_open(paths.GCM):
                    await asyncio.sleep(0.05)
            assert await session.protect() == (0, [])
        finally:
            await session.close()


async def test_only_the_clusters_own_nodes_are_closed(tmp_path: Path) -> None:
    """Also where it has no folder of its own; what is somebody else's is told, and stops nobody."""
    server = RunningCoordinator(tmp_path / "data")
    server.start()
    address = f"{server.address}/"
    card = tmp_path / "host-1.card"
    write_secret(card, Authority.init(tmp_path / "authority.json").issue("host-1", CardRole.HOST))
    try:
        with as_holder(None):
            session = await Session.connect(address)
            for path in ("gcm", "queues", "queues/orders", "kafka"):
                await session.create(path)
            await asyncio.to_thread(take_node, server.address, "/queues/mine")
            await session.close()
        with as_holder(card):
            session = await Session.connect(address)
            assert await session.protect() == (3, ["queues/mine"])
            assert await session.protect() == (0, ["queues/mine"])
            await session.close()
        with as_holder(None):
            session = await Session.connect(address)
            await session.set("kafka", b"as before", -1)
            await session.create("another")
            with pytest.raises(AccessDenied):
                await session.set("queues/orders", b"", -1)
            await session.close()
    finally:
        server.stop()


def take_node(address: str, path: str) -> None:
    client = connected(address, auth_data=[("digest", "somebody:else")])
    try:
        client.create(path, b"", [make_digest_acl("somebody", "else", all=True)])
    finally:
        close(client)
