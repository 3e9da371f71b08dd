"""Lines over time as plain SVG: panels under each other with one axis of time. Pure. Scales and times: axes.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import msgspec

from roq.tools.charts.axes import AxisScale, AxisTick, linear, logarithmic, since, times

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 84, 48, 50, 46
PANEL, NAME, LEGEND_ROW, GAP = 130, 30, 17, 8  # heights in pixels: of a panel, above it its name and legend, between panels
MARK, CHARACTER = 26, 6.6  # widths in a legend: of a line's mark, and about that of a character
LEGEND_SPACE = 16  # between entries
TITLE_CHARACTERS, LEGEND_CHARACTERS = 84, 60  # what is longer loses its middle
BAND_NAMES, BAND_WIDTH = 100, 2.0  # pixels: height of what is written over bands; at least so wide, so that a moment is seen
GREY, RULE, DAY_RULE = "#555", "#e2e2e2", "#9a9a9a"
Point = tuple[float, float]  # Unix seconds, value


class ChartLine(msgspec.Struct, frozen=True):
    """One line. name: in the legend, "" keeps it out. Points further apart than gap_seconds are not joined. steps: a value
    holds until the next one. dashes: of SVG, "" is none. raised: pixels upwards, so that lines alike don't hide each other.
    filled: what is under it is coloured."""

    name: str
    colour: str
    points: Sequence[Point]
    gap_seconds: float = math.inf
    steps: bool = False
    width: float = 1.6
    dashes: str = ""
    raised: float = 0.0
    filled: bool = False


class Panel(msgspec.Struct, frozen=True):
    """Lines over one axis of values; those that come first lie under the others. axis: linear, whole or logarithmic."""

    name: str
    lines: Sequence[ChartLine]
    axis: str = "linear"

    def scale(self) -> AxisScale:
        """Of all its lines."""
        values = [value for line in self.lines for _, value in line.points]
        return logarithmic(values) if self.axis == "logarithmic" else linear(values, whole=self.axis == "whole")


class Band(msgspec.Struct, frozen=True):
    """A time marked in all panels. name: written over it, "" is none."""

    begin: float
    end: float
    colour: str
    name: str = ""


class LegendEntry(msgspec.Struct, frozen=True):
    """A line in a legend. x: pixels from the left; row: from 0."""

    line: ChartLine
    text: str
    x: float
    row: int


def draw(
    title: str,
    below: str,
    panels: Sequence[Panel],
    begin: float,
    end: float,
    *,
    bands: Sequence[Band] = (),
    elapsed: bool = False,
) -> str:
    """The whole picture from begin to end (Unix seconds). below: a second line of the title, for what must not be cut.
    elapsed: times are counted from begin, not those of the clock."""
    end = max(end, begin + 1.0)
    ticks = since(begin, end) if elapsed else times(begin, end)
    parts = [
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(shortened(title, TITLE_CHARACTERS))}</text>',
        f'<text x="{LEFT}" y="40" fill="{GREY}">{escape(below)}</text>',
    ]
    y: float = TOP
    if any(band.name for band in bands):
        y += BAND_NAMES
        parts += _names(bands, y, begin, end)
    for panel in panels:
        entries = legend(panel.lines)
        y += NAME + LEGEND_ROW * max((entry.row + 1 for entry in entries), default=0)
        parts += _panel(panel, entries, y, begin, end, ticks, bands)
        y += PANEL + GAP
    parts += _time_labels(y, begin, end, ticks)
    height = y + BOTTOM - GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" font-size="12">'
        f'\n<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def shortened(text: str, characters: int) -> str:
    """The text, or its beginning and end."""
    if len(text) <= characters:
        return text
    end = (characters - 1) // 2
    return f"{text[: characters - 1 - end]}…{text[-end:]}"


def legend(lines: Sequence[ChartLine]) -> list[LegendEntry]:
    """Where each line's entry comes to lie: one after the other, in as many rows as that takes."""
    found: list[LegendEntry] = []
    x, row = float(LEFT), 0
    for line in filter(lambda line: line.name, lines):
        text = shortened(line.name, LEGEND_CHARACTERS)
        width = MARK + CHARACTER * len(text)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, row = float(LEFT), row + 1
        found.append(LegendEntry(line, text, x, row))
        x += width + LEGEND_SPACE
    return found


def across(at: float, begin: float, end: float) -> float:
    """Pixels from the left."""
    return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)


def stretches(line: ChartLine) -> list[list[Point]]:
    """Its points, divided where they are too far apart."""
    found: list[list[Point]] = []
    for point in line.points:
        if found and point[0] - found[-1][-1][0] <= line.gap_seconds:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def _names(bands: Sequence[Band], bottom: float, begin: float, end: float) -> list[str]:
    parts = []
    for band in bands:
        turned = f'transform="translate({across(band.begin, begin, end) + 3:.1f},{bottom:g}) rotate(-50)"'
        parts.append(f'<text {turned} fill="{band.colour}" font-size="9">{escape(band.name)}</text>')
    return parts


def _panel(
    panel: Panel,
    entries: Sequence[LegendEntry],
    top: float,
    begin: float,
    end: float,
    ticks: Sequence[AxisTick],
    bands: Sequence[Band],
) -> list[str]:
    bottom, scale = top + PANEL, panel.scale()
    above = top - 10 - LEGEND_ROW * max((entry.row + 1 for entry in entries), default=0)
    parts = [f'<text x="{LEFT}" y="{above:g}" font-weight="bold">{escape(panel.name)}</text>']
    for entry in entries:
        parts += _entry(entry, above + LEGEND_ROW * (entry.row + 1))
    for value in scale.ticks:
        y = bottom - PANEL * scale.part(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{value:,.6g}</text>')
    for band in bands:
        left = across(band.begin, begin, end)
        width = max(BAND_WIDTH, across(min(band.end, end), begin, end) - left)
        where = f'x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{PANEL}"'
        parts.append(f'<rect {where} fill="{band.colour}" opacity="0.25"/>')
    for tick in ticks:
        x, colour = across(tick.at, begin, end), DAY_RULE if tick.midnight else RULE
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}" stroke="{colour}"/>')
    for line in panel.lines:
        for stretch in stretches(line):
            places = [(across(at, begin, end), bottom - PANEL * scale.part(value) - line.raised) for at, value in stretch]
            parts.append(_stretch(line, places, bottom))
    return parts


def _stretch(line: ChartLine, places: Sequence[Point], bottom: float) -> str:
    """One part of a line, in pixels."""
    if line.steps:
        corners = [place for before, after in pairwise(places) for place in (before, (after[0], before[1]))]
        places = [*corners, places[-1]]
    if len(places) == 1:
        radius = max(1.5, line.width / 2)
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="{radius:g}" fill="{line.colour}"/>'
    if line.filled:
        places = [(places[0][0], bottom), *places, (places[-1][0], bottom)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if line.filled:
        return f'<polygon points="{points}" fill="{line.colour}"/>'
    return f'<polyline points="{points}" fill="none" {_stroke(line)}/>'


def _stroke(line: ChartLine) -> str:
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return f'stroke="{line.colour}" stroke-width="{line.width:g}"{dashes}'


def _entry(entry: LegendEntry, y: float) -> list[str]:
    line, end = entry.line, entry.x + MARK - 5
    if line.filled:
        mark = f'<rect x="{entry.x:g}" y="{y - 9:g}" width="{MARK - 5}" height="10" fill="{line.colour}"/>'
    else:
        mark = f'<line x1="{entry.x:g}" x2="{end:g}" y1="{y - 4:g}" y2="{y - 4:g}" {_stroke(line)}/>'
    return [mark, f'<text x="{entry.x + MARK:g}" y="{y:g}" fill="{GREY}">{escape(entry.text)}</text>']


def _time_labels(bottom: float, begin: float, end: float, ticks: Sequence[AxisTick]) -> list[str]:
    parts = []
    for tick in ticks:
        x = across(tick.at, begin, end)
        rows = [text for text in (tick.text, tick.date) if text]
        for number, text in enumerate(rows):
            y = bottom + 10 + 15 * number
            parts.append(f'<text x="{x:.1f}" y="{y:g}" text-anchor="middle" fill="{GREY}">{escape(text)}</text>')
    return parts
