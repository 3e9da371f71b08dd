"""Recorded queues in containers: hosts without power, cut off and paused under load; what was stored is read by everybody, also
by a durable reader that is closed and opened anew every second, if it got something new in that time.

Not covered: single processes (tests/integration/test_recorded.py), disks that fail (tests/simulation).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

import roq
from roq.errors import DeadlineExceeded, MessagesLost, NotConfirmed, TemporaryError
from roq.testing import DockerCluster

CLUSTER = {"gcms": 1, "hcms": 3}
PUBLISHERS, BURST, PAUSE_SECONDS = 2, 20, 0.02  # paced: a machine with 2 processors runs two such clusters at a time
WAIT_SECONDS = 60.0  # a host without power, its replacement, and whatever must be sent again
LIFE_SECONDS = 1.0  # of a durable reader, at least
PATIENCE_SECONDS = (
    20.0  # for the first message of a life: a publisher that went to another Exchange has seconds of both tapes read
)
LIVES_MIN = 3
AUDIT = "audit"


class DurableReader:
    """One name, lives of a second or a little more each. kept: where the newest life began."""

    def __init__(self, client: roq.Cluster, queue: str) -> None:
        self._client, self._queue = client, queue
        self.came: dict[int, set[int]] = {}  # publisher -> numbers, of all lives
        self.lost: list[MessagesLost] = []
        self.wrong: list[str] = []
        self.lives, self.kept = 0, dict[str, int]()
        self.refused: list[str] = []  # why it could not be opened, or ended

    async def read(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._live()
            except TemporaryError as error:  # no host that is needed answers: it is opened again
                self.refused.append(f"{clock() - began:.1f} s, then {error!r}")

    async def _live(self) -> None:
        make, told = self._client.subscriber, self.lost.append
        async with make(self._queue, durable=AUDIT, start="earliest", follow="stored", on_lost=told) as life:
            self.lives += 1
            self._begin(life.position)
            newest: dict[int, int] = {}
            clock = asyncio.get_running_loop().time
            end = clock() + LIFE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    async for message in life:
                        number = int(message.payload)
                        if number <= newest.get(message.publisher, -1):
                            self.wrong.append(f"{message.publisher}: {number} behind {newest[message.publisher]} in one life")
                        newest[message.publisher] = number
                        is_new = number not in self.came.setdefault(message.publisher, set())
                        self.came[message.publisher].add(number)
                        if is_new and clock() > end:
                            break

    def _begin(self, position: roq.TapePosition | None) -> None:
        done = position.done if position is not None else {}
        if any(done.get(exchange, 0) < entry for exchange, entry in self.kept.items()):
            self.wrong.append(f"life {self.lives} begins at {done}, the one before began at {self.kept}")
        self.kept = done


class RecordedLoad:
    """Publishers that are told what is stored, a reader that is there from the beginning, and a durable one.

    burst: so many messages, of payload_bytes at least, then a flush and a pause. refused: how many flushes of
    each publisher were not answered in flush_seconds; they are tried again, for WAIT_SECONDS in all."""

    def __init__(
        self,
        client: roq.Cluster,
        queue: str,
        *,
        burst: int = BURST,
        pause_seconds: float = PAUSE_SECONDS,
        payload_bytes: int = 0,
        flush_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._client, self.queue = client, queue
        self._burst, self._pause_seconds, self._flush_seconds = burst, pause_seconds, flush_seconds
        self._payload_bytes = payload_bytes
        self.refused = Counter[int]()
        self.stored: dict[int, int] = {}  # publisher -> so many messages, numbered from 0
        self.came: dict[int, list[int]] = {}
        self.lost: list[MessagesLost] = []
        self.audit = DurableReader(client, queue)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Beside the test."""
        work = [self._read(), self.audit.read(), *(self._publish() for _ in range(PUBLISHERS))]
        self._tasks = [asyncio.get_running_loop().create_task(one) for one in work]

    async def _publish(self) -> None:
        async with self._client.publisher(self.queue, confirm="stored") as publisher:
            self.stored[publisher.id] = number = 0
            while not self._stop.is_set():
                for _ in range(self._burst):
                    await publisher.publish(f"t.{number % 3}", (b"%d" % number).ljust(self._payload_bytes))
                    number += 1
                await self._flush(publisher)
                self.stored[publisher.id] = number
                await asyncio.sleep(self._pause_seconds)

    async def _flush(self, publisher: roq.Publisher) -> None:
        """Until all of it is stored."""
        clock = asyncio.get_running_loop().time
        until = clock() + WAIT_SECONDS
        while True:
            try:
                await publisher.flush(self._flush_seconds)
                return
            except DeadlineExceeded as error:
                if clock() >= until:
                    pytest.fail(f"not stored in {WAIT_SECONDS:g} s: {error}")
                self.refused[publisher.id] += 1
            except NotConfirmed as error:
                pytest.fail(f"it is not known what is stored: {error}")

    async def _read(self) -> None:
        async with self._client.subscriber(self.queue, start="earliest", on_lost=self.lost.append) as early:
            async for message in early:
                self.came.setdefault(message.publisher, []).append(int(message.payload))

    async def flowing(self) -> None:
        """More of everybody is stored than now."""
        before = dict(self.stored)
        async with asyncio.timeout(WAIT_SECONDS):
            while not before or any(self.stored[one] <= count + self._burst for one, count in before.items()):
                before = before or dict(self.stored)
                self._raise()
                await asyncio.sleep(0.05)

    def _raise(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def finish(self) -> None:
        """Publish no more, once the durable reader was opened anew, and wait until the readers have all of it."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + WAIT_SECONDS
        while self.audit.lives < LIVES_MIN:
            self._raise()
            assert clock() < deadline, self.missing()
            await asyncio.sleep(0.05)
        self._stop.set()
        await asyncio.gather(*self._tasks[2:])
        deadline, due = clock() + WAIT_SECONDS, sum(self.stored.values())
        while min(sum(map(len, self.came.values())), sum(map(len, self.audit.came.values()))) < due:
            self._raise()
            assert clock() < deadline, self.missing()
            await asyncio.sleep(0.05)

    def missing(self) -> str:
        """What readers have not got, in words."""

        def of(came: Mapping[int, Collection[int]]) -> dict[int, tuple[int, list[int], list[int]]]:
            gone = {one: sorted({*range(count)} - {*came.get(one, ())}) for one, count in self.stored.items()}
            return {one: (len(numbers), numbers[:3], numbers[-3:]) for one, numbers in gone.items()}

        audit = f"{self.audit.lives} lives, {len(self.audit.refused)} times refused, {self.audit.refused[-5:]}"
        lost = f"told lost {self.lost[:5]}, {self.audit.lost[:5]}; {audit}"
        return f"not delivered {of(self.came)}, to the durable reader {of(self.audit.came)} of {self.stored}, {lost}"

    async def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def recorded(client: roq.Cluster, **options: Any) -> AsyncIterator[RecordedLoad]:
    """A queue that is kept three times, with a load (see there for options) that flows; at the end every reader has read the
    same."""
    queue = f"kept-{secrets.token_hex(3)}"
    await client.create_queue(queue, overflow="block", replication=2, record=roq.Record(days=1, copies=3, ack=2))
    await client.create_exchange(queue)
    load = RecordedLoad(client, queue, **options)
    load.start()
    try:
        await load.flowing()
        yield load
        await load.finish()
        whole = {publisher: list(range(count)) for publisher, count in load.stored.items()}
        assert (load.came, load.lost) == (whole, []), "the reader that was there all the time"
        audited = {publisher: sorted(numbers) for publisher, numbers in load.audit.came.items()}
        assert (audited, load.audit.lost, load.audit.wrong) == (whole, [], []), "the durable reader"
        assert load.audit.lives > 2, f"it was closed and opened anew: {load.audit.refused}"
        assert any(load.audit.kept.values()), "and went on where it was"
        fresh: dict[int, list[int]] = {}
        async with client.subscriber(queue, start="earliest", follow=False, on_lost=load.lost.append) as past:
            async for message in past:
                fresh.setdefault(message.publisher, []).append(int(message.payload))
        assert (fresh, load.lost) == (whole, []), "a reader that comes afterwards"
    finally:
        await load.close()


@pytest.mark.quick
async def test_the_host_of_an_exchange_loses_power(machines: DockerCluster, client: roq.Cluster) -> None:
    async with recorded(client) as load:
        record = (await client.queue(load.queue)).record
        host = record.monitor_host
        await machines.kill(host)
        try:
            await load.flowing()
        finally:
            await machines.start(host)
        await load.flowing()


async def test_stores_and_their_host_are_cut_off_or_stand_still(machines: DockerCluster, client: roq.Cluster) -> None:
    async with recorded(client) as load:
        for host in machines.hosts:
            await machines.kill_process(host, "store")
            await load.flowing()
            await machines.wait_process(host, "store")
        other = machines.hosts[-1]
        await machines.partition_halves([other])
        await load.flowing()
        await machines.heal()
        await machines.wait_hosts(len(machines.hosts))
        await machines.pause(other)
        try:
            await load.flowing()
        finally:
            await machines.unpause(other)
        await load.flowing()


async def test_all_hosts_lose_power_at_once(machines: DockerCluster, client: roq.Cluster) -> None:
    async with recorded(client) as load:
        await asyncio.gather(*(machines.kill(host) for host in machines.hosts))
        await asyncio.gather(*(machines.start(host) for host in machines.hosts))
        await load.flowing()
