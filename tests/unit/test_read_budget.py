"""Unfinished messages of many peers (runtime/read_budget.py): bounded, and everybody's turn comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roq.runtime.connections import TURN_LOOK_SECONDS
from roq.runtime.read_budget import READ_BYTES_MAX, READ_BYTES_MIN, SMALL_BYTES, STILL_LOOKS_MAX, ReadBudget

MIB = 1 << 20
LIMIT = 3 * MIB


class Peer:
    """Sends messages of these sizes, one after the other."""

    def __init__(self, intake: ReadBudget, sizes: list[int]) -> None:
        self._intake, self.left = intake, list(sizes)
        self.paused, self.has = False, 0

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False

    def read(self) -> None:
        """As the loop does: what there is, as there is room for it."""
        count = min(self._intake.room(self), sum(self.left) - self.has)
        self.has += count
        finished = False
        while self.left and self.has >= self.left[0]:
            self.has -= self.left.pop(0)
            finished = True
        self._intake.read(self, self.has, finished=finished)


@given(
    st.lists(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.integers(0, 11), max_size=40),
)
def test_all_get_done_within_the_limit(messages: list[list[int]], order: list[int]) -> None:
    intake = ReadBudget(LIMIT)
    peers = [Peer(intake, sizes) for sizes in messages]
    most = LIMIT + max(map(max, messages)) + len(peers) * READ_BYTES_MIN
    turns = [*order, *range(len(peers))]
    for _ in range(10 * sum(map(sum, messages)) // READ_BYTES_MIN + 1000):
        reading = [peer for peer in peers if peer.left and not peer.paused]
        if not reading:
            break
        turns.append(turns.pop(0))
        reading[turns[0] % len(reading)].read()
        assert intake.total == sum(peer.has for peer in peers) <= most
    assert not any(peer.left or peer.paused for peer in peers)
    assert (intake.total, intake.first) == (0, None)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["read", "gone"])), max_size=60))
def test_who_goes_away_leaves_its_place(steps: list[tuple[int, str]]) -> None:
    intake = ReadBudget(MIB)
    peers = [Peer(intake, [2 * MIB] * 20) for _ in range(6)]
    for number, step in steps:
        if step == "gone":
            intake.gone(peers[number])
            peers[number] = Peer(intake, [2 * MIB] * 20)
        elif not peers[number].paused:
            peers[number].read()
        assert intake.total == sum(peer.has for peer in peers)
        assert not all(peer.paused for peer in peers), "somebody gets on"
        if intake.first is not None:
            assert isinstance(intake.first, Peer)
            assert not intake.first.paused


def test_small_messages_never_wait() -> None:
    intake = ReadBudget(MIB)
    large = [Peer(intake, [4 * MIB]) for _ in range(20)]
    for _ in range(40):
        for peer in large:
            if not peer.paused and peer.has < 3 * MIB:
                peer.read()
    assert sum(peer.paused for peer in large) == 19
    small = Peer(intake, [READ_BYTES_MIN] * 5)
    while small.left:
        assert not small.paused
        small.read()


def test_room_is_kept_for_small_messages_while_large_ones_wait() -> None:
    intake = ReadBudget(4 * MIB)
    large = [Peer(intake, [4 * MIB]) for _ in range(20)]
    for _ in range(40):
        for peer in large:
            if not peer.paused and peer.has < 3 * MIB:
                peer.read()
    assert sum(peer.paused for peer in large) == 19
    small = [Peer(intake, [SMALL_BYTES] * 5) for _ in range(4)]
    while any(peer.left for peer in small):
        for peer in small:
            assert not peer.paused
            peer.read()
    assert sum(peer.paused for peer in large) == 19


def test_who_does_not_use_its_turn_is_told() -> None:
    intake = ReadBudget(MIB)
    first, other = (Peer(intake, [4 * MIB]) for _ in range(2))
    for _ in range(MIB // READ_BYTES_MAX):
        first.read()
    assert [intake.late() for _ in range(2 * STILL_LOOKS_MAX)] == [[]] * 2 * STILL_LOOKS_MAX, "nobody waits for it"
    while not other.paused:
        other.read()
    assert other.has <= MIB
    first.read()
    assert [intake.late() for _ in range(STILL_LOOKS_MAX)] == [[]] * STILL_LOOKS_MAX
    first.read()
    assert intake.late() == [], "it has gone on"
    assert [intake.late() for _ in range(STILL_LOOKS_MAX)] == [[]] * (STILL_LOOKS_MAX - 1) + [[first]]
    intake.gone(first)
    assert not other.paused
    assert intake.late() == []
    assert intake._seen == {}, "who waits later begins anew"


def test_who_stands_still_in_a_small_message_has_no_turn_and_all_of_them_go_at_once() -> None:
    intake = ReadBudget(MIB)
    still = [Peer(intake, [SMALL_BYTES]) for _ in range(8)]
    for peer in still:
        peer.has = 1
        intake.read(peer, 1, finished=False)
    large = [Peer(intake, [8 * MIB]) for _ in range(2)]
    while not large[1].paused:
        for peer in large:
            if not peer.paused:
                peer.read()
    assert intake.first is large[0], "though the small ones began before"
    late: list[object] = []
    for _ in range(STILL_LOOKS_MAX + 1):
        assert not late
        large[0].read()
        late = list(intake.late())
    assert late == still


def test_who_stands_still_in_large_messages_goes_when_its_turn_comes_and_more_go_at_a_time() -> None:
    """As docs/decisions/0042 tells: 60 with 400 KB each."""
    intake = ReadBudget(32 * MIB)
    peers = [Peer(intake, [8 * MIB]) for _ in range(60)]
    for peer in 8 * peers:
        if not peer.paused:
            peer.has += min(intake.room(peer), MIB // 8)
            intake.read(peer, peer.has, finished=False)
    assert [peer.paused for peer in peers] == [False] + 59 * [True]
    looks, gone = 0, list[tuple[float, int]]()
    while intake.first is not None:
        late = intake.late()
        for one in late:
            intake.gone(one)
        gone += [(looks * TURN_LOOK_SECONDS, len(late))] if late else []
        looks += 1
    assert gone[:2] == [(2.0, 1), (4.5, 1)]
    assert [count for _, count in gone] == sorted(count for _, count in gone)
    assert gone[-1][0] == 12.0
