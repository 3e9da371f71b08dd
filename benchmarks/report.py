"""Measured numbers as Markdown tables: medians with their spread, ratios against targets, met or missed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from benchmarks.measure import FOREIGN_CORES_MAX, Measured, values
from benchmarks.scenarios import Goal, cpu_per_million, metric_of


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(found: Sequence[float]) -> str:
    """Median [lowest to highest], three digits or whole numbers."""
    if not found:
        return "-"
    middle = _number(median(found))
    return middle if len(found) == 1 else f"{middle} [{_number(min(found))} to {_number(max(found))}]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goal_row(measured: Measured, goal: Goal) -> list[str]:
    """Scenario, metric, RoQ, peer, ratio, target, verdict."""
    read = partial(metric_of, metric=goal.metric)
    ours = values(measured.runs.get("RoQ", []), read)
    theirs = values(measured.runs.get(goal.peer, []), read)
    sign = "at least" if goal.at_least else "at most"
    unit = "messages/s" if goal.metric == "throughput" else f"{goal.metric}, us"
    row = [measured.scenario.name, unit, spread(ours), f"{goal.peer}: {spread(theirs)}"]
    if not ours or not theirs:
        return [*row, "-", f"{sign} {goal.ratio:g}", "not measured"]
    ratio = median(ours) / median(theirs)
    return [*row, f"{ratio:.2f}", f"{sign} {goal.ratio:g}", "met" if goal.met(ratio) else "MISSED"]


def goals_table(all_measured: Sequence[Measured]) -> str:
    """Every goal with what was measured."""
    rows = [goal_row(measured, goal) for measured in all_measured for goal in measured.scenario.goals]
    return markdown(("scenario", "what", "RoQ", "peer", "ratio", "target", "verdict"), rows)


def systems_table(all_measured: Sequence[Measured]) -> str:
    """Every system in every scenario. Noisy: runs beside too much foreign work."""
    rows = []
    for measured in all_measured:
        for name, results in measured.runs.items():
            latencies = [spread(values(results, partial(metric_of, metric=metric))) for metric in ("p50", "p99")]
            wrong = sum(result.lost + result.duplicated + result.reordered for result in results)
            noisy = sum(result.foreign_cores >= FOREIGN_CORES_MAX for result in results)
            rows.append(
                [
                    measured.scenario.name,
                    name,
                    spread([result.throughput for result in results]),
                    *latencies,
                    spread([cpu_per_million(result) for result in results]),
                    str(wrong),
                    f"{noisy} of {len(results)}",
                ]
            )
    columns = ("scenario", "system", "delivered/s", "p50 us", "p99 us", "CPU s per million", "lost, dup., reord.", "noisy runs")
    return markdown(columns, rows)


def cpu_table(all_measured: Sequence[Measured]) -> str:
    """Where RoQ's CPU seconds go, per million deliveries, by process kind."""
    rows = []
    for measured in all_measured:
        if results := measured.runs.get("RoQ", []):
            kinds = results[0].cpu_seconds
            parts = [median(result.cpu_seconds[kind] / max(1, result.delivered) * 1e6 for result in results) for kind in kinds]
            told = ", ".join(f"{kind} {part:.2f}" for kind, part in zip(kinds, parts, strict=True))
            rows.append([measured.scenario.name, told])
    return markdown(("scenario", "CPU s per million deliveries, RoQ"), rows)


def full(all_measured: Sequence[Measured], absent: Mapping[str, str]) -> str:
    """The report."""
    parts = [goals_table(all_measured), systems_table(all_measured), cpu_table(all_measured)]
    missing = [f"Not taking part: {name} ({reason})." for name, reason in absent.items()]
    failed = [f"Failed: {failure}." for measured in all_measured for failure in measured.failures]
    return "\n\n".join([*parts, *missing, *failed]) + "\n"
