"""Structured logs and counters. Nothing secret goes in either.

A line says what happened in fixed words, and its facts in `extra={"fields": …}`. Our own processes write both as JSON
(roq/runtime/log_output.py); in a user's process, whose logging is ordinary, `logger` puts the facts behind the words.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Sequence

LOG_REPEAT_SECONDS = 5.0  # the same kind of refusal is logged at most this often; all are counted


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
