"""Where a reader's range comes from in a cluster: from one of its holders, and from another one when that fails.

Readers begin with different holders, by hash: a round robin without state. A holder that is busy, silent, damaged or not whole
is left for the next one; when all have failed, they are asked again after growing pauses with jitter, up to a deadline, and the
leader is asked who holds the range now. Rows have numbers, so another holder goes on at the very row. Not covered: merging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar
from zlib import crc32

from roq.errors import Closed, DataLost, FrameError, RoqError, TemporaryError, Unavailable, WinnersUnknown
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.shuffle.contract import Opened
from roq.shuffle.follower_link import FollowerLink
from roq.shuffle.placement import replica_order
from roq.shuffle.ranges import intersection
from roq.shuffle.winners import Winners, parts
from roq.wire import shuffle as wire
from roq.wire.gcm import ShuffleInfo
from roq.wire.shuffle import BLOCKS_BYTES_MAX, Block, Cursor, Range, RunSlice

log = logger(__name__)
T = TypeVar("T")
TRY_SECONDS = 10.0  # one request to one holder
PATIENCE_SECONDS = 120.0  # without a single answer
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.05, 5.0
AHEAD_BYTES = 8 * 1024 * 1024  # read at once, by all slices of a range together


class Holders(NamedTuple):
    """Who may have the range, the likeliest first: (host, endpoint)."""

    range: Range
    winners: Winners
    found: list[tuple[str, str]]


class ClusterSource:
    """A contract.RangeSource. info: what the range is located by. describe(): the shuffle as the leader knows it now. Raises
    Unavailable, DataLost."""

    def __init__(self, link: FollowerLink, describe: Callable[[], ShuffleInfo], number: int, info: ShuffleInfo) -> None:
        self._link, self._describe, self._number = link, describe, number
        self._reader = new_token()
        self._shuffle, self._wanted = info.description.id, info.description.ranges[number]
        self.opened = Opened(self._shuffle, self._wanted.interval)
        self._name, self._spec = info.description.name, info.description.spec
        self._holders = self._locate(info)
        self._at = 0  # the holder that is asked
        self.slices: Sequence[RunSlice] = ()
        self._persist(self._list)
        self._ahead = max(1, AHEAD_BYTES // max(1, len(self.slices)))

    def _locate(self, info: ShuffleInfo) -> Holders:
        """Its holders, then those of what overlaps it now and in the table before: each row is with one of them."""
        description = info.description
        hosts = list(replica_order(self._reader, self._shuffle, self._number, self._wanted.holders))
        for each in (*description.ranges, *description.former):
            if intersection(each.interval, self._wanted.interval) is not None:
                hosts += replica_order(self._reader, self._shuffle, self._number, each.holders)
        known = [(host, info.followers[host]) for host in dict.fromkeys(hosts) if host in info.followers]
        return Holders(self._wanted, Winners(description.winners), known)

    def _persist(self, attempt: Callable[[str], T]) -> T:
        """What attempt(endpoint) returns at the first holder that can. Raises Unavailable, DataLost, Closed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pauses = delays(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        failure: RoqError = Unavailable(f"no holder of range {self._number} is known")
        while True:
            for _ in range(len(self._holders.found)):
                host, endpoint = self._holders.found[self._at % len(self._holders.found)]
                try:
                    return attempt(endpoint)
                except Closed:
                    raise
                except RoqError as error:  # whatever is wrong with this one, another may be well
                    log.info("read failed over to another replica", extra={"fields": {"host": host, "reason": str(error)}})
                    if not (isinstance(error, Unavailable) and isinstance(failure, DataLost)):
                        failure = error
                    self._at += 1
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                raise failure if isinstance(failure, DataLost | TemporaryError) else Unavailable(str(failure))
            self._link.pause(pause)
            try:
                self._holders = self._locate(self._describe())
            except TemporaryError as error:
                failure = error

    def _list(self, endpoint: str) -> None:
        slices: list[RunSlice] = []
        begin: Cursor | None = wire.BEGIN
        while begin is not None:
            page = self._page(endpoint, begin)
            slices += page.slices
            if page.next is not None and page.next <= begin:
                raise FrameError(f"the pages of {endpoint} do not go on")
            begin = page.next
        rows = sum(each.rows for each in slices)
        if 0 <= self._wanted.rows != rows:
            raise DataLost(f"range {self._number} has {self._wanted.rows} rows, and {endpoint} has {rows} of them")
        self.slices = slices

    def _page(self, endpoint: str, begin: Cursor) -> wire.Slices:
        """Who does not know the winners (any more) is told them."""
        winners = self._holders.winners
        digest = winners.digest if len(winners) else ""
        request = wire.ListSlices(self._shuffle, self._wanted.interval, {}, digest=digest, begin=begin)
        try:
            return self._link.ask(endpoint, request, wire.Slices, TRY_SECONDS)
        except WinnersUnknown:
            for part in parts(self._shuffle, self._name, self._spec, winners):
                self._link.ask(endpoint, part, wire.FollowerDone, TRY_SECONDS)
            return self._link.ask(endpoint, request, wire.Slices, TRY_SECONDS)

    def blocks(self, slice: RunSlice) -> Iterator[Block]:
        """See RangeSource."""
        row, last = slice.first, slice.first + slice.rows - 1
        size = min(self._ahead, BLOCKS_BYTES_MAX)
        while row <= last:
            request = wire.ReadBlocks(self._shuffle, slice.partition, slice.attempt, slice.run, row, last, size)
            for block in self._persist(lambda endpoint: self._read(endpoint, request)).blocks:  # noqa: B023
                yield block
                row = block.first + block.rows

    def _read(self, endpoint: str, request: wire.ReadBlocks) -> wire.Blocks:
        found = self._link.ask(endpoint, request, wire.Blocks, TRY_SECONDS)
        row = request.first
        for block in found.blocks:
            if crc32(block.data) != block.crc or not block.first <= row < block.first + block.rows:
                raise DataLost(f"{endpoint} sent a damaged block")
            row = block.first + block.rows
        if not found.blocks:
            raise DataLost(f"{endpoint} does not have row {row} of run {request.run} of partition {request.partition}")
        return found

    def close(self) -> None:
        """See RangeSource: lines belong to the link, nothing else is held."""
