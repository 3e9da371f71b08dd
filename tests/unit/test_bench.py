"""The load generator's arithmetic: what a load is, pacing, counting by number, percentiles, results. No process is started."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure import Measured
from benchmarks.overhead import rows
from benchmarks.report import full, goal_row
from benchmarks.scenarios import SCENARIOS, Goal, cpu_per_million
from roq.errors import CallError
from roq.tools.bench.accounting import (
    NEVER,
    PAUSE_EVERY,
    Account,
    LatencySamples,
    Tally,
    latency_us,
    percentile,
    stream_ends,
    stream_of,
    thin,
)
from roq.tools.bench.harness import summary
from roq.tools.bench.load import STAMP, Load, Pace, on_topic
from roq.tools.bench.protocol import PublisherFinished, SubscriberFinished
from roq.tools.bench.publish import flat_out, flat_out_many, paced


def counted(numbers: list[int], end: int = NEVER) -> Tally:
    """A tally after these numbers, read as the subscriber's loop reads them."""
    tally = Tally(7, end)
    for number in numbers:
        if number == tally.next:
            tally.next += 1
        else:
            tally.take(number)
    return tally


@pytest.mark.parametrize(
    ("numbers", "lost", "duplicated", "reordered"),
    [
        ([1, 2, 3, 4, 5], 0, 0, 0),
        ([1, 2, 5], 2, 0, 0),
        ([2, 3, 4, 5], 1, 0, 0),
        ([1, 2, 3], 2, 0, 0),
        ([1, 2, 2, 3, 4, 5, 1], 0, 2, 0),
        ([1, 3, 2, 4, 5], 0, 0, 1),
        ([5, 4, 3, 2, 1], 0, 0, 4),
        ([1, 5, 3, 3], 2, 1, 1),
        ([], 5, 0, 0),
    ],
)
def test_every_message_is_lost_duplicated_reordered_or_fine(
    numbers: list[int], lost: int, duplicated: int, reordered: int
) -> None:
    tally = counted(numbers)
    assert (tally.lost(5), tally.duplicated, tally.reordered) == (lost, duplicated, reordered)


@given(st.lists(st.integers(1, 40), max_size=80))
def test_the_tally_agrees_with_a_set(numbers: list[int]) -> None:
    tally = counted(numbers)
    seen: set[int] = set()
    duplicated = reordered = 0
    for number in numbers:
        duplicated += number in seen
        reordered += number not in seen and number < max(seen, default=0)
        seen.add(number)
    assert (tally.distinct, tally.duplicated, tally.reordered) == (len(seen), duplicated, reordered)
    assert tally.lost(40) == 40 - len(seen)


def test_the_reader_pauses_now_and_then_and_exactly_at_the_end() -> None:
    account = Account({7: PAUSE_EVERY + 10})
    tally = account.nobody
    paused_at = []
    for number in range(1, PAUSE_EVERY + 11):
        if number == tally.next and tally.stream == 7:
            tally.next += 1
        else:
            tally = account.take(7, number)
        if tally.next <= tally.limit:
            continue
        paused_at.append(number)
        if account.pause(tally, number, 1000):
            break
    assert paused_at[-1] == PAUSE_EVERY + 10
    assert len(paused_at) <= 3
    assert account.complete
    assert account.last_ns == PAUSE_EVERY + 10


def test_messages_of_unknown_publishers_are_foreign() -> None:
    account = Account({7: 1})
    assert not account.pause(account.take(8, 1), 1, 1)
    assert account.foreign == 1
    assert account.pause(account.take(7, 1), 1, 1)
    assert account.totals() == (1, 0, 0)


def test_the_end_may_be_told_late() -> None:
    account = Account({7: NEVER})
    account.take(7, 1)
    account.take(7, 3)
    account.set_ends({7: 3})
    assert not account.complete
    assert account.pause(account.take(7, 2), 1, 1)
    assert account.totals() == (3, 0, 1)


def test_streams_of_a_stamped_load_are_publisher_and_topic() -> None:
    load = Load(publishers=2, topics=3, rate=10, size=24, messages=7)
    ends = stream_ends(load, {0: 111, 1: 222}, {0: 7, 1: 7})
    assert len(ends) == 6
    assert ends[stream_of(1, 0)] == 3
    assert ends[stream_of(1, 2)] == 2
    assert stream_ends(Load(publishers=1, messages=5), {0: 111}, {}) == {111: NEVER}


@pytest.mark.parametrize("published", [0, 1, 6, 7, 8])
def test_topics_share_all_messages(published: int) -> None:
    assert sum(on_topic(published, 3, topic) for topic in range(3)) == published


def test_percentiles() -> None:
    values = list(range(1, 1001))
    random.Random(1).shuffle(values)
    assert latency_us(value * 1000 for value in values) == {"p50": 501.0, "p99": 991.0, "p999": 1000.0}
    assert latency_us([]) == {"p50": None, "p99": None, "p999": None}
    assert percentile([5], 0.999) == 5


def test_thinning_keeps_percentiles() -> None:
    ordered = list(range(100_000))
    thinned = thin(ordered, 1_000)
    assert len(thinned) == 1_000
    assert abs((percentile(thinned, 0.99) or 0) - 99_000) <= 100
    assert thin([1, 2], 10) == [1, 2]


def test_samples_stay_bounded_and_cover_the_whole_run() -> None:
    samples = LatencySamples(kept=100)
    for value in range(10_000):
        samples.add(value)
    assert len(samples.values) < 100
    assert samples.values[0] == 0
    assert samples.values[-1] > 9_000


def test_a_pace_catches_up_and_ends() -> None:
    pace = Pace(1000.0, 50, 0)
    assert pace.due(0) == 1
    assert pace.due(500_000) == 0
    assert pace.due(10_000_000) == 10
    assert pace.due(10_000_000_000) == 39
    assert pace.finished


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(messages=1, publishers=0),
        Load(messages=1, publishers=2, pairs=True),
        Load(messages=1, size=-1),
        Load(messages=1, rate=-1),
    ],
)
def test_a_senseless_load_is_refused(load: Load) -> None:
    with pytest.raises(CallError):
        load.check()


def test_pairs_hear_their_own_publisher_only() -> None:
    pairs = Load(messages=1, publishers=2, subscribers=2, pairs=True)
    assert pairs.heard_by(1) == [1]
    assert pairs.topics_of(1) == pairs.patterns_of(1) == ["bench.p1.t0"]
    assert pairs.expected([10, 20]) == 30
    fan = Load(messages=1, publishers=2, subscribers=3, topics=2)
    assert fan.patterns_of(0) == ["bench.>"]
    assert fan.expected([10, 20]) == 90


class Sent:
    """Stands in for a publisher."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    async def publish(self, topic: str, payload: bytes) -> None:
        self.messages.append((topic, payload))

    async def publish_many(self, topic: str, payloads: list[bytes]) -> None:
        self.messages += [(topic, payload) for payload in payloads]


async def test_flat_out_deals_messages_over_the_topics() -> None:
    sent = Sent()
    assert await flat_out(Load(messages=5, topics=2, size=3), 0, sent.publish) == 5
    assert [topic for topic, _ in sent.messages] == ["bench.t0", "bench.t1", "bench.t0", "bench.t1", "bench.t0"]
    assert {payload for _, payload in sent.messages} == {bytes(3)}


async def test_batches_add_up() -> None:
    sent = Sent()
    assert await flat_out_many(Load(messages=250, batch=100), 0, sent.publish_many) == 250
    assert len(sent.messages) == 250


async def test_a_load_bounded_by_time_ends() -> None:
    sent = Sent()
    async with asyncio.timeout(5):
        assert await flat_out(Load(duration=0.02), 0, sent.publish) == len(sent.messages) > 0


@pytest.mark.parametrize("batch", [0, 4])
async def test_a_paced_load_numbers_each_topic(batch: int) -> None:
    sent = Sent()
    load = Load(messages=20, topics=2, rate=2000.0, size=32, batch=batch)
    assert await paced(load, 3, sent.publish, sent.publish_many) == 20
    stamps = sorted(STAMP.unpack_from(payload)[:3] for _, payload in sent.messages)
    assert stamps == [(3, topic, number) for topic in range(2) for number in range(1, 11)]
    assert {len(payload) for _, payload in sent.messages} == {32}


def test_a_summary_adds_up() -> None:
    load = Load(messages=10, subscribers=2)
    published = [PublisherFinished(10, 1_000_000_000, 1_500_000_000, 0.5)]
    delivered = [
        SubscriberFinished(10, 0, 0, 0, 0, 2_000_000_000, 0.25, [1000, 2000]),
        SubscriberFinished(8, 1, 2, 0, 2, 3_000_000_000, 0.25, [3000]),
    ]
    result = summary(load, published, delivered, {"exchange": 0.125}, 0.5)
    assert (result.published, result.delivered, result.lost, result.duplicated, result.reordered) == (10, 18, 2, 1, 2)
    assert result.throughput == 9.0
    assert result.publish_rate == 20.0
    assert result.cpu_seconds == {"publisher": 0.5, "subscriber": 0.5, "exchange": 0.125}


def test_goals_are_judged_by_the_ratio_of_medians() -> None:
    load = Load(messages=10)
    reports = [PublisherFinished(10, 0, 1_000_000_000, 0.1)], [SubscriberFinished(10, 0, 0, 0, 0, 1_000_000_000, 0.1, [5000])]
    slow = summary(load, *reports, {"server": 0.3}, 0.0)
    fast = [msgspec.structs.replace(slow, throughput=rate) for rate in (10.0, 90.0, 100.0)]
    measured = Measured(SCENARIOS["4 pairs"], {"RoQ": fast, "nats-py": [slow]}, ["one did not run"])
    assert goal_row(measured, Goal("throughput", "nats-py", 9.0))[-3:] == ["9.00", "at least 9", "met"]
    assert goal_row(measured, Goal("throughput", "nats-py", 9.1))[-1] == "MISSED"
    assert goal_row(measured, Goal("p50", "nats-py", 1.0))[-1] == "met"
    assert goal_row(measured, Goal("p50", "redis-py", 1.0))[-1] == "not measured"
    assert cpu_per_million(slow) == pytest.approx(50_000)
    report = full([measured], {"aio-pika": "not installed"})
    assert "aio-pika (not installed)" in report
    assert "one did not run" in report


def test_every_goal_has_its_systems_in_the_scenario() -> None:
    for scenario in SCENARIOS.values():
        assert {"RoQ", *(goal.peer for goal in scenario.goals)} <= set(scenario.systems)
        for system in scenario.systems:
            scenario.load_for(system, 1.0).check()


def test_overhead_is_the_median_of_the_ratios_to_the_same_round() -> None:
    found = {"plain": [100.0, 200.0, 300.0], "on": [50.0, 20.0, 240.0]}
    assert rows(found) == [
        ("plain", "200", "1.000", "1.000", "1.000"),
        ("on", "50", "0.500", "0.100", "0.800"),
    ]
