"""Payloads kept by stores, seen from their master: copies, time-outs, orphans, dead stores. Real stores, no real log."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from roq.errors import DataLost, LogUnavailable, RoqError, TaskNotFound, TemporaryError
from roq.log.replicated.health import rank
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.log.store.server import StoreServer
from roq.runtime.blocking_connection import ConnectionPool, StopEvent
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.task import PayloadReference, StoreAddress, TaskToPut
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.big_payloads import BigPayloads
from roq.workqueue.fold import Fold
from roq.workqueue.master.blobs import BlobStores
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.registry import RegistryPace
from roq.workqueue.master.service import MasterService
from roq.workqueue.records import BlobRef

PACE = RegistryPace(heartbeat_seconds=0.1, pending_seconds=10.0, inventory_seconds=0.15, orphan_seconds=0.4)
PAYLOAD = bytes(range(256)) * 1000
WAIT_SECONDS = 15.0


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not true():
            await asyncio.sleep(0.02)


class Rig:
    """Four stores in this process, and the blobs of a master with a write quorum of 3."""

    def __init__(self, directory: Path, pace: RegistryPace = PACE) -> None:
        self.directory = directory
        self.servers: dict[str, StoreServer] = {}
        self.static = StaticDirectory({})
        for host in ("h1", "h2", "h3", "h4"):
            self.open(host)
        self.stores = Stores(self.static)
        self.service = MasterService(Fold(), Recent(), 1, 65536, self.places)
        self.counters = Counters()
        self.answers: dict[int, wire.Reply | RoqError] = {}
        self.blobs = BlobStores(
            WorkQueueSpec("log", 3, 2), self.stores, self.service, self.turn, self.barrier, self.now, self.counters, pace
        )
        self._ids = 0

    def open(self, host: str) -> None:
        server = self.servers[host] = StoreServer(
            self.directory / host, host, "127.0.0.1", 0, lambda error: None, file_bytes=1024 * 1024
        )
        self.static.endpoints[host] = f"tcp://127.0.0.1:{server.port}"
        self.static.alive.add(host)

    async def end(self, host: str) -> None:
        """Its process is gone; the directory does not know."""
        await self.servers.pop(host).close()

    def places(self, hosts: tuple[str, ...]) -> tuple[StoreAddress, ...]:
        return self.blobs.places(hosts)

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def turn(self) -> None:
        batches = self.service.cut()
        while batches:
            batch = batches.popleft()
            self.service.waiting.durable(batch)
            self.answers |= {id: body for _, id, body in batch.answers}
            self.blobs.drop(batch.dropped)

    async def barrier(self) -> None:
        self.turn()

    async def answer(self, id: int) -> wire.Reply | Exception:
        await until(lambda: id in self.answers)
        return self.answers.pop(id)

    async def reserve(self, sequence: int = 1, avoid: tuple[str, ...] = ()) -> wire.Reserved:
        self._ids += 1
        self.blobs.take(b"peer", self._ids, wire.Reserve(7, sequence, len(PAYLOAD), crc(), list(avoid)))
        self.turn()
        reserved = await self.answer(self._ids)
        assert isinstance(reserved, wire.Reserved)
        return reserved

    async def upload(self, reserved: wire.Reserved) -> None:
        await self.stores.put_blob([reserved.store.host], reserved.blob, PAYLOAD)

    async def stored(self, blob: str, sequence: int = 1) -> wire.Reply | Exception:
        self._ids += 1
        self.blobs.take(b"peer", self._ids, wire.PayloadStored(7, sequence, blob, TaskToPut(b"")))
        self.turn()
        return await self.answer(self._ids)

    async def put(self, sequence: int = 1) -> BlobRef:
        reserved = await self.reserve(sequence)
        await self.upload(reserved)
        assert await self.stored(reserved.blob, sequence) == wire.TasksAdded([])
        return self.ref(sequence)

    def ref(self, sequence: int = 1) -> BlobRef:
        payload = self.service.fold.blobs[7, sequence].payload
        assert isinstance(payload, BlobRef)
        return payload

    def held(self, prefix: str = "log/") -> dict[str, list[str]]:
        return {host: server.blobs.names(prefix) for host, server in self.servers.items() if server.blobs.names(prefix)}

    async def close(self) -> None:
        await self.blobs.close()
        self.stores.close()
        for server in self.servers.values():
            await server.close()


def crc() -> int:
    return crc32(PAYLOAD)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    made.blobs.start()
    yield made
    await made.close()


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig that waits two seconds for the end of an upload."""
    made = Rig(tmp_path, replace(PACE, pending_seconds=2.0))
    made.blobs.start()
    yield made
    await made.close()


@pytest.mark.quick
async def test_a_payload_is_answered_when_enough_stores_have_it_and_deleted_with_its_task(rig: Rig) -> None:
    ref = await rig.put()
    assert len(ref.holders) == 3
    assert rig.held() == {host: [ref.blob] for host in sorted(ref.holders)}
    rig.service.take(b"peer", 99, wire.PurgeQueue(), rig.now())
    rig.turn()
    await until(lambda: not rig.held())


async def test_an_upload_that_never_ends_is_discarded(hasty: Rig) -> None:
    reserved = await hasty.reserve()
    await hasty.upload(reserved)
    assert hasty.held() == {reserved.store.host: [reserved.blob]}
    await until(lambda: not hasty.held())
    assert isinstance(await hasty.stored(reserved.blob), TaskNotFound)
    assert hasty.counters["uploads_discarded"] == 1


async def test_what_was_not_uploaded_is_not_believed(rig: Rig) -> None:
    reserved = await rig.reserve()
    assert isinstance(await rig.stored(reserved.blob), TaskNotFound)
    assert not rig.service.fold.blobs


async def test_the_client_can_avoid_a_store(rig: Rig) -> None:
    avoid = ("h1", "h2", "h3")
    for sequence in range(1, 6):
        assert (await rig.reserve(sequence, avoid)).store.host == "h4"


async def test_orphans_are_removed_and_nothing_else(rig: Rig) -> None:
    ref = await rig.put()
    await rig.stores.put_blob(["h1", "h2"], "log/of-a-master-that-is-gone.1", b"orphan")
    await rig.stores.put_blob(["h1"], "other/1", b"not ours")
    spare = next(host for host in rig.servers if host not in ref.holders)
    await rig.stores.put_blob([spare], ref.blob, PAYLOAD)  # a copy too many, as on a store that came back
    await until(lambda: rig.held() == {host: [ref.blob] for host in sorted(ref.holders)})
    assert rig.held("other/") == {"h1": ["other/1"]}
    await until(lambda: rig.counters["orphans_deleted"] == 3)


async def test_what_a_dead_store_held_is_copied(rig: Rig) -> None:
    ref = await rig.put()
    dead = ref.holders[0]
    await rig.end(dead)
    await until(lambda: dead not in rig.ref().holders)
    after = rig.ref()
    assert len(after.holders) == 3
    assert await rig.stores.get_blob([host for host in after.holders if host not in ref.holders], ref.blob) == PAYLOAD
    rig.open(dead)
    await until(lambda: dead not in rig.held())


async def test_a_copy_that_was_lost_is_made_again(rig: Rig) -> None:
    ref = await rig.put()
    await asyncio.to_thread(rig.servers[ref.holders[1]].blobs.put_aside, ref.blob)
    await until(lambda: rig.counters["copies_lost"] == 1 and len(rig.ref().holders) == 3)
    await until(lambda: all(ref.blob in rig.held().get(host, []) for host in rig.ref().holders))


async def test_too_few_stores_are_an_error_and_not_a_promise(rig: Rig) -> None:
    reserved = await rig.reserve()
    await rig.upload(reserved)
    for host in [host for host in rig.servers if host != reserved.store.host]:
        await rig.end(host)
    assert isinstance(await rig.stored(reserved.blob), LogUnavailable)
    assert not rig.service.fold.blobs


@pytest.fixture
async def still(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig that does nothing by itself."""
    made = Rig(tmp_path)
    yield made
    await made.close()


async def test_a_store_that_takes_nothing_keeps_no_other_from_getting_a_copy(rig: Rig) -> None:
    rig.open("h5")
    ref = await rig.put()
    dead = ref.holders[0]
    first = rank(ref.blob, [host for host in rig.servers if host not in ref.holders])[0]
    await asyncio.to_thread(rig.servers[first].blobs.delete, ref.blob)  # it refuses the name for a while
    await rig.end(dead)
    await until(lambda: dead not in rig.ref().holders and len(rig.ref().holders) == 3)
    assert first not in rig.ref().holders


async def test_a_watch_that_breaks_begins_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = rig.static.hosts

    def broken() -> frozenset[str]:
        monkeypatch.setattr(rig.static, "hosts", hosts)
        raise ZeroDivisionError("once")

    ref = await rig.put()
    monkeypatch.setattr(rig.static, "hosts", broken)
    await until(lambda: rig.counters["watches_broken"] == 1)
    await rig.end(ref.holders[0])
    await until(lambda: len(rig.ref().holders) == 3 and ref.holders[0] not in rig.ref().holders)


async def test_a_put_that_meets_an_unexpected_error_is_answered_and_may_be_repeated(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: object) -> None:
        raise ZeroDivisionError("once")

    reserved = await rig.reserve()
    await rig.upload(reserved)
    with monkeypatch.context() as patch:
        patch.setattr(rig.stores, "copy_blob", broken)
        assert isinstance(await rig.stored(reserved.blob), TemporaryError)
    assert await rig.stored(reserved.blob) == wire.TasksAdded([])


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig whose next inventory is ten minutes away."""
    made = Rig(tmp_path, replace(PACE, inventory_seconds=600.0))
    made.blobs.start()
    yield made
    await made.close()


async def test_disks_replaced_one_after_the_other_lose_no_payload(patient: Rig) -> None:
    """A store that begins another life is compared with what the log says at once, not with the next inventory."""
    ref = await patient.put()
    for host in ref.holders:
        await until(lambda: len(patient.held()) == 3)
        assert await patient.blobs.copies() == []
        await patient.end(host)
        shutil.rmtree(patient.directory / host)
        patient.open(host)
        await until(lambda: len(patient.ref().holders) == 3 and len(patient.held()) == 3)
    assert await patient.stores.get_blob(patient.ref().holders, ref.blob) == PAYLOAD


async def test_who_asks_is_told_which_payloads_lack_copies(still: Rig) -> None:
    ref = await still.put()
    assert await still.blobs.copies() == []
    await asyncio.to_thread(still.servers[ref.holders[0]].blobs.delete, ref.blob)
    assert await still.blobs.copies() == [wire.Shortage(f"1 payloads, {ref.blob} first", 2, 3, (ref.holders[0],))]


async def test_a_payload_that_is_damaged_everywhere_is_named_with_its_hosts(still: Rig) -> None:
    """And only then: while one store does not answer, it may have it."""
    ref = await still.put()

    class Link:
        connections = ConnectionPool(StopEvent())

    payloads = BigPayloads(Link())  # type: ignore[arg-type]
    where = PayloadReference(ref.blob, ref.size, ref.crc, still.places(ref.holders))
    one, *others = ref.holders
    for host in others:
        (path,) = (still.directory / host).glob("blobs/*/*1")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await asyncio.to_thread(payloads.get, where) == PAYLOAD
    await asyncio.to_thread(still.servers[one].blobs.delete, ref.blob)
    with pytest.raises(DataLost) as damage:
        await asyncio.to_thread(payloads.get, where)
    assert all(text in str(damage.value) for text in (ref.blob, "damaged or missing on every host", *ref.holders))
    assert await asyncio.to_thread(payloads.peek, where) == b""
    await still.end(one)
    assert await asyncio.to_thread(payloads.get, where) is None
    Link.connections.close()
