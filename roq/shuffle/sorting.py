"""The order of encoded keys: a stable sort of whole numbers, eight bytes of the keys at a time.

What all keys have in common is skipped first. Later bytes are looked at only where the earlier ones tie, so random keys are
sorted by one pass (in C, vectorised), and sorted or equal ones by none.
"""

from __future__ import annotations

import numpy as np

from roq.shuffle.keys import WORD, Keys, Rows, Words

ENDED_BYTES = 8 * WORD  # so often keys that have ended are left out: one long key must not make work for many short ones


def order(keys: Keys) -> Rows:
    """The rows in key order; those with the same key stay as they were."""
    rows: Rows = np.arange(len(keys), dtype=np.int64)
    if len(keys) < 2:
        return rows
    at, words = _first_difference(keys)
    if at >= keys.longest:
        return _by_length(keys, rows) if keys.width < 0 else rows
    if not (words[1:] >= words[:-1]).all():
        rows = np.argsort(words)  # not stable: _Ties puts that right
        words = words[rows]
    ties = _Ties(words)
    ties.settle(rows)
    for offset in range(at + WORD, keys.longest, WORD):
        if not ties.positions.size:
            return rows
        ties.refine(rows, keys.words(offset, rows[ties.positions]))
        if keys.width < 0 and (offset - at) % ENDED_BYTES == 0:
            ties.drop_ended(rows, keys, offset + WORD)
    if keys.width < 0 and ties.positions.size:  # "a" and "a\0" have the same words
        ties.refine(rows, keys.lengths(rows[ties.positions]))
    return rows


def is_sorted(rows: Rows) -> bool:
    """Whether an order leaves everything as it is."""
    return bool((rows[1:] > rows[:-1]).all())


def _first_difference(keys: Keys) -> tuple[int, Words]:
    """The number of leading bytes that all keys share, and the words from there on."""
    for offset in range(0, max(1, keys.longest), WORD):
        words = keys.words(offset)
        differing = int(words.min()) ^ int(words.max())
        if differing:
            shared = WORD - (differing.bit_length() + 7) // 8
            return offset + shared, words if shared == 0 else keys.words(offset + shared)
    return keys.longest, words


def _by_length(keys: Keys, rows: Rows) -> Rows:
    return rows[np.argsort(keys.lengths(rows), kind="stable")]


class _Ties:
    """Where neighbours in the order so far are not told apart yet. positions: all such places, in order; groups: which of them
    tie with each other."""

    def __init__(self, words: Words) -> None:
        same = np.zeros(len(words) + 1, bool)
        np.equal(words[1:], words[:-1], out=same[1:-1])
        self.positions: Rows = np.flatnonzero(same[1:] | same[:-1])
        self._groups: Rows = np.cumsum(~same[:-1][self.positions])

    def settle(self, rows: Rows) -> None:
        """Put the rows of each group in their original order."""
        tied = rows[self.positions]
        if not ((tied[1:] > tied[:-1]) | (self._groups[1:] != self._groups[:-1])).all():
            both = np.sort((self._groups.astype(np.uint64) << np.uint64(32)) | tied.astype(np.uint64))
            rows[self.positions] = (both & np.uint64(0xFFFFFFFF)).astype(np.int64)

    def drop_ended(self, rows: Rows, keys: Keys, offset: int) -> None:
        """Settle ties between keys of which no more than `offset` bytes, all compared, are left: the shorter one is a prefix of
        the other, and those of one length are equal."""
        if self.positions.size:
            self.refine(rows, np.minimum(keys.lengths(rows[self.positions]), np.uint64(offset + 1)))
            going_on = keys.lengths(rows[self.positions]) > offset
            self.positions, self._groups = self.positions[going_on], self._groups[going_on]

    def refine(self, rows: Rows, words: Words) -> None:
        """Sort within the groups by these words of the tied rows, stably, and keep what still ties."""
        groups = self._groups
        if not ((words[1:] >= words[:-1]) | (groups[1:] != groups[:-1])).all():
            by = np.lexsort((words, groups))
            rows[self.positions] = rows[self.positions][by]
            words = words[by]
        same = np.zeros(len(words) + 1, bool)
        same[1:-1] = (words[1:] == words[:-1]) & (groups[1:] == groups[:-1])
        still = same[1:] | same[:-1]
        self._groups = np.cumsum(~same[:-1])[still]
        self.positions = self.positions[still]
