"""One simulated run: a master, nodes that come and go, clients that enqueue and dequeue as Blizzard's do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any, NamedTuple, TypeVar

from benchmarks.churn import virtual_loop
from benchmarks.churn.cluster import Cluster, Fate, SimulatedLog, SimulatedStores, Speeds
from roq.errors import RoqError
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope
from roq.wire.task import ACK, RELEASE, PayloadReference, Settlement, StoreAddress, TaskToPut
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.fold import Fold
from roq.workqueue.master.blobs import BlobStores
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.registry import RegistryPace
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm, SteadyClock
from roq.workqueue.records import Configure

T = TypeVar("T")
COPIES = 3
BLOB_BYTES = 64 * 1024
LEASE_MS, WAIT_MS = 60_000, 5_000
ANSWER_SECONDS, UPLOAD_SECONDS = 60.0, 5.0
SAMPLE_SECONDS = 60.0
PRODUCER = 1


class VirtualClock(SteadyClock):
    """Milliseconds of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> int:
        """Now."""
        return 1 + int(self._loop.time() * 1000)


class Scene(NamedTuple):
    """failure: probability per second and node; outage: seconds until its replacement. operations: enqueues, and as many
    dequeues, per client. size: bytes of a payload."""

    nodes: int
    clients: int = 1
    operations: int = 100
    failure: float = 0.0
    outage: float = 5.0
    seed: int = 0
    size: int = 100_000
    speeds: Speeds = Speeds()


class Churned(NamedTuple):
    """What happened. lost: acknowledged values that nobody can read any more; gone: values all copies of which died before
    another one could be made (only those may be lost); seconds: virtual, per 100 enqueues and per 100 dequeues of a client."""

    acknowledged: int
    delivered: int
    lost: int
    gone: int
    failures: int
    copies: int
    retries: int
    enqueue_seconds: float
    dequeue_seconds: float
    displacement: float  # mean distance between the order of enqueueing and of dequeueing


class Master:
    """The real master over the simulated cluster; `ask` is what a client's request does."""

    def __init__(self, cluster: Cluster) -> None:
        clock, counters = VirtualClock(), Counters()
        self._cluster = cluster
        spec = WorkQueueSpec("sim", COPIES, COPIES - 1)
        stores = SimulatedStores(cluster)
        service = MasterService(Fold(), Recent(), 1, BLOB_BYTES, self._places, 0)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self.term = MasterTerm(service, SimulatedLog(cluster.speeds), self._answered, self._drop, clock, counters)
        turn, barrier = self.term.turn, self.term.barrier
        self.blobs = BlobStores(spec, stores, service, turn, barrier, clock.now, counters, RegistryPace(), token="reign")
        self.service = service
        service.apply(Configure(clock.now(), service.fold.settings, 0))
        self.term.turn()

    def _places(self, hosts: tuple[str, ...]) -> tuple[StoreAddress, ...]:
        return self.blobs.places(hosts)

    def _drop(self, blobs: Any) -> None:
        self.blobs.drop(blobs)

    def _answered(self, peer: bytes, message: bytes) -> bool:
        envelope = open_envelope(message)
        waiting = self._answers.pop(envelope.id, None)
        if waiting is not None and not waiting.done():
            if envelope.kind == EnvelopeKind.ERROR:
                waiting.set_exception(error_of(envelope.body))
            else:
                waiting.set_result(wire.open_answer(message).body)
        return True

    async def ask(self, request: wire.Request) -> Any:
        """The answer, after the way there and back."""
        id = next(self._ids)
        await asyncio.sleep(self._cluster.speeds.network)
        waiting = self._answers[id] = asyncio.get_running_loop().create_future()
        match request:
            case wire.Reserve() | wire.PayloadStored():
                self.blobs.take(b"client", id, request)
            case _:
                self.term.take(b"client", id, request)
        self.term.turn()
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await waiting
        await asyncio.sleep(self._cluster.speeds.network)
        return answer


class Client:
    """Enqueues, then dequeues, one value at a time."""

    def __init__(self, number: int, master: Master, cluster: Cluster, size: int) -> None:
        self._master, self._cluster, self._size, self._number = master, cluster, size, number
        self._nonces = itertools.count(1)
        self.retries = 0

    async def enqueue(self, sequence: int) -> None:
        """Until it is acknowledged."""
        avoid: list[str] = []
        host = ""
        while True:
            try:
                reserved = await self._master.ask(wire.Reserve(PRODUCER, sequence, self._size, sequence, avoid))
                host = reserved.store.host
                async with asyncio.timeout(UPLOAD_SECONDS):
                    node = await self._cluster.serve(host, self._size)
                    node.blobs[reserved.blob] = (self._size, sequence, asyncio.get_running_loop().time())
                await self._master.ask(wire.PayloadStored(PRODUCER, sequence, reserved.blob, TaskToPut(b"")))
            except TimeoutError:
                avoid = [host]
            except RoqError:
                avoid = []
            else:
                return
            self.retries += 1

    async def dequeue(self) -> int:
        """The sequence of a value that was read and acknowledged; 0: its last copy is gone."""
        while True:
            found = await self._master.ask(wire.Lease(self._number, next(self._nonces), 0, LEASE_MS, 1, WAIT_MS, []))
            if not found.tasks:
                continue
            (task,) = found.tasks
            good = await self._fetch(task.payload)
            if good or not any(task.payload.blob in node.blobs for node in self._cluster.nodes.values()):
                await self._master.ask(wire.SettleAll(self._number, 0, [Settlement(ACK, task.token)]))
                return int(task.id.rsplit("-", 1)[1]) if good else 0
            self.retries += 1  # its holders died, and others have it by now
            await self._master.ask(wire.SettleAll(self._number, 0, [Settlement(RELEASE, task.token)]))

    async def _fetch(self, payload: PayloadReference) -> bool:
        for place in payload.stores:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UPLOAD_SECONDS):
                    node = await self._cluster.serve(place.host, self._size)
                    if payload.blob in node.blobs:
                        return True
        return False


@contextlib.asynccontextmanager
async def _running(scene: Scene) -> AsyncIterator[tuple[Cluster, Master, Fate]]:
    cluster = Cluster(scene.nodes, scene.speeds)
    master = Master(cluster)
    fate = Fate(cluster, scene.failure, scene.outage, random.Random(scene.seed))
    master.blobs.start()
    falling = asyncio.ensure_future(fate.run())
    try:
        yield cluster, master, fate
    finally:
        falling.cancel()
        await master.blobs.close()
        master.term.close()


async def _churn(scene: Scene) -> Churned:
    loop = asyncio.get_running_loop()
    async with _running(scene) as (cluster, master, fate):
        clients = [Client(number + 1, master, cluster, scene.size) for number in range(scene.clients)]
        sequences = itertools.count(1)
        acknowledged: list[int] = []
        delivered: list[int] = []
        lost = 0

        async def enqueue(client: Client) -> None:
            for _ in range(scene.operations):
                sequence = next(sequences)
                await client.enqueue(sequence)
                acknowledged.append(sequence)

        async def dequeue(client: Client) -> None:
            nonlocal lost
            for _ in range(scene.operations):
                sequence = await client.dequeue()
                if sequence:
                    delivered.append(sequence)
                else:
                    lost += 1

        began = loop.time()
        await asyncio.gather(*(enqueue(client) for client in clients))
        half = loop.time()
        await asyncio.gather(*(dequeue(client) for client in clients))
        ended = loop.time()
        places = {sequence: place for place, sequence in enumerate(sorted(delivered))}
        displaced = sum(abs(place - places[sequence]) for place, sequence in enumerate(delivered))
        return Churned(
            len(acknowledged),
            len(set(delivered)),
            lost,
            len(cluster.gone_at_once),
            fate.failures,
            cluster.copies,
            sum(client.retries for client in clients),
            (half - began) * 100 / scene.operations,
            (ended - half) * 100 / scene.operations,
            displaced / max(1, len(delivered)),
        )


async def _persist(scene: Scene, values: int, seconds: float) -> list[tuple[float, float]]:
    """(seconds, share of the values lost), for values that nobody dequeues."""
    async with _running(scene._replace(failure=0.0)) as (cluster, master, _):
        client = Client(1, master, cluster, scene.size)
        for sequence in range(1, values + 1):
            await client.enqueue(sequence)
        wanted = {task.payload.blob for task in master.service.fold.blobs.values()}  # type: ignore[union-attr]
        falling = asyncio.ensure_future(Fate(cluster, scene.failure, scene.outage, random.Random(scene.seed)).run())
        loop, curve = asyncio.get_running_loop(), [(0.0, 0.0)]
        began = loop.time()
        while loop.time() - began < seconds:
            await asyncio.sleep(SAMPLE_SECONDS)
            there = {blob for node in cluster.nodes.values() for blob in node.blobs}
            curve.append((loop.time() - began, len(wanted - there) / values))
        falling.cancel()
        return curve


def churn(scene: Scene) -> Churned:
    """Enqueue everything, dequeue everything, while nodes fail."""
    return _quietly(_churn(scene))


def persist(scene: Scene, values: int, seconds: float) -> list[tuple[float, float]]:
    """How values that stay in the queue get lost over virtual time."""
    return _quietly(_persist(scene, values, seconds))


def _quietly(work: Coroutine[Any, Any, T]) -> T:
    """Dead stores and failed copies are what this is about: no word of each."""
    logger = logging.getLogger("roq")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return virtual_loop.run(work)
    finally:
        logger.setLevel(level)
