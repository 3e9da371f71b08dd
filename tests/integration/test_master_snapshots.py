"""A master's snapshots with real stores: made when the log has many segments, however short, and loaded by who comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from roq.coordination.session import Session
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import RepairSettings
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.task import TaskToPut
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Fold
from roq.workqueue.master import term as terms
from roq.workqueue.master.follower import LogFollower
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm, SteadyClock
from roq.workqueue.records import Configure
from roq.workqueue.state import State
from tests.integration.store_rig import StoreRig

SEGMENTS = 5


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[StoreRig]:
    made = StoreRig(chroot, tmp_path, await sessions(chroot))
    await made.session.ensure_path("")
    yield made
    await made.close()


@pytest.mark.parametrize("tasks", [10, 5_000])
async def test_many_short_segments_force_a_snapshot(rig: StoreRig, monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """Of a small state, which is dumped at once, and of a larger one, which a fork dumps."""
    monkeypatch.setattr(terms, "SNAPSHOT_SEGMENTS", SEGMENTS)
    monkeypatch.setattr(terms, "SNAPSHOT_LOOK_SECONDS", 0.1)
    await rig.start("abc")
    writer, counters, clock = await rig.writer(), Counters(), SteadyClock()
    service = MasterService(Fold(), Recent(), 1, 65536, lambda hosts: ())
    term = MasterTerm(service, writer, lambda peer, message: True, lambda blobs: None, clock, counters)
    service.apply(Configure(clock.now(), TaskSettings(), 0))
    beside = asyncio.ensure_future(terms.snapshots(term, writer, counters, asyncio.Event()))
    try:
        for segment in range(SEGMENTS + 1):
            each = [TaskToPut(b"x")] * (tasks // (SEGMENTS + 1))
            term.take(b"peer", segment, wire.Put(7, 1 + segment * len(each), each))
            await term.barrier()
            assert not counters["snapshots"]
            await writer.roll()
        async with asyncio.timeout(10):
            while not counters["snapshots"]:
                await asyncio.sleep(0.02)
        meta = writer.meta
        assert meta.snapshot is not None
        assert len(meta.segments) <= 2
        assert meta.trimmed > 0
        await asyncio.sleep(0.5)
        assert counters["snapshots"] == 1, "once is enough"
        term.take(b"peer", 99, wire.Put(8, 1, [TaskToPut(b"after it")]))
        await term.barrier()
        follower = LogFollower(rig.reader())
        await follower.catch_up(writer.confirmed)
        assert State(follower.fold).digest() == State(service.fold).digest()
    finally:
        beside.cancel()
        term.close()
        await asyncio.gather(beside, return_exceptions=True)


async def test_a_snapshot_that_every_store_has_lost_is_made_again_by_the_master_that_serves(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the state; whoever comes next would have nothing to begin with."""
    monkeypatch.setattr(terms, "SNAPSHOT_LOOK_SECONDS", 0.1)
    await rig.start("abc")
    writer, counters, clock, lost = await rig.writer(), Counters(), SteadyClock(), asyncio.Event()
    service = MasterService(Fold(), Recent(), 1, 65536, lambda hosts: ())
    term = MasterTerm(service, writer, lambda peer, message: True, lambda blobs: None, clock, counters)
    service.apply(Configure(clock.now(), TaskSettings(), 0))
    repairer = LogRepairer(writer, RepairSettings(), lost.set)
    beside = asyncio.ensure_future(terms.snapshots(term, writer, counters, lost))

    async def made(count: int) -> None:
        async with asyncio.timeout(20):
            while counters["snapshots"] < count:
                await asyncio.sleep(0.02)

    try:
        term.take(b"peer", 1, wire.Put(7, 1, [TaskToPut(b"x")] * 100))
        await term.barrier()
        lost.set()
        await made(1)
        await repairer.round()
        assert not lost.is_set()
        first = writer.meta.snapshot
        assert first is not None
        await writer.stores.delete_blob(first.nodes, first.blob)
        await repairer.round()
        await made(2)
        assert writer.meta.snapshot is not None
        assert writer.meta.snapshot.blob != first.blob
        await repairer.round()
        assert not lost.is_set()
        follower = LogFollower(rig.reader())
        await follower.catch_up(writer.confirmed)
        assert State(follower.fold).digest() == State(service.fold).digest()
    finally:
        beside.cancel()
        term.close()
        await asyncio.gather(beside, return_exceptions=True)
