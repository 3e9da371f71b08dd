"""Which attempts count, as one value with a short name. There may be hundreds of thousands of them: they are told in parts,
once to each follower, and named by their digest in everything that is asked. Not covered: who tells them when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice

import msgspec

from roq.wire.shuffle import COMMITTED_AT_ONCE, NameCommitted, Spec

DIGEST_DIGITS = 32
_encode = msgspec.msgpack.Encoder().encode


class CommittedAttempts:
    """Immutable. by: partition → attempt, in order of partitions."""

    __slots__ = ("_digest", "by", "partitions")

    def __init__(self, committed: dict[int, str]) -> None:
        """Sorting 100,000 takes some 20 ms."""
        self.by = dict(sorted(committed.items()))
        self.partitions = list(self.by)
        self._digest = ""

    def __len__(self) -> int:
        return len(self.by)

    @property
    def digest(self) -> str:
        """Names them."""
        if not self._digest:
            self._digest = sha256(_encode(self.by)).hexdigest()[:DIGEST_DIGITS]
        return self._digest


def joined(parts: Iterable[dict[int, str]]) -> CommittedAttempts:
    """What was told in parts."""
    found: dict[int, str] = {}
    for part in parts:
        found |= part
    return CommittedAttempts(found)


def parts(shuffle: str, name: str, spec: Spec, committed: CommittedAttempts) -> Iterator[NameCommitted]:
    """The messages that tell them."""
    items = iter(committed.by.items())
    last = max(0, len(committed) - 1) // COMMITTED_AT_ONCE
    for number in range(last + 1):
        part = dict(islice(items, COMMITTED_AT_ONCE))
        yield NameCommitted(shuffle, name, spec, committed.digest, number, number == last, part)
