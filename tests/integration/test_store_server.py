"""One store server in this process: a failing disk, entries and followers on the wire; and the directory of stores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.registration import register_store
from roq.coordination.session import Session
from roq.errors import LogFenced, LogUnavailable, RoqError, StorageFailed
from roq.log.replicated.stores import StoreDirectory
from roq.log.store.server import StoreServer
from roq.runtime.files import TEMPORARY
from roq.runtime.rpc import RpcClient
from roq.wire import store as wire
from roq.wire.assignment import HostReport, ProcessKind, ProcessState, RunningProcess, to_json
from roq.wire.store import Add, EntriesAdded, EntriesRefused, entry_crc
from roq.wire.stores import StoreRegistration, StoreState
from tests.integration.zmtp_rig import mute_router
from tests.unit.test_store_storage import new_disk, power_cut


def add(first: int, *entries: bytes, epoch: int = 1, confirmed: int = 0) -> Add:
    crcs = [entry_crc("s", position, entry) for position, entry in enumerate(entries, first)]
    return Add("s", epoch, first, confirmed, crcs, list(entries))


class Peer:
    """A writer's end of the conversation."""

    def __init__(self, port: int) -> None:
        self.answers: asyncio.Queue[EntriesAdded | EntriesRefused] = asyncio.Queue()
        self.client = RpcClient(f"tcp://127.0.0.1:{port}", wire.Reply, wire.NoticeToWriter, self.answers.put_nowait)

    async def send(self, one: Add) -> EntriesAdded | EntriesRefused:
        self.client.notify(one)
        return await asyncio.wait_for(self.answers.get(), 5)

    async def ask(self, request: wire.Request) -> Any:
        return await self.client.request(request, wire.StoreDone | wire.Entries | wire.Fenced, 5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", ["write", "sync"])
async def test_a_store_whose_disk_fails_answers_nothing_more(tmp_path: Path, failing: str) -> None:
    failed: asyncio.Queue[RoqError] = asyncio.Queue()
    disk = new_disk()
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, failed.put_nowait, disk=disk)
    peer = Peer(server.port)
    try:
        await peer.ask(wire.OpenSegment("s", 1))
        assert await peer.send(add(1, b"one")) == EntriesAdded("s", 1, 1)
        disk.failing = failing
        peer.client.notify(add(2, b"two"))
        assert isinstance(await asyncio.wait_for(failed.get(), 5), StorageFailed)
        disk.failing = ""  # a later sync would succeed, and prove nothing
        peer.client.notify(add(2, b"two"))
        await asyncio.sleep(0.2)
        assert peer.answers.empty()
        assert failed.empty()
    finally:
        peer.client.close()
        await server.close()


async def test_a_store_that_does_not_know_its_disk_yet_is_asked_again_and_counts_for_no_loss(tmp_path: Path) -> None:
    """As after a power cut, before ZooKeeper answers it: a take-over that counted its doubt would call the entries lost."""
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, lambda error: None, disk=new_disk())
    peer = Peer(server.port)
    recover = wire.Recover("s", 2, 1, 10)
    try:
        await peer.ask(wire.OpenSegment("s", 1))
        assert await peer.send(add(1, b"one")) == EntriesAdded("s", 1, 1)
        server.storage.doubt(takes_entries=True)
        found = await peer.client.request(recover, wire.Recovered, 5.0)
        assert [(answer[0], answer[2]) for answer in found.answers] == [(wire.Found.ENTRY, b"one")], "what it has it gives"
        behind = wire.Recover("s", 2, 2, 10)
        with pytest.raises(LogUnavailable, match="not known yet"):
            await peer.client.request(behind, wire.Recovered, 5.0)
        assert server.storage.prove(0)
        found = await peer.client.request(behind, wire.Recovered, 5.0)
        assert found.answers[0][0] == wire.Found.NO_SUCH
    finally:
        peer.client.close()
        await server.close()


async def test_a_store_started_again_after_a_failed_sync_acknowledges_what_is_on_the_disk(tmp_path: Path) -> None:
    """The host starts it again at once, the pages are still in the cache, and the writer sends again what was not answered."""
    failed: asyncio.Queue[RoqError] = asyncio.Queue()
    disk = new_disk()
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, failed.put_nowait, disk=disk)
    peer = Peer(server.port)
    await peer.ask(wire.OpenSegment("s", 1))
    disk.failing = "sync"
    peer.client.notify(add(1, b"one"))
    assert isinstance(await asyncio.wait_for(failed.get(), 5), StorageFailed)
    peer.client.close()
    await server.close()
    for acknowledged in (False, True):
        server = StoreServer(tmp_path, "h", "127.0.0.1", 0, failed.put_nowait, disk=disk)
        peer = Peer(server.port)
        try:
            if not acknowledged:
                assert await peer.send(add(1, b"one")) == EntriesAdded("s", 1, 1)
            answer = await peer.ask(wire.Read("s", 1, 1))
            assert answer.entries == [b"one"]
        finally:
            peer.client.close()
            await server.close()
        disk = power_cut(disk, random.Random(1))


@pytest.mark.quick
async def test_entries_fences_and_followers_on_the_wire(tmp_path: Path) -> None:
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, lambda error: None)
    peer, other = Peer(server.port), Peer(server.port)
    try:
        assert await peer.send(add(1, b"early")) == EntriesRefused("s", 1, 1, wire.Refusal.NOT_OPEN)
        await peer.ask(wire.OpenSegment("s", 1))
        assert await peer.send(add(1, b"one", b"two")) == EntriesAdded("s", 1, 2)
        assert (await peer.ask(wire.Read("s", 1, 0))).entries == []  # nothing is confirmed yet
        follower = asyncio.ensure_future(other.ask(wire.Read("s", 1, 0, 5.0)))
        await asyncio.sleep(0.05)
        peer.client.notify(add(3, confirmed=2))
        assert (await asyncio.wait_for(follower, 2)).entries == [b"one", b"two"]
        assert (await other.ask(wire.FenceLog("s", 4))).confirmed == 2
        assert await peer.send(add(3, b"three")) == EntriesRefused("s", 3, 1, wire.Refusal.FENCED)
        with pytest.raises(LogFenced):
            await peer.ask(wire.OpenSegment("s", 3))
        peer.client.notify(Add("s", 5, 3, 0, [1], []))  # malformed: dropped and counted
        peer.client.notify(Add("s", 5, 0, 0, [1], [b""]))
        assert await peer.send(add(3, b"three", epoch=5)) == EntriesAdded("s", 3, 1)
        assert server.counters["refused_malformed"] == 2
    finally:
        peer.client.close()
        other.client.close()
        await server.close()


@pytest.mark.parametrize("quick_seconds", [60.0, 0.0])
async def test_a_reader_that_waited_in_vain_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_seconds: float
) -> None:
    """Whether the loop writes or, as with a slow disk, a thread."""
    monkeypatch.setattr("roq.log.store.server.QUICK_SECONDS", quick_seconds)
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, lambda error: None)
    peer = Peer(server.port)
    try:
        await peer.ask(wire.OpenSegment("s", 1))
        for _ in range(3):
            assert (await peer.ask(wire.Read("s", 1, 0, 0.05))).entries == []
        waiting = asyncio.ensure_future(peer.ask(wire.Read("s", 1, 0, 5.0)))
        while not server._waiting.readers:
            await asyncio.sleep(0.01)
        assert [len(futures) for futures in server._waiting.readers.values()] == [1]
        peer.client.notify(add(1, b"one"))
        assert await asyncio.wait_for(peer.answers.get(), 5) == EntriesAdded("s", 1, 1)  # only then a writer calls it confirmed
        peer.client.notify(add(2, confirmed=1))
        assert (await asyncio.wait_for(waiting, 5)).entries == [b"one"]
        assert not server._waiting.readers
    finally:
        peer.client.close()
        await server.close()


async def test_big_payloads_do_not_hold_up_the_repair_of_a_segment(tmp_path: Path) -> None:
    source = StoreServer(tmp_path / "1", "h1", "127.0.0.1", 0, lambda error: None)
    server = StoreServer(tmp_path / "2", "h2", "127.0.0.1", 0, lambda error: None)
    writer, peer = Peer(source.port), Peer(server.port)
    try:
        await writer.ask(wire.OpenSegment("s", 1))
        assert await writer.send(add(1, b"one")) == EntriesAdded("s", 1, 1)
        with mute_router() as silent:
            copies = [asyncio.ensure_future(peer.ask(wire.CopyBlob(f"b{n}", f"tcp://127.0.0.1:{silent}"))) for n in range(8)]
            await asyncio.sleep(0.1)
            order = wire.CopySegment("s", 1, 1, 1, f"tcp://127.0.0.1:{source.port}")
            assert await asyncio.wait_for(peer.ask(order), 3) == wire.StoreDone()
            await asyncio.gather(*copies, return_exceptions=True)
    finally:
        for one in (writer, peer):
            one.client.close()
        await source.close()
        await server.close()


async def test_an_abandoned_upload_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.log.store.server.EXPIRE_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("roq.log.store.blobs.UPLOAD_SECONDS_MAX", 0.3)
    server = StoreServer(tmp_path, "h", "127.0.0.1", 0, lambda error: None)
    peer = Peer(server.port)
    try:
        assert await peer.ask(wire.PutBlob("b", 0, 100, 1, b"half of it")) == wire.StoreDone()
        assert len(list((tmp_path / "blobs").glob(f"??/*{TEMPORARY}"))) == 1
        async with asyncio.timeout(5):
            while not server.counters["uploads_expired"]:
                await asyncio.sleep(0.02)
        assert not list((tmp_path / "blobs").glob(f"??/*{TEMPORARY}"))
    finally:
        peer.client.close()
        await server.close()


async def test_the_directory_follows_reports_of_hosts_that_register_no_store(
    chroot: str, sessions: Callable[..., Awaitable[Session]]
) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    changed = asyncio.Event()
    directory = await StoreDirectory(session, changed.set).start()
    assert directory.hosts() == frozenset()

    async def report(host: str, state: ProcessState, port: int) -> None:
        ports = {"clients": port, "control": 1}
        process = RunningProcess("store", ProcessKind.STORE, "", "", state, 1, ports)
        await session.ensure_path(paths.running(host))
        await session.set(paths.running(host), to_json(HostReport(host, "10.0.0.1", "i", 1, 1, (process,))), -1)

    async def until(hosts: str) -> None:
        async with asyncio.timeout(5):
            while directory.hosts() != frozenset(hosts):
                changed.clear()
                await changed.wait()

    await report("a", ProcessState.RUNNING, 7)
    await report("b", ProcessState.STARTING, 8)
    await session.ensure_path(paths.hosts())
    for host in "ab":
        await session.create_ephemeral(paths.host(host))
    await until("a")
    await report("b", ProcessState.RUNNING, 8)
    await until("ab")
    await session.delete(paths.host("a"))
    await until("b")
    assert directory.endpoint("a") == "tcp://10.0.0.1:7"  # still known: it may serve on
    assert directory.endpoint("c") is None
    directory.close()


async def test_the_directory_follows_registered_stores(chroot: str, sessions: Callable[..., Awaitable[Session]]) -> None:
    """What a host registers counts, and its report is not read any more; once it is away, the report does."""
    session = await sessions(chroot)
    for folder in (paths.hosts(), paths.stores(), paths.running("a")):
        await session.ensure_path(folder)
    process = RunningProcess("store", ProcessKind.STORE, "", "", ProcessState.RUNNING, 1, {"clients": 1})
    report = HostReport("a", "10.0.0.1", "i", 1, 1, (process,))
    await session.set(paths.running("a"), to_json(report), -1)
    await session.create_ephemeral(paths.host("a"))
    serving = StoreRegistration("a", "10.0.0.1", 7, StoreState.RUNNING)
    await register_store(session, "a", serving)
    await session.create_ephemeral(paths.store("of a later version"))
    changed = asyncio.Event()
    directory = await StoreDirectory(session, changed.set).start()

    async def until(endpoint: str, hosts: str, leaving: str) -> None:
        async with asyncio.timeout(5):
            while (directory.endpoint("a"), directory.hosts(), directory.leaving()) != (
                endpoint,
                frozenset(hosts),
                frozenset(leaving),
            ):
                changed.clear()
                await changed.wait()

    assert directory.endpoint("a") == "tcp://10.0.0.1:7"
    assert (directory.hosts(), directory.leaving()) == (frozenset("a"), frozenset())
    await register_store(session, "a", msgspec.structs.replace(serving, port=8, state=StoreState.LEAVING))
    await until("tcp://10.0.0.1:8", "a", "a")
    await register_store(session, "a", msgspec.structs.replace(serving, port=9, state=StoreState.AWAY))
    await until("tcp://10.0.0.1:9", "", "")
    await register_store(session, "a", None)
    await until("tcp://10.0.0.1:1", "a", "")  # as one of 0.1 would say it
    await register_store(session, "a", serving)
    await until("tcp://10.0.0.1:7", "a", "")
    await session.set(paths.running("a"), to_json(msgspec.structs.replace(report, processes=())), -1)
    await session.delete(paths.host("a"))
    await until("tcp://10.0.0.1:7", "", "")
    directory.close()
