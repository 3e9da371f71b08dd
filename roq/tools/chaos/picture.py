"""A run as pictures over time, faults as marks: what each subscriber got, and what each process took. Plain SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from roq.tools.chaos.history import Done, Heard
from roq.tools.chaos.resources import Series

WIDTH, LANE, LEFT, RIGHT, TOP, GAP, BOTTOM = 1200, 90, 110, 20, 170, 22, 40
MEMORY_LANE, MEMORY_LEFT, MEMORY_TOP = 60, 190, 40
FAULT_SECONDS_DRAWN = 0.3  # at least, so that a kill can be seen
COLOURS = {"kill": "#c0392b", "pause": "#d68910"}
NETWORK_COLOUR = "#7d3c98"
LINE_COLOUR, TOLD_COLOUR, MARK_COLOUR, GREY = "#1f618d", "#c0392b", "#1e8449", "#666"


class _Sheet:
    """A picture of `lanes` lanes under each other, with a time axis of `seconds`."""

    def __init__(self, title: str, lanes: int, seconds: float, *, lane: int, left: int, top: int) -> None:
        self._length, self._lane, self._left, self._top = max(seconds, 1.0), lane, left, top
        self._height = top + lanes * (lane + GAP) + BOTTOM
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self._height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{WIDTH}" height="{self._height}" fill="white"/>',
            f'<text x="{left}" y="16" font-size="14">{escape(title)}</text>',
        ]

    def across(self, at: float) -> float:
        return round(self._left + (WIDTH - self._left - RIGHT) * at / self._length, 1)

    def faults(self, faults: Sequence[Done]) -> Iterator[tuple[float, Done, str]]:
        """Draws them; where each begins, and its colour."""
        bottom = self._height - BOTTOM
        for fault in faults:
            colour = COLOURS.get(fault.kind, NETWORK_COLOUR)
            left, right = self.across(fault.t), self.across(fault.t + max(fault.seconds, FAULT_SECONDS_DRAWN))
            where = f'x="{left}" y="{self._top}" width="{right - left:.1f}" height="{bottom - self._top}"'
            self.parts.append(f'<rect {where} fill="{colour}" opacity="0.25"/>')
            yield left, fault, colour

    def lane(self, number: int, *labels: str) -> int:
        """Draws its base line and what stands beside it; the base line's height."""
        base = self._top + number * (self._lane + GAP) + self._lane
        self.parts.append(f'<line x1="{self._left}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#999"/>')
        for line, label in enumerate(labels):
            colour = GREY if line else "black"
            self.parts.append(f'<text x="4" y="{base - self._lane / 2 + 14 * line}" fill="{colour}">{escape(label)}</text>')
        return base

    def line(self, base: int, points: Sequence[tuple[float, float]], most: float, colour: str = LINE_COLOUR) -> None:
        """points: (seconds, value); most: the value at the top of the lane."""
        text = " ".join(f"{self.across(at)},{base - self._lane * value / most:.1f}" for at, value in points)
        self.parts.append(f'<polyline points="{text}" fill="none" stroke="{colour}"/>')

    def done(self) -> str:
        """The time axis; all of it."""
        step = next(step for step in (1, 2, 5, 10, 30, 60, 300, 600, 3600, self._length) if self._length / step <= 20)
        for tick in range(int(self._length / step) + 1):
            at = tick * step
            self.parts.append(f'<text x="{self.across(at)}" y="{self._height - 20}" text-anchor="middle">{at:g} s</text>')
        return "\n".join([*self.parts, "</svg>", ""])


def timeline(title: str, heard: Sequence[Heard], faults: Sequence[Done], seconds: float) -> str:
    """Deliveries per second of each subscriber. seconds: length of the whole run, drain included."""
    sheet = _Sheet(title, len(heard), seconds, lane=LANE, left=LEFT, top=TOP)
    for left, fault, colour in sheet.faults(faults):
        label = escape(f"{fault.kind} {fault.target.partition(':')[2].rpartition('/')[0] or fault.target} {fault.seconds:g} s")
        turned = f'transform="translate({left + 3},{TOP - 4}) rotate(-50)"'
        sheet.parts.append(f'<text {turned} fill="{colour}" font-size="9">{label}</text>')
    most = max([1, *(count for one in heard for count in one.per_second)])
    for number, one in enumerate(heard):
        base = sheet.lane(number, f"subscriber {number}", f"0 … {most}/s")
        counts = [*one.per_second, *[0] * (int(seconds) + 1 - len(one.per_second))]
        sheet.line(base, [(at + 0.5, count) for at, count in enumerate(counts)], most)
        if lost := sum(told.messages for told in one.told):
            sheet.parts.append(f'<text x="4" y="{base - LANE / 2 + 28}" fill="{TOLD_COLOUR}">{lost} told lost</text>')
    return sheet.done()


def memory(
    title: str, series: Sequence[Series], znodes: Sequence[tuple[float, int]], faults: Sequence[Done], seconds: float
) -> str:
    """Anonymous memory of each process, one lane per machine and kind; a line is one life, the longest in another colour."""
    lanes: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        kind, _, rest = one.name.partition("/")
        queue = rest.partition("/")[0]
        lanes.setdefault((one.machine, f"{kind}/{queue}" if queue else kind.removeprefix("roq-")), []).append(one)
    sheet = _Sheet(title, len(lanes) + 1, seconds, lane=MEMORY_LANE, left=MEMORY_LEFT, top=MEMORY_TOP)
    for _ in sheet.faults(faults):
        pass  # only the marks: an hour has too many for labels
    for number, ((machine, kind), lives) in enumerate(sorted(lanes.items())):
        most = max(value for one in lives for value in one.column("memory"))
        longest = max(lives, key=lambda one: one.at[-1] - one.at[0])
        life = f"longest life {longest.at[-1] - longest.at[0]:.0f} s"
        name = machine if machine == kind else f"{machine} {kind}"
        base = sheet.lane(number, name, f"0 … {most / 2**20:.1f} MiB", f"{len(lives)} lives, {life}")
        for one in lives:
            colour = MARK_COLOUR if one is longest else LINE_COLOUR
            sheet.line(base, list(zip(one.at, one.column("memory"), strict=True)), max(most, 1), colour)
    most = max([1, *(count for _, count in znodes)])
    sheet.line(sheet.lane(len(lanes), "znodes", f"0 … {most}"), znodes, most)
    return sheet.done()
