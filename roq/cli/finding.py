"""What `roq doctor` finds."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad it is."""

    GOOD = "good"
    WARNING = "warning"  # works, but will cause trouble
    WRONG = "wrong"  # does not work


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. advice: what to do, empty when it is good, and only then."""

    subject: str
    verdict: Severity
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert bool(self.advice) == (self.verdict is not Severity.GOOD), f"{self.subject}: {self.found}"


def good(subject: str, found: str) -> Finding:
    """As it should be."""
    return Finding(subject, Severity.GOOD, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It works, but."""
    return Finding(subject, Severity.WARNING, found, advice)


def wrong(subject: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(subject, Severity.WRONG, found, advice)
