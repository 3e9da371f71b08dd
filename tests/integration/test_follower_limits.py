"""What followers refuse, count and bound, over real sockets: samples, keys, slow messages, reads; and orders that meet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from zlib import crc32

import msgspec
import pytest

from roq.errors import AttemptLost, CallError, Overloaded, PayloadTooLarge, RoqError
from roq.runtime.read_budget import READ_BYTES_MIN
from roq.shuffle import blocks
from roq.shuffle.cluster import FollowerLink
from roq.shuffle.node.attempt import Attempt, sample_bytes
from roq.shuffle.node.buffer import AttemptCollector
from roq.shuffle.node.server import Follower
from roq.wire import shuffle as wire
from roq.wire import zmtp
from roq.wire.shuffle import (
    BLOCKS_BYTES_MAX,
    KEY_BYTES_MAX,
    SAMPLE_BYTES_MAX,
    Block,
    Interval,
    RunSample,
)
from tests.harness.shuffle_rows import SPEC, batch_of, piece, run_of, sample_of
from tests.integration.follower_rig import SECONDS, SHUFFLE, Followers, InThread, batches, made_in, until, write_all

Make = Callable[..., Followers]
MIB = 1 << 20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from made_in(tmp_path)


def collector_of(follower: Follower) -> AttemptCollector:
    return follower.buffer._collectors[SHUFFLE]


def attempt_of(follower: Follower, attempt: str = "a", partition: int = 0) -> Attempt:
    return collector_of(follower).plan.attempts[partition, attempt]


class DiskHeld:
    """A follower's disk takes nothing until `let_go`, or for SECONDS."""

    def __init__(self, follower: Follower) -> None:
        self._gate = threading.Event()
        follower.storage._committer._thread.submit(self._gate.wait, SECONDS)

    def let_go(self) -> None:
        self._gate.set()


# --- what comes -------------------------------------------------------------------------------------------------------------


def test_a_sample_that_is_too_large_is_refused_at_once(make: Make) -> None:
    """It could not be told to the leader."""
    followers = make(count=1)
    followers.open_attempt("a", 0)
    blocks = run_of(range(100), 1)
    followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 0, 0, blocks))
    key = bytes(KEY_BYTES_MAX - 1)
    count = SAMPLE_BYTES_MAX // len(key) + 1
    good = sample_of(0, "a", 0, blocks)
    for keys, at in (((key,) * count, range(count)), (good.keys, range(99)), (good.keys * 2, range(200))):
        sample = RunSample(0, "a", 0, 100, good.size, keys, tuple(at), (1,) * len(keys))
        with pytest.raises(CallError, match="sample"):
            followers.ask("a", wire.EndRun(SHUFFLE, 1, sample))
    followers.ask("a", wire.EndRun(SHUFFLE, 1, good))


def test_a_report_of_many_large_samples_is_several(make: Make) -> None:
    followers = make(count=1)
    leader, told = followers.leader, list[int]()
    leader.silent, report = True, leader.report

    async def noted(runs: object) -> object:
        told.append(len(msgspec.msgpack.encode(runs)))
        return await report(runs)  # type: ignore[arg-type]

    followers.open_attempt("a", 0)
    collector = collector_of(followers.follower("a"))
    collector._context = collector._context._replace(report=noted)  # type: ignore[arg-type]
    blocks = run_of(range(8), 8)
    for run in range(12):
        sample = RunSample(0, "a", run, 8, len(blocks[0].data), (bytes(60_000),) * 8, tuple(range(8)), (1,) * 8)
        followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 2 * run, run, blocks))
        followers.ask("a", wire.EndRun(SHUFFLE, 2 * run + 1, sample))
    leader.silent = False
    until(lambda: len(leader.samples) == 12)
    assert max(told) < 4 * MIB


def test_an_attempt_that_can_not_be_split_fails_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    followers = make(count=1)
    followers.leader.replicas = 1
    followers.write("a", 0, 5000)
    followers.open_attempt("a", 1, "bad")
    batch = batch_of([0, 1 << 40])
    data = batch.slice(0, 1).serialize().to_pybytes()  # a row less than it says
    keys = run_of([0, 1 << 40], 2)[0]
    followers.ask(
        "a", wire.SendBlocks(SHUFFLE, 1, "bad", 0, 0, [Block(0, 2, keys.first_key, keys.last_key, crc32(data), data)])
    )
    follower = followers.follower("a")
    innocent = followers.writer("a", 8)
    for batch in batches(8, 5000, 10):
        innocent.write(batch)

    until(lambda: attempt_of(follower, "bad", 1).failed)
    with pytest.raises(AttemptLost):
        followers.ask("a", wire.SendBlocks(SHUFFLE, 1, "bad", 1, 0, []))
    for number, (error, seen) in enumerate(((MemoryError("none"), AttemptLost), (PayloadTooLarge("a key"), PayloadTooLarge))):

        def broken(*_: object, error: Exception = error) -> None:
            raise error

        followers.open_attempt("a", 2 + number, "poor")
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "divide", broken)
            followers.ask("a", wire.SendBlocks(SHUFFLE, 2 + number, "poor", 0, 0, run_of([0, 1 << 40], 2)))
            until(lambda at=number: attempt_of(follower, "poor", 2 + at).failed)  # type: ignore[misc]
        with pytest.raises(seen):
            followers.ask("a", wire.SendBlocks(SHUFFLE, 2 + number, "poor", 1, 0, []))
    innocent.finish()
    followers.judge({0: "a", 8: "a"}, {0: 5000, 8: 5000})


def test_a_shuffle_whose_work_ended_says_so(make: Make) -> None:
    """Instead of letting its attempts wait."""
    followers = make(count=1)
    writer = followers.writer("a", 0)
    followers.leader.refusal = cast(RoqError, ValueError("a defect"))
    for batch in batches(0, 1000, 10):
        writer.write(batch)
    with pytest.raises(AttemptLost, match="ValueError"):
        writer.finish()
    followers.leader.refusal = None
    followers.write("a", 0, 1000, "again")
    followers.judge({0: "again"}, {0: 1000})


# --- memory -----------------------------------------------------------------------------------------------------------------


def test_keys_and_samples_are_counted(make: Make) -> None:
    followers = make(ranges=0)
    follower = followers.follower("a")
    followers.open_attempt("a", 0)
    key = bytes(50_000)
    blocks = [msgspec.structs.replace(block, first_key=key, last_key=key) for block in run_of(range(40), 1)]
    sample = RunSample(0, "a", 0, 40, 40, (key,) * 10, tuple(range(10)), (4,) * 10)
    followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 0, 0, blocks))
    followers.ask("a", wire.EndRun(SHUFFLE, 1, sample))
    data = sum(len(block.data) for block in blocks)
    assert follower.budget.held == data + 90 * len(key)
    followers.ask("a", wire.AbandonAttempt(SHUFFLE, 0, "a"))
    assert follower.budget.held == 0


def test_keys_stay_counted_when_rows_go_to_a_file_and_samples_until_there_is_a_table(make: Make) -> None:
    followers = make(ranges=0)
    follower, leader = followers.follower("a"), followers.leader
    writer = followers.writer("a", 0)
    for batch in batches(0, 40_000, 600):
        writer.write(batch)
    until(lambda: follower.counters["bytes_spilled"] > MIB and not follower.budget.spill)
    attempt = attempt_of(follower)
    counted = sum(held.memory for held in attempt.holding()) + sum(map(sample_bytes, attempt.samples))
    assert follower.budget.held == counted
    assert any(held.data is None and held.counted == len(held.first_key) + len(held.last_key) for held in attempt.holding())
    assert attempt.samples
    leader.ranges = 4
    leader.cut(4)
    until(lambda: not attempt.samples)
    writer.finish()
    until(lambda: follower.budget.used == 0)
    followers.judge({0: "a"}, {0: 40_000})


def test_what_is_sent_is_counted(make: Make) -> None:
    followers = make()
    follower = followers.follower("a")
    held = [DiskHeld(followers.follower(host)) for host in "bc"]
    writing = InThread(lambda: followers.write("a", 0, 20_000))
    until(lambda: collector_of(follower)._sending if SHUFFLE in follower.buffer._collectors else 0)
    until(lambda: follower.budget.borrowed > 100_000)
    for one in held:
        one.let_go()
    writing.join()
    until(lambda: follower.budget.borrowed == 0)


def test_messages_that_come_slowly_take_turns(make: Make) -> None:
    """Each has most of a message here, none gets done; others that are small are answered, and those that are large too."""
    followers = make(count=1)
    follower = followers.follower("a")
    server = follower._server
    assert server is not None
    host, _, port = followers.leader.hosts["a"].rpartition("/")[2].rpartition(":")
    message = zmtp.frame(bytes(2 * MIB))[:-1]
    most = follower.budget.coming_max + 8 * MIB
    peers = [socket.create_connection((host, int(port))) for _ in range(60)]
    sent = [0] * len(peers)
    for peer in peers:
        peer.sendall(zmtp.hello(b"DEALER"))
        peer.setblocking(False)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        for at, peer in enumerate(peers):
            try:
                sent[at] += peer.send(message[sent[at] :][:MIB]) if sent[at] < len(message) else 0
            except BlockingIOError:
                continue
        assert server.unfinished() <= most
    until(lambda: server.unfinished() > follower.budget.coming_max / 2)
    began = time.monotonic()
    followers.ask("a", wire.DescribeFollower())
    assert time.monotonic() - began < 10, "a small request does not wait: each of their turns lasts two seconds"
    for peer in peers[3:]:
        peer.close()
    blocks = [msgspec.structs.replace(block, data=bytes(MIB)) for block in run_of([1], 1)]
    with pytest.raises(AttemptLost):
        followers.ask("a", wire.SendBlocks("unknown", 0, "a", 0, 0, blocks))
    for peer in peers[:3]:
        peer.close()
    until(lambda: server.unfinished() < READ_BYTES_MIN)


def test_many_large_messages_at_once_are_all_answered(make: Make) -> None:
    followers = make(count=1)
    follower = followers.follower("a")
    server = follower._server
    assert server is not None
    blocks = [msgspec.structs.replace(block, data=bytes(2 * MIB)) for block in run_of([1], 1)]
    request = wire.SendBlocks("unknown", 0, "a", 0, 0, blocks)

    def ask() -> None:
        link = FollowerLink("127.0.0.1:1")
        try:
            for _ in range(3):
                with pytest.raises(AttemptLost):
                    link.ask(followers.leader.hosts["a"], request, wire.FollowerDone, 30)
        finally:
            link.close()

    asking = [InThread(ask) for _ in range(40)]
    most = 0
    while any(one.running for one in asking):
        most = max(most, server.unfinished())
        time.sleep(0.001)
    for one in asking:
        one.join()
    assert 0 < most <= follower.budget.coming_max + 3 * MIB + 40 * READ_BYTES_MIN


def test_a_reader_gets_no_more_at_once_than_a_message(make: Make) -> None:
    followers = make(count=1)
    run = run_of(range(12_000), 500, pad=500)
    for at in range(0, len(run), 4):
        followers.ask("a", wire.StorePieces(SHUFFLE, "visits", SPEC, [piece(0, "a", 0, run[at : at + 4])]))
    assert sum(len(block.data) for block in run) > 2 * BLOCKS_BYTES_MAX
    for size in (10**12, BLOCKS_BYTES_MAX, 0, -(10**12)):
        blocks = followers.ask("a", wire.ReadBlocks(SHUFFLE, 0, "a", 0, 0, 10**9, size))
        assert isinstance(blocks, wire.Blocks)
        assert 0 < sum(len(block.data) for block in blocks.blocks) <= BLOCKS_BYTES_MAX
        assert size > 0 or len(blocks.blocks) == 1


def test_a_fetch_waits_while_its_source_has_no_room_to_read(make: Make) -> None:
    followers = make(count=2, ranges=1)
    for one in write_all(followers, 2, 10_000, "ab"):
        one.join()
    leader, winners = followers.leader, dict.fromkeys(range(2), "a")
    source = followers.follower("a")
    followers.start("c")
    source.budget.reading += source.budget.size
    for request in (wire.ReadBlocks(SHUFFLE, 0, "a", 0, 0, 99), wire.CutBlocks(SHUFFLE, 0, "a", 0, 0, 99)):
        with pytest.raises(Overloaded):
            followers.ask("a", request)
    order = wire.FetchInterval(1, SHUFFLE, Interval(None, None), winners, [leader.hosts["a"]])
    refused = source.counters["refused_reads"]
    fetching = InThread(lambda: followers.ask("c", order))
    until(lambda: source.counters["refused_reads"] > refused + 30)  # more often than sources are tried
    assert fetching.running
    source.budget.reading -= source.budget.size
    fetching.join()
    assert followers.count("c", Interval(None, None), winners)[0] == 20_000
    assert source.budget.reading == 0


# --- orders that meet -------------------------------------------------------------------------------------------------------


def test_a_fetch_that_meets_another_one_has_its_own_sources(make: Make) -> None:
    followers = make(count=3, ranges=1)
    followers.write("b", 0, 10_000)
    leader, winners = followers.leader, {0: "a"}
    followers.start("d")
    source = next(host for host in leader.table[0].holders)
    everything = Interval(None, None)
    dead = InThread(lambda: followers.ask("d", wire.FetchInterval(1, SHUFFLE, everything, winners, ["tcp://127.0.0.1:1"]), 60))
    until(lambda: followers.follower("d").fetcher._under_way)
    followers.ask("d", wire.FetchInterval(1, SHUFFLE, everything, winners, [leader.hosts[source]]), 60)
    assert followers.count("d", everything, winners)[0] == 10_000
    with pytest.raises(RoqError):
        dead.join()


def test_nothing_is_sent_by_the_old_table_while_something_is_still_on_its_way(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roq.shuffle.node.fill_plan.PAUSE_SECONDS_MAX", 0.2)
    followers = make()
    followers.write("a", 0, 1000)
    collector = collector_of(followers.follower("a"))
    held = DiskHeld(followers.follower("b"))
    writer = followers.writer("a", 1)
    for batch in batches(1, 10_000, 100):
        writer.write(batch)
    writing = InThread(writer.finish)
    until(lambda: any(worker for worker in followers.follower("a").buffer._outboxes["b"]._workers))
    until(lambda: collector._sending)
    changing = InThread(lambda: followers.ask("a", wire.TableChanged(1, SHUFFLE, 99)))
    until(lambda: collector.plan.paused(time.monotonic()))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert collector.plan.paused(time.monotonic()), "as long as it is not answered"
        assert changing.running
    held.let_go()
    changing.join(5)
    writing.join()
    followers.judge({0: "a", 1: "a"}, {0: 1000, 1: 10_000})
