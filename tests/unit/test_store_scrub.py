"""The background check of a store's entries: in a thread, in slices, and only what is damaged for certain is put aside."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from roq.log.store import upkeep
from roq.log.store.upkeep import scrub_entries
from roq.runtime.observe import Counters
from roq.tools.simulation.disks import SimulatedDisk
from roq.wire.store import Found
from tests.unit.test_store_storage import HERE, Bench, entry

MUCH = 1e12


class WatchedDisk(SimulatedDisk):
    """Counts what is read, by thread; reads in another thread than the loop's wait for `go_on`."""

    def __init__(self) -> None:
        super().__init__(None, random.Random(1), HERE)
        self.on_loop = self.elsewhere = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def read(self, file: int, size: int, offset: int) -> bytes:
        data = super().read(file, size, offset)
        if threading.current_thread() is threading.main_thread():
            self.on_loop += len(data)
        else:
            assert self.go_on.wait(10)
            self.elsewhere += len(data)
        return data


@pytest.fixture
def bench() -> Bench:
    bench = Bench(WatchedDisk())
    bench.open()
    for position in range(1, 41):
        assert bench.add(position, entry(position, 3000)) is None
    assert isinstance(bench.disk, WatchedDisk)
    bench.disk.on_loop = 0
    return bench


def damage(bench: Bench, position: int) -> None:
    place = bench.storage.index.segments["s"].place(position)
    bench.file(place >> 32)[(place & 0xFFFFFFFF) + 60] ^= 1


async def test_entries_are_checked_beside_the_loop_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "SLICE_BYTES", 10_000)
    disk = bench.disk
    assert isinstance(disk, WatchedDisk)
    disk.go_on.clear()
    damage(bench, 7)
    damage(bench, 40)
    counters = Counters()
    scrubbing = asyncio.ensure_future(scrub_entries(bench.storage, counters, MUCH))
    for _ in range(100):
        await asyncio.sleep(0)
        assert not scrubbing.done(), "and the loop goes on"
    disk.go_on.set()
    await asyncio.wait_for(scrubbing, 10)
    assert counters["scrub_bad_entries"] == 2
    assert disk.elsewhere > 40 * 3000
    assert disk.on_loop < 4 * 3100, "only what seems damaged is read again there"
    bench.flush()
    assert bench.found(6, 7, 8, 40) == [Found.ENTRY, Found.UNKNOWN, Found.ENTRY, Found.UNKNOWN]


async def test_a_slice_ends_with_its_bytes(bench: Bench) -> None:
    held = bench.storage.held("s", 1, 40)
    count, size, bad = bench.storage.verify("s", held, 10_000)
    assert (count, bad) == (4, [])
    assert 10_000 <= size < 10_000 + 3100
    assert bench.storage.verify("s", held, 1)[0] == 1, "or it would never come to an end"


async def test_what_moved_or_came_back_while_it_was_read_is_not_put_aside(bench: Bench) -> None:
    damage(bench, 3)
    ((position, place),) = bench.storage.verify("s", bench.storage.held("s", 3, 3), 1)[2]
    damage(bench, 3)  # mended: the flip is taken back
    assert not bench.storage.still_damaged("s", position, place)
    damage(bench, 3)
    assert bench.storage.still_damaged("s", position, place)
    assert not bench.storage.still_damaged("s", position, place + 1), "it was written again elsewhere"
    assert not bench.storage.still_damaged("gone", position, place)
    bench.storage.journal.remove(1)  # its file is gone: read in the thread all the same
    assert len(bench.storage.verify("s", [(position, place)], 1)[2]) == 1
