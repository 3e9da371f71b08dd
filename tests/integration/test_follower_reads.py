"""What followers give to each other and to readers over real sockets: fetches, replicas that fail, damage that is mended."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roq.errors import Closed, DataLost, Unavailable
from roq.shuffle import cluster
from roq.shuffle.node.datafile import DataFile
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Position
from tests.harness.shuffle_rows import key_of
from tests.integration.follower_rig import SHUFFLE, Followers, InThread, made_in, until, write_all

Make = Callable[..., Followers]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from made_in(tmp_path)


# --- fetching ---------------------------------------------------------------------------------------------------------------


def filled(followers: Followers) -> None:
    for one in write_all(followers, 4, 20_000):
        one.join()


def test_a_fetch_moves_what_the_interval_holds_and_no_more(make: Make) -> None:
    followers = make()
    filled(followers)
    leader, winners = followers.leader, dict.fromkeys(range(4), "a")
    followers.start("d")
    middle = leader.table[2].interval
    inside = Interval(
        Position(key_of(1 << 37), 1, 0, 77), Position(key_of(1 << 38), 0, 0, 5)
    )  # cuts blocks of several runs and ranges
    for interval, sources in (
        (inside, [leader.hosts[host] for host in "abc"]),
        (middle, [leader.hosts[host] for host in leader.table[2].holders]),
    ):
        if interval is inside:
            whole = [host for host in "abc" if followers.count(host, inside, winners)[0]]
            best = max(whole, key=lambda host: followers.count(host, inside, winners)[0])
            sources = [leader.hosts[best]]
            expected = followers.count(best, inside, winners)
        else:
            expected = followers.count(leader.table[2].holders[0], middle, winners)
        already = followers.count("d", interval, winners)
        fetched = followers.ask("d", wire.FetchInterval(1, SHUFFLE, interval, winners, sources))
        assert isinstance(fetched, wire.Fetched)
        assert followers.count("d", interval, winners)[0] == expected[0] > 100
        assert fetched.size <= 1.05 * (expected[1] - already[1]) + 20_000, "border blocks have heads of their own"
        again = followers.ask("d", wire.FetchInterval(1, SHUFFLE, interval, winners, sources))
        assert again == wire.Fetched(0), "nothing is fetched twice"


def test_a_fetch_turns_to_another_source_and_fails_without_any(make: Make) -> None:
    followers = make(ranges=4)
    filled(followers)
    leader, winners = followers.leader, dict.fromkeys(range(4), "a")
    one = leader.table[1]
    followers.start("d")
    first, second = one.holders
    followers.stop(first)
    sources = [leader.hosts[first], leader.hosts[second]]
    followers.ask("d", wire.FetchInterval(1, SHUFFLE, one.interval, winners, sources))
    assert followers.count("d", one.interval, winners) == followers.count(second, one.interval, winners)
    with pytest.raises(Unavailable):
        followers.ask("d", wire.FetchInterval(1, SHUFFLE, leader.table[0].interval, winners, [leader.hosts[first]]), 60)
    with pytest.raises(Unavailable):
        followers.ask("d", wire.FetchInterval(1, SHUFFLE, leader.table[0].interval, winners, []))


# --- reading ----------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_reader_goes_on_at_another_holder_at_the_exact_row(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "AHEAD_BYTES", 100_000)
    followers = make(ranges=2)
    filled(followers)
    info = followers.info(dict.fromkeys(range(4), "a"))
    source = followers.source(info, 0)
    for piece in source.slices:
        blocks, rows = source.blocks(piece), 0
        for at, block in enumerate(blocks):
            if at == 1:
                host = source._holders.found[source._at % len(source._holders.found)][0]
                followers.stop(host)
                followers.start(host)
            rows += min(block.first + block.rows, piece.first + piece.rows) - max(block.first, piece.first)
        assert rows == piece.rows


def test_readers_begin_with_different_holders(make: Make) -> None:
    followers = make(ranges=2)
    filled(followers)
    info = followers.info({0: "a"})
    first = {followers.source(info, 0)._holders.found[0][0] for _ in range(40)}
    assert first == set(followers.leader.table[0].holders)


def test_a_holder_that_lacks_rows_is_not_believed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_SECONDS", 1.0)
    followers = make(ranges=2)
    filled(followers)
    winners = dict.fromkeys(range(4), "a")
    info = followers.info(winners)
    one = info.description.ranges[0]
    followers.ask(one.holders[0], wire.KeepIntervals(1, SHUFFLE, [], winners, True))
    for _ in range(4):
        assert sum(piece.rows for piece in followers.source(info, 0).slices) == one.rows
    followers.ask(one.holders[1], wire.KeepIntervals(1, SHUFFLE, [], winners, True))
    with pytest.raises(DataLost):
        followers.source(info, 0)


def test_all_holders_are_away_for_a_while(make: Make) -> None:
    followers = make(ranges=2)
    filled(followers)
    winners = dict.fromkeys(range(4), "a")
    info = followers.info(winners)
    holders = info.description.ranges[0].holders
    for host in holders:
        followers.stop(host)
    reading = InThread(lambda: followers.source(info, 0))
    reading_others = [InThread(lambda: followers.source(info, 0)) for _ in range(3)]
    until(lambda: reading.running, 1)
    for host in holders:
        followers.start(host)
    for one in (reading, *reading_others):
        one.join(30)
    followers.judge(winners, dict.fromkeys(range(4), 20_000))


def test_closing_the_address_ends_every_wait(make: Make) -> None:
    followers = make(ranges=2)
    filled(followers)
    info = followers.info(dict.fromkeys(range(4), "a"))
    for host in "abc":
        followers.stop(host)
    reading = InThread(lambda: followers.source(info, 0))
    followers.link.close()
    with pytest.raises(Closed):
        reading.join(5)


def test_damage_is_mended_from_another_holder(make: Make) -> None:
    followers = make(ranges=2)
    filled(followers)
    winners = dict.fromkeys(range(4), "a")
    info = followers.info(winners)
    followers.leader.winners = winners
    host = info.description.ranges[0].holders[0]
    path = next((followers.directory / host / "shuffles" / SHUFFLE).glob("data-*"))
    data = bytearray(path.read_bytes())
    for found in [*DataFile(path, 1).scan()][::5]:
        data[found.offset + found.size // 2] ^= 1
    path.write_bytes(data)

    def mended() -> bool:
        assert len(followers.read(info)) == 80_000, "readers find it, and turn to the other holder"
        rows = [followers.count(host, one.interval, winners)[0] for one in info.description.ranges if host in one.holders]
        counters = followers.follower(host).counters
        return (counters["damaged"] > 1, counters["repaired"] > 0, rows) == (
            *(True, True),
            [one.rows for one in info.description.ranges if host in one.holders],
        )

    until(mended)
    followers.judge(winners, dict.fromkeys(winners, 20_000))


def described(followers: Followers, host: str) -> wire.FollowerView:
    """The connection to its life before is found broken once."""
    try:
        view = followers.ask(host, wire.DescribeFollower())
    except Unavailable:
        view = followers.ask(host, wire.DescribeFollower())
    assert isinstance(view, wire.FollowerView)
    return view


def test_disks_replaced_one_after_the_other_lose_nothing_of_a_sealed_shuffle(make: Make) -> None:
    """A follower that starts on an empty disk asks what it should hold, and fetches it; until then it says what it lacks."""
    followers = make(ranges=2)
    filled(followers)
    winners = dict.fromkeys(range(4), "a")
    info = followers.info(winners)
    followers.leader.winners = winners
    for host in "abc":
        followers.stop(host)
        shutil.rmtree(followers.directory / host)
        followers.start(host)
        view = described(followers, host)
        assert not view.compared or view.lacking == (SHUFFLE,)
        until(lambda host=host: (view := described(followers, host)).compared and not view.lacking)  # type: ignore[misc]
        ours = [one for one in info.description.ranges if host in one.holders]
        assert [followers.count(host, one.interval, winners)[0] for one in ours] == [one.rows for one in ours]
    followers.judge(winners, dict.fromkeys(winners, 20_000))
