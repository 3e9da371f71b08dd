"""How calls of an event loop travel to a blocking backend: in threads, together.

A batcher has at most one call under way; what is asked for meanwhile travels with the next, so a thousand waiting coroutines
cost one call and nobody chooses a linger. Only puts into a queue of several shards do not wait for a call that takes long: they
go beside it, to another shard. Leases have a batcher per lease time with two calls: one that never waits, and one
that waits for tasks on behalf of all who can. Cancelled callers leave nothing behind: what was not sent is dropped, leased
tasks that nobody takes are given back. Not covered: what the calls mean (queue.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from roq.errors import CallError, Closed, InvalidConfiguration, PayloadTooLarge, RoqError
from roq.wire.task import LeasedTask
from roq.workqueue.contract import LEASE_COUNT_MAX, RoundTrip
from roq.workqueue.lease_keeper import Settlements

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
THREADS = 32  # at most: puts, settlements and leases, those of each shard, a waiting lease, and administration beside them
REFUSALS = (CallError, InvalidConfiguration, PayloadTooLarge)  # themselves: what a call was given is wrong, and was seen first
BESIDE_SECONDS = 0.5  # a call that is under way for longer has others beside it, where there may be any
WAIT_SLICE_SECONDS = 1.0  # one waiting call to the backend; bounds how long a cancelled wait keeps its thread


class CallThreads:
    """A few threads of one open queue, and the calls that are under way in them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="roq-queue")
        self._calls: set[asyncio.Future[Any]] = set()

    def start(self, call: Callable[..., Result], *arguments: object) -> asyncio.Future[Result]:
        """Call in a thread."""
        future = self.loop.run_in_executor(self._pool, call, *arguments)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def opened(self, open_it: Callable[..., Result], *arguments: object, close: Callable[[Result], object]) -> Result:
        """Open something in a thread, for as long as these threads are needed. Whoever is cancelled meanwhile leaves nothing
        open: it is closed as soon as it is there. Raises what open_it raises."""
        made: list[Result] = []  # until somebody has it: who takes it out closes it
        abandoned = threading.Event()

        def close_abandoned() -> None:
            with suppress(IndexError):
                close(made.pop())

        def open_here() -> Result:
            opened = open_it(*arguments)
            made.append(opened)
            if abandoned.is_set():
                close_abandoned()
            return opened

        try:
            return await self.start(open_here)
        except BaseException:
            abandoned.set()
            if self.loop.is_closed():  # so nobody awaits anything any more
                close_abandoned()
            else:
                self.start(close_abandoned)
            self._pool.shutdown(wait=False)
            raise

    async def settle_down(self, timeout_seconds: float) -> None:
        """Wait until every call has ended, but not for ever."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_seconds)

    async def close(self) -> None:
        """Wait until every call has ended."""
        while self._calls:
            await asyncio.wait(self._calls)
        self._pool.shutdown(wait=False)


def answer(future: asyncio.Future[Result], result: Result | BaseException) -> None:
    """Give the result or the error to who still waits."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class _BatchedItem(Generic[Item, Answer]):
    __slots__ = ("future", "items", "size")

    def __init__(self, items: Sequence[Item], size: int, future: asyncio.Future[list[Answer]]) -> None:
        self.items, self.size, self.future = items, size, future


class Batcher(Generic[Item, Answer]):
    """Batches of items to one blocking call. `call`: answers in the order of the items; nothing was done if it raises one of
    REFUSALS. at_once: how many calls may be under way, when they take long."""

    def __init__(
        self,
        threads: CallThreads,
        call: Callable[[list[Item]], list[Answer]],
        count_max: int,
        bytes_max: int = 1 << 62,
        at_once: Callable[[], int] = lambda: 1,
    ) -> None:
        self._threads, self._call = threads, call
        self._count_max, self._bytes_max = count_max, bytes_max
        self._at_once = at_once
        self._entries: deque[_BatchedItem[Item, Answer]] = deque()
        self._under_way, self._latest = 0, 0.0  # calls; the loop's time at which the latest of them began
        self._begins = False  # soon
        self._beside: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, items: Sequence[Item], size: int = 0) -> asyncio.Future[list[Answer]]:
        """Have these travel with the next batch, together. size: bytes of the items."""
        future: asyncio.Future[list[Answer]] = self._threads.loop.create_future()
        if self._closed:
            raise Closed("this work queue is closed")
        self._entries.append(_BatchedItem(items, size, future))
        if not (self._under_way or self._begins):
            self._begins = True
            self._threads.loop.call_soon(self._send)
        elif self._under_way and self._beside is None and self._under_way < self._at_once():
            self._beside = self._threads.loop.call_at(self._latest + BESIDE_SECONDS, self._send_beside)
        return future

    def close(self) -> None:
        """What was not sent yet fails with Closed."""
        self._closed = True
        while self._entries:
            answer(self._entries.popleft().future, Closed("this work queue was closed before it was sent"))

    def _send_beside(self) -> None:
        self._beside = None
        if self._entries and self._under_way < self._at_once():
            self._send()

    def _send(self) -> None:
        self._begins = False
        batch: list[_BatchedItem[Item, Answer]] = []
        count = size = 0
        while self._entries:
            entry = self._entries[0]
            if entry.future.done():  # cancelled
                self._entries.popleft()
                continue
            count, size = count + len(entry.items), size + entry.size
            if batch and (count > self._count_max or size > self._bytes_max):
                break
            batch.append(self._entries.popleft())
        if batch:
            self._under_way, self._latest = self._under_way + 1, self._threads.loop.time()
            self._threads.start(self._work, batch).add_done_callback(lambda done: self._sent(batch, done))

    def _work(self, batch: list[_BatchedItem[Item, Answer]]) -> list[list[Answer] | BaseException]:
        """In a thread. One caller's mistake is his alone: a refused batch, of which nothing was done, is sent one by one."""
        try:
            answers = self._call([item for entry in batch for item in entry.items])
        except RoqError as error:
            if type(error) in REFUSALS and len(batch) > 1:
                return [self._work([entry])[0] for entry in batch]
            return [_copied(error) for _ in batch]
        results: list[list[Answer] | BaseException] = []
        start = 0
        for entry in batch:
            results.append(answers[start : start + len(entry.items)])
            start += len(entry.items)
        return results

    def _sent(self, batch: list[_BatchedItem[Item, Answer]], done: asyncio.Future[list[list[Answer] | BaseException]]) -> None:
        failure = done.exception()
        results: list[list[Answer] | BaseException] = [failure] * len(batch) if failure is not None else done.result()
        for entry, result in zip(batch, results, strict=True):
            answer(entry.future, result)
        self._under_way -= 1
        self._send()


def _copied(error: RoqError) -> RoqError:
    """One error per waiting coroutine: each adds its own traceback."""
    copy = type(error).__new__(type(error), *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error
    return copy


LeaseCall = Callable[[float, int, float, Settlements], RoundTrip]  # seconds, count, wait_seconds, settle: blocking


class _LeaseRequest:
    """One caller's."""

    __slots__ = ("count", "deadline", "future", "settle")

    def __init__(self, count: int, deadline: float, settle: Settlements, future: asyncio.Future[RoundTrip]) -> None:
        self.count, self.deadline, self.settle, self.future = count, deadline, settle, future

    def can_wait(self, now: float) -> bool:
        return not self.settle and self.deadline > now


class LeaseBatcher:
    """Leases of one lease time. `call`: Backend.lease with settlements; `give_back`: release what nobody takes."""

    def __init__(
        self, threads: CallThreads, seconds: float, call: LeaseCall, give_back: Callable[[list[LeasedTask[bytes]]], None]
    ) -> None:
        self._threads, self._seconds = threads, seconds
        self._call, self._give_back = call, give_back
        self._new: deque[_LeaseRequest] = deque()
        self._patient: deque[_LeaseRequest] = deque()  # found nothing and wait on
        self._asking = self._waiting = self._closed = False

    def add(self, count: int, wait_seconds: float, settle: Settlements = ()) -> asyncio.Future[RoundTrip]:
        """Up to `count` tasks, waiting up to `wait_seconds` for the first. With settlements: those first, never wait."""
        if self._closed:
            raise Closed("this work queue is closed")
        future: asyncio.Future[RoundTrip] = self._threads.loop.create_future()
        self._new.append(_LeaseRequest(count, time.monotonic() + wait_seconds, settle, future))
        if not self._asking:
            self._asking = True
            self._threads.loop.call_soon(self._ask)
        return future

    def close(self) -> None:
        """Everybody who waits gets Closed."""
        self._closed = True
        for request in (*self._new, *self._patient):
            answer(request.future, Closed("this work queue is closed"))
        self._new.clear()
        self._patient.clear()

    @property
    def idle(self) -> bool:
        """Nothing is under way or requested."""
        return not (self._asking or self._waiting or self._new or self._patient)

    def _ask(self) -> None:
        """Send what is new; alone and able to wait, it goes straight into the waiting call."""
        requests = _taken(self._new)
        self._asking = False
        if not requests:
            return
        now = time.monotonic()
        if not self._waiting and all(request.can_wait(now) for request in requests):
            self._patient.extend(requests)
            self._wait()
            return
        self._asking = True
        self._start(requests, 0.0, self._asked)

    def _asked(self, requests: list[_LeaseRequest], trip: RoundTrip | BaseException) -> None:
        self._hand_out(requests, trip)
        self._ask()
        self._wait()

    def _wait(self) -> None:
        if self._waiting or not (requests := _taken(self._patient)):
            return
        self._waiting = True
        left = min(request.deadline for request in requests) - time.monotonic()
        self._start(requests, min(WAIT_SLICE_SECONDS, max(left, 0.0)), self._waited)

    def _waited(self, requests: list[_LeaseRequest], trip: RoundTrip | BaseException) -> None:
        self._waiting = False
        self._hand_out(requests, trip)
        self._wait()

    def _start(
        self,
        requests: list[_LeaseRequest],
        wait_seconds: float,
        then: Callable[[list[_LeaseRequest], RoundTrip | BaseException], None],
    ) -> None:
        settle = [one for request in requests for one in request.settle]
        count = min(LEASE_COUNT_MAX, sum(request.count for request in requests))
        call = self._threads.start(self._call, self._seconds, count, wait_seconds, settle)
        call.add_done_callback(lambda ended: then(requests, ended.exception() or ended.result()))

    def _hand_out(self, requests: list[_LeaseRequest], trip: RoundTrip | BaseException) -> None:
        """Tasks first come, first served; who got none and can wait, waits on; what nobody takes goes back."""
        if isinstance(trip, BaseException):
            for request in requests:
                answer(request.future, _copied(trip) if isinstance(trip, RoqError) else trip)
            return
        answers, tasks, began = trip
        if self._closed:
            self._give_back(tasks)
            tasks = []
        now, first = time.monotonic(), 0
        for request in requests:
            mine, first = answers[first : first + len(request.settle)], first + len(request.settle)
            if request.future.done():  # cancelled
                continue
            got, tasks = tasks[: request.count], tasks[request.count :]
            if self._closed and not request.settle:
                request.future.set_exception(Closed("this work queue is closed"))
            elif got or not request.can_wait(now):
                request.future.set_result(RoundTrip(mine, got, began))
            else:
                self._patient.append(request)
                if self._waiting and request.deadline < now + WAIT_SLICE_SECONDS:
                    self._answer_in_time(request, now)
        for queue in (self._patient, self._new):
            for request in queue:
                if tasks and not request.settle and not request.future.done():
                    got, tasks = tasks[: request.count], tasks[request.count :]
                    request.future.set_result(RoundTrip([], got, began))
        if tasks:
            self._give_back(tasks)

    def _answer_in_time(self, request: _LeaseRequest, now: float) -> None:
        """The call that waits goes on after this one's time: it is not waited for."""
        timer = self._threads.loop.call_later(
            request.deadline - now, answer, request.future, RoundTrip([], [], request.deadline)
        )
        request.future.add_done_callback(lambda _: timer.cancel())  # what it was answered must not live as long as the timer


def _taken(queue: deque[_LeaseRequest]) -> list[_LeaseRequest]:
    """Wants of one call, at most LEASE_COUNT_MAX tasks; the cancelled and answered ones are dropped."""
    requests: list[_LeaseRequest] = []
    count = 0
    while queue:
        if queue[0].future.done():
            queue.popleft()
            continue
        count += queue[0].count
        if requests and count > LEASE_COUNT_MAX:
            break
        requests.append(queue.popleft())
    return requests
