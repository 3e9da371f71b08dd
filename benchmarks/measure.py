"""Running the scenarios: systems interleaved (A B C A B C …), a quiet machine before each run, disturbed runs repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.contenders import Run
from benchmarks.scenarios import Scenario
from roq.errors import RoqError
from roq.tools.bench.harness import PubSubResult

FOREIGN_CORES_MAX = 0.3  # a run beside more foreign work than this is repeated


class Measured(msgspec.Struct, frozen=True):
    """One scenario's runs by system, and what could not be measured."""

    scenario: Scenario
    runs: dict[str, list[PubSubResult]]
    failures: list[str]


async def measure(
    scenario: Scenario, present: Mapping[str, Run], runs: int, seconds: float, repeats: int, tell: Callable[[str], None]
) -> Measured:
    """`runs` runs of each system, about `seconds` long; disturbed ones repeated up to `repeats` times: the calmest counts."""
    systems = [name for name in scenario.systems if name in present]
    found: dict[str, list[PubSubResult]] = {name: [] for name in systems}
    failures: list[str] = []
    for number in range(runs):
        for name in systems:
            try:
                result = await _calm_run(present[name], scenario, name, seconds, repeats)
            except (RoqError, RuntimeError, TimeoutError) as error:
                failures.append(f"{scenario.name}, {name}, run {number + 1}: {type(error).__name__}: {error}")
                tell(failures[-1])
                continue
            found[name].append(result)
            tell(_line(scenario, name, number, result))
    return Measured(scenario, found, failures)


async def _calm_run(run: Run, scenario: Scenario, name: str, seconds: float, repeats: int) -> PubSubResult:
    results: list[PubSubResult] = []
    for _ in range(1 + repeats):
        results.append(await run(scenario.load_for(name, seconds)))
        if results[-1].foreign_cores < FOREIGN_CORES_MAX:
            break
    return min(results, key=lambda result: result.foreign_cores)


def _line(scenario: Scenario, name: str, number: int, result: PubSubResult) -> str:
    wrong = f"lost {result.lost}, duplicated {result.duplicated}, reordered {result.reordered}"
    latency = "/".join("-" if value is None else f"{value:.0f}" for value in result.latency_us.values())
    return (
        f"{scenario.name} | run {number + 1} | {name} | {result.throughput:,.0f}/s | {wrong} | latency {latency} us | "
        f"{result.seconds:.1f} s | foreign {result.foreign_cores:.2f} cores"
    )


def values(results: Sequence[PubSubResult], read: Callable[[PubSubResult], float | None]) -> list[float]:
    """What `read` finds in each result, where there is something."""
    return [value for result in results if (value := read(result)) is not None]
