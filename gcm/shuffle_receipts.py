"""Receipts of commits that come, told in parts: in memory, for the few that are told last. Whoever finds that some are not here
(any more, or as another GCM leads now) tells all of them again. Pure."""

from __future__ import annotations

from collections import OrderedDict

from roq.errors import FrameError, NotReady
from roq.wire.gcm import CommitShuffle, NameReceipts
from roq.wire.shuffle import PARTITIONS_MAX, WINNERS_AT_ONCE, Receipt

COMMITS_MAX = 8  # told at a time
PARTS_MAX = -(-PARTITIONS_MAX // WINNERS_AT_ONCE)


class Receipts:
    """Of one term."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], dict[int, list[Receipt]]] = OrderedDict()  # by shuffle and transaction

    def add(self, part: NameReceipts) -> None:
        """One part; again: the same. Raises FrameError."""
        if not 0 <= part.number < PARTS_MAX or len(part.receipts) > WINNERS_AT_ONCE:
            raise FrameError(f"part {part.number} of the receipts of shuffle {part.name!r}, with {len(part.receipts)}")
        commit = (part.name, part.transaction)
        self._told.setdefault(commit, {})[part.number] = part.receipts
        self._told.move_to_end(commit)
        while len(self._told) > COMMITS_MAX:
            self._told.popitem(last=False)

    def of(self, commit: CommitShuffle) -> tuple[Receipt, ...]:
        """All that the commit names. Raises NotReady."""
        told = self._told.get((commit.name, commit.transaction), {})
        missing = [number for number in range(min(commit.parts, PARTS_MAX + 1)) if number not in told]
        if missing:
            raise NotReady(f"{len(missing)} of {commit.parts} parts of the receipts of {commit.name!r} are not known")
        return (*(receipt for number in range(commit.parts) for receipt in told[number]), *commit.receipts)

    def forget(self, commit: CommitShuffle) -> None:
        """It is sealed."""
        self._told.pop((commit.name, commit.transaction), None)
