"""Found by review: what compaction must carry, and an answer that must not be given."""

from __future__ import annotations

from roq.wire.store import Refusal
from tests.unit.test_store_storage import ENTRY, NO_SUCH, UNKNOWN, Bench, add, entry


def churned(bench: Bench, rounds: int, *, compact: bool) -> None:
    """Other segments come and go."""
    for round in range(rounds):
        name = f"s{round}"
        bench.open(name)
        for number in range(1, 60):
            assert bench.add(number, entry(number, 900), segment=name) is None
        assert bench.ask("delete", name, 1) is None
        while compact and bench.compaction.step():
            bench.flush()


def test_entries_written_before_their_segment_was_carried_come_back() -> None:
    bench, last = Bench(), 0
    bench.open("kept")
    for _ in range(6):
        for _ in range(5):
            last += 1
            assert bench.add(last, entry(last, 900), segment="kept") is None
        churned(bench, 1, compact=False)
    first = bench.storage.journal.numbers[0]
    while bench.storage.journal.numbers[0] == first:  # one file only: the next ones still hold entries of it
        bench.compaction.step()
        bench.flush()
    everything = range(1, last + 1)
    assert bench.found(*everything, segment="kept") == [ENTRY] * last
    assert bench.reopened().found(*everything, segment="kept") == [ENTRY] * last


def test_what_was_put_aside_is_never_absent_however_often_the_journal_was_compacted() -> None:
    bench = Bench()
    bench.open("kept")
    assert bench.add(1, entry(1), entry(2), segment="kept") is None
    place = bench.storage.index.segments["kept"].place(2)
    bench.file(place >> 32)[(place & 0xFFFFFFFF) + 60] ^= 1
    bench.storage.put_aside("kept", 2)
    churned(bench, 12, compact=True)
    for one in (bench, bench.reopened()):
        assert one.found(1, 2, 3, segment="kept") == [ENTRY, UNKNOWN, NO_SUCH]


def test_what_is_sent_again_while_the_disk_gets_full_is_not_answered_as_stored() -> None:
    bench = Bench()
    bench.open()
    storage, answers, number = bench.storage, list[Refusal | None](), 1
    bench.disk.full = True
    while storage.journal.room - storage._reserve > 3000:
        storage.add(add("s", number, entry(number, 1000)), answers.append)
        write = storage.stage()
        assert write is not None
        storage.journal.perform(write)
        storage.committed(write)
        number += 1
    answers.clear()
    for _ in range(2):
        storage.add(add("s", number, entry(number, 8000)), answers.append)
    storage.full = True  # only now it is known that no other file can be made
    bench.flush()
    assert answers == [Refusal.FULL, Refusal.FULL]
    assert bench.found(number) == [NO_SUCH]
