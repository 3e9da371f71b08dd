"""The segment store on a disk that forgets, tears, flips bits and fills up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from struct import pack_into
from zlib import crc32

import pytest

from roq.errors import StorageFailed, UnknownFormat
from roq.log.store.journal import BATCH_HEADER_BYTES, path_of
from roq.log.store.storage import COPY_EPOCH, SegmentStorage
from roq.log.store.upkeep import Compaction
from roq.tools.simulation.disks import SimulatedDisk
from roq.wire.store import Add, Found, Refusal, entry_crc, segment_id

HERE = Path("/journal")
FILE_BYTES = 64 * 1024
ENTRY, NO_SUCH, UNKNOWN = Found.ENTRY, Found.NO_SUCH, Found.UNKNOWN


def entry(position: int, size: int = 100) -> bytes:
    return (b"%d." % position * size)[:size]


def add(segment: str, first: int, *entries: bytes, epoch: int = 1, confirmed: int = 0) -> Add:
    crcs = [entry_crc(segment, position, one) for position, one in enumerate(entries, first)]
    return Add(segment, epoch, first, confirmed, crcs, list(entries))


def new_disk() -> SimulatedDisk:
    """Which takes no time; what its syncs fail to write stays in the page cache."""
    disk = SimulatedDisk(None, random.Random(1), HERE)
    disk.evicted_part = 0.0
    return disk


def power_cut(disk: SimulatedDisk, draw: random.Random) -> SimulatedDisk:
    """The disk after it."""
    after = disk.copied(draw)
    after.lose_power()
    return after


class Bench:
    """A Storage whose writes are performed at once; remembers every answer."""

    def __init__(self, disk: SimulatedDisk | None = None, *, marked: bool = True) -> None:
        self.disk = disk or new_disk()
        self.storage = SegmentStorage(self.disk, HERE, FILE_BYTES)
        self.compaction = Compaction(self.storage)
        self.marked = marked
        self.flush()

    def flush(self) -> None:
        storage = self.storage
        while storage.has_pending:
            write = storage.stage()
            if storage.wants_file and not self.disk.full:
                storage.journal.adopt(storage.journal.create())
            elif storage.wants_file:
                storage.full = True
            if write is None:
                continue
            storage.journal.perform(write)
            storage.committed(write)
        if self.marked and (marker := storage.marker()) is not None:
            storage.journal.perform(marker)
            storage.committed(marker)

    def ask(self, verb: str, *arguments: object) -> Refusal | None:
        answers: list[Refusal | None] = []
        getattr(self.storage, verb)(*arguments, answers.append)
        self.flush()
        assert len(answers) == 1
        return answers[0]

    def open(self, segment: str = "s", epoch: int = 1) -> None:
        assert self.ask("open_segment", segment, epoch) is None

    def add(self, first: int, *entries: bytes, segment: str = "s", epoch: int = 1) -> Refusal | None:
        return self.ask("add", add(segment, first, *entries, epoch=epoch))

    def found(self, *positions: int, segment: str = "s") -> list[Found]:
        return [self.storage.look(segment, position)[0] for position in positions]

    def reopened(self, disk: SimulatedDisk | None = None) -> Bench:
        for segment in self.storage.index.segments.values():
            segment.check()
        return Bench(disk or self.disk, marked=self.marked)

    def file(self, number: int) -> bytearray:
        return self.disk.files[path_of(HERE, number)].data


def test_entries_come_back_with_their_crc_after_a_restart() -> None:
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1), entry(2, 5000), b"") is None
    for one in (bench, bench.reopened()):
        assert one.storage.look("s", 2) == (ENTRY, entry_crc("s", 2, entry(2, 5000)), entry(2, 5000))
        assert one.storage.read("s", 1, 9)[1:] == ([entry(1), entry(2, 5000), b""], True)
        assert one.found(3, 4) == [ENTRY, NO_SUCH]
        assert one.storage.damaged == 0


def test_the_same_entry_again_is_taken_and_another_one_refused() -> None:
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1), entry(2)) is None
    assert bench.add(2, entry(2), entry(3)) is None
    assert bench.add(2, b"other") is Refusal.DIVERGED
    bad = add("s", 4, entry(4))
    assert bench.ask("add", Add("s", 1, 4, 0, [bad.crcs[0] ^ 1], bad.entries)) is Refusal.DAMAGED
    assert bench.add(1 << 60, entry(1)) is Refusal.DIVERGED  # a wild position does not eat the memory
    assert bench.found(1, 2, 3, 4) == [ENTRY, ENTRY, ENTRY, NO_SUCH]


def test_a_fence_refuses_from_the_moment_it_is_asked_for_and_after_a_restart() -> None:
    bench = Bench()
    bench.open()
    answers: list[tuple[str, Refusal | None]] = []
    bench.storage.add(add("s", 1, entry(1)), lambda refusal: answers.append(("before", refusal)))
    bench.storage.fence("s", 5, lambda refusal: answers.append(("fence", refusal)))
    bench.storage.add(add("s", 2, entry(2)), lambda refusal: answers.append(("after", refusal)))
    assert answers == [("after", Refusal.FENCED)]
    bench.flush()
    assert answers[1:] == [("before", None), ("fence", None)]
    for one in (bench, bench.reopened()):
        assert one.add(2, entry(2), epoch=4) is Refusal.FENCED
        assert one.ask("fence", "s", 4) is Refusal.FENCED
        assert one.ask("open_segment", "s", 4) is Refusal.FENCED
        assert one.add(2, entry(2), epoch=5) is None


def test_nothing_is_answered_before_it_is_synced() -> None:
    bench = Bench()
    bench.open()
    answers: list[object] = []
    bench.storage.add(add("s", 1, entry(1)), answers.append)
    bench.storage.add(add("s", 1, entry(1)), answers.append)  # the same one, while the first is on its way
    write = bench.storage.stage()
    assert write is not None
    assert not answers
    assert bench.found(1) == [NO_SUCH]
    bench.storage.journal.perform(write)
    assert not answers
    bench.storage.committed(write)
    assert answers == [None, None]


def test_a_store_that_did_not_see_the_opening_is_never_sure_and_takes_nothing() -> None:
    bench = Bench()
    assert bench.add(1, entry(1)) is Refusal.NOT_OPEN
    assert bench.ask("fence", "s", 3) is None
    assert bench.found(1) == [UNKNOWN]
    assert bench.ask("add", add("s", 1, entry(1), epoch=COPY_EPOCH)) is None  # a copy of a closed segment
    assert bench.found(1, 2) == [ENTRY, UNKNOWN]
    bench.open(epoch=3)
    assert bench.reopened().found(1, 2) == [ENTRY, NO_SUCH]


def test_what_a_killed_process_left_unsynced_is_synced_before_it_is_believed() -> None:
    bench = Bench()
    bench.open()
    bench.storage.add(add("s", 1, entry(1)), lambda refusal: None)
    write = bench.storage.stage()
    assert write is not None
    bench.disk.write(1, write.data, write.offset)  # kill -9: written, not synced, never answered
    after = bench.reopened()
    assert after.add(1, entry(1)) is None  # answered at once, since it is there
    for seed in range(20):
        assert after.reopened(power_cut(after.disk, random.Random(seed))).found(1) == [ENTRY]


@pytest.mark.parametrize("marked", [True, False])
def test_a_torn_tail_is_cut_and_what_was_answered_stays(marked: bool) -> None:
    draw = random.Random(7)
    for _ in range(60):
        bench = Bench(marked=marked)
        bench.open()
        assert bench.add(1, *(entry(number, draw.randrange(1500)) for number in range(1, 4))) is None
        bench.storage.add(
            add("s", 4, *(entry(number, draw.randrange(1, 3000)) for number in range(4, 9))), lambda refusal: None
        )
        write = bench.storage.stage()
        assert write is not None
        bench.disk.write(1, write.data, write.offset)
        after = bench.reopened(power_cut(bench.disk, draw))
        assert after.found(1, 2, 3) == [ENTRY] * 3
        whole = after.found(4)[0]
        assert after.found(4, 5, 6, 7, 8) == [whole] * 5  # the batch is there whole or not at all
        assert whole in (ENTRY, NO_SUCH) or after.storage.damaged
        again = after.reopened()
        assert again.found(*range(1, 10)) == after.found(*range(1, 10))


def test_a_flip_in_the_last_batch_is_not_taken_for_a_torn_write() -> None:
    """No marker follows it: the machine went down right after the answer."""
    bench = Bench(marked=False)
    bench.open()
    begin = len(bytes(bench.file(1)).rstrip(b"\0"))
    assert bench.add(1, entry(1, 900)) is None
    end = len(bytes(bench.file(1)).rstrip(b"\0"))
    for at in range(begin, end, 7):
        disk = power_cut(bench.disk, random.Random(at))
        disk.files[path_of(HERE, 1)].data[at] ^= 16
        after = bench.reopened(disk)
        assert after.found(1)[0] is not NO_SUCH, at
        assert after.storage.damaged
        assert after.found(2) == [UNKNOWN]
    disk = power_cut(bench.disk, random.Random(1))
    disk.files[path_of(HERE, 1)].data[begin // 512 * 512 + 512 : end] = bytes(end - begin // 512 * 512 - 512)
    after = bench.reopened(disk)
    assert (after.found(1), after.storage.damaged) == ([NO_SUCH], 0)  # a write of which only the first sector came


def test_a_bit_flip_anywhere_is_never_taken_for_absence() -> None:
    draw = random.Random(11)
    bench = Bench()
    bench.open()
    for number in range(1, 21):
        assert bench.add(number, entry(number, draw.randrange(300))) is None
    used = len(bytes(bench.file(1)).rstrip(b"\0"))
    for _ in range(300):
        disk = power_cut(bench.disk, draw)
        at = draw.randrange(used)
        disk.files[path_of(HERE, 1)].data[at] ^= 1 << draw.randrange(8)
        after = bench.reopened(disk)
        found = after.found(*range(1, 22))
        assert NO_SUCH not in found[:20], at
        if UNKNOWN in found:
            assert after.storage.damaged
            assert after.reopened().found(*range(1, 22)) == found  # known for ever, and after every restart
            assert found[20] is UNKNOWN
            assert after.add(21, entry(21)) is Refusal.NOT_OPEN  # a fence may have been lost, too


def test_a_bit_flip_anywhere_confirms_nothing_and_fences_nobody_else() -> None:
    """A record's own checksum covers what it is, not what it says of others: one flip must not end a log beyond its entries."""
    bench = Bench()
    bench.open(epoch=3)
    assert bench.ask("add", add("s", 1, entry(1), epoch=3)) is None
    assert bench.ask("add", add("s", 2, entry(2), entry(3), epoch=3, confirmed=1)) is None
    path = path_of(HERE, 1)
    end = len(bench.disk.files[path].data.rstrip(b"\0"))
    for place, bit in itertools.product(range(end), (0, 7)):
        disk = power_cut(bench.disk, random.Random(1))
        disk.files[path].data[place] ^= 1 << bit
        after = Bench(disk)
        assert after.storage.confirmed("s") <= 1
        assert all(segment.fenced <= 3 for segment in after.storage.index.segments.values())


def test_a_truncated_file_is_damage_also_when_it_was_cut_between_two_batches() -> None:
    bench = Bench()
    bench.open()
    ends = []
    for number in range(1, 6):
        assert bench.add(number, entry(number)) is None
        ends.append(len(bytes(bench.file(1)).rstrip(b"\0")))
    for cut in (0, 30, 64, *ends, ends[2] + 7):
        disk = power_cut(bench.disk, random.Random(1))
        del disk.files[path_of(HERE, 1)].data[cut:]
        after = bench.reopened(disk)
        assert NO_SUCH not in after.found(*range(1, 7)), cut
        assert after.storage.damaged
        assert NO_SUCH not in after.reopened().found(*range(1, 7))


def test_a_segment_opened_after_the_damage_is_sure_again() -> None:
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1), entry(2)) is None
    bench.file(1)[200] ^= 4
    after = bench.reopened()
    assert after.storage.damaged
    after.open("t")
    assert after.add(1, entry(1), segment="t") is None
    for one in (after, after.reopened()):
        assert one.found(1, 2, segment="t") == [ENTRY, NO_SUCH]
        assert one.found(9) == [UNKNOWN]


def test_a_missing_file_of_the_journal_is_damage() -> None:
    bench = Bench()
    bench.open()
    for number in range(1, 400):
        assert bench.add(number, entry(number, 500)) is None
    assert len(bench.storage.journal.numbers) > 3
    del bench.disk.files[path_of(HERE, 2)]
    found = bench.reopened().found(*range(1, 401))
    assert UNKNOWN in found
    assert NO_SUCH not in found


def test_another_version_of_the_format_is_refused() -> None:
    bench = Bench()
    bench.open()
    head = bench.file(1)
    pack_into("<I", head, 4, 2)
    pack_into("<I", head, 24, crc32(head[:24]))
    with pytest.raises(UnknownFormat, match="format 2"):
        bench.reopened()


def test_a_failing_sync_is_an_error_and_nothing_is_answered() -> None:
    for failing in ("write", "sync"):
        bench = Bench()
        bench.open()
        bench.disk.failing = failing
        answers: list[object] = []
        bench.storage.add(add("s", 1, entry(1)), answers.append)
        with pytest.raises(StorageFailed):
            bench.flush()
        assert not answers


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_failed_sync_left_in_the_page_cache_is_written_again_before_it_is_believed(fresh: bool) -> None:
    """The store ends and is started again; the pages look written, and no sync would write them. fresh: in a new file."""
    bench = Bench()
    bench.open()
    position, before = 1, bench.storage.journal.number
    while bench.storage.journal.room > 3500 and (fresh or position < 3):
        assert bench.add(position, entry(position, 3000)) is None
        position += 1
    bench.disk.failing = "sync"
    with pytest.raises(StorageFailed):
        bench.add(position, entry(position, 3500))
    assert (bench.storage.journal.number > before) == fresh  # then the write brought the header of its file
    after = bench.reopened()
    assert after.add(position, entry(position, 3500)) is None  # the writer sends it again: it is acknowledged
    after.disk.drop_cache()
    assert after.found(1, position) == [ENTRY, ENTRY]
    for seed in range(5):
        again = after.reopened(power_cut(after.disk, random.Random(seed)))
        assert again.found(1, position) == [ENTRY, ENTRY]
        assert not again.storage.damaged


def test_what_a_failed_sync_left_torn_is_not_there() -> None:
    """As above, but the cache is gone before the store is back: what was never answered may be gone, and nothing else."""
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1)) is None
    bench.disk.failing = "sync"
    with pytest.raises(StorageFailed):
        bench.add(2, entry(2))
    bench.disk.drop_cache()
    after = bench.reopened()
    assert after.found(1, 2) == [ENTRY, NO_SUCH]
    assert after.add(2, b"another") is None
    assert after.reopened(power_cut(after.disk, random.Random(1))).found(1, 2) == [ENTRY, ENTRY]


def test_a_full_disk_refuses_entries_keeps_what_it_has_and_still_fences_and_deletes() -> None:
    bench = Bench()
    bench.open()
    bench.open("t")
    bench.disk.full = True
    position, refusal = 1, None
    while refusal is None:
        refusal = bench.add(position, entry(position, 1000))
        position += 1
    assert refusal is Refusal.FULL
    assert bench.found(*range(1, position)) == [ENTRY] * (position - 2) + [NO_SUCH]
    for number in range(2, 12):
        assert bench.ask("fence", "s", number) is None
    assert bench.ask("delete", "t", 9) is None
    after = bench.reopened()  # also a full disk can be opened
    assert after.found(*range(1, position)) == [ENTRY] * (position - 2) + [NO_SUCH]
    after.disk.full = after.storage.full = False
    assert after.add(position - 1, entry(1), epoch=11) is None


def test_deleted_segments_give_their_space_back_and_stay_deleted() -> None:
    bench = Bench()
    bench.open("kept")
    assert bench.add(1, entry(1), segment="kept") is None
    for round in range(12):
        name = f"s{round}"
        bench.open(name)
        for number in range(1, 60):
            assert bench.add(number, entry(number, 900), segment=name) is None
        assert bench.ask("delete", name, 1) is None
        while bench.compaction.step():
            bench.flush()
    assert len(bench.storage.journal.numbers) <= 4
    after = bench.reopened()
    assert sorted(after.storage.index.segments) == ["kept"]
    assert after.found(1, 2, segment="kept") == [ENTRY, NO_SUCH]
    assert bench.ask("fence", "kept", 7) is None
    assert bench.ask("delete", "kept", 6) is Refusal.FENCED  # an earlier owner of the log


def test_scrubbing_finds_what_rotted_and_a_copy_mends_it() -> None:
    bench = Bench()
    bench.open()
    for number in range(1, 6):
        assert bench.add(number, entry(number)) is None
    place = bench.storage.index.segments["s"].place(3)
    bench.file(place >> 32)[(place & 0xFFFFFFFF) + 60] ^= 1
    assert [position for position, _ in bench.storage.verify("s", bench.storage.held("s", 1, 5), 1 << 20)[2]] == [3]
    assert bench.found(2, 3) == [ENTRY, UNKNOWN]
    bench.storage.put_aside("s", 3)
    bench.flush()
    assert bench.storage.missing("s", 1, 6) == [(3, 3), (6, 6)]
    assert bench.ask("add", add("s", 3, entry(3), epoch=COPY_EPOCH)) is None
    assert bench.found(3) == [ENTRY]
    assert bench.reopened().found(3) == [ENTRY]


def torn_batches() -> Iterator[tuple[int, SimulatedDisk, bytes]]:
    """A last batch that begins anywhere in a sector: (offset in its file, disk without it, its bytes)."""
    for shift in range(0, 512, 3):
        bench = Bench(marked=False)
        bench.open()
        used = len(bytes(bench.file(1)).rstrip(b"\0"))
        assert bench.add(1, entry(1, (shift - used) % 512 + 512)) is None
        bench.storage.add(add("s", 2, entry(2, 600)), lambda refusal: None)
        write = bench.storage.stage()
        assert write is not None
        yield write.offset, bench.disk, write.data


def test_a_batch_torn_between_any_two_sectors_is_cut_wherever_its_header_is() -> None:
    """Every prefix of its sectors, every suffix, and a middle one alone. A header may be on both sides of a border."""
    straddling = 0
    for offset, disk, data in torn_batches():
        borders = [0, *range(512 - offset % 512, len(data), 512), len(data)]
        straddling += borders[1] < BATCH_HEADER_BYTES
        pieces = list(itertools.pairwise(borders))
        for present in (one for count in range(len(pieces)) for one in itertools.combinations(pieces, count)):
            torn = power_cut(disk, random.Random(1))
            for begin, end in present:
                torn.files[path_of(HERE, 1)].data[offset + begin : offset + end] = data[begin:end]
            after = Bench(torn)
            assert after.found(1, 2) == [ENTRY, NO_SUCH], (offset, present)
            assert not after.storage.damaged, (offset, present)
            assert after.add(2, b"another") is None
            assert after.reopened().found(1, 2, 3) == [ENTRY, ENTRY, NO_SUCH]
    assert straddling


def test_the_first_write_of_a_file_torn_between_any_two_sectors_is_cut() -> None:
    bench = Bench(marked=False)
    bench.open()
    position = 1
    while bench.storage.journal.room > 3000:
        assert bench.add(position, entry(position, 2900)) is None
        position += 1
    bench.storage.add(add("s", position, entry(position, 3000)), lambda refusal: None)
    write = bench.storage.stage()
    assert write is not None
    assert (write.number, write.offset) == (2, 0)
    size = 0
    for present in itertools.product((False, True), repeat=len(range(0, len(write.data), 512))):
        torn, size = power_cut(bench.disk, random.Random(1)), 0
        for begin in (512 * number for number, here in enumerate(present) if here):
            torn.files[path_of(HERE, 2)].data[begin : min(begin + 512, len(write.data))] = write.data[begin : begin + 512]
            size += 1
        after = Bench(torn)
        assert after.found(position - 1, position) == [ENTRY, ENTRY if all(present) else NO_SUCH], present
        assert not after.storage.damaged, present
        for more in range(position, position + 8):
            assert after.add(more, entry(more, 3000)) is None
            after = after.reopened()
            assert not after.storage.damaged, present
    assert size > 5


def test_a_batch_torn_at_any_byte_is_never_believed_and_takes_nothing_with_it() -> None:
    """No disk tears within a sector; were one to, what was acknowledged stays, and what is not sure is not called absent."""
    draw = random.Random(3)
    for offset, disk, data in itertools.islice(torn_batches(), 0, None, 43):
        for cut in range(len(data)):
            torn = power_cut(disk, draw)
            torn.files[path_of(HERE, 1)].data[offset : offset + cut] = data[:cut]
            after = Bench(torn)
            assert after.found(1) == [ENTRY], (offset, cut)
            assert after.found(2) == [UNKNOWN if after.storage.damaged else NO_SUCH]
            assert not after.storage.damaged or cut > BATCH_HEADER_BYTES, (offset, cut)


def test_logs_are_counted_by_the_names_of_their_segments() -> None:
    bench = Bench()
    for segment in (segment_id("orders", 1, 1), segment_id("orders", 2, 2), segment_id("a~b", 1, 1)):
        bench.storage.index.segment(segment)
    assert bench.storage.index.logs() == 2
