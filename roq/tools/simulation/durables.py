"""A simulated recorded queue with durable subscribers: lives end with a close, without one, or when the name is taken.

Two names, which all clients share: each opens one of them again and again, also while another has it, some take slowly what
comes. All lives of a name are one reader, which begins with the tapes: the accounts of recordings.py hold over them. A life
never begins before the place at which one before began.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from random import Random
from typing import Any

import roq
from roq.errors import DurableTaken, InvalidPosition, RoqError, SlowSubscriber, TemporaryError
from roq.tools.simulation.cluster import QUEUE, ZOOKEEPER
from roq.tools.simulation.load import AGAIN_SECONDS, CLOSE_SECONDS, OPEN_SECONDS
from roq.tools.simulation.recording_cluster import RecordingCluster
from roq.tools.simulation.recordings import Reading, RecordingBooks, take_batches
from roq.wire.recording import TapePosition

NAMES = "d0", "d1"
LIFE_SECONDS = 1.0, 4.0, 12.0, math.inf
PAUSE_SECONDS = 0.0, 0.0, 0.3  # after each batch
TAKE_BACK_SECONDS = 6.0  # who was fenced opens the name again within that


class DurableBook:
    """All lives of a name, as they began: where, and what they read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives: list[Reading] = []
        self.begun: dict[str, int] = {}  # the furthest of each tape

    def begin(self, books: RecordingBooks, reading: Reading, place: TapePosition | None, floor: dict[str, int]) -> None:
        """Another life has begun there. floor: `begun` when it was asked for."""
        done = {} if place is None else place.done
        if back := {tape: entry for tape, entry in floor.items() if done.get(tape, -1) < entry}:
            books.errors.append(f"{reading}: it begins at {done}, behind an earlier one at {back}")
        self.begun = {tape: max(done.get(tape, -1), self.begun.get(tape, -1)) for tape in done.keys() | self.begun.keys()}
        reading.before = self.lives[-1] if self.lives else None
        self.lives.append(reading)
        books.readings.append(reading)


async def read_lives(
    books: RecordingBooks, book: DurableBook, zookeeper: str, label: str, random: Random, stop: asyncio.Event
) -> None:
    """Life after life of that name until `stop`; at the end the last one stays."""
    while not stop.is_set():
        seconds = math.inf if books.ending else random.choice(LIFE_SECONDS)
        cluster = roq.connect(zookeeper, connect_seconds=OPEN_SECONDS)
        try:
            taken = await _live(books, book, cluster, Reading(label, f"durable {book.name}", 0.0), seconds, random, stop)
        except TemporaryError:
            taken = False
        with contextlib.suppress(RoqError):
            await cluster.close()
        if taken and books.ending:
            await stop.wait()
        await asyncio.sleep(random.uniform(0.0, TAKE_BACK_SECONDS) if taken else AGAIN_SECONDS)


async def _live(
    books: RecordingBooks,
    book: DurableBook,
    cluster: roq.Cluster,
    reading: Reading,
    seconds: float,
    random: Random,
    stop: asyncio.Event,
) -> bool:
    """For so long at most; whether the name was taken. Raises TemporaryError: it could not begin."""
    told: list[roq.MessagesLost] = []
    reading.opened, floor = books.loop.time(), dict(book.begun)
    await cluster.__aenter__()
    follow = random.choice((True, "stored"))
    made = cluster.subscriber(QUEUE, durable=book.name, on_lost=told.append, start="earliest", follow=follow)
    try:
        subscriber = await made.open(OPEN_SECONDS)
    except (DurableTaken, InvalidPosition) as error:
        if isinstance(error, InvalidPosition):
            books.errors.append(f"{reading}: {error}")
        return isinstance(error, DurableTaken)
    book.begin(books, reading, subscriber.position, floor)
    job = asyncio.get_running_loop().create_task(take_batches(books, reading, subscriber, told, random.choice(PAUSE_SECONDS)))
    waiting = asyncio.get_running_loop().create_task(stop.wait())
    limit = None if seconds == math.inf else seconds
    await asyncio.wait([job, waiting], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    reading.over = job.done() or not stop.is_set()
    with contextlib.suppress(RoqError):
        await subscriber.close(CLOSE_SECONDS if stop.is_set() or random.random() < 0.5 else 0)
    try:
        await job
    except (TemporaryError, SlowSubscriber):
        return False
    except DurableTaken:
        return True
    return False


class DurableCluster(RecordingCluster):
    """As a RecordingCluster, with other readers."""

    READERS = ("reader",) * 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._durables = [DurableBook(name) for name in NAMES]
        self._opened = 0

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what != "reader":
            return super()._program(what, label, random, stop)
        self._opened += 1
        book = self._durables[self._opened % len(NAMES)]
        return self._told(label, read_lives(self.recording, book, ZOOKEEPER, label, random, stop))
