"""Requests over a queue, the side that asks: `Cluster.request`. Who answers: responder.py; what travels: roq/wire/requests.py.

A Caller is a publisher and a subscriber of its own topic of answers, one of each per queue and Cluster, opened by the first
request. The queue's Monitor tells it who serves. A request is sent once; it goes to another server only if one has said that it
did not look at it.

Not covered: which server is chosen (responders.py).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from roq.client.responders import ResponderTable
from roq.coordination.locate import GcmClient
from roq.errors import (
    Closed,
    DeadlineExceeded,
    FrameError,
    IncompatibleVersion,
    NoResponder,
    Overloaded,
    ProcessFailed,
    RequestFailed,
    ResponderLost,
    RoqError,
)
from roq.ids import topic_bytes
from roq.pubsub.publisher import Publisher
from roq.pubsub.subscriber import OPEN_SECONDS, Subscriber
from roq.pubsub.subscription import Message, log_lost
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.security import new_member_id
from roq.wire import monitor as wire
from roq.wire.headers import Headers, check_headers
from roq.wire.requests import RequestHead, RequestOutcome, answer_head, reply_topic, request_headers, serve_topic

log = logger(__name__)
REQUEST_SECONDS = 5.0  # default deadline of a request
UNDER_WAY_MAX = 10_000  # requests of one caller at a time; more wait
LOOK_SECONDS = 2.0  # for the Monitor's word that nobody serves
CLOSED = "the connection to the cluster was closed"
LAST_ANSWERS_SECONDS = 0.1  # what a server said last may come after the Monitor's word that it is gone: another connection


class Reply(msgspec.Struct, frozen=True):
    """What a server answered. responder: its id."""

    payload: bytes
    headers: dict[str, str | bytes]
    responder: int


class Question:
    """A request before it is answered; its time begins. stage: what it waits for; refused: servers that did. Raises
    InvalidTopic, InvalidHeaders."""

    __slots__ = ("_deadline", "group", "headers", "payload", "refused", "seconds", "stage", "topic")

    def __init__(self, topic: str, payload: bytes, headers: Headers | None, group: str | None, seconds: float) -> None:
        topic_bytes(topic)
        self.topic, self.payload, self.group, self.seconds = topic, payload, group, seconds
        self._deadline = time.monotonic() + seconds
        self.headers = check_headers(headers)[0] if headers else {}
        self.stage = "the queue was not joined"
        self.refused: list[int] = []

    def seconds_left(self) -> float:
        """Of its time."""
        return self._deadline - time.monotonic()


class _Refused(Exception):
    """This server has not looked at the request, nor will."""


class _AnswerSubscriber(Subscriber):
    """Gets a caller's answers, and the Monitor's list of who serves."""

    def __init__(self, client: GcmClient, queue: str, on_list: Callable[[wire.Responders], None]) -> None:
        identity = new_member_id()
        super().__init__(client, queue, (reply_topic(identity.id),), log_lost)
        self.id, self._membership.identity = identity.id, identity
        self._on_list, self._list_version = on_list, 0

    def report(self) -> wire.SubscriberReport:
        """See membership.Member."""
        return msgspec.structs.replace(super().report(), responders=self._list_version)

    def take(self, notice: Any) -> None:
        """See membership.Member."""
        match notice:
            case wire.Responders():
                self._list_version = notice.version
                self._on_list(notice)
                return
            case wire.SubscriberWelcome():
                self._list_version = 0  # another Monitor counts anew
        super().take(notice)

    async def ask_who_serves(self) -> None:
        """Ask the Monitor who serves just now. Raises what kept it from answering."""
        try:
            self.take(await self._membership.ask(wire.ListResponders(), wire.Responders, LOOK_SECONDS))
        except FrameError as error:
            raise IncompatibleVersion("it knows no requests: upgrade the cluster") from error


class Caller:
    """All requests of one Cluster over one queue. Needs the running loop."""

    def __init__(self, client: GcmClient, queue: str) -> None:
        self.counters = Counters()
        self.queue = queue
        self.ended: RoqError | None = None  # why it can't be used any more
        self._publisher = Publisher(client, queue)
        self._subscriber = _AnswerSubscriber(client, queue, self._listed)
        self._reply_topic = reply_topic(self._subscriber.id)
        self._table = ResponderTable()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._room = asyncio.Semaphore(UNDER_WAY_MAX)
        self._opened = asyncio.Event()  # or ended
        self._changed = asyncio.Event()  # set and made anew with each list
        self._refusals = Refusals(log, self.counters)
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open(), name=f"open requests over {queue}")
        self._looking: asyncio.Task[RoqError | None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def request(self, asked: Question) -> Reply:
        """See Cluster.request. Also raises what ended this caller: SlowSubscriber, ProcessFailed."""
        try:
            async with asyncio.timeout(asked.seconds_left()):
                await self._opened.wait()
                asked.stage = f"{UNDER_WAY_MAX} others are under way"
                async with self._room:
                    return await self._ask(asked)
        except TimeoutError:
            where = f"{asked.topic!r} of queue {self.queue!r}"
            raise DeadlineExceeded(f"no answer to a request on {where} in {asked.seconds:g} s: {asked.stage}") from None

    async def _ask(self, asked: Question) -> Reply:
        while True:
            asked.stage = "the Monitor does not know yet who serves"
            server = await self._choose(asked)
            asked.stage = f"server {server:016x} has it"
            try:
                return await self._send(asked, server)
            except _Refused:
                asked.refused.append(server)

    async def _send(self, asked: Question, server: int) -> Reply:
        number, sent = next(self._numbers), False
        head = RequestHead(number, self._reply_topic, asked.topic, asked.seconds_left(), asked.headers)
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[number] = answer
        self._table.begin(number, server, time.monotonic())
        try:
            await self._publisher.publish(serve_topic(server), asked.payload, request_headers(head))
            sent = True
            return await answer
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # whoever was still sending has not looked; asyncio would complain
            if sent:
                self._table.give_up(number, time.monotonic())
            else:
                self._table.end(number)

    async def _choose(self, asked: Question) -> int:
        """A server. Raises NoResponder once the Monitor has said that there is none, Overloaded if all whom it knows by
        now have refused."""
        looked, error = False, None
        while self.ended is None:
            if (server := self._table.choose(asked.topic, asked.group, asked.refused)) is not None:
                return server
            if not looked:
                looked, error = True, await self._look()
                continue
            where = f"{asked.topic!r} of queue {self.queue!r}" + ("" if asked.group is None else f" in group {asked.group!r}")
            if asked.refused:
                raise Overloaded(f"{len(asked.refused)} servers of {where} refused the request: try again later")
            if error is not None:
                raise NoResponder(f"nobody is known to serve {where}, and the Monitor can't be asked: {error}") from error
            if self._table.complete:
                raise NoResponder(f"nobody serves {where}")
            await self._changed.wait()
        raise self.ended

    # --- life ---------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            await self._open_both()
        except RoqError as error:
            await self._give_up(error)
        except Exception as error:  # a defect must not end in silence; likewise in `_read`
            log.exception("defect while requests over a queue were begun", extra={"fields": {"queue": self.queue}})
            await self._give_up(ProcessFailed(f"requests over queue {self.queue!r} could not be begun: {error}"))
        else:
            self._reading = self._loop.create_task(self._read(), name=f"answers over {self.queue}")
            self._opened.set()

    async def _open_both(self) -> None:
        opening = [self._loop.create_task(one.open(OPEN_SECONDS)) for one in (self._publisher, self._subscriber)]
        try:
            await asyncio.gather(*opening)
        finally:
            for task in opening:  # if one fails, the other one would join and live on unseen
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    async def close(self) -> None:
        """Requests under way end with Closed."""
        self._end(Closed(CLOSED))
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        await self._leave()

    async def _leave(self) -> None:
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        await asyncio.gather(self._publisher.close(1.0), self._subscriber.close(), return_exceptions=True)

    async def _give_up(self, error: RoqError) -> None:
        self._end(error)
        await self._leave()

    def _end(self, error: RoqError) -> None:
        self.ended = self.ended or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.ended)
        self._changed.set()
        self._opened.set()

    # --- what is told -------------------------------------------------------------------------------------------------

    def _listed(self, notice: wire.Responders) -> None:
        for server in self._table.told(notice):
            self._loop.call_later(LAST_ANSWERS_SECONDS, self._gone, server)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _gone(self, server: int) -> None:
        told = f"server {server:016x} of queue {self.queue!r} is gone; it may have carried the request out or not"
        for number in self._table.lose(server):
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_exception(ResponderLost(told))

    async def _look(self) -> RoqError | None:
        """Let the Monitor say who serves, what it knows by now; why it did not. Many who look at once share one question."""
        if self._looking is not None:  # it may have been answered before we came
            await asyncio.shield(self._looking)
        if self._looking is None:
            self._looking = self._loop.create_task(self._look_once(), name=f"responders of {self.queue}")
        return await asyncio.shield(self._looking)

    async def _look_once(self) -> RoqError | None:
        try:
            await self._subscriber.ask_who_serves()
        except RoqError as error:
            return error
        finally:
            self._looking = None
        return None

    async def _read(self) -> None:
        try:
            while (batch := await self._subscriber.next_batch()) is not None:
                for message in batch:
                    self._answered(message)
            self._end(Closed(CLOSED))
        except RoqError as error:
            await self._give_up(error)
        except Exception as error:
            log.exception("defect while answers were read", extra={"fields": {"queue": self.queue}})
            await self._give_up(ProcessFailed(f"answers over queue {self.queue!r} could not be read: {error}"))

    def _answered(self, message: Message) -> None:
        try:
            number, outcome, headers = answer_head(message.headers)
        except FrameError as error:
            self._refusals.note("no_answer", error)
            return
        answer, server = self._waiting.get(number), self._table.end(number)
        if answer is None or answer.done() or server is None:
            self.counters["late_answers"] += 1
        elif outcome is RequestOutcome.DONE:
            answer.set_result(Reply(message.payload, headers, server))
        elif outcome is RequestOutcome.REFUSED:
            answer.set_exception(_Refused())
        else:
            kind = RequestFailed if outcome is RequestOutcome.FAILED else ResponderLost
            answer.set_exception(kind(message.payload.decode(errors="replace")))


class Callers:
    """A Cluster's, by queue; made when they are needed."""

    def __init__(self, client: GcmClient) -> None:
        self._client = client
        self._callers: dict[str, Caller] = {}
        self._closed = False

    def of(self, queue: str) -> Caller:
        """The one of this queue; another one if it had ended. Raises Closed."""
        if self._closed:
            raise Closed(CLOSED)
        caller = self._callers.get(queue)
        if caller is None or caller.ended is not None:
            caller = self._callers[queue] = Caller(self._client, queue)
        return caller

    async def close(self) -> None:
        """All of them."""
        self._closed = True
        callers, self._callers = list(self._callers.values()), {}
        await asyncio.gather(*(caller.close() for caller in callers), return_exceptions=True)
