"""A simulated recorded queue whose publishers have names: lives end with a close, without one, or when the name is taken.

Two names, which all clients share: each opens one of them again and again, also while another has it, and publishes what its
source has behind the number that it is told. The accounts of recordings.py hold over all lives of a name: what was told to be
stored comes once, in order. A life never begins behind a lower number than one before was told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from random import Random
from typing import Any

import roq
from roq.errors import Closed, DeadlineExceeded, NotRecorded, ProducerFenced, RoqError, TemporaryError
from roq.tools.simulation.cluster import QUEUE, ZOOKEEPER
from roq.tools.simulation.load import AGAIN_SECONDS, CLOSE_SECONDS, FLUSH_SECONDS, OPEN_SECONDS
from roq.tools.simulation.recording_cluster import RecordingCluster
from roq.tools.simulation.recordings import STORED, RecordedPublisher, RecordingBooks, RecordPace

NAMES = "p0", "p1"
LIFE_SECONDS = 1.0, 4.0, 12.0
TAKE_BACK_SECONDS = 6.0  # who was fenced opens the name again within that


def topic_of(number: int, topics: int) -> str:
    """The source has it like this in every life."""
    return f"t{number * 7919 % topics}"


async def publish_lives(
    books: RecordingBooks, book: RecordedPublisher, zookeeper: str, pace: RecordPace, random: Random, stop: asyncio.Event
) -> None:
    """Life after life of that name until `stop`."""
    while not stop.is_set():
        cluster = roq.connect(zookeeper, connect_seconds=OPEN_SECONDS)
        told = max(book.stored, default=0)
        pause = AGAIN_SECONDS
        try:
            await cluster.__aenter__()
            publisher = await cluster.publisher(QUEUE, producer=book.label).open(OPEN_SECONDS)
        except RoqError:
            await cluster.close()
            await asyncio.sleep(AGAIN_SECONDS)
            continue
        if book.id != publisher.id:
            books.errors += [f"{book.label} has another id than before"] * bool(book.id)
            book.id = publisher.id
        if publisher.number < told:
            books.errors.append(f"{book.label} begins behind {publisher.number}, and {told} is stored")
        try:
            await _live(books, book, publisher, pace, random, stop)
        except ProducerFenced:
            pause = random.uniform(0.0, TAKE_BACK_SECONDS)
        except NotRecorded:
            if not books.switched(books.loop.time(), books.loop.time()):
                books.errors.append(f"{book.label} heard that nothing is recorded, and it is")
        with contextlib.suppress(RoqError):
            await cluster.close()
        await asyncio.sleep(pause)


async def _live(
    books: RecordingBooks,
    book: RecordedPublisher,
    publisher: roq.Publisher,
    pace: RecordPace,
    random: Random,
    stop: asyncio.Event,
) -> None:
    """Publish, and end in some way. Raises ProducerFenced, NotRecorded."""
    number, ends = publisher.number, books.loop.time() + random.choice(LIFE_SECONDS)
    while not stop.is_set() and books.loop.time() < ends:
        for _ in range(pace.burst):
            number += 1
            if number > len(book.began):
                book.began.append(books.loop.time())
                book.topics.append(topic_of(number, pace.topics))
            await publisher.publish(topic_of(number, pace.topics), b"%d " % number + bytes(pace.size))
        if random.random() < 0.5:
            with contextlib.suppress(DeadlineExceeded):
                receipt = await publisher.flush(FLUSH_SECONDS)
                assert receipt.level == STORED
                book.are_stored(number, books.loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.expovariate(pace.rate)):
                await stop.wait()
    if stop.is_set() or random.random() < 0.4:
        with contextlib.suppress(TemporaryError):
            await publisher.close(CLOSE_SECONDS)
            book.are_stored(number, books.loop.time())
    else:  # as if it was killed
        with contextlib.suppress(Closed):
            await publisher.close(0)


class ProducerCluster(RecordingCluster):
    """As a RecordingCluster, with other publishers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._names = [RecordedPublisher(name, named=True) for name in NAMES]
        self.recording.published += self._names
        self.recording.recorded += self._names
        self._opened = 0

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what != "publisher":
            return super()._program(what, label, random, stop)
        self._opened += 1
        book = self._names[self._opened % len(NAMES)]
        return self._told(label, publish_lives(self.recording, book, ZOOKEEPER, self.pace, random, stop))
