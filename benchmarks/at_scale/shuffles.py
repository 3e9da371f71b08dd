"""A shuffle of very many attempts on very many followers: the leader's own machine (roq/shuffle/plan.py), driven to the end
with followers that answer at once and hold what they should. Processor time; what followers do with rows is not there.
"""

from __future__ import annotations

import random
import time
from collections import deque

import msgspec

from gcm.shuffle_store import CHUNK_BYTES
from roq.shuffle import events
from roq.shuffle.events import Event, Instruction
from roq.shuffle.plan import ShufflePlan
from roq.shuffle.record import FollowerHosts, ShuffleRecord, Stage, new_table
from roq.wire import shuffle as wire
from roq.wire.shuffle import Receipt, RunSample, ShuffleState, Spec

ROWS, SIZE, KEYS = 1_000, 1_000_000, 16  # of one attempt; keys in its sample
KEY_BYTES, KEY_SPACE = 8, (1 << 64) - 1
STEPS_MAX = 1_000_000  # of one shuffle: a machine that never ends is a defect


class ShuffleCost(msgspec.Struct, frozen=True):
    """Seconds of processor time: for all reports of attempts, with the first table; from the commit until it is sealed and
    what is over is forgotten. record_bytes: of all that is in ZooKeeper then. largest_bytes: of its largest node."""

    followers: int
    attempts: int
    ranges: int
    report_seconds: float
    commit_seconds: float
    requests: int
    record_bytes: int
    largest_bytes: int


class SimulatedFollowers:
    """Drives a plan; every follower has its share of the rows."""

    def __init__(self, followers: int, attempts: int) -> None:
        self.plan = ShufflePlan(ShuffleRecord("s", f"{followers}-{attempts}", Spec(("k",), b"schema"), 0.0, "t"), 1)
        self.requests, self._now, self._rows, self._size = 0, 0.0, attempts * ROWS, attempts * SIZE
        self._shares: tuple[int, dict[wire.Interval, tuple[int, int]]] = (0, {})
        hosts = frozenset(f"host-{number}" for number in range(followers))
        self.feed(FollowerHosts(hosts, hosts))

    def feed(self, event: Event) -> None:
        """Let this happen, and all that follows from it."""
        pending = deque[Event]([event])
        for _ in range(STEPS_MAX):
            if not pending:
                return
            for instruction in self.plan.handle(pending.popleft(), self._now):
                pending += self._performed(instruction)
        raise AssertionError("the shuffle comes to no end")

    def _performed(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case events.WriteRecord():
                return [events.RecordWritten()]
            case events.ComputeTable(id, record, samples, count, hosts):
                return [events.TableComputed(id, new_table(record, samples, count, hosts))]
            case events.Ask(id, _, request):
                self.requests += 1
                return [events.Answered(id, self._answer(request))]
            case events.Wake(seconds):
                self._now += seconds
                return [events.TimePassed()]
        raise AssertionError(f"not expected of a shuffle that goes well: {instruction}")

    def _answer(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.CountRows(_, intervals):
                shares = [self._share(interval) for interval in intervals]
                return wire.Counts([rows for rows, _ in shares], [size for _, size in shares])
            case wire.TellSamples(_, intervals, committed, keys):
                each = max(1, keys // len(intervals))
                return wire.Samples([self._stored(interval, committed[0], each) for interval in intervals])
            case wire.FetchInterval():
                return wire.Fetched(0)
            case wire.KeepIntervals() | wire.TableChanged():
                return wire.FollowerDone()
        raise AssertionError(f"not expected of a shuffle that goes well: {request}")

    def _stored(self, interval: wire.Interval, attempt: str, count: int) -> RunSample:
        """What stands for its rows: evenly spread keys."""
        rows, size = self._share(interval)
        low = _number(interval.lower.key) if interval.lower is not None else 0
        high = _number(interval.upper.key) if interval.upper is not None else KEY_SPACE
        count = max(1, min(count, high - low, rows))
        keys = tuple((low + (high - low) * number // count).to_bytes(KEY_BYTES, "big") for number in range(count))
        places = tuple(rows * number // count for number in range(count))
        return RunSample(0, attempt, 0, rows, size, keys, places, (size // count,) * count)

    def _share(self, interval: wire.Interval) -> tuple[int, int]:
        """Rows and bytes of it: all ranges have as many."""
        record = self.plan.record
        if self._shares[0] != record.epoch:
            count = len(record.table)
            rows, size = self._rows, self._size
            share = {
                each.interval: (rows * (number + 1) // count - rows * number // count, size // count)
                for number, each in enumerate(record.table)
            }
            self._shares = record.epoch, share
        return self._shares[1][interval]


def _number(key: bytes) -> int:
    return int.from_bytes(key.ljust(KEY_BYTES, b"\0"), "big")


def shuffle_cost(followers: int, attempts: int) -> ShuffleCost:
    """One shuffle, from its first report on."""
    chance, one = random.Random(1), SimulatedFollowers(followers, attempts)
    receipts = tuple(Receipt(number, f"app-20261122-{number:014x}", ROWS, SIZE, 1) for number in range(attempts))
    reports = [events.AttemptReported((_sample(receipt, chance),), (receipt,), wanted=True) for receipt in receipts]
    begun = time.process_time()
    for report in reports:
        one.feed(report)
    reported = time.process_time()
    one.feed(events.Commit(receipts))
    sealed = time.process_time()
    record = one.plan.record
    assert (record.state, record.stage) == (ShuffleState.SEALED, Stage.NONE), (record.state, record.stage)
    parts = [len(msgspec.msgpack.encode(part)) for part in (record.table, record.former, record.receipts)]
    return ShuffleCost(
        followers=followers,
        attempts=attempts,
        ranges=len(record.table),
        report_seconds=reported - begun,
        commit_seconds=sealed - reported,
        requests=one.requests,
        record_bytes=sum(parts),
        largest_bytes=min(CHUNK_BYTES, max(parts)),
    )


def _sample(receipt: Receipt, chance: random.Random) -> RunSample:
    keys = tuple(sorted(chance.randbytes(KEY_BYTES) for _ in range(KEYS)))
    rows = tuple(range(0, ROWS, ROWS // KEYS))[:KEYS]
    return RunSample(receipt.partition, receipt.attempt, 0, ROWS, SIZE, keys, rows, (SIZE // KEYS,) * KEYS)
