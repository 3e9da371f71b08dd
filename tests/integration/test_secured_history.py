"""The history of a secured cluster: its hosts write it, whom a card allows to reads it, and nobody else does either.

Not covered: which request needs which right (tests/unit/test_rights.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import roq
from roq.client.history import past_decisions, past_kpis
from roq.errors import AccessDenied
from roq.wire.card import Grant, Right
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS
from tests.harness.cards import as_holder
from tests.integration.secured_rig import Cluster, started

WAIT_SECONDS, LOOK_SECONDS = 20.0, 0.25


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("secured-history"), "--hosts", "1") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders")
        await connected.record_history(roq.Record())


async def test_hosts_write_it_and_who_may_read_does(cluster: Cluster) -> None:
    grants = [Grant(Right.READ, name) for name in (HISTORY_KPIS, HISTORY_DECISIONS)]
    with as_holder(cluster.card("watcher", *grants)):
        async with roq.connect(cluster.zookeeper) as connected, asyncio.timeout(WAIT_SECONDS):
            while not [kpi async for kpi in past_kpis(connected, "orders", "earliest")]:
                await asyncio.sleep(LOOK_SECONDS)
            assert await past_decisions(connected, "orders", "earliest") == []
    steward = cluster.card("steward", Grant(Right.ADMIN, "orders"), Grant(Right.READ, "orders"), Grant(Right.PUBLISH, "*"))
    with as_holder(steward):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="steward needs the right `admin` to everything"):
                await connected.record_history(None)
            with pytest.raises(AccessDenied, match=HISTORY_KPIS):
                _ = [kpi async for kpi in past_kpis(connected, "orders", "earliest")]
            with pytest.raises(AccessDenied, match="nobody else publishes"):
                async with connected.publisher(HISTORY_KPIS):
                    pass
