"""What is measured, against whom, and what RoQ has to reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from roq.tools.bench.harness import PubSubResult
from roq.tools.bench.load import Load

Metric = Literal["throughput", "p50", "p99"]

# About how many deliveries per second and subscriber each system manages on two cores; decides only how long a run takes.
OURS = ("RoQ", "RoQ, CURVE")  # the second in a cluster with cards
SPEED: Mapping[str, int] = {
    "RoQ": 2_500_000,
    "RoQ, CURVE": 1_500_000,
    "nats-py": 250_000,
    "zmq-proxy": 1_000_000,
    "zmq-proxy-batch100": 4_000_000,
    "redis-py": 12_000,
    "redis-py-pipe100": 200_000,
    "redis-py, not awaited": 30_000,
    "aio-pika": 12_000,
}


class Goal(msgspec.Struct, frozen=True):
    """RoQ's `metric` divided by the peer's is at least (throughput) or at most (latency) `ratio`."""

    metric: Metric
    peer: str
    ratio: float

    @property
    def at_least(self) -> bool:
        """Higher is better."""
        return self.metric == "throughput"

    def met(self, ratio: float) -> bool:
        """This ratio is good enough."""
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio


class Scenario(msgspec.Struct, frozen=True):
    """One load for several systems. speed: what replaces SPEED here, so that runs last alike."""

    name: str
    load: Load
    systems: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    speed: Mapping[str, int] = {}

    def load_for(self, system: str, seconds: float) -> Load:
        """The load, of about `seconds` for this system."""
        rate = self.load.rate or self.speed.get(system, SPEED[system])
        batch = self.load.batch if system in OURS else 0
        return msgspec.structs.replace(self.load, messages=max(100, int(rate * seconds)), batch=batch)


def metric_of(result: PubSubResult, metric: Metric) -> float | None:
    """Messages/s or microseconds."""
    return result.throughput if metric == "throughput" else result.latency_us[metric]


def cpu_per_million(result: PubSubResult) -> float:
    """CPU seconds of all processes together per million deliveries."""
    return sum(result.cpu_seconds.values()) / max(1, result.delivered) * 1e6


PEERS_OF_LATENCY = ("nats-py", "redis-py", "redis-py, not awaited", "zmq-proxy")  # redis-py alone waits for each PUBLISH
LATENCY_GOALS = (Goal("p50", "nats-py", 1.0), Goal("p99", "nats-py", 1.0), Goal("p50", "redis-py", 1.2))

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "1 to 1",
            Load(),
            (*OURS, "nats-py", "zmq-proxy", "redis-py", "redis-py-pipe100", "aio-pika"),
            (Goal("throughput", "nats-py", 8.0), Goal("throughput", "zmq-proxy", 1.6)),
        ),
        Scenario(
            "1 to 1, batches",
            Load(batch=100),
            (*OURS, "zmq-proxy-batch100"),
            (Goal("throughput", "zmq-proxy-batch100", 0.9),),
            speed={"RoQ": 4_000_000, "RoQ, CURVE": 2_500_000},
        ),
        Scenario(
            "4 pairs",
            Load(publishers=4, subscribers=4, pairs=True),
            (*OURS, "nats-py"),
            (Goal("throughput", "nats-py", 7.0),),
            speed={"RoQ": 800_000, "RoQ, CURVE": 500_000, "nats-py": 100_000},
        ),
        Scenario(
            "1 to 4",
            Load(subscribers=4),
            (*OURS, "nats-py"),
            (Goal("throughput", "nats-py", 7.0),),
            speed={"RoQ": 1_400_000, "RoQ, CURVE": 800_000, "nats-py": 130_000},
        ),
        Scenario(
            "1 to 1, 10 KB",
            Load(size=10_240),
            (*OURS, "nats-py", "zmq-proxy"),
            (Goal("throughput", "nats-py", 2.0),),
            speed={"RoQ": 120_000, "RoQ, CURVE": 40_000, "nats-py": 50_000, "zmq-proxy": 35_000},
        ),
        Scenario("latency at 1,000/s", Load(rate=1_000), (*OURS, *PEERS_OF_LATENCY), LATENCY_GOALS),
        Scenario("latency at 10,000/s", Load(rate=10_000), (*OURS, *PEERS_OF_LATENCY), LATENCY_GOALS),
    )
}
