"""The run as a picture: deliveries per second of each subscriber over time, faults as marks. Plain SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from roq.chaos.history import Done, Heard

WIDTH, LANE, LEFT, RIGHT, TOP, GAP = 1200, 90, 110, 20, 170, 22
FAULT_SECONDS_DRAWN = 0.3  # at least, so that a kill can be seen
COLOURS = {"kill": "#c0392b", "pause": "#d68910"}
NETWORK_COLOUR = "#7d3c98"
LINE_COLOUR, TOLD_COLOUR = "#1f618d", "#c0392b"


def timeline(title: str, heard: Sequence[Heard], faults: Sequence[Done], seconds: float) -> str:
    """SVG text. seconds: length of the whole run, drain included."""
    length = max(seconds, 1.0)
    height = TOP + len(heard) * (LANE + GAP) + 40

    def across(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at / length, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="14">{escape(title)}</text>',
    ]
    bottom = height - 40
    for fault in faults:
        colour = COLOURS.get(fault.kind, NETWORK_COLOUR)
        left, right = across(fault.t), across(fault.t + max(fault.seconds, FAULT_SECONDS_DRAWN))
        label = escape(f"{fault.kind} {fault.target.partition(':')[2].rpartition('/')[0] or fault.target} {fault.seconds:g} s")
        parts.append(
            f'<rect x="{left}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP}" fill="{colour}" opacity="0.25"/>'
        )
        parts.append(
            f'<text transform="translate({left + 3},{TOP - 4}) rotate(-50)" fill="{colour}" font-size="9">{label}</text>'
        )
    most = max([1, *(count for one in heard for count in one.per_second.values())])
    for number, one in enumerate(heard):
        base = TOP + number * (LANE + GAP) + LANE
        counts = [one.per_second.get(second, 0) for second in range(int(length) + 1)]
        points = " ".join(f"{across(at + 0.5)},{base - LANE * count / most:.1f}" for at, count in enumerate(counts))
        parts += [
            f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#999"/>',
            f'<text x="4" y="{base - LANE / 2}">subscriber {number}</text>',
            f'<text x="4" y="{base - LANE / 2 + 14}" fill="#666">0 … {most}/s</text>',
            f'<polyline points="{points}" fill="none" stroke="{LINE_COLOUR}"/>',
        ]
        if lost := sum(told.messages for told in one.told):
            parts.append(f'<text x="4" y="{base - LANE / 2 + 28}" fill="{TOLD_COLOUR}">{lost} told lost</text>')
    step = next(step for step in (1, 2, 5, 10, 30, 60, 300, 600, 3600, length) if length / step <= 20)
    for tick in range(int(length / step) + 1):
        at = tick * step
        parts.append(f'<text x="{across(at)}" y="{height - 20}" text-anchor="middle">{at:g} s</text>')
    return "\n".join([*parts, "</svg>", ""])
