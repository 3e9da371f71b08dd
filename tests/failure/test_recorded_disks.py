"""A recorded queue of a cluster whose disks get full under load, and have room again: what is confirmed as stored waits or is
refused, and who has to do with none of it notices nothing. Work queues: test_work_queue_disks.py.

Not covered: disks that fail or are slow (tests/simulation).
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import roq
from roq.log.store.journal import FILE_BYTES
from roq.testing import DockerCluster
from tests.failure.conftest import SESSION_SECONDS
from tests.failure.test_recorded import RecordedLoad, recorded
from tests.failure.test_work_queue_disks import full_until, programs
from tests.harness.traffic import Traffic

PAYLOAD_BYTES, FLUSH_SECONDS = 60_000, 4.0
BIG_BYTES = 900_000
WAITING_BYTES_MAX = (64 + 32) * 1024 * 1024 + 2 * BIG_BYTES  # a publisher's replay buffer, and what an Exchange holds
HELD_SECONDS = 3.0  # a publish() that takes so long waits
NOTICED_SECONDS = 1.5  # between two messages of an unrecorded queue, of which 200 come in a second
REFUSED = 2  # flushes of each publisher, one after the other
BUSY = {"payload_bytes": PAYLOAD_BYTES, "flush_seconds": FLUSH_SECONDS}


class PressingPublisher:
    """It publishes without asking what is stored, until it is held back."""

    def __init__(self, client: roq.Cluster, load: RecordedLoad) -> None:
        self._load = load
        self._publisher = client.publisher(load.queue, confirm="stored")

    async def held_back(self) -> int:
        """Publish until publish() waits; the bytes that were taken."""
        await self._publisher.open()
        taken = 0
        while True:
            try:
                async with asyncio.timeout(HELD_SECONDS):
                    await self._publisher.publish("t.big", (b"%d" % taken).ljust(BIG_BYTES))
            except TimeoutError:
                return taken * BIG_BYTES
            taken += 1
            assert taken * BIG_BYTES <= WAITING_BYTES_MAX, "nobody holds it back"

    async def goes_on(self) -> None:
        """All that was taken is stored, and one more."""
        number = self._publisher.messages
        await self._publisher.publish("t.big", (b"%d" % number).ljust(BIG_BYTES))
        await self._publisher.flush(60.0)
        self._load.stored[self._publisher.id] = number + 1
        await self._publisher.close()


def refused(load: RecordedLoad) -> int:
    """How often each of its publishers was, at least."""
    return min(load.refused[publisher] for publisher in load.stored)


async def test_disks_are_full_and_have_room_again(image: str, tmp_path: Path) -> None:
    """First one disk, which nobody feels; then all of them, which holds up who wants to know that it is stored."""
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=600, logs=tmp_path / "logs"
    )
    async with machines, machines.connect() as client, recorded(client, **BUSY) as load:
        await client.create_queue("plain")
        daemons = {host: await programs(machines, host) for host in machines.hosts}
        async with Traffic(client, "plain") as plain:
            grown = sum(load.stored.values()) + 2 * FILE_BYTES // PAYLOAD_BYTES  # more than a store has at hand
            await full_until(
                machines, machines.hosts[:1], lambda: sum(load.stored.values()) >= grown, "one full disk is enough room"
            )
            assert not load.refused
            plain.calm()
            await full_until(machines, machines.hosts, lambda: refused(load) >= REFUSED, "nothing is confirmed")
            pressing = PressingPublisher(client, load)
            waiting = await pressing.held_back()
            await plain.flowing()
            noticed = round(plain.longest, 2)
            for host in machines.hosts:
                assert await programs(machines, host) >= daemons[host], "a full disk kills nobody"
            for host in machines.hosts:  # what was confirmed must not be with the Exchanges alone
                for name, _ in daemons[host]:
                    if name.startswith(f"exchange/{load.queue}"):
                        await machines.kill_process(host, name)
                await machines.disk_free(host)
            began = time.monotonic()
            await load.flowing()
            figures = {"flowing_again_seconds": round(time.monotonic() - began, 2), "unrecorded_pause_seconds": noticed}
            await pressing.goes_on()
        plain.check_order()
        assert plain.lost == []
        sys.stdout.write(f"\n{figures | {'refused': dict(load.refused), 'held_back_bytes': waiting}}\n")
        assert noticed < NOTICED_SECONDS
