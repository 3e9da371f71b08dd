"""Rates as Markdown tables and a chart, and RoQ against its targets. Pure but for `save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

from benchmarks.durable.run import Measured
from benchmarks.durable.systems import SYSTEMS
from benchmarks.durable.workload import Mode, Phase, Rate
from benchmarks.report import markdown, spread
from roq.tools.charts import ChartLine, Panel, draw, numbers

QUORUM, REDIS, LOG = "rabbitmq-quorum", "redis-streams", "RoQ log:"
CLUSTERS = ("RoQ roq:, 1 store", "RoQ roq:, 3 stores")
QUORUM_RATIO, REDIS_RATIO, LOG_RATIO = 2.0, 0.8, 1.0
REDIS_CLIENTS = (8, 16)
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22")
WINDOW_TARGET = {Phase.WRITE: 100_000.0, Phase.READ: 50_000.0}  # operations per second


def rates(measured: Measured, system: str, phase: Phase) -> list[float]:
    """Operations per second of every run."""
    return [rate.operations_per_second for run in measured.runs.get(system, []) for rate in run if rate.phase is phase]


def _all(measured: Measured, system: str, phase: Phase) -> list[Rate]:
    return [rate for run in measured.runs.get(system, []) for rate in run if rate.phase is phase]


def systems_table(all_measured: Sequence[Measured]) -> str:
    """Every system: operations per second, latency, flushes of the disk per message."""
    rows = []
    for measured in all_measured:
        for system in measured.runs:
            for phase in Phase:
                found = _all(measured, system, phase)
                work = measured.work
                rows.append(
                    [
                        f"{phase}, {work.mode}, {work.clients} clients",
                        system,
                        spread([rate.operations_per_second for rate in found]),
                        spread([rate.p50_us for rate in found]) if work.mode is Mode.ONE_BY_ONE else "-",
                        spread([rate.p99_us for rate in found]) if work.mode is Mode.ONE_BY_ONE else "-",
                        spread([rate.flushes for rate in found]),
                    ]
                )
    return markdown(("workload", "system", "messages/s", "p50 us", "p99 us", "flushes per message"), rows)


def goals_table(all_measured: Sequence[Measured]) -> str:
    """RoQ against what it has to reach."""
    rows: list[list[str]] = []
    for measured in all_measured:
        for phase in Phase:
            rows += _window_goals(measured, phase) if measured.work.mode is Mode.WINDOW else _ratio_goals(measured, phase)
    return markdown(("workload", "RoQ", "messages/s", "against", "ratio", "target", "verdict"), rows)


def _ratio_goals(measured: Measured, phase: Phase) -> list[list[str]]:
    rows = []
    for cluster in CLUSTERS:
        rows.append(_row(measured, phase, cluster, QUORUM, QUORUM_RATIO))
        if measured.work.clients in REDIS_CLIENTS:
            rows.append(_row(measured, phase, cluster, REDIS, REDIS_RATIO))
    peers = [name for name in measured.runs if not name.startswith("RoQ") and SYSTEMS[name].durable]
    medians = {
        name: median(found) for name in peers if (found := rates(measured, name, phase)) and _syncs(measured, name, phase)
    }
    if medians:
        rows.append(_row(measured, phase, LOG, max(medians, key=lambda name: medians[name]), LOG_RATIO))
    return [row for row in rows if row]


def _syncs(measured: Measured, system: str, phase: Phase) -> bool:
    """What it acknowledges in this phase really reaches the disk before, though clients may share a flush."""
    flushes = median(rate.flushes for rate in _all(measured, system, phase))
    return flushes * measured.work.clients >= 0.5


def _row(measured: Measured, phase: Phase, ours: str, peer: str, target: float) -> list[str]:
    mine, theirs = rates(measured, ours, phase), rates(measured, peer, phase)
    if not mine or not theirs:
        return []
    ratio = median(mine) / median(theirs)
    name = f"{phase}, {measured.work.clients} clients"
    verdict = "met" if ratio >= target else "MISSED"
    return [name, ours, spread(mine), f"{peer}: {spread(theirs)}", f"{ratio:.2f}", f"at least {target:g}", verdict]


def _window_goals(measured: Measured, phase: Phase) -> list[list[str]]:
    rows = []
    for ours in (LOG, *CLUSTERS):
        if found := rates(measured, ours, phase):
            target = WINDOW_TARGET[phase]
            verdict = "met" if median(found) >= target else "MISSED"
            name = f"{phase}, window, {measured.work.clients} clients"
            rows.append([name, ours, spread(found), "-", "-", f"at least {target:,.0f}/s", verdict])
    return rows


def chart(all_measured: Sequence[Measured]) -> str:
    """What RDSQ's Figure 2 shows, of every system: messages per second one by one, by clients; SVG. Dashed: not RoQ."""
    singly = [measured for measured in all_measured if measured.work.mode is Mode.ONE_BY_ONE]
    systems = [name for name in SYSTEMS if any(measured.runs.get(name) for measured in singly)]

    def lines(phase: Phase) -> list[ChartLine]:
        found = []
        for system, colour in zip(systems, cycle(COLOURS)):
            points = [(float(one.work.clients), median(rates(one, system, phase))) for one in singly if one.runs.get(system)]
            found.append(ChartLine(system, colour, sorted(points), dashes="" if system.startswith("RoQ") else "6 4"))
        return found

    panels = [Panel(f"{phase}, messages/s", lines(phase), axis="logarithmic") for phase in Phase]
    runs = max(len(found) for measured in singly for found in measured.runs.values())
    below = f"by clients; 100 bytes, one at a time; medians of {runs}"
    last = float(max(measured.work.clients for measured in singly))
    return draw("Durable work queues: write, then read and acknowledge", below, panels, 1.0, last, across=numbers)


def save(all_measured: Sequence[Measured], folder: Path) -> None:
    """The chart, as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work-queues.svg").write_text(chart(all_measured))


def full(all_measured: Sequence[Measured], absent: Mapping[str, str]) -> str:
    """The report."""
    missing = [f"Not taking part: {name} ({reason})." for name, reason in absent.items()]
    failed = [f"Failed: {failure}." for measured in all_measured for failure in measured.failures]
    return "\n\n".join([goals_table(all_measured), systems_table(all_measured), *missing, *failed]) + "\n"
