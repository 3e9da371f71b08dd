"""What a producer's life before has stored and not kept: read from the ends of the tapes when its name is opened anew.

Whoever reads has fenced that life before, so no more comes. Of entries without the producer's id nothing is decoded.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from roq.coordination.locate import GcmClient
from roq.errors import DataLost, FrameError, LogTrimmed, LogUnavailable, TemporaryError
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub.outage import Outage
from roq.pubsub.tape import Tape
from roq.pubsub.tape_looks import describe_tapes
from roq.pubsub.watermarks import TOPICS_REMEMBERED
from roq.runtime.observe import logger
from roq.wire import gcm
from roq.wire.frame import FrameKind, Header, bundle_body, parse
from roq.wire.producers import ProducerGrant
from roq.wire.recording import decode_entry, entry_time

log = logger(__name__)
EARLIER_SECONDS = 10.0  # between the clocks of the GCM and of an Exchange, at most, with room to spare
LATER_SECONDS = 60.0  # likewise, and for what was under way, or a process that stood still, when the lease ended
AGAIN_SECONDS = 0.05
LOST_TRIES = 100  # of an entry that no host has; then it is passed over
TAPES_AT_ONCE = 8  # read, each about 1 MiB at a time


class ProducerTail(NamedTuple):
    """number: everything up to it is stored. topics: of those met on the way: number of the last message, messages sent."""

    number: int
    topics: dict[str, tuple[int, int]]


class StoredNumbers:
    """Frames of one publisher as they lie on several tapes, in the order of each. Pure."""

    def __init__(self, publisher: int) -> None:
        self._publisher, self._mark = publisher, struct.pack("<Q", publisher)
        self._ranges: list[tuple[int, int]] = []
        self._topics: dict[str, tuple[int, int]] = {}

    def take(self, entry: bytes) -> None:
        """An entry of a tape. Raises FrameError: a newer program wrote it."""
        if self._mark not in entry:
            return
        for frame in decode_entry(entry).frames:
            if self._mark in frame:
                for topic, header in self._data(frame):
                    self._add(topic, header)

    def _data(self, frame: bytes) -> Iterator[tuple[bytes, Header]]:
        try:
            topic, header, body = parse(frame)
            if header.publisher == self._publisher and header.kind == FrameKind.DATA:
                yield topic, header
            elif header.publisher == self._publisher and header.kind == FrameKind.BUNDLE:
                for inner in bundle_body(body):
                    yield from self._data(inner)
        except FrameError:  # an Exchange forwards and records what it can't read
            return

    def _add(self, topic: bytes, header: Header) -> None:
        first, last = header.sequence, header.sequence + header.count - 1
        if self._ranges and self._ranges[-1][0] <= first <= self._ranges[-1][1] + 1:
            self._ranges[-1] = (self._ranges[-1][0], max(last, self._ranges[-1][1]))
        else:
            self._ranges.append((first, last))
        name = topic.decode(errors="replace")
        if last > self._topics.get(name, (0, 0))[0]:
            self._topics.pop(name, None)
            self._topics[name] = last, header.index + header.count
            if len(self._topics) > TOPICS_REMEMBERED:
                del self._topics[next(iter(self._topics))]

    def behind(self, number: int) -> ProducerTail:
        """What is stored without a gap behind this one, which is."""
        for first, last in sorted(self._ranges):
            if first > number + 1:
                log.warning("of a producer messages %d to %d are on no tape, and later ones are", number + 1, first - 1)
                break
            number = max(number, last)
        return ProducerTail(number, {topic: known for topic, known in self._topics.items() if known[0] <= number})


async def read_tail(client: GcmClient, queue: str, grant: ProducerGrant, moved: Callable[[], None]) -> ProducerTail:
    """All that may be stored behind what was kept. Waits while stores are away. moved(): called whenever something was read.
    Raises QueueNotFound, NotRecorded, AccessDenied (it needs the right `read`, or `subscribe`), FrameError."""
    if grant.settled:
        return ProducerTail(grant.number, {})
    reader = TailReader(client, queue, grant, moved)
    try:
        return await reader.read()
    finally:
        reader.close()


class TailReader:
    """Of all tapes of a queue, TAPES_AT_ONCE at once. See read_tail."""

    def __init__(self, client: GcmClient, queue: str, grant: ProducerGrant, moved: Callable[[], None]) -> None:
        self._client, self._queue, self._grant, self._moved = client, queue, grant, moved
        self._directory, self._found = StaticDirectory({}), StoredNumbers(grant.publisher)
        self._stores = Stores(self._directory)
        self._outage = Outage("tapes can't be read", queue=queue)
        self._room = asyncio.Semaphore(TAPES_AT_ONCE)

    def close(self) -> None:
        """Once it has read, or was cancelled."""
        self._stores.close()

    async def read(self) -> ProducerTail:
        """To the end."""
        tapes = await self._look()
        of_queue = self._queue, tapes.made_by
        reads = [asyncio.ensure_future(self._read(Tape(view, self._stores, of_queue))) for view in tapes.views]
        try:
            await asyncio.gather(*reads)
        finally:
            for one in reads:
                one.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        return self._found.behind(self._grant.number)

    async def _look(self) -> gcm.Tapes:
        while True:
            try:
                tapes = await describe_tapes(self._client, self._queue)
            except TemporaryError as error:
                self._outage.failed(error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self._directory.endpoints.update(tapes.stores)
            self._directory.alive.update(tapes.stores)
            return tapes

    async def _read(self, tape: Tape) -> None:
        tries, begun = 0, False
        async with self._room:
            while True:
                try:
                    if not begun:
                        await self._begin(tape)
                        begun = True
                    if await self._read_on(tape):
                        return
                    tries = 0
                except (LogUnavailable, LogTrimmed) as error:  # trimmed: the next look says up to where
                    self._outage.failed(error)
                except DataLost as error:
                    tries += 1
                    if tries > LOST_TRIES:
                        fields = {"queue": self._queue}
                        log.error("a producer begins without an entry of a tape: %s", error, extra={"fields": fields})
                        tape.done += 1
                await asyncio.sleep(AGAIN_SECONDS)
                view = next((view for view in (await self._look()).views if view.log == tape.log_id), None)
                if view is None:  # it has expired meanwhile
                    return
                tape.update(view)

    async def _begin(self, tape: Tape) -> None:
        """Where it may first have something that was not kept."""
        tape.done = tape.metadata.trimmed
        await tape.seek(round((self._grant.since - EARLIER_SECONDS) * 1000))
        self._moved()

    async def _read_on(self, tape: Tape) -> bool:
        """Whether it is at an end: nothing follows that counts as stored, or only what was written too late. Times that are
        still to come are of a clock that was wrong, and say nothing."""
        until_ms, now_ms = round((self._grant.until + LATER_SECONDS) * 1000), round((time.time() + EARLIER_SECONDS) * 1000)
        while True:
            await tape.fetch()
            if not tape.ahead:
                return tape.ended or await tape.is_nothing_at(tape.metadata, tape.done + 1)
            while tape.ahead:
                position, entry = tape.ahead.popleft()
                if until_ms < entry_time(entry) < now_ms:
                    return True
                self._found.take(entry)
                tape.done = position
                self._moved()
                await asyncio.sleep(0)
