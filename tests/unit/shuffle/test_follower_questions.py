"""Thousands of attempts at one follower: its answers come in pages that fit a message, and nothing is long without a pause."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import pytest_asyncio

from roq.errors import FrameError, WinnersUnknown
from roq.runtime.observe import Counters
from roq.shuffle.committed import CommittedAttempts, parts
from roq.shuffle.node import queries
from roq.shuffle.node.committed import CommittedRegistry
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.queries import RangeQueries
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.ranges import even_borders, intervals
from roq.shuffle.sampling import Distribution
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.shuffle import (
    COMMITTED_AT_ONCE,
    SAMPLE_KEYS_MAX,
    Cursor,
    Interval,
    NameCommitted,
    Piece,
    Position,
    RunSample,
    Samples,
)
from tests.harness.shuffle_answers import count, samples, slices
from tests.harness.shuffle_rows import SPEC, key_of, piece, run_of

PARTITIONS, RANGES = 6500, 16
STALL_SECONDS = 0.1
pytestmark = pytest.mark.asyncio(loop_scope="module")
WINNERS = {partition: f"attempt-{partition:016x}" for partition in range(PARTITIONS)}
PARTS = intervals([Position(key_of(10 * number), 0, 0, 0) for number in range(1, RANGES)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def storage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RangeStorage]:
    """Every partition has a row in every range."""
    gc.collect()
    gc.freeze()  # what the tests before have left is not the follower's
    made = await RangeStorage.open(tmp_path_factory.mktemp("many"), Budget(1 << 30), Counters(), 0)
    blocks = run_of([10 * number + 5 for number in range(RANGES)], 1)
    for first in range(0, PARTITIONS, 1000):
        pieces = [Piece(number, WINNERS[number], 0, blocks) for number in range(first, min(first + 1000, PARTITIONS))]
        await made.store("s", "visits", SPEC, pieces)
    yield made
    gc.unfreeze()
    await made.close()


class Watch:
    """The longest stretch in which the loop did nothing else, seconds. Works while it is entered."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._look())
        await asyncio.sleep(0)
        return self

    async def _look(self) -> None:
        last = time.thread_time()  # of this thread: what others of the machine do does not count
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, last = max(self.longest, now - last), now

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


async def test_samples_of_many_attempts_fit_a_message_and_say_the_same(storage: RangeStorage) -> None:
    begin: Cursor | None = (-1, "", 0)
    found: list[RunSample] = []
    async with Watch() as watch:
        while begin is not None:
            page = await RangeQueries(storage).samples("s", PARTS, CommittedAttempts(WINNERS), SAMPLE_KEYS_MAX, begin)
            assert len(msgspec.msgpack.encode(Samples(page.samples))) < CONTROL_BYTES_MAX / 2
            found += page.samples
            begin = page.next
    assert watch.longest < STALL_SECONDS
    assert sum(len(sample.keys) for sample in found) < PARTITIONS * RANGES / 4, "not one of every attempt and range"
    whole = Distribution.of(found)
    total = storage.shuffles["s"].live
    assert abs(whole.total - total) < total / 100
    for number in range(1, RANGES):
        border = PARTS[number].lower
        assert abs(whole.before(border) - total * number / RANGES) < total / RANGES / 16
    borders = even_borders(whole, 4)
    assert [border.key for border in borders] == [key_of(45), key_of(85), key_of(125)]


@pytest.mark.parametrize("partitions", [100, 1500])
async def test_a_sample_of_small_attempts_says_where_their_rows_are(tmp_path: Path, partitions: int) -> None:
    """Each is one block, all over the keys: first keys would say that all rows are at the begin."""
    made = await RangeStorage.open(tmp_path / "s", Budget(1 << 30), Counters(), 0)
    chance = Random(5)
    rows = [sorted(chance.randrange(1000) for _ in range(8)) for _ in range(partitions)]
    pieces = [Piece(number, "a", 0, run_of(keys, 8, pad=100)) for number, keys in enumerate(rows)]
    await made.store("s", "visits", SPEC, pieces)
    found = await samples(made, [Interval(None, None)], dict.fromkeys(range(partitions), "a"), keys=256)
    assert sum(len(sample.keys) for sample in found) <= 512
    whole = Distribution.of(found)
    for key in range(100, 1000, 100):
        share = sum(each < key for keys in rows for each in keys) / (8 * partitions)
        assert abs(whole.before(Position(key_of(key), 0, 0, 0)) / whole.total - share) < 1 / 32
    await made.close()


async def test_rows_of_each_attempt_are_told_without_keys(storage: RangeStorage) -> None:
    told = await samples(storage, PARTS, WINNERS, keys=0)
    assert {(sample.partition, sample.attempt): sample.rows for sample in told} == dict.fromkeys(WINNERS.items(), RANGES)
    assert not any(sample.keys for sample in told)


async def test_counting_many_attempts_ends_in_time_and_lets_others_work(
    storage: RangeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is short; all of them together are what a single one says."""
    monkeypatch.setattr(queries, "PAGE_SECONDS", 0.05)
    pages = 0
    begin: Cursor | None = (-1, "", 0)
    rows = [0] * RANGES
    winners = CommittedAttempts(WINNERS)
    async with Watch() as watch:
        while begin is not None:
            page = await RangeQueries(storage).count("s", PARTS, winners, begin)
            rows = [one + other for one, other in zip(rows, page.rows, strict=True)]
            begin = page.next
            pages += 1
    assert rows == [PARTITIONS] * RANGES
    assert pages > 1
    assert watch.longest < STALL_SECONDS


async def test_slices_of_many_attempts_come_in_pages(storage: RangeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.shuffle.node.queries.SLICES_MAX", 1000)
    page = await RangeQueries(storage).slices("s", PARTS[3], CommittedAttempts(WINNERS))
    assert (len(page.slices), page.next) == (1000, (1000, WINNERS[1000], 0))
    found = await slices(storage, PARTS[3], WINNERS)
    assert [(one.partition, one.first, one.rows) for one in found] == [(number, 3, 1) for number in range(PARTITIONS)]
    assert len(await slices(storage, PARTS[3], None)) == PARTITIONS
    assert (await count(storage, [PARTS[3]], {5: WINNERS[5], 7: "another"}))[0] == [1]


# --- winners are told once --------------------------------------------------------------------------------------------------


async def test_winners_are_told_in_parts_and_known_after_a_new_start(tmp_path: Path) -> None:
    winners = CommittedAttempts({number: f"a{number}" for number in range(2 * COMMITTED_AT_ONCE + 5)})
    told = list(parts("s", "visits", SPEC, winners))
    assert [(part.number, part.last, len(part.committed)) for part in told] == [
        (0, False, COMMITTED_AT_ONCE),
        (1, False, COMMITTED_AT_ONCE),
        (2, True, 5),
    ]
    storage = await RangeStorage.open(tmp_path / "s", Budget(1 << 30), Counters(), 0)
    await storage.store("s", "visits", SPEC, [piece(0, "a0", 0, run_of([1], 1))])
    stored, naming = storage.shuffles["s"], CommittedRegistry(0)
    with pytest.raises(WinnersUnknown):
        await naming.of("s", stored, winners.digest)
    assert [await naming.told(part) for part in (told[2], told[0], told[0])] == [None] * 3, "in any order, and again"
    whole = await naming.told(told[1])
    assert whole is not None
    assert whole.by == winners.by
    await naming.save(stored, whole)
    assert (await CommittedRegistry(0).of("s", stored, winners.digest)).by == winners.by
    path = tmp_path / "s" / "s" / f"winners-{winners.digest}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(WinnersUnknown):
        await CommittedRegistry(0).of("s", stored, winners.digest)
    await storage.close()


async def test_a_full_disk_does_not_keep_winners_from_being_known(tmp_path: Path) -> None:
    storage = await RangeStorage.open(tmp_path / "s", Budget(1 << 30), Counters(), 0)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of([1], 1))])
    winners, naming = CommittedAttempts({0: "a"}), CommittedRegistry(1 << 60)
    for part in parts("s", "visits", SPEC, winners):
        assert await naming.told(part) is not None
    await naming.save(storage.shuffles["s"], winners)
    assert (await naming.of("s", storage.shuffles["s"], winners.digest)).by == winners.by
    assert not list((tmp_path / "s" / "s").glob("winners-*"))
    await storage.close()


async def test_winners_that_are_not_those_of_their_digest_are_refused() -> None:
    with pytest.raises(FrameError):
        await CommittedRegistry(0).told(NameCommitted("s", "visits", SPEC, "0" * 32, 0, True, {0: "a"}))
