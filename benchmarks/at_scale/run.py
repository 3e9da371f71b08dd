"""What is measured of a cluster at scale, one thing after the other, on one rig."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from random import Random
from typing import TypeVar

import msgspec

from benchmarks.at_scale.decisions import Decisions
from benchmarks.at_scale.rig import MeteredZooKeeper, ScaleRig, Tell, scale_rig, until
from benchmarks.at_scale.shuffles import ShuffleCost
from roq.coordination.locate import GcmClient, read_leader
from roq.coordination.parts import read_cluster
from roq.runtime.links import SubscriberLink
from roq.wire import gcm as wire
from roq.wire.assignment import QueueSettings
from roq.wire.topology import CHANGES_TOPIC

T = TypeVar("T", bound=msgspec.Struct)
ASKED_AT_ONCE = 128
REQUEST_SECONDS = 60.0
IDLE_SECONDS = 6.0  # broadcasts without news come every 2 s
EVENTS = 3
CLIENTS, CROWD, JOINED_AT_ONCE = 400, 100_000, 32
ASKED_AGAIN = 1_000  # of a crowd
CREATED, CREATED_MIN = 1_000, 100
QUIET_SECONDS = 3.0  # until what a change brought about is over
MONITORS_LOST = 100
RECOVERY_SECONDS = 90.0
LOOK_SECONDS = 2.0  # one question to a leader that may be away
OUTAGES = (0.5, 1.5)  # of ZooKeeper, in sessions: shorter than one, and longer


class Creation(msgspec.Struct, frozen=True):
    """CREATED queues more, ASKED_AT_ONCE at a time, `queues` in the end. requests, writes: of ZooKeeper for each, without
    those of an idle cluster. cpu_ms: of the leading GCM, for each."""

    hosts: int
    queues: int
    rate: float
    p50_seconds: float
    p99_seconds: float
    requests: float
    writes: float
    cpu_ms: float


class Standing(msgspec.Struct, frozen=True):
    """A cluster in which nothing happens. cpu: part of one core, of the leading GCM. requests: of ZooKeeper, per second.
    told_bytes: to each who listens to the topology, per second. view_bytes: the whole cluster, as the first who asks gets
    it, in view_parts; part_seconds: the longest of them took."""

    hosts: int
    queues: int
    cpu: float
    resident_bytes: int
    requests: float
    watches: int
    nodes: int
    tree_bytes: int
    told_bytes: float
    view_bytes: int
    view_seconds: float
    view_parts: int
    part_seconds: float


class Event(msgspec.Struct, frozen=True):
    """One Exchange more, of one queue. told_bytes: to each who listens to the topology, beside what an idle cluster tells."""

    hosts: int
    queues: int
    seconds: float
    requests: float
    writes: float
    told_bytes: float


class Recovery(msgspec.Struct, frozen=True):
    """What was taken away until all is as it should be. goal_seconds: 0: none is set. peak: most requests of ZooKeeper in a
    second."""

    what: str
    hosts: int
    queues: int
    session_seconds: float
    seconds: float
    goal_seconds: float
    requests: int
    writes: int
    peak: int


class Joining(msgspec.Struct, frozen=True):
    """Clients that find the leader and ask about a queue, JOINED_AT_ONCE at a time, and stay. For each: requests and writes of
    ZooKeeper, which a session's begin and end are; cpu_ms, resident_bytes: of the leading GCM. p99_seconds: of a request of one
    of ASKED_AGAIN of them, drawn at random, when all are there."""

    hosts: int
    queues: int
    clients: int
    rate: float
    requests: float
    writes: float
    cpu_ms: float
    resident_bytes: float
    p99_seconds: float


class ScaleFound(msgspec.Struct):
    """Everything of some runs."""

    creations: list[Creation] = []
    standings: list[Standing] = []
    events: list[Event] = []
    joinings: list[Joining] = []
    recoveries: list[Recovery] = []
    decisions: list[Decisions] = []
    shuffles: list[ShuffleCost] = []


class Listener:
    """Listens to the leader's broadcasts; `size`: bytes so far."""

    def __init__(self, leader: wire.LeaderAddress, topics: Iterable[bytes]) -> None:
        self.size = 0
        self._link = SubscriberLink(f"tcp://{leader.host}:{leader.broadcast}", [*topics], self._told)
        self.close = self._link.close

    def _told(self, messages: list[list[bytes]]) -> None:
        self.size += sum(len(part) for parts in messages for part in parts)


class PartsReader(GcmClient):
    """taken: seconds of each request."""

    def __init__(self, zookeeper: str) -> None:
        super().__init__(zookeeper)
        self.taken = list[float]()

    async def request(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float = REQUEST_SECONDS) -> T:
        """See GcmClient."""
        begun = time.monotonic()
        answer = await super().request(body, expect, timeout_seconds)
        self.taken.append(time.monotonic() - begun)
        return answer


class Study:
    """One rig, one cluster that grows."""

    def __init__(self, rig: ScaleRig, hosts: int, queues: int, found: ScaleFound, tell: Tell) -> None:
        self._rig, self._hosts, self._queues, self._found, self._tell = rig, hosts, queues, found, tell
        self._idle_requests = 0.0

    # --- while it grows ---------------------------------------------------------------------------------------------------

    async def create(self, count: int) -> None:
        """So many more queues."""
        gate, taken, rig = asyncio.Semaphore(ASKED_AT_ONCE), list[float](), self._rig
        leader = await rig.leader()
        before, use = await rig.zookeeper.counters(), await rig.use(leader)

        async def one(number: int) -> None:
            async with gate:
                asked = time.monotonic()
                await self._made(f"q-{number}")
                taken.append(time.monotonic() - asked)

        begun = time.monotonic()
        await asyncio.gather(*map(one, range(self._queues, self._queues + count)))
        seconds = time.monotonic() - begun
        after, used = await rig.zookeeper.counters(), await rig.use(leader)
        requests, writes = after.since(before)
        self._queues += count
        row = Creation(
            *(self._hosts, self._queues, count / seconds, statistics.median(taken), _percentile(taken, 0.99)),
            max(0.0, requests - self._idle_requests * seconds) / count,
            writes / count,
            (used.cpu_seconds - use.cpu_seconds) * 1000 / count,
        )
        self._found.creations.append(row)
        self._tell(f"{self._hosts} hosts, {self._queues} queues: {row.rate:.0f}/s, p99 {row.p99_seconds:.2f} s")

    async def _made(self, name: str, host: str = "") -> None:
        request = wire.CreateQueue(name, f"t-{name}", QueueSettings(), host)
        await self._rig.client.request(request, wire.QueueInfo, REQUEST_SECONDS)

    async def stand(self) -> None:
        """Nothing happens for a while."""
        await asyncio.sleep(QUIET_SECONDS)
        rig = self._rig
        leader = await rig.leader()
        async with self._listening() as listener:
            before, use = await rig.zookeeper.counters(), await rig.use(leader)
            heard = listener.size
            await asyncio.sleep(IDLE_SECONDS)
            after, used = await rig.zookeeper.counters(), await rig.use(leader)
            told = (listener.size - heard) / IDLE_SECONDS
        self._idle_requests = after.since(before)[0] / IDLE_SECONDS
        reader = PartsReader(rig.address)
        try:
            await reader.request(wire.QueueExists("q-0"), wire.Exists, REQUEST_SECONDS)  # it is connected from then on
            reader.taken.clear()
            view = await read_cluster(reader, REQUEST_SECONDS)
        finally:
            reader.close()
        row = Standing(
            hosts=self._hosts,
            queues=self._queues,
            cpu=(used.cpu_seconds - use.cpu_seconds) / IDLE_SECONDS,
            resident_bytes=used.resident_bytes,
            requests=self._idle_requests,
            watches=after.watches,
            nodes=after.nodes,
            tree_bytes=after.data_bytes,
            told_bytes=told,
            view_bytes=len(msgspec.msgpack.encode(view)),
            view_seconds=sum(reader.taken),
            view_parts=len(reader.taken),
            part_seconds=max(reader.taken),
        )
        self._found.standings.append(row)
        about = f"{self._hosts} hosts, {self._queues} queues"
        self._tell(f"{about}: {row.told_bytes:,.0f} bytes/s to a listener, idle")
        self._tell(f"{about}: {row.view_bytes:,} bytes in {row.view_parts} parts, {row.view_seconds:.2f} s")

    async def change(self) -> None:
        """Exchanges are added, one after the other."""
        await asyncio.sleep(QUIET_SECONDS)  # what was created last is still being reported
        rig, taken, told = self._rig, list[float](), self._found.standings[-1].told_bytes
        async with self._listening() as listener:
            before, heard, begun = await rig.zookeeper.counters(), listener.size, time.monotonic()
            for number in range(EVENTS):
                asked = time.monotonic()
                request = wire.CreateExchange("q-0", f"e-{self._queues}-{number}")
                await rig.client.request(request, wire.ExchangeCreated, REQUEST_SECONDS)
                taken.append(time.monotonic() - asked)
                await asyncio.sleep(QUIET_SECONDS)
            seconds = time.monotonic() - begun
            requests, writes = (await rig.zookeeper.counters()).since(before)
            size = listener.size - heard
        row = Event(
            *(self._hosts, self._queues, statistics.median(taken)),
            max(0.0, requests - self._idle_requests * seconds) / EVENTS,
            writes / EVENTS,
            max(0.0, size - told * seconds) / EVENTS,
        )
        self._found.events.append(row)
        self._tell(f"{self._hosts} hosts, {self._queues} queues: {row.told_bytes:,.0f} bytes to a listener per Exchange")

    async def join(self, count: int = CLIENTS) -> None:
        """Clients come, and stay."""
        rig, gate = self._rig, asyncio.Semaphore(JOINED_AT_ONCE)
        leader = await rig.leader()
        before, use, begun = await rig.zookeeper.counters(), await rig.use(leader), time.monotonic()
        clients = [GcmClient(rig.address) for _ in range(count)]

        async def one(client: GcmClient) -> float:
            async with gate:
                asked = time.monotonic()
                await client.request(wire.DescribeQueue("q-0"), wire.QueueInfo, REQUEST_SECONDS)
                return time.monotonic() - asked

        try:
            await asyncio.gather(*map(one, clients))
            seconds = time.monotonic() - begun
            after, used = await rig.zookeeper.counters(), await rig.use(leader)
            again = await asyncio.gather(*map(one, Random(count).sample(clients, min(count, ASKED_AGAIN))))
        finally:
            for client in clients:
                client.close()
        requests, writes = after.since(before)
        row = Joining(
            hosts=self._hosts,
            queues=self._queues,
            clients=count,
            rate=count / seconds,
            requests=max(0.0, requests - self._idle_requests * seconds) / count,
            writes=writes / count,
            cpu_ms=(used.cpu_seconds - use.cpu_seconds) * 1000 / count,
            resident_bytes=(used.resident_bytes - use.resident_bytes) / count,
            p99_seconds=sorted(again)[len(again) * 99 // 100],
        )
        self._found.joinings.append(row)
        self._tell(f"{self._hosts} hosts, {self._queues} queues: {count} clients, {row.rate:.0f} a second")

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[Listener]:
        listener = Listener(await read_leader(self._rig.address), [CHANGES_TOPIC])
        try:
            yield listener
        finally:
            listener.close()

    # --- what is taken away -----------------------------------------------------------------------------------------------

    async def lose_leader(self) -> None:
        """SIGKILL of the leading GCM, until the next one answers about a queue."""
        leader = await self._rig.leader()

        async def answers() -> bool:
            await self._rig.client.request(wire.DescribeQueue("q-0"), wire.QueueInfo, LOOK_SECONDS)
            return True

        async def work() -> None:
            await leader.kill()
            await until(answers, RECOVERY_SECONDS)

        await self._timed("leading GCM killed → another one answers", self._rig.session_seconds + 2.0, work)
        await self._rig.start_gcm(leader.name)

    async def lose_host(self) -> None:
        """SIGKILL of a host with MONITORS_LOST queues, until all of them are ready elsewhere."""
        names, lost = [f"lost-{number}" for number in range(MONITORS_LOST)], f"host-{self._hosts}"
        await asyncio.gather(*(self._made(name, lost) for name in names))
        self._queues += MONITORS_LOST
        await asyncio.sleep(QUIET_SECONDS)
        left = list(names)

        async def elsewhere() -> bool:
            while left:
                info = await self._rig.client.request(wire.DescribeQueue(left[-1]), wire.QueueInfo, LOOK_SECONDS)
                if not info.ready or info.record.monitor_host == lost:
                    return False
                left.pop()
            return True

        async def work() -> None:
            await self._rig.hosts["last"].kill()
            await until(elsewhere, RECOVERY_SECONDS)

        what = f"host with {MONITORS_LOST} queues killed → all ready elsewhere"
        await self._timed(what, self._rig.session_seconds + 3.0, work)
        await self._rig.start_hosts("last", self._hosts, 1)
        await self._rig.until_alive(self._hosts)

    async def lose_zookeeper(self, sessions: float) -> None:
        """SIGKILL, started again after so many sessions' time: until every host is registered and a queue is created."""
        rig, seconds = self._rig, sessions * self._rig.session_seconds
        await rig.restart_zookeeper(seconds)

        async def all_alive() -> bool:
            return await rig.alive() == self._hosts

        async def work() -> None:
            await until(all_alive, RECOVERY_SECONDS)
            await self._made(f"after-{seconds:g}")

        what = f"ZooKeeper back after {seconds:g} s → all hosts registered, a queue created"
        await self._timed(what, 0.0, work, since_start=True)
        self._queues += 1

    async def _timed(
        self, what: str, goal_seconds: float, work: Callable[[], Awaitable[None]], *, since_start: bool = False
    ) -> None:
        """Recorded with what it asks of ZooKeeper until QUIET_SECONDS later. since_start: of which all counts, as it has just
        begun."""
        zookeeper = self._rig.zookeeper
        before = await zookeeper.counters()
        if since_start:
            before = msgspec.structs.replace(before, requests=0)
        peaks, ended = [0], asyncio.Event()
        meter = asyncio.create_task(_meter(zookeeper, before.requests, peaks, ended))
        begun = time.monotonic()
        await work()
        seconds = time.monotonic() - begun
        await asyncio.sleep(QUIET_SECONDS)
        ended.set()
        await meter
        requests, writes = (await zookeeper.counters()).since(before)
        about = what, self._hosts, self._queues, self._rig.session_seconds, seconds, goal_seconds
        self._found.recoveries.append(Recovery(*about, requests, writes, max(peaks)))
        self._tell(f"{self._hosts} hosts, {self._queues} queues: {what}: {seconds:.2f} s")


async def _meter(zookeeper: MeteredZooKeeper, requests: int, peaks: list[int], ended: asyncio.Event) -> None:
    """Requests in each second, until it has ended."""
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await ended.wait()
        now = (await zookeeper.counters()).requests
        peaks.append(now - requests)
        requests = now


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def study(
    hosts: int, queues: int, session_seconds: float, faults: bool, crowd: bool, found: ScaleFound, tell: Tell
) -> None:
    """One cluster of so many hosts and queues to which some queues are added; then, with faults, each is injected. crowd: a
    hundred thousand clients come, too."""
    exchanges_max = 4 * (queues + CREATED) // hosts + 3 * MONITORS_LOST
    async with scale_rig(hosts, queues, exchanges_max, session_seconds) as rig:
        one = Study(rig, hosts, queues, found, tell)
        await one.stand()
        await one.create(min(CREATED, max(CREATED_MIN, queues)))
        await one.change()
        await one.join()
        if crowd:
            await one.join(CROWD)
        if faults:
            await one.lose_leader()
            await one.lose_host()
            for sessions in OUTAGES:
                await one.lose_zookeeper(sessions)
