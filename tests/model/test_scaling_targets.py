"""Stability on a queue with latency and limited throughput (benchmarks/elastic/plant.py), whatever its size, load and noise.

Each safeguard that a policy can switch off is switched off once: then a property that holds with it fails.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from benchmarks.elastic.plant import START, Plant, Shape, diurnal, flash_crowd, rise_plateau_fall, sawtooth
from roq.pubsub.scaling.decide import EXCHANGE_COST_SECONDS, IN_VAIN, REFUTED_MAX
from roq.pubsub.scaling.what_if import replay
from roq.wire.policy import Bounds, ExchangeRule, Policy, QueueRule, TargetRule

CAPACITY = 1000.0  # messages/s of an Exchange
TARGET_SECONDS = 0.02  # met up to 66 % of the capacity
EXCHANGES_MAX = 8
RULES: dict[str, Callable[[Bounds], Policy]] = {
    "limit": lambda bounds: Policy(exchange=ExchangeRule(max_messages_per_second=0.7 * CAPACITY), bounds=bounds),
    "latency": lambda bounds: Policy(target=TargetRule(max_latency_p99_seconds=TARGET_SECONDS), bounds=bounds),
    "throughput": lambda bounds: Policy(target=TargetRule(min_messages_per_second_per_publisher=30), bounds=bounds),
    "average": lambda bounds: Policy(queue=QueueRule(max_messages_per_second_per_exchange=0.7 * CAPACITY), bounds=bounds),
    "all": lambda bounds: Policy(
        exchange=ExchangeRule(max_messages_per_second=0.9 * CAPACITY),
        queue=QueueRule(max_publishers_per_exchange=20, max_subscribers_per_exchange=30),
        target=TargetRule(max_latency_p99_seconds=TARGET_SECONDS, min_messages_per_second_per_publisher=30),
        bounds=bounds,
    ),
}
PROFILE = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # half an hour of a queue does not shrink to anything shorter
    suppress_health_check=[HealthCheck.too_slow],
)
Scene = tuple[str, int, float, int, float]  # rules, seed, load in capacities, publishers, noise
SCENES = st.tuples(
    st.sampled_from(list(RULES)), st.integers(0, 10**6), st.floats(0.2, 5), st.integers(6, 24), st.floats(0, 0.15)
)
BURSTS = st.tuples(st.integers(40, 200), st.integers(10, 200), st.floats(2, 50))  # seconds late, and in time; how late


def plant(scene: Scene, shape: Shape, seconds: int, **bounds: float) -> Plant:
    """The scene after so long under this load."""
    rules, seed, load, publishers, noise = scene
    policy = RULES[rules](Bounds(max_exchanges=EXCHANGES_MAX, **bounds)).check()  # type: ignore[arg-type]
    chance = random.Random(seed)
    shares = [chance.uniform(0.5, 2) for _ in range(publishers)]
    rates = {number: load * CAPACITY * share / sum(shares) for number, share in enumerate(shares, 1)}
    return Plant(policy, rates, shape, chance, CAPACITY, noise).run(seconds)


def story(found: Plant) -> list[tuple[int, str, str]]:
    """What was decided, for people."""
    return [(round(each.time - START), each.action, each.cause) for each in found.log]


@PROFILE
@given(SCENES)
def test_rise_plateau_and_fall_are_followed_once(scene: Scene) -> None:
    """Outwards while it rises, still on the plateau, inwards when it falls, and back where it began."""
    found = plant(scene, rise_plateau_fall(), 600)
    assert found.turns() in ([], ["scale-out"], ["scale-out", "scale-in"]), story(found)
    on_plateau = [each for each in found.log if START + 150 < each.time < START + 360 and each.action != "hold"]
    assert not on_plateau, story(found)
    assert found.counts[-1] <= max(1, min(found.counts)) + (scene[0] == "all"), story(found)


@PROFILE
@given(SCENES)
def test_a_flash_crowd_is_served_and_forgotten(scene: Scene) -> None:
    """One way out and one way in for each, and what is decided is little."""
    found = plant(scene, flash_crowd(), 600)
    assert found.turns() in ([], ["scale-out"], ["scale-out", "scale-in"]), story(found)
    assert len(found.log) <= 3 * EXCHANGES_MAX, story(found)


@PROFILE
@given(SCENES, st.integers(20, 90))
def test_a_sawtooth_calms_down(scene: Scene, seconds: int) -> None:
    """The Exchanges of the peak stay: within forty minutes it changes a few times, at last hardly at all."""
    found = plant(scene, sawtooth(seconds=seconds), 2400)
    assert calm(found), story(found)


def calm(found: Plant) -> bool:
    """Few changes, and in the last twenty minutes next to none."""
    return len(found.changes()) <= 40 and len(found.changes(since=1200)) <= 8


@PROFILE
@given(SCENES, st.integers(15, 120), st.floats(0.3, 0.8))
def test_noisy_neighbours_do_not_make_it_nervous(scene: Scene, seconds: int, left: float) -> None:
    """Every so often other programs take much of some hosts; within forty minutes it has what it needs for that."""
    rules, seed, load, publishers, noise = scene
    found = plant((rules, seed, min(load, 2.5), publishers, noise), lambda second: 1.0, 0)
    found.neighbours = lambda second, exchange: left if second // seconds % 2 and exchange % 3 == 0 else 1.0
    found.run(2400)
    assert calm(found), story(found)


@PROFILE
@given(SCENES)
def test_a_day_is_a_handful_of_changes(scene: Scene) -> None:
    found = plant(scene, diurnal(seconds=3600), 3600)
    assert found.turns() in ([], ["scale-out"], ["scale-out", "scale-in"]), story(found)


@PROFILE
@given(st.integers(0, 10**6), st.floats(0.2, 0.6), st.integers(6, 24))
def test_what_exchanges_cannot_help_gets_one_of_them(seed: int, load: float, publishers: int) -> None:
    """All subscribers are slow themselves: an Exchange is tried, it is told once that it was in vain, and that is all."""
    found = plant(("latency", seed, load, publishers, 0.05), lambda second: 1.0, 0)
    found.slow = dict.fromkeys(range(found.subscribers), 30 * TARGET_SECONDS)
    found.run(900)
    assert [each.action for each in found.log] == ["scale-out", "hold"], story(found)
    assert found.log[1].cause.endswith(IN_VAIN)


@pytest.mark.long
@PROFILE
@given(st.integers(0, 10**6), st.floats(0.2, 0.6), st.lists(BURSTS, min_size=2, max_size=20))
def test_lateness_that_comes_and_goes_gets_one_exchange(seed: int, load: float, bursts: list[tuple[int, int, float]]) -> None:
    """Whatever the load is: however often, for however long, and however late."""
    found = plant(("latency", seed, load, 12, 0.05), lambda second: 1.0, 0)
    for late, calm, level in bursts:
        found.slow = dict.fromkeys(range(found.subscribers), level * TARGET_SECONDS)
        found.run(late)
        found.slow = dict.fromkeys(range(found.subscribers), (1 + level) / 2 * TARGET_SECONDS)  # it fades
        found.run(4)
        found.slow = {}
        found.run(calm)
    assert [each.action for each in found.log if each.action != "hold"] == ["scale-out"], story(found)


@pytest.mark.long
@PROFILE
@given(st.integers(0, 10**6), st.floats(0.2, 0.6), st.integers(3, 30), st.integers(70, 600))
def test_lateness_that_passes_before_the_verdict_gets_a_few_exchanges(seed: int, load: float, late: int, calm: int) -> None:
    """It looks as if they had cured it, until it comes back in spite of them."""
    found = plant(("latency", seed, load, 12, 0.05), lambda second: 1.0, 0)
    for _ in range(20):
        found.slow = dict.fromkeys(range(found.subscribers), 5 * TARGET_SECONDS)
        found.run(late)
        found.slow = {}
        found.run(calm)
    assert len(found.changes()) <= 1 + REFUTED_MAX, story(found)


@PROFILE
@given(SCENES)
def test_a_target_that_can_be_met_is_met(scene: Scene) -> None:
    """A minute after the load has come every subscriber is in time, but for noise."""
    found = plant(("latency", scene[1], min(4.0, scene[2]), max(20, scene[3]), 0.05), lambda second: 1.0, 400)
    late = sum(each > TARGET_SECONDS for each in found.latencies[200:])
    assert late == 0, (late, story(found))


@PROFILE
@given(SCENES, st.integers(20, 200))
def test_changes_keep_their_distance_and_records_repeat_them(scene: Scene, seconds: int) -> None:
    found = plant(scene, sawtooth(seconds=seconds), 600)
    assert at_rest(found), story(found)
    assert replay(found.records, found.policy) == found.log


def at_rest(found: Plant) -> bool:
    """A change takes effect after 2 s, then there are 5 s without another one."""
    times = sorted({each.time for each in found.log if each.action != "hold"})
    return all(later - earlier >= 7 for earlier, later in itertools.pairwise(times))


def test_the_price_of_a_scale_in_is_what_the_text_says() -> None:
    found = plant(("limit", 1, 2.0, 8, 0.0), rise_plateau_fall(), 600)
    first = next(each for each in found.log if each.action == "scale-in")
    assert f"to spare for {math.ceil(2 * (EXCHANGE_COST_SECONDS + 0.1 * len(first.moves)))} s" in first.cause


@pytest.mark.parametrize(
    ("off", "holds"),
    [
        ({"credit": 0.0}, lambda scene, off: calm(plant(scene, sawtooth(seconds=60), 2400, **off))),
        ({"hysteresis": 0.0, "credit": 0.0}, lambda scene, off: calm(plant(scene, lambda second: 1.0, 1800, **off))),
        ({"cooldown_seconds": 0.0}, lambda scene, off: at_rest(plant(scene, sawtooth(seconds=60), 600, **off))),
    ],
    ids=["credit", "hysteresis", "cool-down"],
)
def test_without_a_safeguard_a_property_fails(off: dict[str, float], holds: Callable[[Scene, dict[str, float]], bool]) -> None:
    scene = find(SCENES, lambda scene: not holds(scene, off), settings=settings(PROFILE, max_examples=60))
    assert holds(scene, {})
    with pytest.raises(NoSuchExample):
        find(SCENES, lambda scene: not holds(scene, {}), settings=settings(PROFILE, max_examples=10))
