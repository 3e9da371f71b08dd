"""Rates as Markdown tables, a table for each scenario. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.recorded.run import Measured
from benchmarks.recorded.systems import ROQ, SYSTEMS
from benchmarks.recorded.workload import Found, Scenario
from benchmarks.report import markdown, spread

Row = list[str]
PUBLISHING = (Scenario.PUBLISH, Scenario.ONE_BY_ONE)


def _ways(measured: Measured) -> list[tuple[str, str, list[Found]]]:
    return [(system, way, found) for system, ways in measured.runs.items() for way, found in ways.items()]


def _messages(found: Sequence[Found]) -> str:
    return f"{median(one.messages for one in found):,.0f}"


def _some(found: Sequence[Found], field: str) -> str:
    return spread([value for one in found if (value := getattr(one, field)) is not None])


def promise(system: str) -> str:
    """What a confirmation of it says."""
    return "on the disk" if SYSTEMS[system].durable else "not yet on the disk"


def _publish_table(measured: Measured) -> str:
    rows = []
    for system, way, found in _ways(measured):
        told = (_some(found, name) for name in ("rate", "p50_us", "p99_us", "flushes"))
        rows.append([system, way, *told, _messages(found), promise(system)])
    columns = ("system", "way", "messages/s", "p50 us", "p99 us", "flushes per message", "messages", "confirmed is")
    return markdown(columns, rows)


def _rate_table(measured: Measured) -> str:
    rows = [
        [system, way, _some(found, "rate"), _some(found, "client_cores"), _messages(found)]
        for system, way, found in _ways(measured)
    ]
    return markdown(("system", "way", "messages/s", "cores of clients", "messages"), rows)


def _away_table(measured: Measured) -> str:
    rows = [
        [system, way, _some(found, "seconds"), _messages(found), _some(found, "rate")] for system, way, found in _ways(measured)
    ]
    return markdown(("system", "way", "seconds until it has caught up", "messages it read in them", "messages/s"), rows)


def live_ratios(measured: Measured) -> list[Row]:
    """Of each load: what, without recording, with, and the ratio of the medians."""
    rows: list[Row] = []
    ways = measured.runs.get(ROQ, {})
    for way, without in ways.items():
        load, _, kind = way.partition(", ")
        if kind != "not recorded" or not (recorded := ways.get(f"{load}, recorded")):
            continue
        metrics = {"p50, us": "p50_us", "p99, us": "p99_us"} if without[0].p99_us is not None else {"messages/s": "rate"}
        for name, field in metrics.items():
            pair = [[float(getattr(one, field)) for one in found] for found in (without, recorded)]
            ratio = median(pair[1]) / median(pair[0])
            rows.append([load, name, *map(spread, pair), f"{ratio:.2f}"])
    return rows


def _live_table(measured: Measured) -> str:
    return markdown(("1 publisher, 1 subscriber", "what", "not recorded", "recorded", "ratio"), live_ratios(measured))


TABLES = {
    Scenario.REPLAY: _rate_table,
    Scenario.GROUP: _rate_table,
    Scenario.GROUP_SINGLY: _rate_table,
    Scenario.LIVE: _live_table,
    Scenario.AWAY: _away_table,
}


def full(all_measured: Sequence[Measured], absent: Mapping[str, str], disk: str, versions: Sequence[str]) -> str:
    """The report. disk: where everything was stored; versions: of the servers."""
    told = "; ".join(versions) or "RoQ's alone"
    parts = [f"Stored on {disk}, one store or server each. Servers: {told}."]
    for measured in all_measured:
        parts += [f"### {measured.scenario}", TABLES.get(measured.scenario, _publish_table)(measured)]
    parts += [f"Not taking part: {name} ({reason})." for name, reason in absent.items()]
    parts += [f"Failed: {failure}." for measured in all_measured for failure in measured.failures]
    return "\n\n".join(parts) + "\n"
