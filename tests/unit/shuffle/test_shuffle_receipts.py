"""Receipts and winners that are too many for one message: who lacks some says so, and is told them."""

from __future__ import annotations

import msgspec
import pytest

from gcm.shuffle_driver import Inquirer
from gcm.shuffle_leader import COMMITS_MAX, Receipts
from roq.errors import FrameError, NotReady, WinnersUnknown
from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.record import ShuffleRecord
from roq.shuffle.sampling import reduced
from roq.wire import shuffle as wire
from roq.wire.gcm import CommitShuffle, NameReceipts
from roq.wire.shuffle import BEGIN, Interval, Receipt, RunSample, Spec

EVERYTHING = Interval(None, None)
RECORD = ShuffleRecord("s", "id", Spec(("k",), b"schema"), 0.0, "t")
WINNERS = {number: f"a{number}" for number in range(3)}


def receipt(partition: int) -> Receipt:
    return Receipt(partition, "a", 1, 10, 1)


def test_a_commit_has_all_its_parts_or_is_told_again() -> None:
    receipts, commit = Receipts(), CommitShuffle("s", "t", [receipt(9)], 2)
    receipts.add(NameReceipts("s", "t", 1, [receipt(1)]))
    with pytest.raises(NotReady):
        receipts.of(commit)
    receipts.add(NameReceipts("s", "t", 0, [receipt(0)]))
    receipts.add(NameReceipts("s", "t", 0, [receipt(0)]))
    assert receipts.of(commit) == (receipt(0), receipt(1), receipt(9))
    with pytest.raises(NotReady):
        receipts.of(CommitShuffle("s", "another", [], 2))
    for number in range(COMMITS_MAX):
        receipts.add(NameReceipts("s", f"later {number}", 0, []))
    with pytest.raises(NotReady):
        receipts.of(commit)
    assert receipts.of(CommitShuffle("s", "small", [receipt(3)])) == (receipt(3),)
    for number in (-1, 1_000_000):
        with pytest.raises(FrameError):
            receipts.add(NameReceipts("s", "t", number, []))


class OneFollower:
    """Knows the winners when it was told them; counts one partition a page."""

    def __init__(self) -> None:
        self.known: dict[str, dict[int, str]] = {}
        self.asked: list[msgspec.Struct] = []

    async def __call__(
        self, host: str, request: msgspec.Struct, expect: type[msgspec.Struct], seconds: float, /
    ) -> msgspec.Struct:
        self.asked.append(request)
        match request:
            case wire.NameCommitted():
                self.known[request.digest] = request.committed
                return wire.FollowerDone()
            case wire.CountRows(digest=digest, begin=begin) if digest in self.known:
                at = begin[0] + 1 if begin == BEGIN else begin[0]
                return wire.Counts([1], [10], (at + 1, "", 0) if at < 2 else None)
            case wire.FetchInterval(digest=digest) if digest in self.known:
                return wire.Fetched(5, complete=len(self.asked) > 4)
        raise WinnersUnknown


async def test_winners_are_told_once_and_pages_add_up() -> None:
    follower = OneFollower()
    inquirer = Inquirer(follower, RECORD)  # type: ignore[arg-type]  # one answer for all kinds
    counting = wire.CountRows("id", [EVERYTHING], WINNERS)
    for _ in range(2):
        assert await inquirer.answer("h", counting, wire.Counts, 1.0) == wire.Counts([3], [30])
    told = [type(request).__name__ for request in follower.asked]
    assert told == ["CountRows", "NameCommitted", *["CountRows"] * 6]
    assert follower.known == {CommittedAttempts(WINNERS).digest: WINNERS}
    assert not any(request.committed for request in follower.asked if isinstance(request, wire.CountRows))
    follower.known.clear()  # it was started again, and its disk was full
    follower.asked.clear()
    fetching = wire.FetchInterval(1, "id", EVERYTHING, WINNERS, ["x"], 1)
    assert await inquirer.answer("h", fetching, wire.Fetched, 1.0) == wire.Fetched(15)
    assert [type(request).__name__ for request in follower.asked[:3]] == ["FetchInterval", "NameCommitted", "FetchInterval"]


def test_few_samples_stand_for_many() -> None:
    """Of 1000 runs of 10 rows each, all over the keys."""
    runs = [
        RunSample(
            run,
            f"a{run}",
            0,
            10,
            1000,
            tuple(bytes([at, run % 250, run // 250]) for at in range(10)),
            (*range(10),),
            (100,) * 10,
        )
        for run in range(1000)
    ]
    winners = {run: f"a{run}" for run in range(1000)}
    few = reduced(runs, 100, 1 << 20, winners)
    assert len(few) == 100
    assert sum(sample.size for sample in few) == 1_000_000
    assert all(sample.attempt == winners[sample.partition] for sample in few)
    for at in range(1, 10):
        before = sum(sample.size for sample in few if sample.keys[0] < bytes([at]))
        assert abs(before - 100_000 * at) <= 10_000, "half a share, and a row"
    assert len(reduced(runs, 100, 1000, winners)) < 10, "as many as fit"
    assert reduced([], 100, 1000, {}) == []
