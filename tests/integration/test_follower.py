"""Followers and their clients over real sockets: attempts, memory, tables that change, holders and buffers lost, fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roq.errors import AttemptConflict, AttemptLost, CallError, Overloaded, StaleEpoch, StorageFull
from roq.shuffle import cluster
from roq.shuffle.node.committer import Committer
from roq.shuffle.ranges import even_borders, table_of
from roq.shuffle.sampling import Distribution
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Receipt
from tests.harness.shuffle_rows import run_of, sample_of
from tests.integration.follower_rig import SHUFFLE, Followers, InThread, batches, made_in, until, write_all

Make = Callable[..., Followers]
EVERYTHING = Interval(None, None)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from made_in(tmp_path)


# --- writing ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_what_is_written_is_read_in_order_from_any_holder(make: Make) -> None:
    followers = make()
    for one in write_all(followers, 5, 20_000):
        one.join()
    followers.judge(dict.fromkeys(range(5), "a"), dict.fromkeys(range(5), 20_000))
    for host in "abc":
        view = followers.ask(host, wire.DescribeFollower())
        assert isinstance(view, wire.FollowerView)
        assert (view.memory_bytes, view.attempts, view.paused) == (0, 0, False), "nothing is left of the attempts"


def test_attempts_that_lose_are_not_read(make: Make) -> None:
    followers = make()
    followers.write("a", 0, 5000, "lost")
    followers.write("b", 0, 5000, "a")
    with pytest.raises(AttemptConflict):
        followers.open_attempt("a", 0, "lost", "another writer")
    unfinished = followers.writer("a", 0, "never finished")
    unfinished.abandon()
    followers.judge({0: "a"}, {0: 5000})


def test_an_attempt_without_rows(make: Make) -> None:
    followers = make()
    assert followers.write("a", 0, 0) == Receipt(0, "a", 0, 0, 0)
    assert (0, "a") in followers.leader.stored


def test_more_than_memory_without_a_table(make: Make) -> None:
    """The leader says nothing for long: all goes to temporary files, memory stays within its budget."""
    budget = 32 << 20
    followers = make(memory=budget)
    followers.leader.silent = True
    writers = write_all(followers, 3, 60_000, "a", pad=600)
    follower = followers.follower("a")
    until(lambda: follower.counters["bytes_spilled"] > 2 * budget, 60)
    most = 0

    def look() -> bool:
        nonlocal most
        most = max(most, follower.budget.used)
        return not any(one.running for one in writers)

    followers.leader.silent = False
    until(look, 60)
    for one in writers:
        one.join()
    assert most <= budget
    followers.judge(dict.fromkeys(range(3), "a"), dict.fromkeys(range(3), 60_000))


def test_what_is_cut_again_fits_into_memory_too(make: Make) -> None:
    """The table comes late, and to a disk that takes nothing more: what lies in files is cut only as there is room for it."""
    budget = 32 << 20
    followers = make(memory=budget)
    followers.leader.silent = True
    follower = followers.follower("a")
    writers = write_all(followers, 3, 60_000, "a", pad=600)
    until(lambda: follower.counters["bytes_spilled"] > 2 * budget, 60)
    follower.buffer._memory._free_bytes_min = 1 << 60
    followers.leader.silent = False
    most = 0

    def look() -> bool:
        nonlocal most
        most = max(most, follower.budget.used)
        return follower.counters["blocks_cut"] > 0 and not any(one.running for one in writers)

    until(look, 60)
    for one in writers:
        one.join()
    assert follower.counters["spills_failed"]
    assert most <= budget
    followers.judge(dict.fromkeys(range(3), "a"), dict.fromkeys(range(3), 60_000))


def test_a_paused_buffer_says_so_and_goes_on(make: Make) -> None:
    followers = make()
    budget = followers.follower("a").budget
    budget.held += budget.size
    with pytest.raises(Overloaded):
        followers.open_attempt("a", 0)
    budget.held -= budget.size
    sink = followers.open_attempt("a", 0)
    budget.held += budget.size
    blocks = run_of(range(1000), 100)
    sending = InThread(lambda: sink.send(blocks))
    until(lambda: followers.follower("a").counters["refused_blocks"] > 3)
    assert sending.running, "it waits"
    budget.held -= budget.size
    sending.join()
    sink.end(sample_of(0, "a", 0, blocks))
    sink.finish(Receipt(0, "a", 1000, sum(len(block.data) for block in blocks), 1))
    followers.judge({0: "a"}, {0: 1000})


@pytest.mark.quick
def test_messages_that_come_twice_or_never(make: Make) -> None:
    followers = make()
    followers.open_attempt("a", 0)
    blocks = run_of(range(100), 10)
    for _ in range(2):
        followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 0, 0, blocks[:5]))
    with pytest.raises(AttemptLost, match="message 1"):
        followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 2, 0, blocks[5:]))
    with pytest.raises(CallError, match="row 50 is the next"):
        followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 1, 0, blocks[6:]))
    followers.ask("a", wire.SendBlocks(SHUFFLE, 0, "a", 1, 0, blocks[5:]))
    for _ in range(2):
        followers.ask("a", wire.EndRun(SHUFFLE, 2, sample_of(0, "a", 0, blocks)))
    with pytest.raises(CallError, match="does not fit"):
        followers.ask("a", wire.FinishAttempt(SHUFFLE, Receipt(0, "a", 99, 0, 1), 5))
    for _ in range(2):
        followers.ask("a", wire.FinishAttempt(SHUFFLE, Receipt(0, "a", 100, 0, 1), 5))
    followers.judge({0: "a"}, {0: 100})


def test_a_buffer_that_was_started_again_has_lost_its_attempts(make: Make) -> None:
    followers = make()
    writer = followers.writer("a", 0)
    for batch in batches(0, 30_000, 400):
        writer.write(batch)
    followers.stop("a")
    followers.start("a")
    with pytest.raises(AttemptLost):
        writer.finish()
    followers.write("a", 0, 30_000, "again")
    followers.judge({0: "again"}, {0: 30_000})


def test_a_buffer_that_is_gone_has_lost_its_attempts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOST_SECONDS", 0.5)
    followers = make()
    writer = followers.writer("a", 0)
    followers.stop("a")
    with pytest.raises(AttemptLost, match="is lost"):
        writer.finish()


# --- the table changes ----------------------------------------------------------------------------------------------------


def test_a_holder_that_dies_is_replaced_while_data_is_written(make: Make) -> None:
    followers = make(count=4)
    first = write_all(followers, 2, 10_000, "ab")
    for one in first:
        one.join()
    followers.stop("d")
    writers = write_all(followers, 6, 30_000, "abc")[2:]
    until(lambda: followers.follower("a").counters["sends_failed"] > 2)
    assert any(one.running for one in writers), "its share can't be stored"
    leader = followers.leader
    del leader.hosts["d"]
    old = leader.table
    leader.place(leader.table, "abc")
    for one in writers:
        one.join()
    for before, after in zip(old, leader.table, strict=True):
        for host in set(after.holders) - set(before.holders):
            sources = [leader.hosts[other] for other in before.holders if other != "d"]
            followers.ask(host, wire.FetchInterval(1, SHUFFLE, after.interval, {}, sources))
    followers.judge(dict.fromkeys(range(6), "a"), {at: 10_000 if at < 2 else 30_000 for at in range(6)})


def test_borders_that_change_while_data_is_written(make: Make) -> None:
    """Pieces are cut again; what was stored by the older table is not stored twice."""
    followers = make()
    leader = followers.leader
    writers = [followers.writer("a", at) for at in range(3)]
    for at, writer in enumerate(writers):
        for batch in batches(at, 40_000, 200):
            writer.write(batch)
    until(lambda: len(leader.samples) >= 3)
    leader.cut(4)
    until(lambda: followers.follower("b").counters["blocks"] > 10)
    for ranges in (9, 5):
        samples = Distribution.of(leader.samples.values())
        followers.ask("a", wire.TableChanged(1, SHUFFLE, leader.epoch + 1))
        sent = sum(followers.follower(host).counters["blocks"] for host in "abc")
        old = leader.table
        assert sum(followers.follower(host).counters["blocks"] for host in "abc") == sent, "nothing is sent meanwhile"
        leader.place(table_of(even_borders(samples, ranges)))
        for one in leader.table:
            for host in one.holders:
                for before in old:
                    sources = [leader.hosts[other] for other in before.holders if other != host]
                    followers.ask(host, wire.FetchInterval(1, SHUFFLE, one.interval, {}, sources))
    finished = [InThread(writer.finish) for writer in writers]
    for done in finished:
        done.join()
    followers.judge(dict.fromkeys(range(3), "a"), dict.fromkeys(range(3), 40_000))


def test_a_leader_that_does_not_get_to_its_new_table_does_not_stop_a_buffer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roq.shuffle.node.fill_plan.PAUSE_SECONDS_MAX", 0.5)
    followers = make()
    followers.write("a", 0, 1000)
    with followers.writer("a", 1) as writer:
        followers.ask("a", wire.TableChanged(1, SHUFFLE, 2))
        writer.finish()
    followers.judge({0: "a"}, {0: 1000})


def test_a_full_holder_is_told_to_the_writer_and_recovered_from(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ROOM_SECONDS", 0.5)
    followers = make()
    committers: list[Committer] = [followers.follower(host).storage._committer for host in "abc"]
    for one in committers:
        one._free_bytes_min = 1 << 60
    writer = followers.writer("a", 0)
    for batch in batches(0, 10_000, 100):
        writer.write(batch)
    with pytest.raises(StorageFull):
        writer.finish()
    for one in committers:
        one._free_bytes_min = 0
    assert writer.finish().rows == 10_000
    followers.judge({0: "a"}, {0: 10_000})


def test_a_shuffle_that_is_removed_fails_its_attempts(make: Make) -> None:
    followers = make()
    followers.write("a", 0, 1000)
    writer = followers.writer("a", 1)
    for host in "abc":
        followers.ask(host, wire.ForgetShuffle(3, SHUFFLE))
    with pytest.raises(AttemptLost):
        writer.finish()
    for host in "abc":
        view = followers.ask(host, wire.DescribeFollower())
        assert isinstance(view, wire.FollowerView)
        assert (view.shuffles, view.memory_bytes) == ({}, 0)
        with pytest.raises(StaleEpoch):
            followers.ask(host, wire.KeepIntervals(2, SHUFFLE, [], {}, False))
