"""Publishers and readers of a simulated recorded queue, and what their accounts add up to.

What a publisher was told is stored comes to every reader that began before it on the tapes: once, in the publisher's order,
and it is not reported as lost. That holds strictly of what was stored before the reader began, for that it gets from the tapes;
what is stored later may come live, and be lost where faults may cost messages, but is reported then. A reader that goes on at a
position gets everything that the one before had not got; one that begins so long ago, everything since, but for the clocks;
one that reads window after window, everything in one of them, and no stored message is lost because it is in the next.
Not judged: what was under way while recording was switched off, or on again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple

import roq
from roq.client.read import TapeWindow
from roq.coordination.locate import GcmClient
from roq.errors import DeadlineExceeded, InvalidPosition, MessagesLost, NotRecorded, RoqError, SlowSubscriber, TemporaryError
from roq.tools.simulation.load import (
    AGAIN_SECONDS,
    CLOSE_SECONDS,
    FLUSH_SECONDS,
    OPEN_SECONDS,
    Books,
    PublisherAccount,
    note_losses,
    repeats,
)
from roq.wire.recording import TapePosition

STORED, FRESH = "stored", "fresh"
UNTIL_MS = 6_100  # before now a window ends, so that it need not wait
WINDOW_SECONDS = 0.1, 1.5
SKEW_SECONDS = 2.1  # between the clocks of two machines, and what it takes to begin
SWITCH_SECONDS = 20.0  # until every Exchange knows that recording is on again: faults last less
LAST_FLUSH_SECONDS = 28.0  # stores of far hosts with slow disks take less than publishers give, who wait: much may be left
TOLD_MAX = 5  # of what went wrong alike


class RecordPace(NamedTuple):
    """Bursts a second of a publisher, messages in a burst, topics, bytes of a message besides its number."""

    rate: float
    burst: int
    topics: int
    size: int


@dataclass
class RecordedPublisher(PublisherAccount):
    """One life of a publisher, or all lives of one that is named. stored: when it was told that a message is. floor: what is up
    to there may have been forwarded while nothing was recorded. routed: it asks for no more than that until it asks for it
    anew."""

    stored: dict[int, float] = field(default_factory=dict)
    floor: int = 0
    routed: bool = False
    named: bool = False

    def are_stored(self, up_to: int, now: float) -> None:
        """It was told so."""
        for number in range(up_to, self.floor, -1):
            if number in self.stored:
                break
            self.stored[number] = now


@dataclass(eq=False)
class Reading:
    """One life of a reader. since: what was handed over before may not be for it. before: at whose position it began. complete:
    it read to the end of the tapes, and ended there; over: it ended otherwise before the end of the run. topic: the only one
    that it reads; "": all. until: of a window; what is handed over later may not be for it. windows: all of its reader, in any
    of which something may be: what was sent again is in the later one, or in both."""

    label: str
    start: str
    opened: float
    since: float = -math.inf
    before: Reading | None = None
    got: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[MessagesLost]] = field(default_factory=dict)
    place: TapePosition | None = None
    complete: bool = False
    over: bool = False
    topic: str = ""
    until: float = math.inf
    windows: list[Reading] = field(default_factory=list)

    def chain(self) -> Iterator[Reading]:
        """This one, and those before; of a window, all."""
        yield from self.windows
        one: Reading | None = self if not self.windows else None
        while one is not None:
            yield one
            one = one.before

    def wants(self, topic: str) -> bool:
        """Whether it reads that."""
        return self.topic in ("", topic)

    def __str__(self) -> str:
        return f"{self.label} ({self.start} at {self.opened:.3f}{', ' * bool(self.topic)}{self.topic})"


@dataclass
class RecordingBooks(Books):
    """All accounts of a run. off: from when to when recording was switched off, and on again."""

    recorded: list[RecordedPublisher] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    off: list[list[float]] = field(default_factory=list)

    def switched(self, began: float, until: float) -> bool:
        """Whether recording was switched meanwhile, or somebody may not have known yet."""
        return any(began <= on + SWITCH_SECONDS and until >= off for off, on in self.off)

    def counts(self) -> tuple[int, int, int]:
        """Messages stored, delivered, reported as lost."""
        got = sum(len(numbers) for one in self.readings for numbers in one.got.values())
        told = sum(lost.count for one in self.readings for events in one.told.values() for lost in events)
        return sum(len(one.stored) for one in self.recorded), got, told


# --- publishers -------------------------------------------------------------------------------------------------------


async def publish_stored(
    books: RecordingBooks, zookeeper: str, queue: str, label: str, pace: RecordPace, random: Random, stop: asyncio.Event
) -> None:
    """Until `stop`; some have each burst confirmed with its last message, the others flush now and then, beside the rest."""
    book, each = RecordedPublisher(label), random.random() < 0.4
    while True:
        cluster = roq.connect(zookeeper, connect_seconds=OPEN_SECONDS)
        try:
            await cluster.__aenter__()
            publisher = await cluster.publisher(queue, confirm=STORED).open(OPEN_SECONDS)
            break
        except RoqError:
            await cluster.close()
            await asyncio.sleep(AGAIN_SECONDS)
            if stop.is_set():
                return
    book.id = publisher.id
    books.published.append(book)
    books.recorded.append(book)
    flushes: set[asyncio.Task[None]] = set()
    while not stop.is_set():
        for place in range(pace.burst):
            await _publish_one(books, book, publisher, pace, random, asks=each and place == pace.burst - 1)
        if book.routed:
            await _ask_again(books, book, publisher)
        elif not each and len(flushes) < 3 and random.random() < 0.5:
            flush = asyncio.get_running_loop().create_task(_flush(books, book, publisher))
            flushes.add(flush)
            flush.add_done_callback(flushes.discard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.expovariate(pace.rate)):
                await stop.wait()
    await _end(books, book, publisher)
    await cluster.close()


async def _publish_one(
    books: RecordingBooks, book: RecordedPublisher, publisher: roq.Publisher, pace: RecordPace, random: Random, *, asks: bool
) -> None:
    topic = f"t{random.randrange(pace.topics)}"
    book.began.append(books.loop.time())
    book.topics.append(topic)
    number = len(book.began)
    payload = b"%d " % number + bytes(pace.size)
    if not asks or book.routed:
        await publisher.publish(topic, payload)
        return
    with contextlib.suppress(DeadlineExceeded), _refusals(books, book):
        receipt = await publisher.publish(topic, payload, confirm=STORED)
        if receipt is not None and receipt.level == STORED:
            book.are_stored(number, books.loop.time())


async def _ask_again(books: RecordingBooks, book: RecordedPublisher, publisher: roq.Publisher) -> None:
    """Whether what comes next can be stored."""
    with contextlib.suppress(TemporaryError), _refusals(books, book):
        receipt = await publisher.publish_many("t0", (), confirm=STORED)
        if receipt is not None and receipt.level == STORED:
            book.routed, book.floor = False, len(book.began)


async def _flush(
    books: RecordingBooks, book: RecordedPublisher, publisher: roq.Publisher, seconds: float = FLUSH_SECONDS
) -> None:
    up_to = len(book.began)
    with contextlib.suppress(DeadlineExceeded), _refusals(books, book):
        receipt = await publisher.flush(seconds)
        if receipt.level == STORED and not book.routed:
            book.are_stored(up_to, books.loop.time())


@contextlib.contextmanager
def _refusals(books: RecordingBooks, book: RecordedPublisher) -> Iterator[None]:
    """What may come of asking for a confirmation."""
    try:
        yield
    except NotRecorded:
        book.routed, book.floor = True, len(book.began)
        if not books.switched(books.loop.time(), books.loop.time()):
            books.errors.append(f"{book.label} heard that nothing is recorded, and it is")
    except TemporaryError:
        raise
    except RoqError as error:
        books.errors.append(f"{book.label}: {type(error).__name__}: {error}")


async def _end(books: RecordingBooks, book: RecordedPublisher, publisher: roq.Publisher) -> None:
    await _flush(books, book, publisher, LAST_FLUSH_SECONDS)
    try:
        with _refusals(books, book):
            await publisher.close(CLOSE_SECONDS)
            book.closed = True
            if not book.routed:
                book.are_stored(len(book.began), books.loop.time())
    except TemporaryError as error:
        books.errors.append(f"close of {book.label}: {error}")


# --- readers ----------------------------------------------------------------------------------------------------------


async def read_early(books: RecordingBooks, zookeeper: str, queue: str, label: str, stop: asyncio.Event) -> None:
    """From the beginning until `stop`; when it fails it goes on at its position."""
    before: Reading | None = None
    while not stop.is_set():
        reading = Reading(label, "earliest" if before is None else "position", 0.0, before=before)
        start = "earliest" if before is None or before.place is None else before.place
        if await _life(books, roq.connect(zookeeper, connect_seconds=OPEN_SECONDS), queue, reading, start, math.inf, stop):
            before = reading


async def read_late(books: RecordingBooks, zookeeper: str, queue: str, label: str, random: Random, stop: asyncio.Event) -> None:
    """Life after life until `stop`, each from somewhere else and for another time; the last one stays."""
    while not stop.is_set():
        reading = Reading(label, random.choice(("earliest", "present", "ago", "position", "position")), 0.0)
        ended = [one for one in books.readings if one.over and one.place is not None]
        start: str | timedelta | TapePosition = "earliest"
        if reading.start == "position" and ended:
            reading.before = random.choice(ended)
            start = reading.before.place or start
        elif reading.start == "ago":
            start = timedelta(seconds=random.uniform(1.0, 25.0))
        seconds = math.inf if books.ending else random.choice((1.0, 4.0, 12.0, math.inf))
        await _life(books, roq.connect(zookeeper, connect_seconds=OPEN_SECONDS), queue, reading, start, seconds, stop)


async def read_windows(
    books: RecordingBooks, zookeeper: str, queue: str, label: str, random: Random, stop: asyncio.Event
) -> None:
    """Of the past, each from the time at which the one before ended, until `stop`."""
    client = GcmClient(zookeeper)
    start: str | datetime = "earliest"
    windows: list[Reading] = []
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(*WINDOW_SECONDS)):
                await stop.wait()
        now, end_ms = books.loop.time(), time.time_ns() // 1_000_000 - UNTIL_MS
        reading = Reading(label, "window", now, before=windows[-1] if windows else None, until=now - UNTIL_MS / 1000)
        told: list[MessagesLost] = []
        window = TapeWindow(client, queue, (), told.append, start, end_ms)
        with contextlib.suppress(TemporaryError, NotRecorded):
            await window.open(OPEN_SECONDS)
            job = asyncio.get_running_loop().create_task(take_batches(books, reading, window, told))
            waiting = asyncio.get_running_loop().create_task(stop.wait())
            await asyncio.wait([job, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if job.done():
                job.result()
                reading.complete, reading.windows, start = True, windows, datetime.fromtimestamp(end_ms / 1000, UTC)
                windows.append(reading)
                books.readings.append(reading)
        await window.close(0)
    client.close()


async def read_to_the_end(books: RecordingBooks, zookeeper: str, queue: str, stop: asyncio.Event) -> None:
    """Everything that is on the tapes; then one topic of it once more."""
    for topic in ("", "t0"):
        cluster = roq.connect(zookeeper, connect_seconds=OPEN_SECONDS)
        await _life(books, cluster, queue, Reading(FRESH, "present", 0.0, topic=topic), "earliest", math.inf, stop)


async def _life(
    books: RecordingBooks,
    cluster: roq.Cluster,
    queue: str,
    reading: Reading,
    start: str | timedelta | TapePosition,
    seconds: float,
    stop: asyncio.Event,
) -> bool:
    """Read for so long at most. False: it could not begin."""
    told: list[MessagesLost] = []
    reading.opened = books.loop.time()
    try:
        await cluster.__aenter__()
        follow = reading.start != "present"
        topics = [reading.topic] if reading.topic else []
        made = cluster.subscriber(queue, *topics, on_lost=told.append, start=start, follow=follow)
        subscriber = await made.open(OPEN_SECONDS)
    except RoqError as error:
        if isinstance(error, InvalidPosition):
            books.errors.append(f"{reading}: {error}")
        await cluster.close()
        await asyncio.sleep(AGAIN_SECONDS)
        return False
    if isinstance(start, timedelta):
        reading.since = books.loop.time() - start.total_seconds() + SKEW_SECONDS
    elif reading.before is not None:
        reading.since = reading.before.since
    books.readings.append(reading)
    job = asyncio.get_running_loop().create_task(take_batches(books, reading, subscriber, told))
    waiting = asyncio.get_running_loop().create_task(stop.wait())
    limit = None if seconds == math.inf else seconds
    await asyncio.wait([job, waiting], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    reading.complete = job.done() and job.exception() is None
    reading.over = not reading.complete and (job.done() or not stop.is_set())
    with contextlib.suppress(RoqError):
        await subscriber.close()
        await cluster.close()
    with contextlib.suppress(TemporaryError, SlowSubscriber):
        await job
    reading.place = subscriber.position
    return True


async def take_batches(
    books: RecordingBooks, reading: Reading, subscriber: roq.Subscriber, told: list[MessagesLost], pause_seconds: float = 0.0
) -> None:
    """Until it ends, with a pause after each until the end comes. told: what it has reported."""
    done: dict[str, int] = {}
    try:
        async for batch in subscriber.batches():
            note_losses(told, reading.told)
            for message in batch:
                number = int(message.payload.split(b" ", 1)[0])
                if number != message.sequence:
                    books.errors.append(f"{reading}: message {number} has number {message.sequence}")
                reading.got.setdefault(message.publisher, []).append(number)
            place = subscriber.position
            now = {} if place is None else place.done
            if any(now.get(exchange, -1) < entry for exchange, entry in done.items()):
                books.errors.append(f"{reading}: its position went back from {done} to {now}")
            done = now
            if pause_seconds and not books.ending:
                await asyncio.sleep(pause_seconds)
    finally:
        note_losses(told, reading.told)


# --- the judgement ----------------------------------------------------------------------------------------------------


def judge_recording(books: RecordingBooks, *, lossless: bool) -> list[str]:
    """What is wrong, in words; empty if nothing is. lossless: nothing happened that may cost a message on its way."""
    wrong = list(dict.fromkeys(books.errors))[: 2 * TOLD_MAX]
    known = {one.id for one in books.recorded}
    for reading in books.readings:
        wrong += [f"{reading}: messages of an unknown publisher {id:x}" for id in sorted(reading.got.keys() - known)]
        for lost in reading.told.get(0, []):
            wrong.append(f"{reading}: {lost}")
        for one in books.recorded:
            wrong += _judge_one(books, reading, one, lossless=lossless)
    return wrong


def _judge_one(books: RecordingBooks, reading: Reading, one: RecordedPublisher, *, lossless: bool) -> list[str]:
    who = f"{reading} and {one.label}"
    numbers = reading.got.get(one.id, [])
    got, wrong = set(numbers), repeats(who, numbers)
    lost, doubted = _told(one, reading.told.get(one.id, []))
    if lost & got:
        wrong.append(f"{who}: reported as lost and delivered: {sorted(lost & got)[:TOLD_MAX]}")
    wanted = {number for number, topic in enumerate(one.topics, 1) if reading.wants(topic)}
    due = {number for number, at in one.stored.items() if number in wanted and _is_judged(books, reading, one, number, at)}
    strict = due if lossless else {number for number in due if one.stored[number] < reading.opened}
    entire = reading.before is None and reading.since == -math.inf
    # Of whom it meets after messages may have passed it by it can't know when they were sent. Without losses everybody else
    # whom it meets then begins with number 1, and only a life of a producer behind those of the lives before.
    if not entire and (one.named or not lossless):
        doubted = {number for number in doubted if lossless and number >= min(got, default=math.inf)}
    if refused := strict & (lost | doubted):
        wrong.append(f"{who}: {len(refused)} stored messages were reported as lost, {_some(refused)}")
    earlier = {number for each in reading.chain() for number in each.got.get(one.id, ())}
    reported = {number for each in reading.chain() for part in _told(one, each.told.get(one.id, [])) for number in part}
    last = max(got, default=0)
    if reading.complete:
        due = {number for number in due if one.stored[number] < min(reading.opened, reading.until - SKEW_SECONDS)}
    elif reading.over:
        due = {number for number in due if number < last}
    if missing := due - earlier - reported:
        wrong.append(f"{who}: {len(missing)} stored messages did not come, {_some(missing)} of {len(one.began)}")
    newest = {one.topics[number - 1]: number for number in sorted(got)}
    silent = {
        number
        for number, began in enumerate(one.began, 1)
        if number in wanted
        and number < (newest.get(one.topics[number - 1], 0) if one.killed else last)
        and reading.since <= began < reading.until - SKEW_SECONDS
        and not books.switched(began, one.stored.get(number, math.inf))
    }
    if books.off and not entire:
        silent = set()  # of a path that began while nothing was recorded it does not know what came before
    if silent := silent - earlier - reported - due:
        wrong.append(f"{who}: {len(silent)} messages were lost in silence, {_some(silent)} of {len(one.began)}")
    return wrong


def _is_judged(books: RecordingBooks, reading: Reading, one: RecordedPublisher, number: int, stored: float) -> bool:
    began = one.began[number - 1]
    return began >= reading.since and not books.switched(began, stored)


def _told(one: RecordedPublisher, events: Iterable[MessagesLost]) -> tuple[set[int], set[int]]:
    """Numbers that were reported as lost, and those of which nobody knows."""
    lost, doubted = set[int](), set[int]()
    for event in events:
        (lost if event.count else doubted).update(
            number
            for number in range(max(1, event.first), min(event.last, len(one.began)) + 1)
            if one.topics[number - 1] == event.topic
        )
    return lost, doubted


def _some(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:TOLD_MAX]))
