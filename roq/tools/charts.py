"""Lines over time, or over a number, as plain SVG: panels under each other over one axis. Pure.

Why not a library: docs/decisions/0052.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise

import msgspec

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 84, 48, 50, 46
PANEL, NAME, LEGEND_ROW, GAP = 130, 30, 17, 8  # heights in pixels: of a panel, above it its name and legend, between panels
MARK, CHARACTER = 26, 6.6  # widths in a legend: of a line's mark, and about that of a character
LEGEND_SPACE = 16  # between entries
TITLE_CHARACTERS, LEGEND_CHARACTERS = 84, 60  # what is longer loses its middle
BAND_NAMES, BAND_WIDTH = 100, 2.0  # pixels: height of what is written over bands; at least so wide, so that a moment is seen
GREY, RULE, DAY_RULE = "#555", "#e2e2e2", "#9a9a9a"
Point = tuple[float, float]  # Unix seconds (or seconds since the begin, or a number), value
TICKS_MAX = 5  # steps of an axis of values; the top one is its end
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
WHOLE_STEPS = (1.0, 2.0, 5.0, 10.0)
DECADES_MAX = 6  # of a logarithmic axis; what is lower lies on its lower end
FINE_DECADES = 2  # so few have 1, 2 and 5 written, more of them only 1
TIMES_MAX = 9  # times under a chart
MINUTE, HOUR, DAY = 60, 3600, 86_400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE * count for count in (1, 2, 5, 10, 15, 30)),
    *(HOUR * count for count in (1, 2, 3, 6, 12)),
    *(DAY * count for count in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


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
    across: Callable[[float, float], Sequence[AxisTick]] | None = None,
) -> str:
    """The chart from begin to end (Unix seconds). below: a second line of the title, for what must not be cut. across: what is
    written under it: `times` of the clock, `since` the begin, or `numbers`."""
    end = max(end, begin + 1.0)
    ticks = (across or times)(begin, end)
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


def pixels_across(at: float, begin: float, end: float) -> float:
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
        turned = f'transform="translate({pixels_across(band.begin, begin, end) + 3:.1f},{bottom:g}) rotate(-50)"'
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
        left = pixels_across(band.begin, begin, end)
        width = max(BAND_WIDTH, pixels_across(min(band.end, end), begin, end) - left)
        where = f'x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{PANEL}"'
        parts.append(f'<rect {where} fill="{band.colour}" opacity="0.25"/>')
    for tick in ticks:
        x, colour = pixels_across(tick.at, begin, end), DAY_RULE if tick.midnight else RULE
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}" stroke="{colour}"/>')
    for line in panel.lines:
        for stretch in stretches(line):
            places = [
                (pixels_across(at, begin, end), bottom - PANEL * scale.part(value) - line.raised) for at, value in stretch
            ]
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
        x = pixels_across(tick.at, begin, end)
        rows = [text for text in (tick.text, tick.date) if text]
        for number, text in enumerate(rows):
            y = bottom + 10 + 15 * number
            parts.append(f'<text x="{x:.1f}" y="{y:g}" text-anchor="middle" fill="{GREY}">{escape(text)}</text>')
    return parts


# --- axes: where values lie, which are written beside an axis, and round times under it


class AxisScale(msgspec.Struct, frozen=True):
    """An axis of values from its lower to its upper end. ticks: values written beside it, upwards."""

    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def part(self, value: float) -> float:
        """Where a value lies, from 0 (lower end) to 1; what is outside lies at an end."""
        value = min(self.high, max(self.low, value))
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class AxisTick(msgspec.Struct, frozen=True):
    """A time, or a number, under a chart. date: where a day is the first one or another than that of the time before, else "".
    midnight: a day begins here."""

    at: float
    text: str
    date: str
    midnight: bool


def linear(values: Sequence[float], *, whole: bool = False) -> AxisScale:
    """From 0 to a round number not below the highest value. whole: only whole numbers are written."""
    most = max(values, default=0.0)
    if most <= 0:
        return AxisScale(0.0, 1.0, (0.0, 1.0))
    power: float = 10.0 ** math.floor(math.log10(most / TICKS_MAX))
    steps = [power * step for step in (WHOLE_STEPS if whole else STEPS)]
    if whole and steps[0] < 1:
        steps = [1.0]
    step = next(each for each in steps if each * TICKS_MAX >= most * (1 - 1e-9) or each == steps[-1])
    count = max(1, math.ceil(most / step * (1 - 1e-9)))
    return AxisScale(0.0, step * count, tuple(step * number for number in range(count + 1)))


def logarithmic(values: Sequence[float]) -> AxisScale:
    """From a round number not above the lowest positive value to one not below the highest. For values over several powers of
    ten; 0 has no place of its own and lies at the lower end."""
    positive = [value for value in values if value > 0]
    if not positive:
        return AxisScale(1.0, 10.0, (1.0, 10.0), logarithmic=True)
    last = math.ceil(math.log10(max(positive)) - 1e-9)
    first = max(math.floor(math.log10(min(positive)) + 1e-9), last - DECADES_MAX)
    marks = [10.0**power * step for power in range(first, last + 1) for step in (1, 2, 5)]
    low = max(mark for mark in marks if mark <= max(min(positive), marks[0]) * (1 + 1e-9))
    high = min(mark for mark in marks if mark >= max(positive) * (1 - 1e-9) and mark > low)
    ticks = [mark for mark in marks if low <= mark <= high]
    if high / low > 10.0**FINE_DECADES * (1 + 1e-9):
        ticks = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    return AxisScale(low, high, tuple(ticks), logarithmic=True)


def _step(span: float) -> int:
    return next((each for each in TIME_STEPS if span / each <= TIMES_MAX - 1), math.ceil(span / TIMES_MAX / DAY) * DAY)


def since(begin: float, end: float) -> list[AxisTick]:
    """Round times since the begin, at most TIMES_MAX."""
    step = _step(end - begin)
    unit, per = ("s", 1) if step < MINUTE else ("min", MINUTE) if step < HOUR else ("h", HOUR)
    counts = range(math.floor((end - begin) / step) + 1)
    return [AxisTick(begin + number * step, f"{number * step / per:g} {unit}", "", midnight=False) for number in counts]


def numbers(begin: float, end: float) -> list[AxisTick]:
    """Round numbers, for an axis that is not time."""
    return [AxisTick(at, f"{at:g}", "", midnight=False) for at in linear([end]).ticks if begin <= at <= end]


def times(begin: float, end: float) -> list[AxisTick]:
    """Round times (UTC) from begin to end (Unix seconds), at most TIMES_MAX."""
    step = _step(end - begin)
    found: list[AxisTick] = []
    day = ""
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        when = datetime.fromtimestamp(number * step, UTC)
        date = f"{when.day} {when:%b %Y}"
        text = f"{when:%H:%M:%S}" if step < MINUTE else f"{when:%H:%M}" if step < DAY else ""
        found.append(AxisTick(number * step, text, date if date != day else "", number * step % DAY == 0))
        day = date
    return found
