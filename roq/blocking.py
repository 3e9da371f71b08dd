"""The same API for plain code, without `await`: one event loop in a thread of its own does the work.

    with roq.blocking.connect("127.0.0.1:2181") as cluster:
        with cluster.publisher("orders") as publisher:
            publisher.publish("eu.paris", b"...")
        with cluster.subscriber("orders") as subscriber:
            for message in subscriber: ...
    with roq.blocking.open_queue("file:///data/tasks") as tasks:  # no loop there: straight to the queue
        for task in tasks.leases(seconds=60): ...; task.ack()

Objects may be used from any thread. The thread is a daemon: a program that forgets to close exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from roq.client import cluster as asynchronous
from roq.client.administration import ADMIN_SECONDS
from roq.client.blocking_group import GroupSubscriber
from roq.client.blocking_responder import Request, Responder
from roq.client.blocking_transaction import Transaction
from roq.client.broadcasts import TopologyEvent
from roq.client.events import ClusterEvent
from roq.client.group import LEASE_SECONDS
from roq.client.responder import CAPACITY
from roq.coordination.locate import ZOOKEEPER_SECONDS
from roq.errors import Closed, MessagesLost, RoqError
from roq.pubsub.publisher import Publisher as AsyncPublisher
from roq.pubsub.publisher import PublishReceipt
from roq.pubsub.publisher_health import PublisherHealth
from roq.pubsub.start import Start
from roq.pubsub.subscriber import OPEN_SECONDS
from roq.pubsub.subscriber import Subscriber as AsyncSubscriber
from roq.pubsub.subscription import Message, SubscriberHealth, log_lost
from roq.runtime.loop_thread import LoopThread
from roq.runtime.security import use_card
from roq.wire.headers import Headers, check_message_headers
from roq.wire.hosts import HostRemains
from roq.wire.kpi import QueueKpi
from roq.wire.recording import TapePosition
from roq.workqueue.blocking_queue import Task, WorkQueue, open_queue

__all__ = [
    "Cluster",
    "GroupSubscriber",
    "Publisher",
    "Request",
    "Responder",
    "Subscriber",
    "Task",
    "Transaction",
    "WorkQueue",
    "connect",
    "open_queue",
]

T = TypeVar("T")
P = ParamSpec("P")
PENDING_BYTES = 4 * 1024 * 1024  # handed over by `publish` and not taken by the loop yet; above this it waits
END = object()
ENDED = "this cluster connection is closed"


async def _made(make: Callable[[], T]) -> T:
    """What has to be made, or looked at, on the loop."""
    return make()


class Publisher:
    """See roq.Publisher. `publish` hands over to the loop and returns; what a message met with shows at the next call."""

    def __init__(self, loop: LoopThread, publisher: AsyncPublisher) -> None:
        self._loop, self._publisher = loop, publisher
        self._pending: deque[tuple[str, bytes, Headers | None]] = deque()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._entered = self._draining = False
        self._failure: BaseException | None = None

    @property
    def id(self) -> int:
        """The publisher's id."""
        return self._publisher.id

    @property
    def number(self) -> int:
        """Of a publisher with a `producer`: see the asynchronous face."""
        return self._publisher.number

    @property
    def payload_bytes_max(self) -> int:
        """See roq.Publisher.payload_bytes_max."""
        return self._publisher.payload_bytes_max

    def __enter__(self) -> Publisher:
        self._loop.call(self._publisher.open())
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def publish(
        self, topic: str, payload: bytes, headers: Headers | None = None, confirm: str | None = None
    ) -> PublishReceipt | None:
        """Publish one message; waits only while PENDING_BYTES are on their way, or until it is as `confirm` says. Raises what
        an earlier message met with, and as roq.Publisher.publish."""
        if not self._entered:
            raise Closed("open this publisher first: with …")
        if confirm is not None:
            self._settle()
            return self._loop.call(self._publisher.publish(topic, payload, headers, confirm=confirm))
        copied, beside = check_message_headers(headers) if headers else (None, 0)
        size = len(payload) + beside + 64
        with self._lock:
            while self._pending_bytes > PENDING_BYTES and self._failure is None:
                self._room.wait()
            self._raise_failure()
            start, self._draining = not self._draining, True
            self._pending.append((topic, payload, copied))
            self._pending_bytes += size
        if start:
            try:
                self._loop.soon(self._start)
            except Closed as closed:
                self._end_drain(closed)
                raise
        return None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def publish_many(
        self, topic: str, payloads: Iterable[bytes], headers: Headers | None = None, *, confirm: str | None = None
    ) -> PublishReceipt | None:
        """See roq.Publisher.publish_many; returns when all are handed over, or are as `confirm` says."""
        self._settle()
        return self._loop.call(self._publisher.publish_many(topic, payloads, headers, confirm=confirm))

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drain())
        self._task.add_done_callback(self._drained)

    async def _drain(self) -> None:
        while True:
            with self._lock:
                batch, self._pending = self._pending, deque()
                self._pending_bytes = 0
                self._room.notify_all()
                if not batch:
                    self._draining = False
                    return
            for topic, payload, headers in batch:
                try:
                    await self._publisher.publish(topic, payload, headers)
                except (RoqError, TypeError) as error:  # raised in the caller's thread, by its next call
                    with self._lock:
                        self._failure = error

    def _drained(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for it is told if it did not end well, or never began."""
        if task.cancelled():
            self._end_drain(Closed(ENDED))
        elif error := task.exception():
            self._end_drain(error)

    def _end_drain(self, error: BaseException) -> None:
        with self._lock:
            self._failure, self._draining = error, False
            self._pending.clear()
            self._pending_bytes = 0
            self._room.notify_all()

    def _settle(self) -> None:
        """Wait until everything is handed over. Raises what a message met with."""
        with self._lock:
            while self._draining:
                self._room.wait()
            self._raise_failure()

    def flush(self, timeout_seconds: float = 10.0) -> PublishReceipt:
        """Return when everything published so far has passed the Exchange, or is stored if this publisher confirms that.
        Raises as roq.Publisher.flush, or what a message met."""
        self._settle()
        return self._loop.call(self._publisher.flush(timeout_seconds))

    def close(self, timeout_seconds: float = 5.0) -> None:
        """See roq.Publisher.close."""
        try:
            self._settle()
        finally:
            self._loop.call(self._publisher.close(timeout_seconds))

    @property
    def replays(self) -> int:
        """See roq.Publisher.replays."""
        return self._publisher.replays

    def health(self) -> PublisherHealth:
        """What is well and what is not."""
        return self._loop.call(_made(self._publisher.health))


class Subscriber:
    """See roq.Subscriber: iterate over messages, or over `batches()`."""

    def __init__(self, loop: LoopThread, subscriber: AsyncSubscriber) -> None:
        self._loop, self._subscriber = loop, subscriber
        self._current: Iterator[Message] = iter(())

    def __enter__(self) -> Subscriber:
        self._loop.call(self._subscriber.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def ready(self, timeout_seconds: float = OPEN_SECONDS) -> None:
        """See roq.Subscriber.ready."""
        self._loop.call(self._subscriber.ready(timeout_seconds))

    def next_batch(self) -> list[Message] | None:
        """See roq.Subscriber.next_batch."""
        return self._loop.call(self._subscriber.next_batch())

    def batches(self) -> Iterator[list[Message]]:
        """Lists of messages as they arrive."""
        rest = list(self._current)
        if rest:
            yield rest
        while (batch := self.next_batch()) is not None:
            yield batch

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield from self._current
            batch = self.next_batch()
            if batch is None:
                return
            self._current = iter(batch)

    @property
    def duplicated(self) -> int:
        """See roq.Subscriber.duplicated."""
        return self._subscriber.duplicated

    @property
    def position(self) -> TapePosition | None:
        """See roq.Subscriber.position."""
        return self._subscriber.position

    @property
    def lost(self) -> int:
        """Messages reported as lost so far."""
        return self._subscriber.lost

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Leave the queue; iteration ends."""
        self._loop.call(self._subscriber.close(timeout_seconds))

    def health(self) -> SubscriberHealth:
        """What is well and what is not."""
        return self._loop.call(_made(self._subscriber.health))


def _awaited(
    method: Callable[Concatenate[asynchronous.Cluster, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Cluster, P], T]:
    """The same method, without `await`."""

    @functools.wraps(method)
    def call(self: Cluster, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._loop.call(method(self._cluster, *arguments, **options))

    return call


class Cluster:
    """See roq.Cluster; the same methods, without `await`."""

    def __init__(self, zookeeper: str, **seconds: float) -> None:
        self.zookeeper = zookeeper
        self._loop = LoopThread(ended=ENDED)
        self._cluster = self._loop.call(_made(lambda: asynchronous.Cluster(zookeeper, **seconds)))
        self._iterating: set[AsyncGenerator[Any, None]] = set()
        self._members: weakref.WeakSet[GroupSubscriber] = weakref.WeakSet()

    def __enter__(self) -> Cluster:
        try:
            self._loop.call(self._cluster.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread. Whoever iterates or waits in another thread gets Closed."""
        for values in list(self._iterating):
            self._end(values)
        for member in list(self._members):
            member.close()
        self._loop.call(self._cluster.close())
        self._loop.stop()

    create_queue = _awaited(asynchronous.Cluster.create_queue)
    remove_queue = _awaited(asynchronous.Cluster.remove_queue)
    start_queue = _awaited(asynchronous.Cluster.start_queue)
    stop_queue = _awaited(asynchronous.Cluster.stop_queue)
    record_queue = _awaited(asynchronous.Cluster.record_queue)
    record_history = _awaited(asynchronous.Cluster.record_history)
    tapes = _awaited(asynchronous.Cluster.tapes)
    durables = _awaited(asynchronous.Cluster.durables)
    forget_durable = _awaited(asynchronous.Cluster.forget_durable)
    producers = _awaited(asynchronous.Cluster.producers)
    forget_producer = _awaited(asynchronous.Cluster.forget_producer)
    queue_exists = _awaited(asynchronous.Cluster.queue_exists)
    queues = _awaited(asynchronous.Cluster.queues)
    queue = _awaited(asynchronous.Cluster.queue)
    create_exchange = _awaited(asynchronous.Cluster.create_exchange)
    remove_exchange = _awaited(asynchronous.Cluster.remove_exchange)
    drain_exchange = _awaited(asynchronous.Cluster.drain_exchange)
    exchange_active = _awaited(asynchronous.Cluster.exchange_active)
    create_work_queue = _awaited(asynchronous.Cluster.create_work_queue)
    set_shards = _awaited(asynchronous.Cluster.set_shards)
    remove_work_queue = _awaited(asynchronous.Cluster.remove_work_queue)
    work_queues = _awaited(asynchronous.Cluster.work_queues)
    work_queue = _awaited(asynchronous.Cluster.work_queue)
    create_group = _awaited(asynchronous.Cluster.create_group)
    remove_group = _awaited(asynchronous.Cluster.remove_group)
    groups = _awaited(asynchronous.Cluster.groups)
    hosts = _awaited(asynchronous.Cluster.hosts)
    cordon_host = _awaited(asynchronous.Cluster.cordon_host)
    drain_host = _awaited(asynchronous.Cluster.drain_host)
    evacuate_host = _awaited(asynchronous.Cluster.evacuate_host)
    host_remains = _awaited(asynchronous.Cluster.host_remains)
    options = _awaited(asynchronous.Cluster.options)
    set_template = _awaited(asynchronous.Cluster.set_template)
    set_rebalance = _awaited(asynchronous.Cluster.set_rebalance)
    fleet = _awaited(asynchronous.Cluster.fleet)
    set_fleet = _awaited(asynchronous.Cluster.set_fleet)
    set_policy = _awaited(asynchronous.Cluster.set_policy)
    get_policy = _awaited(asynchronous.Cluster.get_policy)
    set_access = _awaited(asynchronous.Cluster.set_access)
    view = _awaited(asynchronous.Cluster.view)
    inspect = _awaited(asynchronous.Cluster.inspect)
    request = _awaited(asynchronous.Cluster.request)
    move = _awaited(asynchronous.Cluster.move)

    def topology(self) -> Iterator[TopologyEvent]:
        """See roq.Cluster.topology."""
        return self._each(self._cluster.topology())

    def events(self, since: datetime | None = None) -> Iterator[ClusterEvent]:
        """See roq.Cluster.events."""
        return self._each(self._cluster.events(since))

    def remains(self, host: str) -> Iterator[HostRemains]:
        """See roq.Cluster.remains."""
        return self._each(self._cluster.remains(host))

    def kpis(self, queue: str) -> Iterator[QueueKpi]:
        """See roq.Cluster.kpis."""
        return self._each(self._cluster.kpis(queue))

    def _each(self, values: AsyncGenerator[T, None]) -> Iterator[T]:
        async def next_value() -> Any:
            return await anext(values, END)

        self._iterating.add(values)
        try:
            while (value := self._loop.call(next_value())) is not END:
                yield value
        finally:
            self._end(values)

    def _end(self, values: AsyncGenerator[Any, None]) -> None:
        """Unless `close` has, or another thread waits for the next one just now."""
        if values in self._iterating:
            self._iterating.discard(values)
            with contextlib.suppress(Closed, RuntimeError):
                self._loop.call(values.aclose())

    def publisher(
        self, queue: str, *, confirm: str = "routed", producer: str | None = None, create_missing: bool = False
    ) -> Publisher:
        """A publisher; use it as a context manager."""
        options: dict[str, Any] = {"confirm": confirm, "producer": producer, "create_missing": create_missing}
        return Publisher(self._loop, self._loop.call(_made(lambda: self._cluster.publisher(queue, **options))))

    @overload
    def subscriber(
        self,
        queue: str,
        *topics: str,
        on_lost: Callable[[MessagesLost], None] = ...,
        start: Start = ...,
        follow: bool | str = ...,
        durable: str | None = ...,
        where: str = ...,
        create_missing: bool = ...,
    ) -> Subscriber: ...

    @overload
    def subscriber(
        self,
        queue: str,
        *topics: str,
        group: str,
        start: Start = ...,
        order: str | None = ...,
        where: str = ...,
        lease_seconds: float = ...,
        count: int = ...,
        create_missing: bool = ...,
    ) -> GroupSubscriber: ...

    def subscriber(  # noqa: PLR0913 - all but the queue are options
        self,
        queue: str,
        *topics: str,
        on_lost: Callable[[MessagesLost], None] = log_lost,
        start: Start | None = None,
        follow: bool | str = True,
        durable: str | None = None,
        group: str | None = None,
        order: str | None = None,
        where: str = "",
        lease_seconds: float = LEASE_SECONDS,
        count: int = 1,
        create_missing: bool = False,
    ) -> Subscriber | GroupSubscriber:
        """See roq.Cluster.subscriber; use it as a context manager. `on_lost` is called in the loop's thread."""
        make: Any = self._cluster.subscriber  # its overloads take one kind or the other
        options = {"start": start, "follow": follow, "durable": durable, "group": group, "order": order, "where": where}
        leases = {"lease_seconds": lease_seconds, "count": count, "create_missing": create_missing}
        made = self._loop.call(_made(lambda: make(queue, *topics, on_lost=on_lost, **options, **leases)))
        if isinstance(made, AsyncSubscriber):
            return Subscriber(self._loop, made)
        member = GroupSubscriber(self._loop, made)
        self._members.add(member)
        return member

    def transaction(self) -> Transaction:
        """See roq.Cluster.transaction; use it as a context manager."""
        return Transaction(self._loop, self._cluster._transactions)

    def serve(self, queue: str, *topics: str, group: str = "", capacity: int = CAPACITY) -> Responder:
        """See roq.Cluster.serve; use it as a context manager."""
        make = functools.partial(self._cluster.serve, queue, *topics, group=group, capacity=capacity)
        return Responder(self._loop, self._loop.call(_made(make)))


def connect(
    zookeeper: str,
    *,
    connect_seconds: float = ADMIN_SECONDS,
    zookeeper_seconds: float = ZOOKEEPER_SECONDS,
    card: str | Path | None = None,
) -> Cluster:
    """The cluster behind these ZooKeeper addresses, for plain code. See roq.connect."""
    use_card(Path(card) if card is not None else None)
    return Cluster(zookeeper, connect_seconds=connect_seconds, zookeeper_seconds=zookeeper_seconds)
