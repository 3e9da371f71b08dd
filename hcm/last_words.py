"""Why a child ended, in one line for people: its exit code or signal, and the last thing it logged."""

from __future__ import annotations

import json
import signal
from pathlib import Path

TAIL_BYTES = 16 * 1024
WORDS_CHARACTERS_MAX = 400  # goes into a znode


def epitaph(code: int | None, pid: int, log_path: Path) -> str:
    """`code`: exit code, minus the signal number, or None if nobody saw it."""
    words = last_words(pid, log_path) if code != 0 else ""
    if code is None:
        how = "ended (nobody saw how)"
    elif code < 0:
        how = f"killed by {_signal_name(-code)}"
    else:
        how = f"exit code {code}"
    return f"{how}: {words}" if words else how


def last_words(pid: int, log_path: Path) -> str:
    """The last error this process logged, else the last line of whatever kind; "" if there is none."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = ""
    for line in reversed(lines):
        level, text = _reading(line, pid)
        if level in ("error", "critical"):
            return text[:WORDS_CHARACTERS_MAX]
        last = last or text
    return last[:WORDS_CHARACTERS_MAX]


def _reading(line: str, pid: int) -> tuple[str, str]:
    """(level, text) of a log line; ("", "") for one of another process, ("", line) for one that is no record."""
    try:
        record = json.loads(line)
        if record["pid"] != pid:
            return "", ""
        parts = [record["message"], record.get("error", ""), record.get("reason", "")]
        parts += record.get("exception", "").strip().splitlines()[-1:]
        return record["level"], ": ".join(part for part in parts if part)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", line.strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
