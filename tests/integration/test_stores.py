"""The replicated log with real store processes and the real ZooKeeper: whatever is killed, paused or damaged, what was
acknowledged stays readable, and an old writer is refused."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from roq.coordination import paths
from roq.coordination.link import Check
from roq.coordination.session import Session
from roq.errors import CallError, DataLost, LogFenced, LogTrimmed, LogUnavailable, NoHosts, StorageFull
from roq.log.replicated.chain import Chain
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import LogSettings, RepairSettings
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


def check(acked: dict[int, bytes], found: dict[int, bytes], tried: set[bytes]) -> None:
    assert {position: found.get(position) for position in acked} == acked  # nothing acknowledged is lost or moved
    assert set(found.values()) <= tried  # nothing was made up
    assert len(set(found.values())) == len(found)


@pytest.mark.quick
async def test_append_read_take_over_snapshot(rig: StoreRig) -> None:
    await rig.start("abc")
    first = await rig.writer()
    assert [await future for future in [appended(first, b"%d" % number) for number in range(1, 101)]] == list(range(1, 101))
    assert (await rig.read_all(100))[100] == b"100"
    second = await rig.writer(term=2)
    assert await appended(second, b"101") == 101
    with pytest.raises(LogFenced):
        await appended(first, b"late")
    with pytest.raises(LogFenced):
        await rig.writer(term=1)
    await second.roll()
    await second.snapshot(60, b"state" * 500_000)
    assert await appended(second, b"102") == 102
    reader = rig.reader()
    assert await reader.load_snapshot() == (60, b"state" * 500_000)
    assert [position for position, _ in await reader.read(100)] == [101]
    await second.snapshot(101, b"newer")
    with pytest.raises(LogTrimmed):
        await rig.read_all(1)
    assert (await reader.load_snapshot()) == (101, b"newer")
    assert await LogRepairer(second, AT_ONCE).sweep() > 0  # the old snapshot, the old segments
    names = await rig.request("a", wire.ListSegments(""))
    assert isinstance(names, wire.SegmentList)
    assert len(names.segments) <= 1


async def test_killed_stores_lose_nothing_and_a_spare_takes_their_place(rig: StoreRig) -> None:
    await rig.start("abcd")
    writer = await rig.writer()
    load = Load(writer, "one")
    await load.grow(500)
    for victim in list(writer.meta.segments[-1].fragments[-1].nodes)[:2]:
        await rig.stores[victim].kill()
        async with asyncio.timeout(10):
            while victim in writer.meta.segments[-1].fragments[-1].nodes:
                await load.grow(10)
        await rig.stores[victim].start()
        await load.grow(500)
    await load.stop()
    check(load.acked, await rig.read_all(max(load.acked)), load.tried)
    writer.meta.check()


async def test_all_stores_killed_at_once_come_back_with_everything(rig: StoreRig) -> None:
    await rig.start("abc")
    load = Load(await rig.writer(), "one", window=300)
    await load.grow(2000)
    await asyncio.gather(*(store.kill() for store in rig.stores.values()))
    known = dict(load.acked)
    await asyncio.gather(*(store.start() for store in rig.stores.values()))
    await load.grow(500)  # the same writer goes on
    await load.stop()
    later = await rig.writer(term=2)
    assert later.confirmed >= max(load.acked)
    check({**known, **load.acked}, await rig.read_all(later.confirmed), load.tried)


async def test_a_writer_that_was_paused_is_fenced(rig: StoreRig) -> None:
    """The old writer's frames to one store are late: it is stopped while they wait, and goes on after the take-over."""
    await rig.start("abc")
    old = Load(await rig.writer(), "old")
    await old.grow(300)
    rig.stores["a"].freeze()
    await old.grow(100)
    new = await rig.writer(term=2)  # while the old one lives, and one store sleeps
    assert isinstance(await old.ended(), LogFenced)
    rig.stores["a"].signal(signal.SIGCONT)
    load = Load(new, "new")
    await load.grow(300)
    await load.stop()
    found = await rig.read_all(max(load.acked))
    check({**old.acked, **load.acked}, found, old.tried | load.tried)
    first_new = min(load.acked)
    assert all(entry.startswith(b"new") == (position >= first_new) for position, entry in found.items())


@pytest.mark.parametrize("harm", ["flip", "truncate"])
async def test_a_damaged_minority_is_never_believed_and_is_repaired(rig: StoreRig, harm: str) -> None:
    await rig.start("abcd")
    load = Load(await rig.writer(), "one")
    await load.grow(1000)
    await load.stop()
    victim = rig.stores[load.writer.meta.segments[-1].fragments[-1].nodes[0]]
    await victim.kill()
    path = victim.journal()[0]
    data = bytearray(path.read_bytes())
    used = len(bytes(data).rstrip(b"\0"))
    if harm == "flip":
        data[used // 2] ^= 8
        data[used - 40] ^= 1
    else:
        del data[used // 2 :]
    path.write_bytes(data)
    await victim.start()
    writer = await rig.writer(term=2)
    check(load.acked, await rig.read_all(max(load.acked)), load.tried)
    repairer = LogRepairer(writer, AT_ONCE)
    for _ in range(3):
        await repairer.round()
    assert repairer.counters["incomplete"]
    closed = writer.meta.segments[0]
    for fragment in closed.fragments:
        for node in fragment.nodes:
            answer = await rig.request(node, wire.Holes(closed.id, fragment.first, closed.end_of(fragment)))
            assert answer == wire.Ranges([])


async def test_what_a_lost_host_held_is_copied_to_another_one(rig: StoreRig) -> None:
    await rig.start("abcd")
    load = Load(await rig.writer(), "one")
    await load.grow(500)
    await load.stop()
    writer = load.writer
    await writer.snapshot(200, b"state")
    await writer.roll()
    lost = next(node for node in writer.meta.segments[0].fragments[0].nodes)
    await rig.stores[lost].kill()
    repairer = LogRepairer(writer, AT_ONCE)
    for _ in range(4):
        await repairer.round()
    meta = writer.meta
    assert meta.snapshot is not None
    assert lost not in meta.snapshot.nodes
    for segment in meta.segments[:-1]:
        for fragment in segment.fragments:
            assert lost not in fragment.nodes
            assert len(fragment.nodes) == 3
    keep = next(iter(set(meta.segments[0].fragments[0].nodes)))
    for host in set("abcd") - {lost, keep}:
        await rig.stores[host].kill()
    rig.static.alive.clear()
    assert len(await rig.read_all(400)) >= 400  # every single node has everything


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "written"])
async def test_what_a_lost_host_held_of_the_open_segment_is_copied_too(rig: StoreRig, idle: bool) -> None:
    """Written: another host has come into the ensemble, and what came before that has two copies."""
    await rig.start("abcd")
    writer = await rig.writer(settings=QUICK.model_copy(update={"repair_seconds": 2.0}))  # later than the ensemble changes
    last = await appended(writer, b"before")
    lost = writer.meta.segments[-1].fragments[-1].nodes[0]
    await rig.stores[lost].kill()
    if not idle:
        last = await appended(writer, b"after")
        async with asyncio.timeout(10):
            while lost in writer.meta.segments[-1].fragments[-1].nodes:
                await asyncio.sleep(0.05)
    repairer = LogRepairer(writer, AT_ONCE)
    async with asyncio.timeout(20):
        while any(len({*one.nodes} - {lost}) < 3 for segment in writer.meta.segments for one in segment.fragments):
            await repairer.round()
            await asyncio.sleep(0.05)
    assert len(await rig.read_all(last)) == last
    assert await repairer.copies() == []


async def test_a_host_is_left_by_one_segment_and_by_none_while_no_other_takes_it(rig: StoreRig) -> None:
    """The only other store is registered and does not answer: a segment for each try would fill the log's metadata."""
    await rig.start("abcd")
    writer = await rig.writer(settings=QUICK.model_copy(update={"repair_seconds": 0.2}))
    nodes = writer.meta.segments[-1].fragments[-1].nodes
    (other,) = set("abcd") - set(nodes)
    await rig.stores[other].kill()
    rig.static.alive.add(other)
    await appended(writer, b"before")
    rig.static.evacuated = {nodes[0]}
    for number in range(40):
        await appended(writer, b"%d" % number)
        await asyncio.sleep(0.1)
    assert len(writer.meta.segments) == 1
    await rig.stores[other].start()
    async with asyncio.timeout(20):
        while nodes[0] in writer.meta.segments[-1].fragments[-1].nodes:
            await appended(writer, b"more")
            await asyncio.sleep(0.05)
    assert len(writer.meta.segments) == 2


async def test_too_few_stores_is_said_clearly(rig: StoreRig) -> None:
    await rig.start("ab")
    await rig.stores["b"].kill()
    with pytest.raises(NoHosts, match="1 hosts with a store, this log needs 2"):
        await rig.writer()
    await rig.stores["b"].start()
    writer = await rig.writer(settings=QUICK.model_copy(update={"give_up_seconds": 1.0}))  # two of three: it goes on
    load = Load(writer, "one")
    await load.grow(100)
    await rig.stores["b"].kill()
    assert isinstance(await load.ended(), LogUnavailable)
    assert isinstance(writer.error, LogUnavailable)
    await rig.stores["b"].start()
    await rig.writer(term=2)
    check(load.acked, await rig.read_all(max(load.acked)), load.tried)


@pytest.mark.parametrize("kind", ["paused", "killed"])
async def test_a_store_that_stays_away_costs_no_segments(rig: StoreRig, kind: str) -> None:
    """It is said to live, and nobody could take its place: one segment without it, and one with it again when it is back."""
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(50)
    serial, store = load.writer.meta.serial, rig.stores["c"]
    if kind == "paused":
        store.freeze()
    else:
        await store.kill()
        rig.static.alive.add("c")
    async with asyncio.timeout(10):
        while load.writer.meta.serial == serial:
            await load.grow(10)
    assert set(load.writer.meta.segments[-1].fragments[-1].nodes) == {"a", "b"}
    for _ in range(6):  # QUICK looks every half second
        await load.grow(10)
        await asyncio.sleep(0.5)
    assert load.writer.meta.serial == serial + 1
    if kind == "paused":
        store.signal(signal.SIGCONT)
    else:
        await store.start()
    async with asyncio.timeout(15):
        while load.writer.meta.serial == serial + 1:
            await load.grow(10)
    assert set(load.writer.meta.segments[-1].fragments[-1].nodes) == {"a", "b", "c"}
    await load.stop()
    check(load.acked, await rig.read_all(max(load.acked)), load.tried)


async def test_a_log_is_made_only_while_it_is_wanted(rig: StoreRig) -> None:
    """What wants it may change, or go, while it is being made."""
    session, wanting, versions = rig.session, "wanting", iter([7, 1])
    await session.ensure_path(paths.logs())
    await session.create(wanting)
    await session.set(wanting, b"changed", 0)

    async def guard() -> Check:
        return Check(wanting, next(versions))

    await Chain(session, "one", guard).create(LogMeta())
    assert next(versions, None) is None, "the first version was old"
    assert await session.get(paths.log("one")) is not None
    await session.delete(wanting)
    versions = iter([1])
    with pytest.raises(LogFenced):
        await Chain(session, "two", guard).create(LogMeta())
    assert await session.get(paths.log("two")) is None


async def test_an_empty_disk_under_the_name_of_a_lost_one_is_refused(rig: StoreRig) -> None:
    await rig.start("abc")
    load = Load(await rig.writer(), "one")
    await load.grow(300)
    await load.stop()
    store = rig.stores["a"]
    await store.kill()
    shutil.rmtree(store.directory)
    await store.run()
    assert store.process is not None
    assert await asyncio.wait_for(store.process.wait(), 10) == 1
    assert "Mount the right disk" in store.log()
    await rig.forget_disk("a")
    await store.start()  # accepted now, but it knows that it knows nothing
    answer = await rig.request("a", wire.Recover(load.writer.meta.segments[0].id, 1, 1, 1))
    assert answer == wire.Recovered(1, [(wire.Found.UNKNOWN, 0, b"")])
    await rig.writer(term=2)
    check(load.acked, await rig.read_all(max(load.acked)), load.tried)


async def test_an_old_image_of_a_disk_is_not_believed_in_what_it_lacks(rig: StoreRig) -> None:
    """A virtual machine is put back to a snapshot: cookie and openings are there, later entries and fences are not."""
    await rig.start("abc")
    writer = await rig.writer()
    early = Load(writer, "early")
    await early.grow(50)
    await early.stop()
    store, image, segment = rig.stores["a"], rig.directory / "image", writer.meta.segments[0].id
    await asyncio.to_thread(shutil.copytree, store.directory, image)
    load = Load(writer, "one")
    await load.grow(300)
    await load.stop()
    async with asyncio.timeout(10):
        while await rig.request("a", wire.Holes(segment, 1, max(load.acked))) != wire.Ranges([]):
            await asyncio.sleep(0.05)
    await store.kill()
    before = (await rig.session.get(paths.store_cookie("a"))).data  # type: ignore[union-attr]
    await store.start()  # tells ZooKeeper at once how far its disk is
    async with asyncio.timeout(10):
        while (await rig.session.get(paths.store_cookie("a"))).data == before:  # type: ignore[union-attr]
            await asyncio.sleep(0.05)
    await store.kill()
    await asyncio.to_thread(shutil.rmtree, store.directory)
    await asyncio.to_thread(image.rename, store.directory)
    await store.start()
    question = wire.Recover(segment, 1, max(load.acked), 1)
    with contextlib.suppress(LogUnavailable):  # before ZooKeeper has answered it; it never says that there is none
        assert await rig.request("a", question) == wire.Recovered(max(load.acked), [(wire.Found.UNKNOWN, 0, b"")])
    async with asyncio.timeout(10):
        while "disk is older than what it had acknowledged" not in store.log():
            await asyncio.sleep(0.05)
    assert await rig.request("a", question) == wire.Recovered(max(load.acked), [(wire.Found.UNKNOWN, 0, b"")])
    await rig.writer(term=2)
    acked = {**early.acked, **load.acked}
    check(acked, await rig.read_all(max(acked)), early.tried | load.tried)


async def test_pause_kill(rig: StoreRig) -> None:
    """The script of the NATS suite: whoever acknowledges before it syncs, or counts a late store, loses something here."""
    await rig.start("abcde")
    loads = [Load(await rig.writer(settings=LogSettings(**{**QUICK.model_dump(), "write_quorum": 3})), "one")]
    await loads[0].grow(300)
    stores = rig.stores
    for name in "ab":
        stores[name].freeze()
    await asyncio.sleep(1.0)
    await stores["c"].kill()
    for name in "de":
        stores[name].freeze()
    for name in "ab":
        stores[name].signal(signal.SIGCONT)
    await stores["c"].start()
    await asyncio.sleep(1.0)
    taking = asyncio.ensure_future(rig.writer(term=2))
    await asyncio.sleep(1.0)
    for name in "de":
        stores[name].signal(signal.SIGCONT)
    await loads[0].ended()
    loads.append(Load(await taking, "two"))
    await loads[1].grow(300)
    await loads[1].stop()
    acked = {**loads[0].acked, **loads[1].acked}
    assert len(acked) == len(loads[0].acked) + len(loads[1].acked)
    check(acked, await rig.read_all(max(acked)), loads[0].tried | loads[1].tried)


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Three file systems of 80 MiB in memory."""
    made = []
    try:
        for host in "abc":
            folder = tmp_path / f"disk-{host}"
            folder.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", folder], check=False).returncode:
                pytest.skip("this user may not mount")
            made.append(folder)
        yield made
    finally:
        for folder in made:
            subprocess.run(["umount", "-l", folder], check=True)


def grow(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)


async def test_full_disks_stop_the_writer_and_nothing_acknowledged_is_lost(rig: StoreRig, small_disks: list[Path]) -> None:
    await rig.start("abc", small_disks)
    writer = await rig.writer()
    acked: dict[int, bytes] = {}
    while writer.error is None and len(acked) < 1000:
        entry = b"%d " % len(acked) * 50_000
        try:
            acked[await appended(writer, entry)] = entry
        except StorageFull:
            break
    assert 100 < len(acked) < 500
    assert isinstance(writer.error, StorageFull)
    with pytest.raises(StorageFull):
        await writer.stores.put_blob("abc", "big", bytes(30_000_000))
    found = await rig.read_all(len(acked) - 1)
    assert all(found[position] == entry for position, entry in acked.items() if position in found)
    with contextlib.suppress(StorageFull, LogUnavailable):  # there may be no room to secure what was not acknowledged
        early = await rig.writer(term=2, settings=QUICK.model_copy(update={"take_over_seconds": 4.0}))
        assert early.confirmed >= max(acked)
    for folder in small_disks:
        await asyncio.to_thread(grow, folder)
    later = await rig.writer(term=3)
    assert later.confirmed >= max(acked)
    found = await rig.read_all(later.confirmed)
    assert {position: found[position] for position in acked} == acked
    assert await appended(later, b"more") == later.confirmed


async def test_blobs_are_kept_copied_checked_and_deleted(rig: StoreRig) -> None:
    await rig.start("abc")
    stores = (await rig.writer()).stores
    big = bytes(range(256)) * 10_000
    assert await stores.put_blob("ab", "q/ä b~1", big) == ("a", "b")
    assert await stores.put_blob("ab", "q/empty", b"") == ("a", "b")
    await stores.copy_blob("a", "c", "q/ä b~1")
    await rig.stores["c"].kill()
    await rig.stores["c"].start()
    assert await stores.get_blob("c", "q/ä b~1") == big
    assert await stores.get_blob("ab", "q/empty") == b""
    assert [(view.blob, view.size) for view in await stores.inventory("c", "q/")] == [("q/ä b~1", len(big))]
    path = next((rig.stores["a"].directory / "blobs").glob("*/q*b~1"))
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    assert await stores.get_blob("ab", "q/ä b~1") == big  # a's copy does not pass the check, b's does
    path.write_bytes(data[:5000])
    assert await stores.get_blob("ab", "q/ä b~1") == big
    assert [view.blob for view in await stores.inventory("a", "q/")] == ["q/empty"]  # put aside
    await stores.copy_blob("b", "a", "q/ä b~1")
    assert await stores.get_blob("a", "q/ä b~1") == big
    assert await stores.delete_blob("abc", "q/ä b~1") == ("a", "b", "c")
    with pytest.raises(CallError, match="deleted"):
        await stores.put_blob("a", "q/ä b~1", big)  # a copy that was under way
    with pytest.raises(DataLost, match=r"q/ä b~1 is damaged or missing on every host that should hold it: a: .*; b: .*; c: "):
        await stores.get_blob("abc", "q/ä b~1")
    for name in ("", "x" * 300):
        with pytest.raises(CallError):
            await stores.put_blob("a", name, b"1")
