"""Samples that are gathered before there is a table: few enough to be worked on, and telling all bytes."""

from __future__ import annotations

from roq.shuffle.ranges import even_borders, imbalance
from roq.shuffle.sampling import SORTED_AT_ONCE, Distribution, Gathered, coarser, thinned
from roq.wire.shuffle import Position, RunSample


def sample(partition: int, keys: int, width: int = 4) -> RunSample:
    found = tuple((number * 1000 + partition).to_bytes(width, "big") for number in range(keys))
    return RunSample(partition, "a", 0, keys * 10, keys * 100, found, tuple(range(0, keys * 10, 10)), (100,) * keys)


def weight(samples: list[RunSample] | tuple[RunSample, ...]) -> int:
    return sum(sum(each.weights) for each in samples)


def test_many_samples_become_coarser_and_none_is_left_out() -> None:
    found = Gathered(keys_max=1000)
    for partition in range(100):
        found.add(sample(partition, 64))
        found.add(sample(partition, 64))  # told twice
    taken = found.taken()
    assert len(taken) == 100
    assert sum(len(each.keys) for each in taken) <= 1000
    assert found.size == weight(taken) == 100 * 64 * 100
    borders = even_borders(Distribution.of(taken), 4)
    rows = [0] * 4
    for partition in range(100):
        for key in sample(partition, 64).keys:
            rows[sum(Position(key, partition, 0, 0) >= each for each in borders)] += 1
    assert imbalance(rows) <= 1.15


def test_long_keys_are_bounded_by_their_bytes() -> None:
    found = Gathered(bytes_max=1_000_000)
    for partition in range(20):
        found.add(sample(partition, 64, width=1000))
    assert sum(len(key) for each in found.taken() for key in each.keys) <= 1_000_000
    assert len(found.taken()) == 20


def test_what_can_not_become_coarser_is_bounded_too() -> None:
    found = Gathered(keys_max=100)
    for partition in range(1000):
        found.add(sample(partition, 1))
    assert len(found.taken()) == 100
    assert found.size == 1000 * 100, "how many ranges there should be is known all the same"
    assert len(thinned(found.taken(), keys_max=10)) == 100, "what is stored is never left out"


def test_a_thinned_sample_keeps_its_weight_and_its_first_key() -> None:
    one = sample(0, 65)
    for step in (1, 2, 7, 64, 1000):
        other = coarser(one, step)
        assert sum(other.weights) == sum(one.weights)
        assert (other.keys[0], other.rows_at[0], len(other.keys)) == (one.keys[0], 0, -(-65 // step))
    assert sum(len(each.keys) for each in thinned([one] * 10, keys_max=100)) <= 100


def test_points_are_sorted_in_slices() -> None:
    runs = [sample(partition, 3000) for partition in range(2 * SORTED_AT_ONCE // 3000 + 1)]
    distribution = Distribution.of(runs)
    before, points = distribution.candidates()
    assert len(points) > SORTED_AT_ONCE
    assert points == sorted(points)
    assert [*before] == sorted(before)
    assert distribution.total == weight(runs)
