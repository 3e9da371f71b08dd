"""Which shard gets what: none starves, keys stay, ids say where they are from."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from roq.wire.shards import ClosingShard, ShardList, is_shard, marked, queue_of, shard_name, shard_number, unmarked
from roq.wire.task import Status, TaskState, TaskView
from roq.workqueue.spread import (
    AVOID_SECONDS,
    SLOW_SECONDS,
    STAY_CALLS,
    Rotation,
    ShardHealth,
    first_views,
    homes,
    joined_status,
)

NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True).map(sorted)


@given(NUMBERS, st.data())
def test_a_shard_with_tasks_is_asked_first_before_long_whatever_the_others_have(shards: list[int], data: st.DataObject) -> None:
    rotation = Rotation(data.draw(st.integers(0, 9)))
    hungry = data.draw(st.sampled_from(shards))
    for _ in range(data.draw(st.integers(0, 30))):
        rotation.order(shards)
    for _ in range(STAY_CALLS * (len(shards) - 1) + 1):
        order = rotation.order(shards)
        assert sorted(order) == shards
        having = data.draw(st.sets(st.sampled_from(shards))) | {hungry}
        gave = next(number for number in order if number in having)
        if gave == hungry:
            return
        rotation.gave(order[0], gave)
    raise AssertionError(f"shard {hungry} was not asked")


@given(NUMBERS)
def test_a_lease_stays_where_it_was_so_that_an_ack_travels_with_the_next(shards: list[int]) -> None:
    rotation = Rotation()
    firsts = [rotation.order(shards)[0] for _ in range(STAY_CALLS * len(shards))]
    assert [firsts.count(number) for number in shards] == [STAY_CALLS] * len(shards)
    assert sum(one != other for one, other in itertools.pairwise(firsts)) == len(shards) - 1


@given(st.lists(st.text(), min_size=1, unique=True), st.integers(1, 8), st.data())
def test_a_key_moves_only_if_its_shard_goes_and_its_former_ones_are_known(
    keys: list[str], count: int, data: st.DataObject
) -> None:
    numbers = tuple(range(count))
    listed = ShardList(1, numbers, numbers, (), count)
    before = {key: homes(key, listed) for key in keys}
    assert all(closed == () and home in numbers for closed, home in before.values())
    kept = data.draw(st.integers(1, count))
    closing = tuple(ClosingShard(number, 0.0) for number in numbers[kept:])
    merged = ShardList(2, (*numbers[:kept], 70, 71), numbers, closing, 72)
    for key, (_, was) in before.items():
        closed, home = homes(key, merged)
        assert home == was if was < kept else (was in closed and home < kept), "new shards take no keys"
    after = ShardList(3, merged.open, numbers[:kept], (), 72)
    assert all(homes(key, after) == ((), homes(key, merged)[1]) for key in keys)


def test_batches_go_where_least_is_under_way_and_in_turn_among_equals() -> None:
    health = ShardHealth()
    assert Counter(health.least_busy((0, 1, 2), 0.0) for _ in range(30)) == {0: 10, 1: 10, 2: 10}
    with health.call(0, 0.0), health.call(2, 0.0):
        assert {health.least_busy((0, 1, 2), 0.1) for _ in range(9)} == {1}
        with health.call(1, SLOW_SECONDS):  # the others wait for another master
            assert {health.least_busy((0, 1, 2), 2 * SLOW_SECONDS) for _ in range(9)} == {1}
    assert len({health.least_busy((0, 1, 2), 9.0) for _ in range(9)}) == 3


def test_a_shard_that_fails_is_passed_over_for_longer_each_time() -> None:
    health, now = ShardHealth(), 100.0
    for times in range(3):
        health.failed(1, now)
        health.failed(1, now)  # by another thread, the same failure
        assert health.well((0, 1), now + AVOID_SECONDS * 2**times * 0.9) == [0]
        now += AVOID_SECONDS * 2**times
        assert health.well((0, 1), now) == [0, 1]
    health.failed(1, now)
    assert health.well((1,), now) == [1], "who has nothing else asks"
    health.answered(1)
    assert health.well((0, 1), now) == [0, 1]


@given(
    st.integers(0, 10**6),
    st.text(alphabet="0123456789abcdef-.", min_size=1),
    st.text(min_size=1).filter(lambda one: "/" not in one),
)
def test_names_and_ids_say_which_shard(number: int, id: str, queue: str) -> None:
    assert unmarked(marked(number, id)) == (number, id)
    assert marked(number, "") == "", "a lease that is over"
    name = shard_name("q" + queue, number)
    assert (queue_of(name), shard_number(name), is_shard(name)) == ("q" + queue, number, number > 0)


def test_what_looks_like_a_shard_of_none_is_left_to_the_first_one() -> None:
    assert [unmarked(text) for text in ("x:1", ":1", "01:2", "-1:2", "²:3", "0:4")] == [
        (0, text) for text in ("x:1", ":1", "01:2", "-1:2", "²:3", "0:4")
    ]


def test_answers_are_joined() -> None:
    found = joined_status([Status(1, 2, 3, 4, 5, 15, 70), Status(10, 0, 0, 0, 1, 11, -1)])
    assert found == Status(11, 2, 3, 4, 6, 26, 70)
    assert joined_status([Status(0, 0, 0, 0, 0, 0)] * 2).oldest_seconds is None

    def view(id: str, priority: int, inserted: int, due: int = 0) -> TaskView:
        return TaskView(id, b"", TaskState.READY, 0, priority, inserted, due, "", "")

    ready = [view("a", 0, 5), view("b", 9, 9), view("c", 0, 4)]
    assert [one.id for one in first_views(ready, TaskState.READY, 2)] == ["b", "c"]
    late = [view("a", 0, 1, 50), view("b", 9, 2, 40)]
    assert [one.id for one in first_views(late, TaskState.DELAYED, 9)] == ["b", "a"]
