"""The whole cluster read in small parts from a real leader, while queues are created and leaders change.

`late-<n>` is created before `early-<n>`, one after the other: at each moment there are as many of both, or one more late one.
Who read the early ones first and the late ones some time after would find more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
import pytest

from gcm import parts, snapshots
from roq.client.broadcasts import cluster_views
from roq.client.cluster import Cluster
from roq.coordination.locate import GcmClient
from roq.coordination.parts import read_cluster, read_queues
from roq.errors import IncompatibleVersion
from roq.wire import gcm as wire
from roq.wire.gcm import QueueInfo
from roq.wire.parts import PartRequest
from tests.integration.gcm_bench import PATIENCE_SECONDS, Bench

PAIRS, READERS = 30, 3


@pytest.fixture
async def bench(chroot: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A leader that tells a few queues in a part."""
    monkeypatch.setattr(parts, "PART_BYTES", 2_000)
    async with AsyncExitStack() as stack:
        made = Bench(chroot, stack)
        await made.gcm()
        for name in "ab":
            await made.host(name)
        await made.hosts_alive(2)
        yield made


class Progress:
    """Queues that were created, and whether there will be more."""

    def __init__(self) -> None:
        self.created, self.over = 0, False
        self._news = asyncio.Condition()

    async def step(self, over: bool = False) -> None:
        async with self._news:
            self.created, self.over = self.created + 1, over
            self._news.notify_all()

    async def more(self, count: int) -> None:
        """So many more are created, if there are."""
        async with self._news:
            wanted = self.created + count
            await self._news.wait_for(lambda: self.over or self.created >= wanted)


class PartsClient(GcmClient):
    """Waits between two parts for a pair of queues that is created. asked: parts. begun: first ones."""

    def __init__(self, zookeeper: str, progress: Progress | None = None) -> None:
        super().__init__(zookeeper)
        self.asked = self.begun = 0
        self._progress = progress

    async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
        if isinstance(body, PartRequest):
            if body.after and self._progress is not None:
                await self._progress.more(2)
            self.asked += 1
            self.begun += body.after == ""
        return await super().request(body, expect, timeout_seconds)


async def create_pairs(bench: Bench, progress: Progress) -> None:
    for number in range(PAIRS):
        for kind in ("late", "early"):
            await bench.create(f"{kind}-{number}")
            await progress.step(over=(number, kind) == (PAIRS - 1, "early"))


def check_moment(queues: Iterable[QueueInfo]) -> int:
    """How many there are."""
    names = [one.record.name for one in queues]
    early, late = (sum(name.startswith(kind) for name in names) for kind in ("early", "late"))
    assert late - early in (0, 1), f"{early} early ones, {late} late ones"
    assert names == sorted(set(names))
    return len(names)


@pytest.mark.quick
async def test_who_reads_and_who_listens_sees_one_moment_while_queues_are_created(bench: Bench) -> None:
    progress = Progress()
    created = asyncio.create_task(create_pairs(bench, progress))
    clients = [PartsClient(bench.zookeeper, progress) for _ in range(READERS + 1)]
    reads = 0

    async def read(client: PartsClient) -> None:
        nonlocal reads
        while check_moment((await read_cluster(client, PATIENCE_SECONDS)).queues) < 2 * PAIRS:
            check_moment(await read_queues(client, PATIENCE_SECONDS))
            reads += 2

    async def listen(client: PartsClient) -> None:
        await progress.more(PAIRS)
        async with aclosing(cluster_views(client)) as views:
            async for view in views:
                if check_moment(view.queues) == 2 * PAIRS and all(one.ready for one in view.queues):
                    return

    try:
        async with asyncio.timeout(60):
            await asyncio.gather(created, listen(clients[0]), *map(read, clients[1:]))
        assert reads > READERS
        assert sum(client.begun for client in clients[1:]) == reads + READERS, "none was begun anew"
        before = clients[0].asked
        told = await read_cluster(clients[0], PATIENCE_SECONDS)
        assert clients[0].asked - before > PAIRS / 3, "in parts"
        assert [host.host for host in told.hosts] == ["a", "b"]
        assert (told.snapshot, told.more) == ("", False)
    finally:
        created.cancel()
        for client in clients:
            client.close()


async def test_a_leader_that_changes_between_two_parts_is_asked_from_the_beginning(bench: Bench) -> None:
    await asyncio.gather(*(bench.create(f"q-{number:02}") for number in range(12)))
    await bench.gcm()

    class Interrupted(PartsClient):
        async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
            if self.asked == 2:
                await bench.next_term()
            return await super().request(body, expect, timeout_seconds)

    client = Interrupted(bench.zookeeper)
    try:
        view = await read_cluster(client, PATIENCE_SECONDS)
        assert [one.record.name for one in view.queues] == [f"q-{number:02}" for number in range(12)]
        assert client.begun == 2
    finally:
        client.close()


async def test_a_program_of_0_1_gets_all_at_once_until_it_is_too_much(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.gather(*(bench.create(f"q-{number}") for number in range(12)))
    whole = await bench.ask(wire.GetCluster(), wire.ClusterView)
    assert (len(whole.queues), len(whole.hosts), whole.more) == (12, 2, False)
    assert len((await bench.ask(wire.ListQueues(), wire.Queues)).queues) == 12
    monkeypatch.setattr(snapshots, "CONTROL_BYTES_MAX", 4_000)
    for request, reply in ((wire.GetCluster(), wire.ClusterView), (wire.ListQueues(), wire.Queues)):
        with pytest.raises(IncompatibleVersion, match="a message at most 4,000: what asks is of an older RoQ"):
            await bench.ask(request, reply)
    async with Cluster(bench.zookeeper) as cluster:
        assert len((await cluster.view()).queues) == len(await cluster.queues()) == 12
        assert len(await cluster.hosts()) == 2
        assert await cluster.work_queues() == []
