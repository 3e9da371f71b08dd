"""Axes of a picture: where values lie, which of them are written beside the axis, and round times under it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

TICKS_MAX = 5  # steps of an axis of values; the top one is its end
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
WHOLE_STEPS = (1.0, 2.0, 5.0, 10.0)
DECADES_MAX = 6  # of a logarithmic axis; what is lower lies on its lower end
FINE_DECADES = 2  # so few have 1, 2 and 5 written, more of them only 1
TIMES_MAX = 9  # times under a picture
MINUTE, HOUR, DAY = 60, 3600, 86_400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE * count for count in (1, 2, 5, 10, 15, 30)),
    *(HOUR * count for count in (1, 2, 3, 6, 12)),
    *(DAY * count for count in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


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
    """A time under a picture. date: where a day is the first one or another than that of the time before, else "". midnight:
    a day begins here."""

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
