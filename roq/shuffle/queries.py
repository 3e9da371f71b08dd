"""What the leader asks followers of a shuffle, and what their answers mean. Pure functions of a record; when they are asked is
plan.py's. In FetchInterval the sources are hosts here: the shell puts their endpoints in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from roq.errors import AttemptNotFound, DataLost, RoqError
from roq.shuffle.record import ShuffleRecord, Table, held_by, kept_intervals, moves_between
from roq.shuffle.sampling import KEYS_MAX, SAMPLES_PER_RANGE
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Range, RunSample

INTERVALS_AT_ONCE = 256  # counted by one request
SAMPLED_AT_ONCE = 16  # intervals in one request
KEYS_PER_RANGE = 256  # told of one range, unless that are more than one distribution has room for

Asks = Sequence[tuple[str, wire.Request]]  # host, request
Answers = Sequence[tuple[str, wire.Request, wire.Reply]]


class RowCount(NamedTuple):
    """What counting came to. table: with rows and sizes. missing: rows that no holder has. best: range → the holder that has
    most. lacking: who must fetch what from whom."""

    table: Table
    missing: int
    best: dict[int, str]
    lacking: Asks


def table_changed(record: ShuffleRecord, epoch: int, running: frozenset[str]) -> Asks:
    """Buffers are told of a new table, before its holders fetch what those of the former one have."""
    return [(host, wire.TableChanged(epoch, record.id, record.epoch)) for host in sorted(running)]


def fetch(record: ShuffleRecord, epoch: int, running: frozenset[str]) -> Asks:
    """New holders fetch what former ones have."""
    moves = moves_between(record.former, record.table, running) if record.former else []
    return _fetches(record, epoch, ((move.holder, move.interval, move.sources) for move in moves))


def _fetches(record: ShuffleRecord, epoch: int, wanted: Iterable[tuple[str, Interval, Sequence[str]]]) -> Asks:
    committed = record.committed  # one value for all: there may be many
    return [
        (host, wire.FetchInterval(epoch, record.id, interval, committed, list(sources), record.epoch))
        for host, interval, sources in wanted
    ]


def count(record: ShuffleRecord) -> Asks:
    """Every holder counts its ranges. Nothing is asked when nothing is committed."""
    committed = record.committed
    return [
        (host, wire.CountRows(record.id, [each.interval for each in ranges[first : first + INTERVALS_AT_ONCE]], committed))
        for host, ranges in sorted(held_by(record.table).items())
        for first in range(0, len(ranges) if committed else 0, INTERVALS_AT_ONCE)
    ]


def counted(record: ShuffleRecord, epoch: int, answers: Answers) -> RowCount:
    """Everything is there if the most that holders have adds up to the receipts."""
    numbers = {each.interval: each.number for each in record.table}
    found: dict[int, dict[str, tuple[int, int]]] = {each.number: {} for each in record.table}
    for host, request, reply in answers:
        assert isinstance(request, wire.CountRows)
        assert isinstance(reply, wire.Counts)
        for interval, rows, size in zip(request.intervals, reply.rows, reply.sizes, strict=True):
            found[numbers[interval]][host] = (rows, size)
    most = {number: max(counts.values(), default=(0, 0)) for number, counts in found.items()}
    best = {number: max(counts, key=lambda host: counts[host]) for number, counts in found.items() if counts}
    lacking: list[tuple[str, Interval, Sequence[str]]] = []
    for each in record.table:
        counts, full = found[each.number], most[each.number][0]
        sources = [host for host, (rows, _) in counts.items() if rows == full]
        short = [host for host, (rows, _) in counts.items() if rows < full]
        lacking += [(host, each.interval, sources) for host in short]
    rows_and_sizes = ((each, *most[each.number]) for each in record.table)
    table = tuple(msgspec.structs.replace(each, rows=rows, size=size) for each, rows, size in rows_and_sizes)
    return RowCount(table, record.rows - sum(rows for rows, _ in most.values()), best, _fetches(record, epoch, lacking))


def sample(record: ShuffleRecord, running: frozenset[str]) -> Asks:
    """Every range is sampled by one holder, rather one that runs."""

    def one(each: Range) -> str:
        able = [host for host in each.holders if host in running] or list(each.holders)
        return able[each.number % len(able)]

    committed, ranges = record.committed, max(1, len(record.table))
    finer = -(-record.cut // ranges)  # a range is to be cut into so many
    each = max(1, SAMPLES_PER_RANGE * finer, min(KEYS_PER_RANGE, KEYS_MAX // ranges))
    parts = _parts(record, {each.number: one(each) for each in record.table}, SAMPLED_AT_ONCE)
    return [(host, wire.TellSamples(record.id, part, committed, each * len(part))) for host, part in parts]


def account(record: ShuffleRecord, chosen: dict[int, str]) -> Asks:
    """How many rows of each committed attempt these holders have of these ranges."""
    committed = record.committed
    return [(host, wire.TellSamples(record.id, part, committed, 0)) for host, part in _parts(record, chosen, INTERVALS_AT_ONCE)]


def _parts(record: ShuffleRecord, chosen: dict[int, str], most: int) -> list[tuple[str, list[Interval]]]:
    """The intervals of these ranges, at most so many at once, by host."""
    by_host: dict[str, list[Interval]] = {}
    for number, host in chosen.items():
        by_host.setdefault(host, []).append(record.table[number].interval)
    return [
        (host, found[first : first + most]) for host, found in sorted(by_host.items()) for first in range(0, len(found), most)
    ]


def samples_of(answers: Answers) -> list[RunSample]:
    """All samples of the answers."""
    samples: list[RunSample] = []
    for _, _, reply in answers:
        assert isinstance(reply, wire.Samples)
        samples += reply.samples
    return samples


def fault(record: ShuffleRecord, samples: Iterable[RunSample], stored: set[tuple[int, str]]) -> RoqError | None:
    """Which attempt can't be committed, as its rows in storage are not those of its receipt; None if all are right."""
    found: Counter[tuple[int, str]] = Counter()
    for each in samples:
        found[each.partition, each.attempt] += each.rows
    for receipt in record.receipts:
        id = (receipt.partition, receipt.attempt)
        if found[id] != receipt.rows:
            what = f"attempt {receipt.attempt!r} of partition {receipt.partition}"
            if found[id] or id in stored:
                return DataLost(f"{what} has {found[id]} rows in storage, its receipt says {receipt.rows}")
            return AttemptNotFound(f"{what} was never stored")
    return None


def keep(record: ShuffleRecord, epoch: int, hosts: Iterable[str]) -> Asks:
    """These hosts forget what the table does not give them."""
    committed, held = record.committed, held_by(record.table)
    return [
        (host, wire.KeepIntervals(epoch, record.id, kept_intervals(held.get(host, ()), host), committed, True, record.epoch))
        for host in sorted(hosts)
    ]


def forget(record: ShuffleRecord, epoch: int, hosts: Iterable[str]) -> Asks:
    """These hosts forget all of it."""
    return [(host, wire.ForgetShuffle(epoch, record.id)) for host in sorted(hosts)]
