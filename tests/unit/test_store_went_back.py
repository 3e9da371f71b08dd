"""A disk that went back in time: an old image of it under the same name, with its cookie and all its openings."""

from __future__ import annotations

import random

from roq.wire.store import Found, Refusal
from tests.unit.test_store_storage import Bench, add, entry, power_cut

ENTRY, NO_SUCH, UNKNOWN = Found.ENTRY, Found.NO_SUCH, Found.UNKNOWN


def image_and_later() -> tuple[Bench, int]:
    """A store on an image from before entry 2, and the batch that was durable after it."""
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1)) is None
    image = power_cut(bench.disk, random.Random(1))
    assert bench.add(2, entry(2)) is None
    assert bench.ask("fence", "s", 5) is None
    return bench.reopened(image), bench.storage.synced


def test_an_old_image_is_sure_of_nothing_and_takes_nothing_old() -> None:
    bench, known = image_and_later()
    assert bench.found(2) == [NO_SUCH], "what an acknowledged entry would be cut off for"
    bench = bench.reopened()
    bench.storage.doubt(takes_entries=True)
    assert bench.found(1, 2) == [ENTRY, UNKNOWN], "not sure before ZooKeeper was asked"
    assert not bench.storage.prove(known)
    bench.flush()
    for again in range(3):
        assert bench.found(1, 2) == [ENTRY, UNKNOWN]
        assert bench.add(3, entry(3), epoch=4) is Refusal.NOT_OPEN, "the fence at 5 is not there any more"
        assert bench.storage.damaged == 1
        assert bench.storage.synced > known
        bench.open(f"new{again}")
        assert bench.found(1, segment=f"new{again}") == [NO_SUCH], "what was opened since is sure"
        known = bench.storage.synced
        bench = bench.reopened()
        bench.storage.doubt(takes_entries=False)
        assert bench.storage.prove(known)


def test_what_is_written_before_the_proof_does_not_hide_that_the_disk_is_old() -> None:
    bench, known = image_and_later()
    bench.storage.doubt(takes_entries=True)
    for position in range(2, 12):
        assert bench.add(position, entry(position)) is None
    assert bench.storage.synced > known
    answers: list[Refusal | None] = []
    bench.storage.open_segment("s", 6, answers.append)  # on its way: it counts no more than the earlier ones
    assert not bench.storage.prove(known)
    bench.flush()
    assert answers == [None]
    assert bench.found(12) == [UNKNOWN]
    assert bench.reopened().found(12) == [UNKNOWN]


def test_a_disk_in_doubt_takes_entries_later_and_copies_at_once() -> None:
    bench = Bench()
    bench.open()
    assert bench.add(1, entry(1)) is None
    known, bench = bench.storage.synced, bench.reopened()
    bench.storage.doubt(takes_entries=False)
    assert bench.add(2, entry(2)) is Refusal.OVERLOADED
    assert bench.ask("add", add("t", 1, entry(1), epoch=1 << 62)) is None
    assert bench.found(1, 2) == [ENTRY, UNKNOWN]
    assert bench.storage.prove(known)
    assert bench.found(1, 2) == [ENTRY, NO_SUCH]
    assert bench.add(2, entry(2)) is None
    assert bench.storage.prove(known + 1000), "ZooKeeper is told of batches of this process, too"


def test_a_write_that_was_never_synced_is_not_missed() -> None:
    bench = Bench(marked=False)
    bench.open()
    bench.storage.add(add("s", 1, entry(1, 5000)), lambda refusal: None)
    write = bench.storage.stage()
    assert write is not None
    known = bench.storage.synced
    bench.disk.write(1, write.data, write.offset)
    for seed in range(10):
        after = bench.reopened(power_cut(bench.disk, random.Random(seed)))
        after.storage.doubt(takes_entries=False)
        assert after.storage.prove(known)
