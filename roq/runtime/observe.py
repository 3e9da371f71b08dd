"""Structured logs (one JSON object per line) and counters. Nothing secret goes in either.

A line says what happened in fixed words, and its facts in `extra={"fields": …}`. Our own processes write both as JSON; in a
user's process, whose logging is ordinary, `logger` puts the facts behind the words.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

LOG_REPEAT_SECONDS = 5.0  # the same kind of refusal is logged at most this often; all are counted
LOG_BYTES_MAX = 16 * 1024 * 1024  # a log file is cut in two at this size, one older half is kept


class Counters(Counter[str]):
    """Named totals of one process since its start."""


class Histogram:
    """How often a value was how large, since the start. bounds: upper ends of the buckets, ascending; one more bucket has what
    is above. sum: of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class _FactsInText(logging.Filter):
    """Turns "what happened" into "what happened: name=value, …"; the words by themselves stay in `record.what`."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, "fields", None)
        if fields and not hasattr(record, "what"):
            what = record.__dict__["what"] = record.getMessage()
            record.msg = f"{what}: {', '.join(f'{name}={value}' for name, value in fields.items())}"
            record.args = None
        return True


_FACTS = _FactsInText()


def logger(name: str) -> logging.Logger:
    """The logger of a module whose lines have fields: whoever reads them as text sees the facts too."""
    made = logging.getLogger(name)
    made.addFilter(_FACTS)  # once, however often it is added
    return made


class JsonFormatter(logging.Formatter):
    """{"t": seconds since 1970, "level", "process", "pid", "message", …extra fields}"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line = {
            "t": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self.process,
            "pid": os.getpid(),
            "message": getattr(record, "what", None) or record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _CappedFile(logging.StreamHandler):  # type: ignore[type-arg]
    """Appends to a file and starts over once it is large; keeps one older half beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path.open("a", buffering=1))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream.closed or self.stream.tell() > LOG_BYTES_MAX:
                self._begin_anew()
        except OSError:  # tell() writes what is left: on a full disk the record is dropped, and the program goes on
            return
        super().emit(record)

    def _begin_anew(self) -> None:
        self.stream.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
        self.stream = self.path.open("a", buffering=1)


def set_up_logging(process: str, level: str = "INFO", path: Path | None = None) -> None:
    """Send this process's records to `path`, or to standard error."""
    handler = _CappedFile(path) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("kazoo").setLevel(logging.ERROR)


class Refusals:
    """Counts every refused input by reason and logs each reason at most every LOG_REPEAT_SECONDS."""

    def __init__(self, log: logging.Logger, counters: Counters) -> None:
        self._log, self._counters = log, counters
        self._logged: dict[str, float] = {}

    def note(self, reason: str, detail: object) -> None:
        """One refusal. `reason` is a fixed word, `detail` whatever helps."""
        self._counters[f"refused_{reason}"] += 1
        now = time.monotonic()
        if now - self._logged.get(reason, -LOG_REPEAT_SECONDS) >= LOG_REPEAT_SECONDS:
            self._logged[reason] = now
            total = self._counters[f"refused_{reason}"]
            self._log.warning("refused input", extra={"fields": {"reason": reason, "detail": str(detail), "total": total}})
