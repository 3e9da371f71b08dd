"""What a follower's storage role answers, all pages of it."""

from __future__ import annotations

from collections.abc import Sequence

from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.node.queries import FencedCommands, RangeQueries
from roq.shuffle.node.storage import RangeStorage
from roq.wire.shuffle import BEGIN, SAMPLE_KEYS_MAX, Cursor, Interval, RunSample, RunSlice


async def slices(storage: RangeStorage, interval: Interval, winners: dict[int, str] | None, id: str = "s") -> list[RunSlice]:
    """winners: None for every attempt."""
    named = None if winners is None else CommittedAttempts(winners)
    found: list[RunSlice] = []
    begin: Cursor | None = BEGIN
    while begin is not None:
        page = await RangeQueries(storage).slices(id, interval, named, begin)
        found += page.slices
        begin = page.next
    return found


async def count(
    storage: RangeStorage, intervals: Sequence[Interval], winners: dict[int, str], id: str = "s"
) -> tuple[list[int], list[int]]:
    """Rows and bytes of each interval."""
    rows, sizes = [0] * len(intervals), [0] * len(intervals)
    begin: Cursor | None = BEGIN
    while begin is not None:
        page = await RangeQueries(storage).count(id, intervals, CommittedAttempts(winners), begin)
        rows = [one + other for one, other in zip(rows, page.rows, strict=True)]
        sizes = [one + other for one, other in zip(sizes, page.sizes, strict=True)]
        begin = page.next
    return rows, sizes


async def samples(
    storage: RangeStorage, intervals: Sequence[Interval], winners: dict[int, str], keys: int = SAMPLE_KEYS_MAX, id: str = "s"
) -> list[RunSample]:
    """As they are told."""
    found: list[RunSample] = []
    begin: Cursor | None = BEGIN
    while begin is not None:
        page = await RangeQueries(storage).samples(id, intervals, CommittedAttempts(winners), keys, begin)
        found += page.samples
        begin = page.next
    return found


async def keep(storage: RangeStorage, intervals: Sequence[Interval], winners: dict[int, str] | None, id: str = "s") -> None:
    """As a leader orders it that nobody contradicts. winners: None while any attempt may win."""
    orders = FencedCommands(storage, RangeQueries(storage))
    await orders.keep(storage.epoch, id, 1, intervals, None if winners is None else CommittedAttempts(winners))
