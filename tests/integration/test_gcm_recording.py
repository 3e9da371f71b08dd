"""Recorded queues at the GCM: stores run before a request is answered, tapes are found and removed in ZooKeeper.

Hosts are played by a test double (gcm_bench.py); what is decided is in tests/unit/test_recorded_queues.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from roq.coordination import paths
from roq.errors import NoHosts, NotReady, NotRecorded, QueueConflict, QueueNotFound
from roq.wire import gcm as wire
from roq.wire.assignment import ProcessKind, ProcessState
from roq.wire.recording import Record, Recording, tape_log, tapes_of
from tests.integration.gcm_bench import Bench, FakeHost, eventually

WEEK = Record()


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    """A leader that does not wait long for hosts."""
    async with AsyncExitStack() as stack:
        made = Bench(chroot, stack)
        await made.gcm(wait_seconds=1.5)
        yield made


async def hosts(bench: Bench, *names: str) -> list[FakeHost]:
    made = [await bench.host(name) for name in names]
    await bench.hosts_alive(len(names))
    return made


async def create(bench: Bench, record: Record | None, transaction: str = "t") -> wire.QueueInfo:
    return await bench.ask(wire.CreateQueue("q", transaction, record=record), wire.QueueInfo)


async def record_queue(bench: Bench, record: Record | None) -> None:
    await bench.ask(wire.RecordQueue("q", record, "r"), wire.Done)


async def tapes(bench: Bench) -> wire.Tapes:
    return await bench.ask(wire.DescribeTapes("q"), wire.Tapes)


def told(host: FakeHost) -> Recording | None:
    """What the host's Exchange was told last."""
    assert host.assignment is not None
    (recording,) = [spec.recording for spec in host.assignment.processes if spec.kind is ProcessKind.EXCHANGE]
    return recording


async def test_a_recorded_queue_is_answered_when_stores_run(bench: Bench) -> None:
    machines = await hosts(bench, "a", "b")
    for host in machines:
        host.states[ProcessKind.STORE] = ProcessState.STARTING
    with pytest.raises(NotReady, match="'q' does not serve"):
        await create(bench, WEEK)
    waiting = asyncio.ensure_future(create(bench, WEEK))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    for host in machines:
        host.states.clear()
        host.report()
    info = await waiting
    assert (info.record.record, info.record.recorded) == (WEEK, True)
    assert len((await tapes(bench)).stores) == 2
    with pytest.raises(QueueConflict):
        await create(bench, Record(1), "t2")
    with pytest.raises(NoHosts):
        await bench.ask(wire.CreateQueue("other", "t3", record=Record(copies=3)), wire.QueueInfo)


async def test_recording_is_switched_on_and_off_with_the_exchange_told(bench: Bench) -> None:
    (host,) = await hosts(bench, "a")
    await create(bench, None)
    with pytest.raises(NotRecorded):
        await tapes(bench)
    host.states[ProcessKind.STORE] = ProcessState.STARTING
    with pytest.raises(NotReady, match="not enough stores run for queue 'q'"):
        await record_queue(bench, WEEK)
    assert told(host) == Recording(WEEK, tapes_of("q", "t"), on=True), "it is written all the same"
    host.states.clear()
    host.report()
    await record_queue(bench, WEEK)
    await record_queue(bench, None)
    await eventually(lambda: _is(told(host), Recording(WEEK, tapes_of("q", "t"), on=False)))
    found = await tapes(bench)
    assert (found.record, found.recorded, found.views) == (WEEK, False, ())


async def _is(one: object, other: object) -> bool:
    return one == other


async def test_tapes_are_those_in_zookeeper_now_and_go_with_their_queue(bench: Bench) -> None:
    await hosts(bench, "a")
    info = await create(bench, WEEK)
    (exchange,) = info.record.exchanges
    session, name = await bench.session(), tapes_of("q", "t")
    mine = [tape_log(name, exchange), tape_log(name, "former")]
    for log in (*mine, "tape.another.e", "0123456789abcdef"):
        await session.create(paths.log(log), log.encode())
    found = await tapes(bench)
    assert {view.log: (view.live, view.meta.decode()) for view in found.views} == {
        mine[0]: (True, mine[0]),
        mine[1]: (False, mine[1]),
    }
    assert [view.log for view in found.views] == sorted(mine)
    for _ in range(2):
        await bench.ask(wire.RemoveQueue("q", "gone"), wire.Done)
    assert await session.children(paths.LOGS) == ["0123456789abcdef", "tape.another.e"]
    with pytest.raises(QueueNotFound):
        await tapes(bench)
