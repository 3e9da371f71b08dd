"""Storage when the disk fails it, or has little to give: syncs that fail, sectors that can't be read, few descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roq.errors import DataLost, RoqError, StorageFailed, StorageFull, TemporaryError
from roq.runtime.files import DISK
from roq.runtime.observe import Counters
from roq.runtime.rpc import RpcClient
from roq.shuffle import blocks as blocks_module
from roq.shuffle.node import committer, datafile, server
from roq.shuffle.node.committer import Committer
from roq.shuffle.node.datafile import PAGE_BYTES, DataFile, Descriptors, encode
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.node.stored import GONE, remove_folder, write_durably
from roq.wire.assignment import MonitorAddress, ProcessKind, ProcessSpec
from roq.wire.process import ChildSpec
from roq.wire.shuffle import Block, DescribeFollower, FollowerView, ReadBlocks, Reply, RunSlice
from tests.harness.ports import free_port, own_address
from tests.harness.shuffle_rows import SPEC, piece, run_of

Open = Callable[..., Awaitable[RangeStorage]]
MEMORY = 64 * 1024 * 1024


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the storage of one folder, again and again."""
    made: list[RangeStorage] = []

    async def open_again() -> RangeStorage:
        for one in made:
            await one.close()
        made.append(await RangeStorage.open(tmp_path / "s", Budget(MEMORY), Counters(), 0))
        return made[-1]

    yield open_again
    for one in made:
        await one.close()


def here(storage: RangeStorage, partition: int, rows: int, shuffle: str = "s") -> int:
    """How many of the first rows of run 0 are."""
    lacking = storage.missing(shuffle, RunSlice(partition, "a", 0, 0, rows))
    return rows - sum(end - begin for begin, end in lacking)


async def store(storage: RangeStorage, partition: int, blocks: list[Block], shuffle: str = "s") -> None:
    await storage.store(shuffle, "visits", SPEC, [piece(partition, "a", 0, blocks)])


def path_of(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


# --- syncs --------------------------------------------------------------------------------------------------------------


async def test_nothing_that_a_failed_sync_lost_is_said_to_be_stored(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does it: a lost write is told once, by the next sync; the one after that succeeds."""
    blocks = run_of(range(2000), 100)
    size = sum(len(block.data) for block in blocks)
    monkeypatch.setattr(committer, "FILE_BYTES", 2 * size)
    broken: list[str] = []
    sync = os.fdatasync

    def fdatasync(file: int) -> None:
        if not broken and os.fstat(file).st_size > size and path_of(file).endswith("data-000001"):
            broken.append(path_of(file))
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    storage = await opened()
    gate = threading.Event()
    await store(storage, 0, blocks[:1])
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    held = asyncio.ensure_future(storage._committer.call(gate.wait))
    alone = asyncio.ensure_future(store(storage, 1, blocks[:1]))
    await asyncio.sleep(0)
    batch = [asyncio.ensure_future(store(storage, partition, blocks)) for partition in (2, 3, 4)]  # 3 needs another file
    while len(storage._committer._waiting) < len(batch):
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(held, alone)
    answers = await asyncio.gather(*batch, return_exceptions=True)
    assert len(broken) == 1
    assert [type(answer) for answer in answers] == [StorageFailed, StorageFailed, type(None)]
    rows = [100, 100, 0, 0, 2000]
    assert [here(storage, partition, 2000) for partition in range(5)] == rows
    await store(storage, 2, blocks)
    rows[2] = 2000
    storage = await opened()
    assert [here(storage, partition, 2000) for partition in range(5)] == rows, "and so after a new start"
    read = await storage.read(ReadBlocks("s", 2, "a", 0, 0, 1999))
    assert read[0].data == blocks[0].data


def test_a_file_whose_sync_failed_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sync, fails = DataFile(tmp_path / "data-000001", 1), os.fdatasync, [True]

    def fdatasync(descriptor: int) -> None:
        if fails and fails.pop():
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    file.append([b"whole"])
    fails.clear()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    file.sync()
    file.append([b"lost"])
    fails.append(True)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
    with pytest.raises(OSError, match="takes no more"):
        file.append([b"x"])
    assert (tmp_path / "data-000001").read_bytes() == b"whole"
    assert file.read(0, 5) == b"whole"


def test_a_file_that_is_replaced_has_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, bytes(data)[:7], offset))
    write_durably(tmp_path / "spec", bytes(range(100)))
    assert (tmp_path / "spec").read_bytes() == bytes(range(100))


def test_a_removed_shuffle_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new name is on the disk before anything of it is deleted."""
    synced: list[set[str]] = []

    def sync_folder(path: Path) -> None:
        sync(path)
        synced.append({entry.name for entry in path.iterdir()})

    sync = DISK.sync_folder
    monkeypatch.setattr(DISK, "sync_folder", sync_folder)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "spec").write_bytes(b"x")
    remove_folder(tmp_path / "s")
    assert synced == [{"s" + GONE}]
    assert not list(tmp_path.iterdir())


def test_a_removal_whose_sync_failed_is_finished_by_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DISK, "sync_folder", fails)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "spec").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            remove_folder(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s" + GONE]
    monkeypatch.undo()
    remove_folder(tmp_path / "s")
    assert not list(tmp_path.iterdir())


# --- the thread that writes -------------------------------------------------------------------------------------------------


async def test_what_a_full_disk_left_of_a_new_shuffle_is_removed_with_it(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage = await opened()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFull):
            await store(storage, 0, run_of(range(10), 10))
    (folder,) = storage._directory.glob("s")
    await storage.forget("s")
    assert not folder.exists()


async def test_a_defect_fails_what_it_concerns_and_nothing_else(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(*_: object) -> Block:
        raise MemoryError("no memory")

    monkeypatch.setattr(blocks_module, "part", part)
    storage = await opened()
    blocks = run_of(range(2000), 200)
    await store(storage, 0, blocks[:1])
    jobs = [store(storage, 0, run_of(range(300), 300)), *(store(storage, at, blocks) for at in (1, 2))]
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*jobs, return_exceptions=True)
    assert "MemoryError" in str(answers[0])
    assert answers[1:] == [None, None]
    assert storage._budget.pending == 0


async def test_a_batch_that_could_not_be_tried_does_not_stop_the_next_one(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fails = Committer._write, [True]

    def once(self: Committer, batch: list[committer.Job]) -> list[committer.Written | RoqError]:
        if fails and fails.pop():
            raise ValueError("a defect")
        return write(self, batch)

    monkeypatch.setattr(committer, "BATCH_BYTES", 1)
    monkeypatch.setattr(Committer, "_write", once)
    storage = await opened()
    async with asyncio.timeout(10):
        jobs = [store(storage, at, run_of(range(20), 10)) for at in range(3)]
        answers = await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(isinstance(answer, RoqError) for answer in answers) == 1
    assert sum(answer is None for answer in answers) == 2


async def test_a_follower_that_its_disk_kept_from_beginning_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation found this one: its leader waited for it for ever."""
    monkeypatch.setattr(server, "OPEN_AGAIN_SECONDS", 0.05)
    in_the_way = tmp_path / "shuffles"
    in_the_way.touch()
    address = own_address()
    port, monitor = free_port(address), MonitorAddress("", "", 0, 0)
    ports = {"shuffle": port}
    spec = ProcessSpec(ProcessKind.STORE, "")
    child = ChildSpec(spec, "host-1", address, ports, monitor, "", 0, "", f"{address}:1", "", data_dir=str(tmp_path))
    failed: list[RoqError] = []
    monkeypatch.setattr(server.log, "critical", lambda *told, **fields: in_the_way.unlink(missing_ok=True))
    follower = server.FollowerThread(child, failed.append)
    client = RpcClient(f"tcp://{address}:{port}", Reply)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    view = await client.request(DescribeFollower(), FollowerView, 1.0)
                    break
                except TemporaryError:
                    await asyncio.sleep(0.02)
    finally:
        client.close()
        await asyncio.to_thread(follower.close)
    assert (view.host, failed) == ("host-1", [])
    assert in_the_way.is_dir()


async def test_rows_that_come_twice_at_a_time_cut_otherwise_are_all_stored(opened: Open) -> None:
    storage = await opened()
    await store(storage, 9, run_of(range(10), 10))
    await asyncio.gather(
        store(storage, 0, run_of(range(100), 60)[:1]),
        store(storage, 0, run_of(range(100), 100)),
        store(storage, 0, run_of(range(100), 33)),
    )
    assert here(storage, 0, 100) == 100
    storage = await opened()
    assert here(storage, 0, 100) == 100


async def test_space_is_given_back_while_others_store(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files begin and end all the time; what is stored meanwhile is there afterwards, whatever file it came to."""
    blocks = run_of(range(200), 20, pad=50)
    monkeypatch.setattr(committer, "FILE_BYTES", 2 * sum(len(block.data) for block in blocks))
    storage, busy = await opened(), True
    await store(storage, 0, blocks)

    async def forget() -> None:
        while busy:
            for key, entry in [(key, entry) for key, run in storage.shuffles["s"].runs.items() for entry in run.entries]:
                if key[0] % 3:
                    storage.shuffles["s"].remove(key, entry)
            await storage.compact(storage.shuffles["s"])

    forgetting = asyncio.ensure_future(forget())
    for first in range(0, 240, 8):
        await asyncio.gather(*(store(storage, partition, blocks) for partition in range(first, first + 8)))
    busy = False
    await forgetting
    for partition in range(0, 240, 3):
        assert here(storage, partition, 200) == 200
        rows = 0
        while rows < 200:
            rows += sum(block.rows for block in await storage.read(ReadBlocks("s", partition, "a", 0, rows, 199)))
    assert storage.counters["files_given_back"] > 10


# --- what can't be read -------------------------------------------------------------------------------------------------------


class BadSectors:
    """Reads that touch one of these bytes of one file fail as those of a disk do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.at: set[int] = set()
        self._path, self._read = str(path), os.pread
        monkeypatch.setattr(os, "pread", self._pread)

    def _pread(self, file: int, size: int, offset: int) -> bytes:
        if any(offset <= at < offset + size for at in self.at) and path_of(file) == self._path:
            raise OSError(errno.EIO, "Input/output error")
        return self._read(file, size, offset)


async def test_a_block_that_can_not_be_read_is_damaged(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, blocks = await opened(), run_of(range(100), 10, pad=PAGE_BYTES // 2)
    await store(storage, 0, blocks)
    await store(storage, 0, blocks, "other")
    bad = BadSectors(monkeypatch, tmp_path / "s" / "s" / "data-000001")
    page = storage.shuffles["s"].runs[0, "a", 0].entries[3].offset // PAGE_BYTES + 1
    bad.at = set(range(page * PAGE_BYTES, (page + 1) * PAGE_BYTES))
    with pytest.raises(DataLost):
        await storage.read(ReadBlocks("s", 0, "a", 0, 30, 39))
    assert storage.shuffles["s"].damaged, "to be fetched again"
    assert here(storage, 0, 100) == 90
    storage = await opened()
    assert here(storage, 0, 100) == 90
    assert storage.shuffles["s"].damaged
    assert here(storage, 0, 100, "other") == 100
    await store(storage, 0, blocks)
    assert here(storage, 0, 100) == 100


@pytest.mark.parametrize("closed", [False, True], ids=["the file that grows", "a closed file"])
@pytest.mark.parametrize("number", [3, 9], ids=["in the middle", "the last one"])
async def test_a_record_whose_head_can_not_be_read_is_told_at_the_start(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool, number: int
) -> None:
    storage, blocks = await opened(), run_of(range(100), 10, pad=PAGE_BYTES // 4)
    await store(storage, 0, blocks)
    if closed:
        storage.shuffles["s"].current = None
        await store(storage, 1, blocks)
    bad = BadSectors(monkeypatch, tmp_path / "s" / "s" / "data-000001")
    at = storage.shuffles["s"].runs[0, "a", 0].entries[number].offset - 2
    bad.at = set(range(at - at % PAGE_BYTES, at - at % PAGE_BYTES + PAGE_BYTES))
    storage = await opened()
    assert here(storage, 0, 100) in (80, 90), "its page may hold the end of the one before"
    assert storage.shuffles["s"].damaged


async def test_a_shuffle_that_can_not_be_read_is_put_aside_alone(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await opened()
    for shuffle in ("a", "b", "c"):
        await store(storage, 0, run_of(range(100), 10), shuffle)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == tmp_path / "s" / "b" / "spec":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    storage = await opened()
    assert set(storage.shuffles) == {"a", "c"}
    assert (tmp_path / "s" / "b.bad").is_dir()
    await store(storage, 0, run_of(range(100), 10), "b")
    assert here(storage, 0, 100, "b") == 100


# --- descriptors --------------------------------------------------------------------------------------------------------------


def test_files_that_are_closed_meanwhile_are_read_as_ever(tmp_path: Path) -> None:
    pool = Descriptors(4)
    files = [DataFile(tmp_path / f"data-{at:06d}", at, pool) for at in range(40)]
    for at in range(40):
        files[at].append([bytes([at]) * 1000])
        files[at].sync()

    def read(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(2000):
            at = source.randrange(40)
            assert files[at].read(source.randrange(900), 100) == bytes([at]) * 100

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(read, range(3)))
    assert pool.open <= 4 + 3
    files[7].remove()
    for at in (*range(40), 7):
        assert files[at].read(0, 10) == bytes([at]) * 10, "also the one that is removed"
    files.clear()
    assert pool.open == 0, "nobody has them any more"


def test_a_file_with_writes_that_are_not_synced_stays_open(tmp_path: Path) -> None:
    """Its descriptor is the one that is told of a write that failed."""
    pool = Descriptors(2)
    written = DataFile(tmp_path / "written", 1, pool)
    written.append([b"x"])
    descriptor = written._opened.descriptor
    others = [DataFile(tmp_path / f"other-{at}", at, pool) for at in range(10)]
    assert all(other.read(0, 1) == b"" for other in others)
    assert written._opened.descriptor == descriptor >= 0
    written.sync()
    assert all(other.read(0, 1) == b"" for other in others)
    assert written._opened.descriptor == -1


async def test_more_shuffles_than_descriptors(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "OPEN_FILES_MAX", 10)
    before = len(os.listdir("/proc/self/fd"))
    storage = await opened()
    for at in range(60):
        await store(storage, 0, run_of(range(10), 5), f"s{at}")
    storage = await opened()
    for at in range(60):
        assert sum(block.rows for block in await storage.read(ReadBlocks(f"s{at}", 0, "a", 0, 0, 9))) == 10
    assert len(os.listdir("/proc/self/fd")) < before + 30


def test_a_store_takes_the_descriptors_it_is_allowed() -> None:
    program = (
        "import resource\n"
        "from roq.shuffle.node.datafile import raise_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 64


def test_a_search_goes_on_behind_pages_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data-000001"
    file, blocks = DataFile(path, 1), run_of(range(30), 1, pad=3000)
    for block in blocks:
        file.append(list(encode(0, "a", 0, block)))
    bad = BadSectors(monkeypatch, path)
    bad.at = {*range(2 * PAGE_BYTES, 4 * PAGE_BYTES), *range(9 * PAGE_BYTES, 10 * PAGE_BYTES)}
    ends = [found.offset + found.size for found in DataFile(path, 1).scan()]
    monkeypatch.undo()
    whole = list(DataFile(path, 1).scan())
    expected = [one.offset + one.size for one in whole if not any(at in bad.at for at in range(one.begin, one.offset))]
    assert ends == expected
    assert len(ends) < len(whole)
