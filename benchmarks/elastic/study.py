"""What scaling does on traces of load, and what forecasts would change: `python -m benchmarks.elastic`.

A forecast changes the records that `decide` sees: everybody publishes what is expected HORIZON_SECONDS later, if that is more
than now. That is all there is to prediction in a scaling policy: Exchanges come before the load does, or for nothing. Two are
tried: *trend* goes on as the last seconds went (Holt's double exponential smoothing); *season* takes what the recorded history
says of the same time of the day before, and so has the exact answer on traces that repeat themselves to the second;
"unpunctual" ones come up to UNPUNCTUAL_SECONDS sooner or later. What they win has to be more than a lower limit wins at the
same cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from benchmarks.elastic.plant import Forecast, Plant, Shape, diurnal, flash_crowd, rise_plateau_fall, sawtooth
from roq.wire.kpi import ExchangeKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Bounds, ExchangeRule, Policy, TargetRule

CAPACITY, LIMIT, TARGET_SECONDS = 1000.0, 600.0, 0.02  # p99 is 16 ms at the limit
SECONDS, SEEDS = 3600, 6
UNPUNCTUAL_SECONDS = 30
HORIZON_SECONDS = 10  # a scale-out takes about half of that
LEVEL_WEIGHT, TREND_WEIGHT = 0.5, 0.2


def unpunctual(shape: Shape, period: int) -> Shape:
    """The same, but each time sooner or later."""

    def shifted(second: int) -> float:
        shift = random.Random(second // period).randint(-UNPUNCTUAL_SECONDS, UNPUNCTUAL_SECONDS)
        return shape((second % period + shift) % period)

    return shifted


TRACES: dict[str, tuple[Shape, int]] = {  # and after how many seconds it repeats itself
    "rise, plateau, fall": (rise_plateau_fall(), 600),
    "flash crowd": (flash_crowd(), 600),
    "flash crowd, unpunctual": (unpunctual(flash_crowd(), 600), 600),
    "sawtooth, 1 min": (sawtooth(seconds=60), 60),
    "sawtooth, 4 min": (sawtooth(seconds=240), 240),
    "day of 30 min": (diurnal(seconds=1800), 1800),
}
BOUNDS = Bounds(max_exchanges=12)
POLICIES = {
    "limit": Policy(exchange=ExchangeRule(max_messages_per_second=LIMIT), bounds=BOUNDS),
    "limit, 10 % lower": Policy(exchange=ExchangeRule(max_messages_per_second=0.9 * LIMIT), bounds=BOUNDS),
    "limit, no credit": Policy(exchange=ExchangeRule(max_messages_per_second=LIMIT), bounds=replace(BOUNDS, credit=0.0)),
    "p99 target": Policy(target=TargetRule(max_latency_p99_seconds=TARGET_SECONDS), bounds=BOUNDS),
}


class Course(msgspec.Struct, frozen=True):
    """Means over the seeds, of an hour. late_seconds: with a p99 above TARGET_SECONDS; exchanges: on average; changes:
    scale-outs and scale-ins."""

    trace: str
    policy: str
    forecast: str
    late_seconds: float
    exchanges: float
    changes: float


def nothing(shape: Shape, period: int) -> Forecast:
    """No forecast."""
    return lambda kpi: kpi


def trend(shape: Shape, period: int) -> Forecast:
    """As the last seconds went."""
    level = slope = 0.0

    def forecast(kpi: QueueKpi) -> QueueKpi:
        nonlocal level, slope
        before = level or kpi.messages_per_second
        level = LEVEL_WEIGHT * kpi.messages_per_second + (1 - LEVEL_WEIGHT) * (before + slope)
        slope = TREND_WEIGHT * (level - before) + (1 - TREND_WEIGHT) * slope
        return _scaled(kpi, level + HORIZON_SECONDS * slope)

    return forecast


def season(shape: Shape, period: int) -> Forecast:
    """As at the same time of the period before; nothing is known of the first one."""
    history: list[float] = []

    def forecast(kpi: QueueKpi) -> QueueKpi:
        history.append(kpi.messages_per_second)
        at = len(history) - 1 + HORIZON_SECONDS - period
        return _scaled(kpi, history[at]) if at >= 0 else kpi

    return forecast


FORECASTS: dict[str, Callable[[Shape, int], Forecast]] = {"none": nothing, "trend": trend, "season": season}


def _scaled(kpi: QueueKpi, expected: float) -> QueueKpi:
    """The record with so much load, if that is more."""
    factor = expected / kpi.messages_per_second if kpi.messages_per_second else 1.0
    if factor <= 1:
        return kpi

    publishers = tuple(replace(each, **_rates(each, factor)) for each in kpi.publishers)
    exchanges = tuple(replace(each, **_rates(each, factor)) for each in kpi.exchanges)
    return replace(kpi, **_rates(kpi, factor), publishers=publishers, exchanges=exchanges)


def _rates(of: QueueKpi | PublisherKpi | ExchangeKpi, factor: float) -> dict[str, float]:
    return {"messages_per_second": factor * of.messages_per_second, "bytes_per_second": factor * of.bytes_per_second}


def course(trace: str, policy: str, forecast: str, seeds: int = SEEDS, seconds: int = SECONDS) -> Course:
    """One row of the study: loads of 1.5 to 5 Exchanges, 10 to 40 publishers."""
    shape, period = TRACES[trace]
    late = exchanges = changes = 0
    for seed in range(seeds):
        chance = random.Random(seed)
        load, publishers = chance.uniform(1.5, 5) * LIMIT, chance.randint(10, 40)
        rates = dict.fromkeys(range(1, publishers + 1), load / publishers)
        plant = Plant(POLICIES[policy], rates, shape, chance, CAPACITY, forecast=FORECASTS[forecast](shape, period))
        plant.run(seconds)
        late += sum(each > TARGET_SECONDS for each in plant.latencies)
        exchanges += sum(plant.counts)
        changes += len(plant.changes())
    return Course(trace, policy, forecast, late / seeds, exchanges / seeds / seconds, changes / seeds)


def study() -> list[Course]:
    """Every trace, policies without forecast, and the limit with each forecast."""
    pairs = [(policy, "none") for policy in POLICIES] + [("limit", each) for each in FORECASTS if each != "none"]
    return [course(trace, policy, forecast) for trace in TRACES for policy, forecast in pairs]


def markdown(found: list[Course]) -> str:
    """The table."""
    lines = ["| trace | policy | forecast | late, s | Exchanges | changes |", "|---|---|---|--:|--:|--:|"]
    for one in found:
        numbers = f"{one.late_seconds:.0f} | {one.exchanges:.2f} | {one.changes:.0f}"
        lines.append(f"| {one.trace} | {one.policy} | {one.forecast} | {numbers} |")
    return "\n".join(lines)
