"""The feed of a group, in the process of its master: what is stored on the tapes of a recorded queue comes into its work queue.

    tapes ──► subscriber, which joins nothing ──► intake: fold and log ──► leases
                       ▲                              │
                       └──── position, after a take-over

It reads as a subscriber does that begins in the past, so paths, moves and repeats are put right by the same order machine; but
only what is stored, and only from the stores: a group that stands still holds nobody back. Where it is, is kept in the group's
log behind what was fed, so the next master goes on there and the publishers' numbers drop what comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from roq.coordination.locate import GcmClient
from roq.errors import InvalidHeaders, MessagesLost, NotRecorded, ProcessFailed, QueueNotFound, RoqError
from roq.pubsub.start import Start, read_group_start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Message
from roq.pubsub.tape import REST_SECONDS
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.run import Tasks
from roq.wire.headers import MARK, join_headers, priority_of, ttl_ms
from roq.wire.recording import TapePosition
from roq.wire.work_queue import GroupOrder, GroupSource
from roq.workqueue.records import FeedMessages

KEEP_SECONDS = 0.2, 1.0, 5.0  # between two positions that are kept, and two looks while nothing comes: something waits, or not
LAG_SECONDS = 1.0, 5.0  # between two looks at how many messages follow: when some come, and when stores were asked or none do;
# both every REST_SECONDS while the group rests
PAUSE_SECONDS = 0.1, 5.0  # between two tries, the first and the longest
FEED_COUNT = 1_000  # messages fed at once
FEED_BYTES = 256 * 1024  # of payloads in one record: from here on the next one begins
REPORT_SECONDS = 60.0  # between two lines in the log about messages' headers, of each kind
LEFT_OUT, NO_PRIORITY, NO_END = "does not come into the group", "has no priority in the group", "has no end in the group"
NO_WISHES = 0, 0  # priority, and ms when it ends

log = logger(__name__)


class Intake(Protocol):
    """Where messages go: the master's GroupIntake."""

    waiting_since: int | None
    lag: int
    read_on: Callable[[], None]

    @property
    def position(self) -> dict[str, int] | None:
        """See GroupIntake, as all of these."""

    def now(self) -> int:
        """ms."""

    async def take(self, messages: Sequence[FeedMessages]) -> None:
        """As soon as there is room."""

    def rests(self) -> bool:
        """Nobody has asked for messages lately; `read_on` is called when somebody does."""

    def has_enough(self) -> bool:
        """Likewise, and there are some for whoever comes first."""

    def missed(self) -> None:
        """Something does not come into the group."""

    def reached(self, done: dict[str, int]) -> None:
        """All that was taken lies up to here."""


async def feed(zookeeper: str, source: GroupSource, intake: Intake) -> None:
    """Until cancelled. What can't be read now is tried again, and told in the log; what is in the group is served meanwhile."""
    client, fields = GcmClient(zookeeper), {"queue": source.queue}
    pauses = delays(*PAUSE_SECONDS)
    try:
        while True:
            before = intake.position
            try:
                await _read(client, source, intake)
            except (NotRecorded, QueueNotFound) as error:
                log.info("the group's queue is not there: %s", error, extra={"fields": fields})
            except RoqError as error:
                log.warning("the group can't be fed now, trying again: %s", error, extra={"fields": fields})
            except Exception:  # a defect must not end the master, whose members have leases
                log.exception("defect while a group was fed, trying again", extra={"fields": fields})
            intake.waiting_since, intake.lag = intake.waiting_since or intake.now(), -1
            if intake.position != before:
                pauses = delays(*PAUSE_SECONDS)
            await asyncio.sleep(next(pauses))
    finally:
        client.close()


def begin(source: GroupSource, position: dict[str, int] | None) -> Start:
    """Where to read on. position: up to which the group was fed, None for a new one. Raises as read_group_start."""
    return read_group_start(source.start) if position is None else TapePosition(source.tapes, position)


class FeedReader(Subscriber):
    """A subscriber that knows how much is stored behind its position, and reads on as the intake says."""

    def __init__(self, client: GcmClient, source: GroupSource, intake: Intake, on_lost: Callable[[MessagesLost], None]) -> None:
        start = begin(source, intake.position)
        super().__init__(client, source.queue, source.topics, on_lost, start, "stored", where=source.where)
        self._intake = intake
        intake.read_on = self.took

    def rests(self) -> bool:
        """Nobody asks the group for messages."""
        return self._intake.rests()

    def is_full(self) -> bool:
        """Also with what is there for whoever comes first."""
        return self._intake.has_enough() or super().is_full()

    async def lag(self) -> int:
        """Messages on all tapes, of whatever topics; -1: that is not known. Raises LogUnavailable, DataLost, LogTrimmed, as
        the GCM's client does."""
        done = {} if self.position is None else self.position.done
        if self._past is None or all(tape.is_read(done.get(id, 0)) for id, tape in self._past.tapes.reading.items()):
            return 0
        tapes = await self._past.tapes.unread_now()
        found = await asyncio.gather(*(tape.messages_behind(done.get(tape.exchange.id, 0), meta) for tape, meta in tapes))
        return -1 if -1 in found else sum(found)


async def _read(client: GcmClient, source: GroupSource, intake: Intake) -> None:
    def on_lost(lost: MessagesLost) -> None:
        log.warning("the group's feed lost messages, its members do not get them: %s", lost)
        intake.missed()

    subscriber = FeedReader(client, source, intake, on_lost)
    keeper = Tasks(lambda error: subscriber.fail(ProcessFailed(f"the feed failed: {error}")))
    keep, measure = came = asyncio.Event(), asyncio.Event()
    async with subscriber:
        if (found := subscriber.position) is None or found.tapes != source.tapes:
            raise NotRecorded(f"queue {source.queue!r} was created anew: this group belongs to the one before")
        intake.reached(found.done)  # where it begins, in any case
        keeper.start(_keep(subscriber, intake, keep), "feed position")
        keeper.start(_measure(subscriber, intake, measure), "feed lag")
        try:
            await _feed(subscriber, source.order is GroupOrder.TOPIC, intake, came)
        finally:
            await keeper.stop()


class HeaderReports:
    """Messages whose headers can't be followed: one of a kind is told in REPORT_SECONDS, and how many there were. clock():
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._untold = Counter[str]()
        self._told: dict[str, float] = {}

    def note(self, message: Message, kind: str, error: InvalidHeaders) -> None:
        """One more."""
        self._untold[kind] += 1
        now = self._clock()
        if now - self._told.get(kind, float("-inf")) < REPORT_SECONDS:
            return
        self._told[kind] = now
        named = f"message {message.sequence} of publisher {message.publisher:016x} on {message.topic!r}"
        report = log.error if kind == LEFT_OUT else log.warning
        report("%s %s: %s (messages like this since the last report: %s)", named, kind, error, self._untold.pop(kind))


async def _feed(subscriber: Subscriber, ordered: bool, intake: Intake, came: tuple[asyncio.Event, ...]) -> None:
    """came: set when a batch has come, which may wait for room, and when it was taken."""
    reports = HeaderReports(time.monotonic)
    async for batch in subscriber.batches():
        for event in came:
            event.set()
        for begin in range(0, len(batch), FEED_COUNT):
            await intake.take(list(_records(batch[begin : begin + FEED_COUNT], ordered, intake.now(), reports)))
        for event in came:
            event.set()


async def _keep(subscriber: Subscriber, intake: Intake, came: asyncio.Event) -> None:
    """A position counts what was taken before the batch in progress, all of which is in the intake by now."""
    between, waiting, idle = KEEP_SECONDS
    while True:
        await _pause(came, between, REST_SECONDS if intake.rests() else idle if intake.waiting_since == 0 else waiting)
        if (position := subscriber.position) is not None:
            intake.reached(position.done)
        now = intake.now()
        behind = subscriber.behind_ms(now)
        intake.waiting_since = now - behind if behind else 0
        if not behind:
            intake.lag = 0


async def _pause(came: asyncio.Event, least: float, most: float) -> None:
    """Until something has come, but within these bounds (seconds)."""
    await asyncio.sleep(least)
    if not came.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most - least):
                await came.wait()
    came.clear()


async def _measure(subscriber: FeedReader, intake: Intake, came: asyncio.Event) -> None:
    """How much is left on the tapes. Who stands still for want of room asks stores for it, and seldom."""
    soon, late = LAG_SECONDS
    while True:
        try:
            async with asyncio.timeout(late):
                intake.lag = await subscriber.lag()
        except (RoqError, TimeoutError) as error:
            intake.lag = -1
            log.debug("the group's lag can't be measured now, retrying: %s", error)
        await _pause(came, late if intake.lag else soon, REST_SECONDS if intake.rests() else late)


def _records(messages: Sequence[Message], ordered: bool, now: int, reports: HeaderReports) -> Iterator[FeedMessages]:
    """Messages of one batch, which have publisher, topic and time in common; those that ask for the same are one record. One
    that no task can be is left out, and told in the log."""
    publisher, topic, published = messages[0].publisher, messages[0].topic, messages[0].timestamp // 1_000_000
    run, size, wishes = list[tuple[int, bytes]](), 0, NO_WISHES
    for message in messages:
        payload, headers, asked = message.payload, message.headers, NO_WISHES
        if headers or payload.startswith(MARK):
            try:
                payload = join_headers(payload, headers)
            except InvalidHeaders as error:
                reports.note(message, LEFT_OUT, error)
                continue
            asked = _wishes(message, published, reports)
            if 0 < asked[1] <= now:
                payload = b""  # nobody gets it: the fold only counts it
        if run and (asked != wishes or size >= FEED_BYTES):
            yield FeedMessages(now, publisher, topic, published, ordered, tuple(run), *wishes)
            run, size = [], 0
        run.append((message.sequence, payload))
        size += len(payload)
        wishes = asked
    if run:
        yield FeedMessages(now, publisher, topic, published, ordered, tuple(run), *wishes)


def _wishes(message: Message, published: int, reports: HeaderReports) -> tuple[int, int]:
    """Priority, and ms when it ends (0: never). One that can't be understood is told in the log, and passed over."""
    priority = ttl = 0
    try:
        priority = priority_of(message.headers)
    except InvalidHeaders as error:
        reports.note(message, NO_PRIORITY, error)
    try:
        ttl = ttl_ms(message.headers)
    except InvalidHeaders as error:
        reports.note(message, NO_END, error)
    return priority, published + ttl if ttl else 0
