"""A run as charts over time, faults as bands: what each subscriber got, and what each process took. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from roq.tools.chaos.history import FaultDone, SubscriberHistory
from roq.tools.chaos.resources import Series
from roq.tools.charts import Band, ChartLine, Panel, draw, since

FAULT_COLOURS = {"kill": "#c0392b", "pause": "#d68910"}
NETWORK_COLOUR = "#7d3c98"
LINE_COLOUR, MARK_COLOUR = "#1f618d", "#1e8449"


def _bands(faults: Sequence[FaultDone], *, named: bool) -> list[Band]:
    found = []
    for fault in faults:
        name = f"{fault.kind} {fault.target.partition(':')[2].rpartition('/')[0] or fault.target} {fault.seconds:g} s"
        colour = FAULT_COLOURS.get(fault.kind, NETWORK_COLOUR)
        found.append(Band(fault.t, fault.t + fault.seconds, colour, name if named else ""))
    return found


def timeline(title: str, heard: Sequence[SubscriberHistory], faults: Sequence[FaultDone], seconds: float) -> str:
    """Deliveries per second of each subscriber. seconds: length of the whole run, drain included."""
    panels = []
    for number, one in enumerate(heard):
        counts = [*one.per_second, *[0] * (int(seconds) + 1 - len(one.per_second))]
        lost = sum(told.messages for told in one.told)
        name = f"subscriber {number}: messages per second" + (f"; {lost} reported lost" if lost else "")
        panels.append(Panel(name, [ChartLine("", LINE_COLOUR, [(at + 0.5, float(count)) for at, count in enumerate(counts)])]))
    return draw(title, "", panels, 0.0, int(seconds) + 1.0, bands=_bands(faults, named=True), across=since)


def memory(
    title: str, series: Sequence[Series], znodes: Sequence[tuple[float, int]], faults: Sequence[FaultDone], seconds: float
) -> str:
    """Anonymous memory of each process, one panel per machine and kind; a line is one life, the longest in another colour."""
    lanes: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        kind, _, rest = one.name.partition("/")
        queue = rest.partition("/")[0]
        lanes.setdefault((one.machine, f"{kind}/{queue}" if queue else kind.removeprefix("roq-")), []).append(one)
    panels = []
    for (machine, kind), lives in sorted(lanes.items()):
        longest = max(lives, key=lambda one: one.at[-1] - one.at[0])
        who = machine if machine == kind else f"{machine} {kind}"
        name = f"{who}: MiB in {len(lives)} lives, the longest {longest.at[-1] - longest.at[0]:.0f} s"
        lines = []
        for one in lives:
            points = [(at, value / 2**20) for at, value in zip(one.at, one.column("memory"), strict=True)]
            lines.append(ChartLine("", MARK_COLOUR if one is longest else LINE_COLOUR, points))
        panels.append(Panel(name, lines))
    panels.append(Panel("znodes", [ChartLine("", LINE_COLOUR, [(at, float(count)) for at, count in znodes])], "whole"))
    # only the marks: an hour has too many faults for names
    return draw(title, "", panels, 0.0, seconds, bands=_bands(faults, named=False), across=since)
