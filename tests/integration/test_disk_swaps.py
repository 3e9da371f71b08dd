"""Disks that are replaced under the names of living hosts, with real store processes: what they held is copied again."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from roq.coordination.session import Session
from roq.errors import DataLost, RoqError
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import RepairSettings
from roq.wire import store as wire
from tests.integration.store_rig import QUICK, Load, StoreRig, appended

EVERY = RepairSettings(every_seconds=0.2, gone_seconds=30)  # a deep check is an hour away


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[StoreRig]:
    session = await sessions(chroot)
    await session.ensure_path("")
    made = StoreRig(chroot, tmp_path, session)
    yield made
    await made.close()


AT_ONCE = RepairSettings(gone_seconds=30, garbage_seconds=0, garbage_every_seconds=0.001)


async def swap(rig: StoreRig, host: str) -> None:
    """Another, empty disk under the same host name."""
    store = rig.stores[host]
    await store.kill()
    shutil.rmtree(store.directory)
    store.directory.mkdir()
    await rig.forget_disk(host)
    await store.start()


@pytest.mark.timeout(180)
async def test_three_disks_replaced_one_after_the_other_lose_nothing_of_an_idle_log(rig: StoreRig) -> None:
    """Snapshot, closed segments and the open one; nothing is appended meanwhile."""
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(200)
    await load.stop()
    writer = load.writer
    await writer.snapshot(50, b"state" * 100_000)
    await writer.roll()
    open_entry = await appended(writer, b"in the open segment")
    repairer = LogRepairer(writer, EVERY)
    repairs = asyncio.ensure_future(repairer.run())
    try:
        async with asyncio.timeout(120):
            while await repairer.copies():
                await asyncio.sleep(0.05)
            for host in "abc":
                await swap(rig, host)
                assert await repairer.copies(), f"the new disk of {host} is empty"
                while await repairer.copies():
                    await asyncio.sleep(0.05)
    finally:
        repairs.cancel()
        await asyncio.gather(repairs, return_exceptions=True)
    await writer.close()
    later = await rig.writer(term=2)
    assert later.confirmed == open_entry
    reader = rig.reader()
    assert await reader.load_snapshot() == (50, b"state" * 100_000)
    found = await rig.read_all(open_entry)
    assert {position: found.get(position) for position in load.acked} == load.acked
    assert found[open_entry] == b"in the open segment"


async def test_a_snapshot_under_upload_is_no_garbage_whatever_is_opened_meanwhile(rig: StoreRig) -> None:
    """A host takes long; the two copies that are finished look as old as those that nobody needs."""
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(100)
    await load.stop()
    writer, state = load.writer, b"state" * 10_000
    await writer.snapshot(50, b"older")
    slow = rig.stores["c"]
    slow.freeze()
    upload = asyncio.ensure_future(writer.snapshot(100, state))
    prefix = f"{rig.log_id}~snapshot-"
    async with asyncio.timeout(10):
        for host in "ab":
            while not any(one.size == len(state) for one in await writer.stores.inventory(host, prefix)):
                await asyncio.sleep(0.02)
    await writer.roll()
    repairer = LogRepairer(writer, AT_ONCE)
    for _ in range(2):
        await repairer.sweep()
    slow.signal(signal.SIGCONT)
    await upload
    assert writer.meta.snapshot is not None
    for host in writer.meta.snapshot.nodes:
        assert await writer.stores.get_blob([host], writer.meta.snapshot.blob) == state


async def test_a_snapshot_that_was_lost_while_it_was_uploaded_is_not_named(rig: StoreRig) -> None:
    """Two disks fail while the third host is still at it: the former snapshot stays, with the log behind it."""
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(100)
    await load.stop()
    writer, state = load.writer, b"state" * 10_000
    await writer.snapshot(50, b"older")
    rig.stores["c"].freeze()
    upload = asyncio.ensure_future(writer.snapshot(100, state))
    prefix = f"{rig.log_id}~snapshot-"
    async with asyncio.timeout(10):
        for host in "ab":
            while not (found := [one for one in await writer.stores.inventory(host, prefix) if one.size == len(state)]):
                await asyncio.sleep(0.02)
            await rig.request(host, wire.DeleteBlob(found[0].blob))
    rig.stores["c"].signal(signal.SIGCONT)
    with pytest.raises(RoqError, match="only c kept snapshot"):
        await upload
    assert await rig.reader().load_snapshot() == (50, b"older")


@pytest.mark.quick
async def test_damage_on_every_host_is_named_at_once(rig: StoreRig) -> None:
    """An entry in the middle, then the snapshot: what can be read is, and the error says what is damaged, and where."""
    await rig.start("abc")
    load = Load(await rig.writer(settings=QUICK.model_copy(update={"ack_quorum": 3})), "one")  # a slow third would miss some
    await load.grow(300)
    await load.stop()
    await load.writer.roll()
    await load.writer.snapshot(50, b"state")
    for store in rig.stores.values():
        await store.kill()
        path = store.journal()[0]
        data = bytearray(path.read_bytes())
        data[data.rindex(b"one 200") + 5] ^= 1
        path.write_bytes(data)
        await store.start()
    reader = rig.reader()
    found: dict[int, bytes] = {}

    async def follow() -> None:
        async for entries in reader.follow(0):
            found.update(entries)

    with pytest.raises(DataLost, match=r"entry \d+ of log .*, segment .*, is damaged or missing on every host .*: a, b, c"):
        await asyncio.wait_for(follow(), 10)
    assert found
    assert found == {position: entry for position, entry in load.acked.items() if position < max(found) + 1}
    for store in rig.stores.values():
        for path in store.directory.glob("blobs/*/*snapshot*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataLost, match=r"snapshot of log .* as of entry 50: .* is damaged or missing on every host .*[abc]: "):
        await reader.load_snapshot()


async def test_a_take_over_that_no_disk_can_decide_says_so_at_once(rig: StoreRig) -> None:
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(10)
    await load.stop()
    await load.writer.close()
    for host in "abc":
        await swap(rig, host)
    with pytest.raises(DataLost, match=r"whether segment .* can't be found out: a, b, c of .* lost part of what they held"):
        await asyncio.wait_for(rig.writer(term=2), 10)
