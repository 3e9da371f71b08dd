"""Dead letters by what their errors have in common. Pure.

What differs from letter to letter is left out of an error's text, so that the rest is the same for one cause:

    5e0c1f9a-…-…-…-…   «uuid»      0x7f3a…, 3f2a9c01 (8 hexadecimal digits and more, a digit among them)   «hex»
    2026-11-26T10:00   «time»      -12.5e3   #      'orders-7', "eu"   kept, their numbers are not

Not covered: which letters there are (desk.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

PATTERN_CHARACTERS_MAX = 300  # of the first line that says something: what follows is mostly where it happened
NO_ERROR = "(no error was given)"
_RULES = (
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "«uuid»"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"), "«time»"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "«hex»"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "«hex»"),
    (re.compile(r"(?<![\w.])[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE), "#"),
    (re.compile(r"(?<=[^\W\d])\d+"), "#"),  # within a word: host12, order7
    (re.compile(r"\s+"), " "),
)


class FailedLetter(NamedTuple):
    """What is looked at of one. inserted: Unix seconds."""

    id: str
    error: str
    attempts: int
    inserted: float


class ErrorPattern(NamedTuple):
    """Letters whose errors are alike. id: of the pattern, always the same one; example: number of the first of them among all
    that were looked at; first, last: when they were put, Unix seconds."""

    id: str
    pattern: str
    ids: tuple[str, ...]
    first: float
    last: float
    attempts_most: int
    example: int


def pattern_of(error: str) -> str:
    """What an error has in common with others of its cause: see the rules above."""
    line = next((line for line in error.splitlines() if line.strip()), "")
    for rule, mark in _RULES:
        line = rule.sub(mark, line)
    return line.strip()[:PATTERN_CHARACTERS_MAX] or NO_ERROR


def pattern_id(pattern: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(pattern.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def patterns_of(letters: Iterable[FailedLetter]) -> list[ErrorPattern]:
    """The most frequent first, among equals the one with the newest letter."""
    found: dict[str, list[tuple[int, FailedLetter]]] = {}
    for number, letter in enumerate(letters):
        found.setdefault(pattern_of(letter.error), []).append((number, letter))
    return sorted((_pattern(text, those) for text, those in found.items()), key=lambda one: (-len(one.ids), -one.last, one.id))


def _pattern(text: str, those: list[tuple[int, FailedLetter]]) -> ErrorPattern:
    letters = [letter for _, letter in those]
    put = [letter.inserted for letter in letters]
    ids = tuple(letter.id for letter in letters)
    return ErrorPattern(
        pattern_id(text), text, ids, min(put), max(put), max(letter.attempts for letter in letters), those[0][0]
    )
