"""The simulated part: stores with their disks, the network, the log. It knows latencies and failing nodes, nothing else.

A node that fails is gone with what it held; after an outage a new, empty one takes its place under another name, as a store
with another disk would have to. A node serves one request at a time, so that load on it is felt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from roq.errors import DeadlineExceeded, RoqError, TaskNotFound
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.wire import store as wire

T = TypeVar("T", bound=msgspec.Struct)
CAPACITY = 1 << 40
INSTANT = 1e-6  # seconds


class Speeds(NamedTuple):
    """network: one way between any two. disk: of one small write or read. bandwidth: bytes per second of a node. log: one entry
    on a quorum. Seconds."""

    network: float = 0.0005
    disk: float = 0.004
    bandwidth: float = 50e6
    log: float = 0.002


class Node:
    """One store. blobs: name -> size, CRC, when stored."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.blobs: dict[str, tuple[int, int, float]] = {}
        self.turn = asyncio.Lock()


class Cluster:
    """All nodes, the dead ones too. `kill` and `join` are for whoever plays fate."""

    def __init__(self, nodes: int, speeds: Speeds) -> None:
        self.speeds = speeds
        self.nodes: dict[str, Node] = {}
        self.directory = StaticDirectory({})
        self.gone_at_once: list[str] = []  # blobs whose last copy died
        self.copies = 0
        self._joined = 0
        for _ in range(nodes):
            self.join()

    def join(self) -> Node:
        """A new, empty node."""
        self._joined += 1
        node = Node(f"node-{self._joined}")
        self.nodes[node.name] = node
        self.directory.endpoints[node.name] = f"sim://{node.name}"
        self.directory.alive.add(node.name)
        return node

    def kill(self, node: Node) -> None:
        """It is gone with all it held."""
        node.alive = False
        held, node.blobs = node.blobs, {}
        del self.nodes[node.name]
        self.directory.alive.discard(node.name)
        living = {blob for other in self.nodes.values() for blob in other.blobs} if held else set()
        self.gone_at_once += [blob for blob in held if blob not in living]

    async def serve(self, name: str, size: int) -> Node:
        """The node, after its turn came and it worked on so many bytes. It may die meanwhile: then nothing answers."""
        await asyncio.sleep(self.speeds.network)
        node = self.nodes.get(name)
        if node is None:
            await asyncio.Event().wait()
        assert node is not None
        async with node.turn:
            await asyncio.sleep(self.speeds.disk + size / self.speeds.bandwidth)
        if not node.alive:
            await asyncio.Event().wait()
        return node


class SimulatedStores(Stores):
    """What the master knows as stores."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.directory)
        self._cluster = cluster

    async def request(self, host: str, request: wire.Request, expect: type[T], seconds: float = 5.0) -> T:
        """See Stores."""
        try:
            async with asyncio.timeout(seconds):
                answer: Any = await self._answer(host, request)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {host} in {seconds:g} s") from None
        return cast(T, answer)

    async def _answer(self, host: str, request: wire.Request) -> msgspec.Struct:
        cluster, now = self._cluster, asyncio.get_running_loop().time
        answer: msgspec.Struct
        match request:
            case wire.DescribeStore():
                await asyncio.sleep(cluster.speeds.network)
                if host not in cluster.nodes:
                    await asyncio.Event().wait()
                answer = wire.StoreView(host, host, CAPACITY, 0, 0, 0, {})
            case wire.GetBlob(blob=blob):
                size, crc, _ = (await cluster.serve(host, 0)).blobs.get(blob) or _missing(blob)
                answer = wire.BlobPart(size, crc, b"")
            case wire.CopyBlob(blob=blob, source=source):
                size, crc, _ = (await cluster.serve(source.removeprefix("sim://"), 0)).blobs.get(blob) or _missing(blob)
                (await cluster.serve(host, size)).blobs[blob] = (size, crc, now())
                cluster.copies += 1
                answer = wire.StoreDone()
            case wire.DeleteBlob(blob=blob):
                (await cluster.serve(host, 0)).blobs.pop(blob, None)
                answer = wire.StoreDone()
            case wire.ListBlobs(prefix=prefix, after=after):
                node = await cluster.serve(host, 0)
                found = sorted(name for name in node.blobs if name.startswith(prefix) and name > after)
                views = [wire.BlobView(name, node.blobs[name][0], now() - node.blobs[name][2]) for name in found]
                answer = wire.BlobList(views[: wire.LIST_COUNT_MAX], [])
            case _:
                raise AssertionError(f"the master asked for {type(request).__name__}")
        await asyncio.sleep(cluster.speeds.network)
        return answer


def _missing(blob: str) -> tuple[int, int, float]:
    raise TaskNotFound(f"no blob {blob}")


class SimulatedLog:
    """A log that is always there and takes its time."""

    def __init__(self, speeds: Speeds) -> None:
        self._seconds, self._position, self._last = speeds.log, 0, 0.0

    def write(self, entry: bytes, done: Callable[[int | RoqError], None]) -> None:
        """See roq.workqueue.master.term.Writer."""
        loop = asyncio.get_running_loop()
        self._position += 1
        self._last = max(loop.time() + self._seconds, self._last + INSTANT)  # entries are durable in their order
        loop.call_at(self._last, done, self._position)


class Fate:
    """Kills every living node with `failure` probability per second, and replaces it after `outage` seconds."""

    def __init__(self, cluster: Cluster, failure: float, outage: float, dice: random.Random) -> None:
        self._cluster, self._failure, self._outage, self._dice = cluster, failure, outage, dice
        self.failures = 0

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while self._failure:
            await asyncio.sleep(1.0)
            for node in list(self._cluster.nodes.values()):
                if self._dice.random() < self._failure:
                    self.failures += 1
                    self._cluster.kill(node)
                    loop.call_later(self._outage, self._cluster.join)
