"""How a follower is asked what one shuffle's machine wants to know, however many winners there are: their digest stands for
them, who does not know it is told them in parts, and an answer in pages is put together.

Not covered: when it is asked again (shuffle_driver.py).
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

import msgspec

from roq.errors import FrameError, WinnersUnknown
from roq.shuffle.committed import Winners, parts
from roq.shuffle.record import ShuffleRecord
from roq.shuffle.sampling import is_sound, key_count, message_bytes, reduced
from roq.wire import shuffle as wire
from roq.wire.shuffle import Cursor, RunSample

T = TypeVar("T", bound=msgspec.Struct)
SAMPLES_HELD = 16  # times the keys that are wanted; more are made fewer at once
SAMPLE_BYTES_MAX = 8 * 1024 * 1024  # of one answer
TELL_SECONDS = 20.0  # one part of the winners
WithWinners = wire.TellSamples | wire.CountRows | wire.FetchInterval | wire.KeepIntervals


class FollowerRequest(Protocol):
    """A follower's answer (gcm/followers.py)."""

    async def __call__(self, host: str, request: msgspec.Struct, expect: type[T], seconds: float, /) -> T:
        """Raises what the follower raises, Unavailable, DeadlineExceeded, Closed."""


class Inquirer:
    """Of one shuffle. record: any of it; which winners count is said by each request."""

    def __init__(self, request: FollowerRequest, record: ShuffleRecord) -> None:
        self._request, self._record = request, record
        self._named: tuple[dict[int, str], Winners] | None = None  # as they are in requests, and as they are told
        self._telling: dict[str, asyncio.Lock] = {}
        self._told: dict[str, int] = {}  # how often, by host

    async def answer(self, host: str, request: wire.Request, expect: type[msgspec.Struct], seconds: float) -> msgspec.Struct:
        """All of it. seconds: for each page. Raises what the follower raises, Unavailable, DeadlineExceeded, FrameError."""
        if not isinstance(request, WithWinners):
            return await self._request(host, request, expect, seconds)
        winners = self._winners(request.winners)
        if len(winners):
            request = msgspec.structs.replace(request, winners={}, digest=winners.digest)
        match request:
            case wire.CountRows():
                return await self._counts(host, request, winners, seconds)
            case wire.TellSamples():
                return await self._samples(host, request, winners, seconds)
            case wire.FetchInterval():
                return await self._fetched(host, request, winners, seconds)
            case wire.KeepIntervals():
                return await self._one(host, request, winners, wire.FollowerDone, seconds)

    def _winners(self, named: dict[int, str]) -> Winners:
        if self._named is None or (self._named[0] is not named and self._named[0] != named):
            self._named = (named, Winners(named))
        self._named = (named, self._named[1])
        return self._named[1]

    async def _one(self, host: str, request: msgspec.Struct, winners: Winners, expect: type[T], seconds: float) -> T:
        """One page. Who does not know the winners is told them once, however many requests wait for that."""
        told = self._told.get(host, 0)
        try:
            return await self._request(host, request, expect, seconds)
        except WinnersUnknown:
            async with self._telling.setdefault(host, asyncio.Lock()):
                if self._told.get(host, 0) == told:
                    for part in parts(self._record.id, self._record.name, self._record.spec, winners):
                        await self._request(host, part, wire.FollowerDone, TELL_SECONDS)
                    self._told[host] = told + 1
        return await self._request(host, request, expect, seconds)

    async def _fetched(self, host: str, request: wire.FetchInterval, winners: Winners, seconds: float) -> wire.Fetched:
        """When it is whole, however long that takes: each time the follower says that it goes on."""
        size, whole = 0, False
        while not whole:
            reply = await self._one(host, request, winners, wire.Fetched, seconds)
            size, whole = size + reply.size, reply.whole
        return wire.Fetched(size)

    async def _counts(self, host: str, request: wire.CountRows, winners: Winners, seconds: float) -> wire.Counts:
        rows, sizes = [0] * len(request.intervals), [0] * len(request.intervals)
        begin: Cursor | None = request.begin
        while begin is not None:
            page = await self._one(host, msgspec.structs.replace(request, begin=begin), winners, wire.Counts, seconds)
            if not len(rows) == len(page.rows) == len(page.sizes):
                raise FrameError("that does not answer what was asked")
            rows = [one + other for one, other in zip(rows, page.rows, strict=True)]
            sizes = [one + other for one, other in zip(sizes, page.sizes, strict=True)]
            begin = _following(begin, page)
        return wire.Counts(rows, sizes)

    async def _samples(self, host: str, request: wire.TellSamples, winners: Winners, seconds: float) -> wire.Samples:
        """All samples, or fewer that stand for them, as if they had been one page."""
        found: list[RunSample] = []
        keys = 0
        begin: Cursor | None = request.begin
        while begin is not None:
            page = await self._one(host, msgspec.structs.replace(request, begin=begin), winners, wire.Samples, seconds)
            if not all(map(is_sound, page.samples)):
                raise FrameError("that does not answer what was asked")
            found += page.samples
            keys += key_count(page.samples)
            begin = _following(begin, page)
            if request.keys and keys > SAMPLES_HELD * request.keys:
                found = await asyncio.to_thread(reduced, found, 4 * request.keys, 4 * SAMPLE_BYTES_MAX, winners.by)
                keys = key_count(found)
        if request.keys and (keys > 2 * request.keys or sum(map(message_bytes, found)) > SAMPLE_BYTES_MAX):
            found = await asyncio.to_thread(reduced, found, request.keys, SAMPLE_BYTES_MAX, winners.by)
        return wire.Samples(found)


def _following(begin: Cursor, page: wire.Counts | wire.Samples) -> Cursor | None:
    """Where the next page begins. Raises FrameError: it does not go on."""
    if page.next is not None and page.next <= begin:
        raise FrameError("pages do not go on")
    return page.next
