"""The replicated log with one store whose disk hangs: two real processes, and a server here that can be held in a sync."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from roq.coordination.session import Session
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import RepairSettings
from roq.log.store import storage
from roq.log.store.server import StoreServer
from roq.runtime.files import Disk
from roq.runtime.rpc import RpcClient
from roq.wire import store as wire
from tests.integration.store_rig import Load, StoreRig, appended

ENTRY = bytes(64 * 1024)
BOUND = 4 * 1024 * 1024


class HeldDisk(Disk):
    """A sync waits for `open`."""

    def __init__(self) -> None:
        self.open_again = threading.Event()
        self.open_again.set()

    def sync(self, file: int) -> None:
        self.open_again.wait(30)
        super().sync(file)


@pytest.mark.quick
async def test_a_store_whose_disk_hangs_holds_up_nobody_and_gets_later_what_it_missed(
    chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PENDING_BYTES_MAX", BOUND)
    session = await sessions(chroot)
    await session.ensure_path("")
    rig = StoreRig(chroot, tmp_path, session)
    disk = HeldDisk()
    slow = StoreServer(tmp_path / "c", "c", "127.0.0.1", 0, lambda error: None, disk=disk)
    slow._sync_seconds = 60.0  # in the thread, as for any slow disk
    try:
        await rig.start("ab")
        rig.static.endpoints["c"] = f"tcp://127.0.0.1:{slow.port}"
        rig.static.alive.add("c")
        writer = await rig.writer()
        await appended(writer, b"first")
        disk.open_again.clear()
        async with asyncio.timeout(30):
            for _ in range(40):
                await asyncio.gather(*(appended(writer, ENTRY) for _ in range(8)))  # two of three have it
                assert slow.storage.pending_bytes < BOUND + 2 * 1024 * 1024
        assert writer.confirmed == 321
        assert slow.counters["refused_overloaded"] > 0
        disk.open_again.set()
        load = Load(writer, "later")
        at_once = RepairSettings(gone_seconds=0, verify_seconds=0.001, garbage_seconds=0, garbage_every_seconds=0)
        repairer = LogRepairer(writer, at_once)
        async with asyncio.timeout(30):
            while not await whole(rig, writer.meta.segments[0].id):
                await load.grow(10)
                await repairer.round()
        await load.stop()
        assert writer.error is None
        assert len(await rig.read_all(max(load.acked))) >= max(load.acked)
    finally:
        disk.open_again.set()
        await rig.close()
        await slow.close()


async def whole(rig: StoreRig, segment: str) -> bool:
    """Does the slow store hold all of the first segment?"""
    one = RpcClient(rig.static.endpoints["c"], wire.Reply)
    try:
        answer = await one.request(wire.Holes(segment, 1, 321), wire.Ranges, 5.0)
    finally:
        one.close()
    return answer.ranges == []
