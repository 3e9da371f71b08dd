"""A shuffle of a cluster of containers whose hosts come and go, and the bill: which bytes had to move for it, and which did.

Half of the writers stop in the middle of their attempts, and readers in the middle of a range, until they are let go: so what a
test does meanwhile happens in that phase, however quick the machine is. Not covered: what is done to whom (the tests).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import pyarrow as pa

import roq
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.shuffle.cluster import FollowerLink
from roq.shuffle.writer import MEMORY_BYTES_MIN
from roq.testing import DockerCluster
from roq.wire import gcm
from roq.wire import shuffle as wire
from roq.wire.shuffle import Description, Range
from tests.harness.gate import Gate
from tests.harness.shuffle_load import BATCH_ROWS, ShuffleLoad

STORE = "store"
PARTITIONS, ROWS, PAD, RANGES, REPLICAS = 6, 10_000, 800, 24, 2
HELD = PARTITIONS // 2  # writers that stop in the middle
ANSWER_SECONDS = 5.0
T = TypeVar("T", bound=msgspec.Struct)


class HeldLoad(ShuffleLoad):
    """went_on: ranges that were in the middle when readers were let go, and had more rows."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, name, PARTITIONS, ROWS, PAD)
        self.writers, self.readers = Gate(), Gate()
        self.went_on = 0

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """See ShuffleLoad."""
        for number, batch in enumerate(super().batches(partition)):
            if number == ROWS // BATCH_ROWS // 2 and partition >= PARTITIONS - HELD:
                self.writers.stop()
            yield batch

    def _read_range(self, number: int) -> tuple[int, int, list[int], int]:
        keys: list[int] = []
        ids: list[int] = []
        held = False
        for at, batch in enumerate(self.shuffles.read(self.name, number, memory_bytes=MEMORY_BYTES_MIN)):
            keys += batch.column(0).to_pylist()
            ids += batch.column(1).to_pylist()
            held = held or (at == 0 and self.readers.stop())
            self.went_on += held and at == 1
        wrong = sum(after < before for before, after in pairwise(keys))
        return (keys[0] if keys else 0), (keys[-1] if keys else 0), ids, wrong


class Scene:
    """A new shuffle. `begin`, what the test does, `judge`, `close`."""

    def __init__(self, machines: DockerCluster, client: roq.Cluster) -> None:
        self.machines, self.client = machines, client
        self.load = HeldLoad(f"roq://{machines.zookeeper}", f"s-{secrets.token_hex(4)}")
        self._link = FollowerLink(machines.zookeeper)
        self._before: dict[str, int] = {}  # bytes fetched by host

    async def begin(self, hosts: int) -> None:
        """The cluster has so many hosts, and the shuffle is made."""
        while len(self.machines.hosts) > hosts:
            await self.machines.stop(self.machines.hosts[0])
            await self.machines.remove_host(self.machines.hosts[0])
        while len(self.machines.hosts) < hosts:
            await self.machines.add_host()
        await self.machines.wait_hosts(hosts)
        await asyncio.to_thread(self.load.create, REPLICAS, RANGES)
        self._before = await self._fetched()

    async def close(self) -> None:
        """Remove it."""
        self.load.writers.open()
        self.load.readers.open()
        await asyncio.to_thread(self.load.remove)
        await asyncio.to_thread(self.load.close)
        self._link.close()

    # --- phases -----------------------------------------------------------------------------------------------------------

    async def filling(self) -> Description:
        """Half of the attempts are stored by a table, and half are in the middle."""
        self.load.start()

        async def half() -> Description | None:
            found = await self.describe()
            done = found.epoch and found.stored == PARTITIONS - HELD and self.load.writers.came == HELD
            return found if done else None

        return await self.machines.wait_for(half, "half of the attempts are stored")

    async def sealed(self) -> Description:
        """All attempts go on, and are sealed."""
        self.load.writers.open()
        await asyncio.to_thread(self.load.finished)
        return await asyncio.to_thread(self.load.commit)

    async def reading(self) -> asyncio.Future[None]:
        """Readers are in the middle of a range. Wait for what is given when they were let go: it has judged their rows."""
        task = asyncio.ensure_future(asyncio.to_thread(lambda: self.load.read().check()))

        async def begun() -> bool:
            return self.load.readers.came > 0 or task.done()

        await self.machines.wait_for(begun, "readers are in the middle of a range")
        return task

    async def read(self, reading: asyncio.Future[None]) -> None:
        """Readers go on, to the end."""
        self.load.readers.open()
        await reading
        assert self.load.went_on > 0, "no reader was in the middle of a range"

    # --- views ------------------------------------------------------------------------------------------------------------

    async def describe(self) -> Description:
        """As the leader tells it."""
        return await asyncio.to_thread(self.load.shuffles.describe, self.load.name)

    async def join(self) -> str:
        """One more host; returns when the leader places ranges on it."""
        host = await self.machines.add_host()
        request = gcm.DescribeShuffle(self.load.name)

        async def member() -> bool:
            info = await asyncio.to_thread(self._link.leader, request, gcm.ShuffleInfo, ANSWER_SECONDS)
            return host in info.members

        await self.machines.wait_for(member, f"{host} is given ranges")
        return host

    async def placed(self, holding: Sequence[str] = (), without: Sequence[str] = ()) -> Description:
        """Until every range has all its holders among the hosts that are here, `holding` among them and `without` not."""
        here = set(self.machines.hosts) - set(without)

        async def whole() -> Description | None:
            found = await self.describe()
            having = {host for one in found.ranges for host in one.holders}
            copied = all(len(set(one.holders) & here) == len(one.holders) == REPLICAS for one in found.ranges)
            return found if copied and not found.former and set(holding) <= having else None

        return await self.machines.wait_for(whole, "every range has its holders")

    async def held(self, host: str) -> int:
        """Bytes of the shuffle on this host's disk."""
        id = (await self.describe()).id
        return (await self._ask(host, wire.DescribeFollower(), wire.FollowerView)).shuffles.get(id, 0)

    async def fetched(self) -> dict[str, int]:
        """Bytes that each host that is here has fetched from others since `begin`."""
        return {host: count - self._before.get(host, 0) for host, count in (await self._fetched()).items()}

    async def _fetched(self) -> dict[str, int]:
        views = {host: await self._ask(host, wire.DescribeFollower(), wire.FollowerView) for host in self.machines.hosts}
        return {host: view.counters.get("bytes_fetched", 0) for host, view in views.items()}

    async def _ask(self, host: str, request: wire.Request, expect: type[T]) -> T:
        """The answer of a host's follower, which begins to serve a little after its store."""
        store = await self.machines.wait_process(host, STORE)
        rpc = RpcClient(
            f"tcp://{self.machines.address(host)}:{store.ports['shuffle']}", wire.Reply, on_disconnect=OnDisconnect.FAIL
        )
        try:
            return await self.machines.wait_for(
                lambda: rpc.request(request, expect, ANSWER_SECONDS), f"the follower on {host} answers"
            )
        finally:
            rpc.close()

    # --- verdict ----------------------------------------------------------------------------------------------------------

    async def judge(self, fault: str, **figures: object) -> None:
        """Read all, tell, judge; then count what each holder of each range has itself."""
        self.load.readers.open()
        verdict = await asyncio.to_thread(self.load.read)
        found = await self.placed()
        told = {"moved": found.moved, "moved_least": found.moved_least, "size": found.size, **figures}
        sys.stdout.write(f"\nverdict {verdict.line(fault, **told)}\n")
        verdict.check()
        for host in {host for one in found.ranges for host in one.holders}:
            ranges = [one for one in found.ranges if host in one.holders]
            asked = wire.CountRows(found.id, [one.interval for one in ranges], found.winners)
            counted = await self._ask(host, asked, wire.Counts)
            assert counted.rows == [one.rows for one in ranges], f"{host} lacks rows of its ranges"


def size_at(table: Sequence[Range], host: str) -> int:
    """Bytes of the ranges this host holds."""
    return sum(one.size for one in table if host in one.holders)


def given(before: Sequence[Range], after: Sequence[Range]) -> set[str]:
    """Hosts that hold more ranges than before."""
    return {host for old, new in zip(before, after, strict=True) for host in {*new.holders} - {*old.holders}}


def least_between(before: Sequence[Range], after: Sequence[Range]) -> int:
    """Bytes that must be sent to get there when no border has changed."""
    assert [one.interval for one in before] == [one.interval for one in after]
    return sum(old.size * len({*new.holders} - {*old.holders}) for old, new in zip(before, after, strict=True))
