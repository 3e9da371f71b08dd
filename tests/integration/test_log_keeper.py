"""A log that nobody writes any more, with real store processes and the real ZooKeeper: its writer or a keeper has closed it,
its copies are kept, and what was trimmed goes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import Closed, LogFenced, LogTrimmed, LogUnavailable
from roq.log.replicated import metadata
from roq.log.replicated.metadata import SegmentState
from roq.log.replicated.owner import now_ms
from roq.log.replicated.reader import ANSWER_SECONDS
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import RepairSettings
from roq.log.replicated.writer import LogWriter
from roq.wire import store as wire
from tests.integration.store_rig import QUICK, Load, StoreRig, appended

AT_ONCE = RepairSettings(gone_seconds=0, verify_seconds=0.001, garbage_seconds=0, garbage_every_seconds=0)


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[StoreRig]:
    session = await sessions(chroot)
    await session.ensure_path("")
    made = StoreRig(chroot, tmp_path, session)
    yield made
    await made.close()


async def append(writer: LogWriter, first: int, last: int) -> None:
    """Entries that say their number."""
    futures = [appended(writer, b"%d" % number) for number in range(first, last + 1)]
    assert [await future for future in futures] == list(range(first, last + 1))


def numbered(upto: int) -> dict[int, bytes]:
    return {number: b"%d" % number for number in range(1, upto + 1)}


async def segments_on(rig: StoreRig, host: str) -> set[str]:
    found = await rig.request(host, wire.ListSegments(rig.log_id))
    assert isinstance(found, wire.SegmentList)
    return {view.segment for view in found.segments}


@pytest.mark.quick
async def test_a_sealed_log_has_an_end_that_readers_see_and_may_be_written_again(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    await append(writer, 1, 40)
    await writer.roll()
    under_way = [appended(writer, b"%d" % number) for number in range(41, 51)]
    began = now_ms()
    assert await writer.seal()
    assert [await future for future in under_way] == list(range(41, 51))
    assert isinstance(writer.error, Closed)
    with pytest.raises(Closed):
        writer.write(b"late", lambda result: None)
    reader = rig.reader()
    meta = await reader.meta()
    meta.check()
    assert [(one.first, one.last, one.state) for one in meta.segments] == [
        (1, 40, SegmentState.CLOSED),
        (41, 50, SegmentState.CLOSED),
    ]
    assert 0 < meta.segments[0].closed_at <= began <= meta.segments[1].closed_at <= now_ms()
    assert meta.next_first == 51
    assert await reader.read(50) == []
    assert await rig.read_all(50) == numbered(50)
    again = await rig.writer()
    await append(again, 51, 51)
    assert await again.seal()
    assert (await rig.read_all(51))[51] == b"51"


async def test_a_log_is_left_open_while_too_few_stores_answer(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    await append(writer, 1, 10)
    for host in "ab":
        await rig.stores[host].kill()
    unknown = appended(writer, b"11")
    assert not await writer.seal()
    with pytest.raises(Closed):
        await unknown
    assert writer.meta.segments[-1].state is SegmentState.OPEN
    for host in "ab":
        await rig.stores[host].start()
    meta = (await rig.keeper()).meta
    assert meta.segments[-1].state is SegmentState.CLOSED
    assert meta.segments[-1].last in (10, 11)


async def test_a_log_sealed_with_nothing_in_it_keeps_no_segment(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    assert await writer.seal()
    assert (await rig.reader().meta()).segments == ()
    assert (await rig.keeper()).meta.next_first == 1


async def test_a_keeper_closes_what_a_killed_writer_left(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    load = Load(writer, "one")
    await load.grow(500)
    await writer.close()  # at once, with entries under way: what it does when its process is killed
    assert isinstance(await load.ended(), Closed)
    assert writer.meta.segments[-1].state is SegmentState.OPEN
    began = now_ms()
    keeper = await rig.keeper()
    (segment,) = keeper.meta.segments
    assert segment.state is SegmentState.CLOSED
    assert segment.last >= max(load.acked)
    assert began <= segment.closed_at <= now_ms()
    found = await rig.read_all(segment.last)
    assert {position: found[position] for position in load.acked} == load.acked
    assert set(found.values()) <= load.tried
    assert await rig.reader().read(segment.last) == []


def connections(rig: StoreRig) -> int:
    """From here to stores."""
    ports = {int(store.endpoint.rpartition(":")[2]) for store in rig.stores.values()}
    found = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.status == psutil.CONN_ESTABLISHED and one.raddr.port in ports for one in found)


async def test_keepers_of_many_logs_share_their_connections(rig: StoreRig) -> None:
    """A recorded queue keeps the tapes of all lives of its Exchanges, for days."""
    await rig.start("abc")
    keepers, logs = [], [rig.log_id, *[f"{rig.log_id}{number}" for number in range(7)]]
    for rig.log_id in logs:
        writer = await rig.writer()
        load = Load(writer, "one")
        await load.grow(10)
        await writer.close()
        await load.ended()
        keepers.append(await rig.keeper())
    for keeper in keepers:
        for host in "abc":
            assert await keeper.stores.segments(host, f"{keeper.log_id}~")
    async with asyncio.timeout(10):
        while connections(rig) > len(rig.stores):  # those of the take-overs are being closed
            await asyncio.sleep(0.02)
    keepers[0].close()
    assert await keepers[1].stores.segments("a", f"{keepers[1].log_id}~"), "the others go on"


async def test_a_keeper_fences_the_writer_and_the_next_keeper_the_first_one(rig: StoreRig) -> None:
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(100)
    first = await rig.keeper()
    assert isinstance(await load.ended(), LogFenced)
    (segment,) = first.meta.segments
    assert segment.last >= max(load.acked)
    await first.own()
    second = await rig.keeper()
    assert second.meta.segments == first.meta.segments, "it was closed already"
    for step in (first.own(), first.change(lambda meta: meta)):
        with pytest.raises(LogFenced):
            await step
    assert isinstance(first.error, LogFenced)
    assert isinstance(await first.failed(), LogFenced)
    assert second.error is None
    with pytest.raises(LogFenced):
        await rig.keeper(term=0)
    writer = await rig.writer()
    await append(writer, segment.last + 1, segment.last + 1)
    with pytest.raises(LogFenced):
        await LogRepairer(second, AT_ONCE).sweep()


async def test_a_keeper_makes_no_log_and_waits_for_stores_only_so_long(rig: StoreRig) -> None:
    with pytest.raises(LogFenced, match="the log was removed"):
        await rig.keeper()
    await rig.start("abc")
    await append(await rig.writer(), 1, 10)
    for host in "ab":
        await rig.stores[host].kill()
    with pytest.raises(LogUnavailable, match="waits for an answer of"):
        await rig.keeper(settings=QUICK.model_copy(update={"take_over_seconds": 2.0}))
    assert await rig.session.get(paths.log(rig.log_id)) is not None


async def test_what_a_lost_disk_held_is_copied_again_by_a_keeper(rig: StoreRig) -> None:
    await rig.start("abcd")
    writer = await rig.writer()
    await append(writer, 1, 300)
    await writer.roll()
    await append(writer, 301, 400)
    await writer.close()
    keeper = await rig.keeper()
    lost = keeper.meta.segments[0].fragments[0].nodes[0]
    await rig.stores[lost].kill()
    shutil.rmtree(rig.stores[lost].directory)
    repairer = LogRepairer(keeper, AT_ONCE)
    for _ in range(3):
        await repairer.round()
    keeper.meta.check()
    nodes = [fragment.nodes for segment in keeper.meta.segments for fragment in segment.fragments]
    assert all(len(one) == 3 and lost not in one for one in nodes)
    assert repairer.counters["copies"] >= 1
    assert await repairer.copies() == []
    for host in set("bcd" if lost == "a" else "abcd") - {lost, nodes[0][0]}:
        await rig.stores[host].kill()
    rig.static.alive.clear()
    assert await rig.read_all(400) == numbered(400), "one host has everything"


async def test_what_was_trimmed_is_deleted_and_readers_are_told(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    for first in (1, 11, 21):
        await append(writer, first, first + 9)
        await writer.roll()
    names = [segment.id for segment in writer.meta.segments]
    assert (await writer.change(partial(metadata.trim, position=1_000_000))).segments[0].id == names[-1], "it is written"
    await append(writer, 31, 40)
    await writer.close()
    keeper = await rig.keeper()
    (segment,) = keeper.meta.segments
    assert (keeper.meta.trimmed, segment.first, segment.last) == (30, 31, 40)
    assert await segments_on(rig, "a") >= set(names[:-1])
    reader = rig.reader()
    await reader.refresh()
    for after in (0, 29):
        with pytest.raises(LogTrimmed):
            await reader.read(after)
    assert [position for position, _ in await reader.read(30)] == list(range(31, 41))
    await LogRepairer(keeper, AT_ONCE).sweep()
    for host in "abc":
        assert await segments_on(rig, host) == {segment.id}


async def test_a_lost_host_is_asked_last_though_it_answered_last(rig: StoreRig) -> None:
    """It is silent: who takes over reads on at once, as the directory knows that it is lost."""
    await rig.start("abc")
    writer, reader = await rig.writer(), rig.reader()
    await append(writer, 1, 10)
    await writer.roll()
    await reader.refresh()
    assert len(await reader.read(0)) == 10
    lost = reader._preferred
    rig.stores[lost].freeze()
    rig.static.alive.discard(lost)
    async with asyncio.timeout(ANSWER_SECONDS / 2):
        assert [position for position, _ in await reader.read(5)] == list(range(6, 11))


async def test_a_trim_ends_between_segments_and_may_leave_none(rig: StoreRig) -> None:
    await rig.start("abc")
    writer = await rig.writer()
    for first in (1, 11):
        await append(writer, first, first + 9)
        await writer.roll()
    await writer.seal()
    keeper, reader = await rig.keeper(), rig.reader()
    assert (await keeper.change(partial(metadata.trim, position=9))).trimmed == 0
    assert (await keeper.change(partial(metadata.trim, position=19))).trimmed == 10
    assert (await keeper.change(partial(metadata.trim, position=20))).segments == ()
    assert keeper.meta.next_first == 21
    await reader.refresh()
    with pytest.raises(LogTrimmed):
        await reader.read(19)
    assert await reader.read(20) == []
    assert await LogRepairer(keeper, AT_ONCE).sweep() > 0
    assert not await segments_on(rig, "a")
    await append(await rig.writer(), 21, 22)
    found: list[bytes] = []
    async with asyncio.timeout(10.0):
        async for entries in reader.follow(20):
            found += [entry for _, entry in entries]
            if len(found) == 2:
                break
    assert found == [b"21", b"22"]
