"""Times, places and sizes as people write them on the command line: 90m, 2026-11-26T10:00, earliest, 10GB."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import typer

from roq.wire.recording import TapePosition

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
UNIT_BYTES: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
}
EARLIEST, LAST, NOW, POSITION = "earliest", "last", "now", "p1."
_NUMBER = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)


def duration_seconds(text: str) -> float:
    """90m → 5400.0. Raises BadParameter."""
    number, unit = _parts(text)
    if unit not in UNIT_SECONDS:
        raise typer.BadParameter(f"a time is a number of {', '.join(UNIT_SECONDS)}, such as 90m or 7d; got {text!r}")
    return number * UNIT_SECONDS[unit]


def start_of(text: str) -> str | datetime | timedelta | TapePosition:
    """Where to begin in what was recorded: earliest; last → with the last one of each topic; 2h → so long ago; 2026-11-26T10:00
    → then, local time unless it says otherwise; p1.… → that position. Raises BadParameter, InvalidPosition."""
    if text in (EARLIEST, LAST):
        return text
    if text.startswith(POSITION):
        return TapePosition.parse(text)
    number, unit = _parts(text)
    try:
        if unit not in UNIT_SECONDS:
            return datetime.fromisoformat(text).astimezone()
        return timedelta(seconds=number * UNIT_SECONDS[unit])
    except (ValueError, OverflowError):
        possible = (
            f"{EARLIEST}, {LAST}, so long ago such as 2h or 7d, a date or time such as 2026-11-26T10:00, or a position "
            f"({POSITION}…)"
        )
        raise typer.BadParameter(f"where to begin is {possible}; got {text!r}") from None


def group_start(text: str) -> str | datetime | timedelta | TapePosition:
    """Where a group begins: now, or as start_of, but for last."""
    if text == LAST:
        raise typer.BadParameter(f"a group gets everything from where it begins, so not only the {LAST} of each topic")
    return text if text == NOW else start_of(text)


def byte_count(text: str) -> int:
    """10GB → 10 000 000 000, 1 GiB → 1 073 741 824, 500 → 500. Raises BadParameter."""
    number, unit = _parts(text)
    unit = next((known for known in UNIT_BYTES if known.upper() == unit.upper()), "?")
    if unit not in UNIT_BYTES:
        raise typer.BadParameter(f"a size is a number of bytes, or of KB, MB, GB, TB, KiB … TiB, such as 10GB; got {text!r}")
    return round(number * UNIT_BYTES[unit])


def _parts(text: str) -> tuple[float, str]:
    """(0.0, "?") if it is no number with a unit."""
    found = _NUMBER.fullmatch(text.strip())
    return (float(found[1]), found[2]) if found else (0.0, "?")
