"""Publishers and subscribers of a simulation, and what their accounts add up to: silent loss, repeats, order, standstill.

From the moment a subscriber is ready each message of each publisher comes to it once and in order, or is reported as lost;
reported and delivered, or reported twice, is wrong as well. How far a publisher's messages have to have come: to the last one
if it closed, to the last one it flushed, and to the last one that came, whatever happened to it. Of one that was killed nobody
knows more of a topic than its last message there that came, and what it flushed; and only the former if the Monitor that knew
of it ended, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import NamedTuple

import roq
from roq.errors import MessagesLost, RoqError
from roq.tools.simulation.loop import SimulatedLoop

OPEN_SECONDS, AGAIN_SECONDS = 60.0, 0.3
FLUSH_EVERY_SECONDS, FLUSH_SECONDS, CLOSE_SECONDS = 2.0, 10.0, 10.0
KNOWN_SECONDS = 15.0  # before a publisher's death: what it told a Monitor of itself may have been told to that one alone
STALL_SECONDS = 7.0  # without a message after everything was healed, while publishers go on


@dataclass
class PublisherAccount:
    """One life of a publisher. began: when each message was handed over, message 1 first."""

    label: str
    id: int = 0
    began: list[float] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    flushed: int = 0
    closed: bool = False
    killed: float | None = None  # when


@dataclass
class Received:
    """One life of a subscriber, from ready on. got and told by publisher."""

    label: str
    opened: float
    got: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[MessagesLost]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    over: bool = False  # before the end of the run


@dataclass
class Books:
    """All accounts of a run."""

    loop: SimulatedLoop
    published: list[PublisherAccount] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    healed: float = 0.0
    ending: float = 0.0
    errors: list[str] = field(default_factory=list)
    monitors_ended: list[float] = field(default_factory=list)

    def forgotten(self, one: PublisherAccount) -> bool:
        """Whether a Monitor that ended may have been the last that knew how far a killed publisher had come."""
        return one.killed is not None and any(at > one.killed - KNOWN_SECONDS for at in self.monitors_ended)

    def counts(self) -> tuple[int, int, int]:
        """Messages published, delivered, reported as lost."""
        got = sum(len(numbers) for one in self.received for numbers in one.got.values())
        told = sum(lost.count for one in self.received for events in one.told.values() for lost in events)
        return sum(len(one.began) for one in self.published), got, told


class TrafficPattern(NamedTuple):
    """What a publisher publishes: so many bursts a second on average, of so many messages, each on one of so many topics."""

    rate: float
    burst: int
    topics: int


async def publish(
    books: Books, zookeeper: str, queue: str, label: str, traffic: TrafficPattern, random: Random, stop: asyncio.Event
) -> None:
    """Until `stop`; then flush and close."""
    book = PublisherAccount(label)
    while True:
        try:
            cluster = await roq.connect(zookeeper, connect_seconds=OPEN_SECONDS).__aenter__()
            publisher = await cluster.publisher(queue).open(OPEN_SECONDS)
            break
        except RoqError:
            await asyncio.sleep(AGAIN_SECONDS)
            if stop.is_set():
                return
    book.id = publisher.id
    books.published.append(book)
    flushed_at = books.loop.time()
    flushing: asyncio.Task[None] | None = None

    async def flush(up_to: int) -> None:
        with contextlib.suppress(RoqError):
            await publisher.flush(FLUSH_SECONDS)
            book.flushed = max(book.flushed, up_to)

    while not stop.is_set():
        for _ in range(traffic.burst):
            topic = f"t{random.randrange(traffic.topics)}"
            book.began.append(books.loop.time())
            book.topics.append(topic)
            await publisher.publish(topic, b"%d" % len(book.began))
        if books.loop.time() - flushed_at > FLUSH_EVERY_SECONDS and (flushing is None or flushing.done()):
            flushed_at = books.loop.time()
            flushing = asyncio.get_running_loop().create_task(flush(len(book.began)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.expovariate(traffic.rate)):
                await stop.wait()
    await flush(len(book.began))
    try:
        await publisher.close(CLOSE_SECONDS)
        book.closed = True
    except RoqError as error:
        books.errors.append(f"close of {label}: {error}")
    await cluster.close()


async def subscribe(books: Books, zookeeper: str, queue: str, label: str, stop: asyncio.Event) -> None:
    """Until `stop`; opened again when it fails."""
    while not stop.is_set():
        told: list[MessagesLost] = []
        try:
            cluster = await roq.connect(zookeeper, connect_seconds=OPEN_SECONDS).__aenter__()
            subscriber = await cluster.subscriber(queue, on_lost=told.append).open(OPEN_SECONDS)
        except RoqError:
            await asyncio.sleep(AGAIN_SECONDS)
            continue
        book = Received(label, books.loop.time())
        books.received.append(book)
        job = asyncio.get_running_loop().create_task(_read(books, book, subscriber, told))
        waiting = asyncio.get_running_loop().create_task(stop.wait())
        await asyncio.wait([job, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        book.over = not stop.is_set()
        with contextlib.suppress(RoqError):
            await subscriber.close()
            await cluster.close()
        with contextlib.suppress(RoqError):
            await job


async def _read(books: Books, book: Received, subscriber: roq.Subscriber, told: list[MessagesLost]) -> None:
    try:
        async for batch in subscriber.batches():
            note_losses(told, book.told)
            book.times.append(books.loop.time())
            for message in batch:
                number = int(message.payload)
                if number != message.sequence:
                    books.errors.append(
                        f"{book.label}: message {number} of {message.publisher:x} has number {message.sequence}"
                    )
                book.got.setdefault(message.publisher, []).append(number)
    finally:
        note_losses(told, book.told)


def note_losses(told: list[MessagesLost], noted: dict[int, list[MessagesLost]]) -> None:
    """What was reported since the last call, by publisher."""
    for lost in told:
        noted.setdefault(lost.publisher, []).append(lost)
    told.clear()


def judge(books: Books, *, lossless: bool) -> list[str]:
    """What is wrong, in words; empty if nothing is. lossless: nothing happened that a message may be lost for."""
    wrong = list(books.errors)
    if lossless and (told := books.counts()[2]):
        wrong.append(f"{told} messages were lost, and nothing had happened that may cost any")
    known = {one.id: one for one in books.published}
    for book in books.received:
        wrong += [f"{book.label}: messages of an unknown publisher {id:x}" for id in sorted(book.got.keys() - known.keys())]
        for one in books.published:
            wrong += _judge_one(book, one, books.forgotten(one))
        wrong += _stalls(books, book)
    return wrong


def repeats(who: str, numbers: list[int]) -> list[str]:
    """What is wrong with one publisher's numbers as they came: some twice, or out of order."""
    wrong, twice = list[str](), len(numbers) - len(set(numbers))
    if twice:
        wrong.append(f"{who}: {twice} messages came twice")
    if any(later < earlier for earlier, later in pairwise(numbers)):
        wrong.append(f"{who}: out of order")
    return wrong


def _judge_one(book: Received, one: PublisherAccount, forgotten: bool) -> list[str]:
    who = f"{book.label} (ready at {book.opened:.3f}) and {one.label}"
    numbers = book.got.get(one.id, [])
    got, wrong = set(numbers), repeats(who, numbers)
    newest = _newest_by_topic(one, got)
    if one.killed is None:
        newest = dict.fromkeys(newest, max(got, default=0))
    told = 0 if book.over or forgotten else len(one.began) if one.closed else one.flushed
    covered: set[int] = set()
    for lost in book.told.get(one.id, []):
        span = {
            number
            for number in range(max(1, lost.first), lost.last + 1)
            if number <= len(one.began) and one.topics[number - 1] == lost.topic
        }
        if span & got and lost.count:  # of a doubt nobody knows which of them are missing
            wrong.append(f"{who}: reported as lost and delivered: {sorted(span & got)[:5]}")
        if span & covered and lost.count:
            wrong.append(f"{who}: reported as lost twice: {sorted(span & covered)[:5]}")
        covered |= span
    silent = [
        number
        for number, began in enumerate(one.began, 1)
        if number <= max(told, newest.get(one.topics[number - 1], 0))
        and began > book.opened
        and number not in got
        and number not in covered
    ]
    if silent:
        wrong.append(f"{who}: {len(silent)} messages lost in silence, {silent[0]} to {silent[-1]} of {len(one.began)}")
    return wrong


def _newest_by_topic(one: PublisherAccount, got: set[int]) -> dict[str, int]:
    newest = dict.fromkeys(one.topics, 0)
    for number in sorted(got):
        newest[one.topics[number - 1]] = number
    return newest


def _stalls(books: Books, book: Received) -> list[str]:
    if book.over or not books.healed:
        return []
    times = [max(book.opened, books.healed), *(at for at in book.times if at > books.healed), books.ending]
    worst = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    return [f"{book.label}: nothing came for {worst:.1f} s after everything was healed"] if worst > STALL_SECONDS else []
