"""RabbitMQ quorum queues through pika: persistent messages, publisher confirms, consumer acknowledgments.

A queue gives each message away once, to whoever consumes it: there is nothing to replay, and members share the queue itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pika

from benchmarks.recorded.clients.client import POLL_SECONDS, WAIT_SECONDS, Clients, Run
from benchmarks.recorded.workload import WINDOW

PERSISTENT = pika.BasicProperties(delivery_mode=2)
ACK_EVERY = 100  # messages; an acknowledgment covers all before it


def _parameters(address: str) -> pika.URLParameters:
    parameters = pika.URLParameters(address)
    parameters.heartbeat = 0
    return parameters


def prepare(address: str, queue: str) -> None:
    """Declare the queue."""
    connection = pika.BlockingConnection(_parameters(address))
    connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()


class Loop:
    """A connection with callbacks, the way pika is fast. opened: gets the channel once it is there."""

    def __init__(self, address: str, opened: Callable[[Loop, Any], None]) -> None:
        self.connection = pika.SelectConnection(
            _parameters(address),
            on_open_callback=lambda connection: connection.channel(on_open_callback=partial(opened, self)),
            on_close_callback=lambda connection, _: connection.ioloop.stop(),
        )

    def run(self) -> None:
        """Until `stop`."""
        self.connection.ioloop.start()

    def stop(self) -> None:
        """Close the connection; `run` returns."""
        if self.connection.is_open:
            self.connection.close()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it then."""
        self.connection.ioloop.call_later(seconds, call)


class Publishing:
    """Payloads out, with at most `window` unconfirmed."""

    def __init__(self, run: Run, window: int) -> None:
        self._run, self._window = run, window
        self._payloads: Iterator[bytes] = iter(())
        self._sent = self.confirmed = 0
        self._ended = False
        self.latencies: list[int] = []
        self._began = 0
        self._loop = Loop(run.address, self._opened)

    def publish(self) -> Publishing:
        """All of them."""
        self._loop.run()
        return self

    def _opened(self, loop: Loop, channel: Any) -> None:
        self._run.begin()
        self._payloads = (payload for window in self._run.timed() for payload in window)
        channel.confirm_delivery(partial(self._confirmed, channel))
        self._fill(channel)

    def _fill(self, channel: Any) -> None:
        while not self._ended and self._sent - self.confirmed < self._window:
            payload = next(self._payloads, None)
            if payload is None:
                self._ended = True
                break
            self._sent += 1
            self._began = time.monotonic_ns()
            channel.basic_publish("", self._run.queue, payload, PERSISTENT)
        if self._ended and self.confirmed == self._sent:
            self._run.end()
            self._loop.stop()

    def _confirmed(self, channel: Any, frame: Any) -> None:
        method = frame.method
        if type(method) is not pika.spec.Basic.Ack:
            raise RuntimeError(f"RabbitMQ refused message {method.delivery_tag}")
        if self._window == 1:
            self.latencies.append(time.monotonic_ns() - self._began)
        self.confirmed = method.delivery_tag if method.multiple else self.confirmed + 1  # a single queue confirms in order
        self._fill(channel)


def publish(run: Run) -> int:
    """1,000 unconfirmed."""
    return Publishing(run, WINDOW).publish().confirmed


def one_by_one(run: Run) -> list[int]:
    """Each waits for the confirmation of the one before."""
    return Publishing(run, 1).publish().latencies


def member(run: Run, count: int) -> list[bytes]:
    """basic_consume with `count` unacknowledged, until all members together have them all."""
    return _consume(run, count, run.took)


def replay(run: Run) -> list[bytes]:
    """basic_consume of all there is, for whoever checks it: it is gone then."""
    taken = 0

    def took(count: int) -> bool:
        nonlocal taken
        taken += count
        if count:
            run.end()
        return taken >= run.count

    return _consume(run, WINDOW, took)


def _consume(run: Run, count: int, took: Callable[[int], bool]) -> list[bytes]:
    taken: list[bytes] = []
    every = min(ACK_EVERY, count)
    unacknowledged, last = 0, 0
    deadline = time.monotonic() + WAIT_SECONDS

    def opened(loop: Loop, channel: Any) -> None:
        def acknowledge() -> None:
            nonlocal unacknowledged, deadline
            if unacknowledged:
                channel.basic_ack(last, multiple=True)
                deadline = time.monotonic() + WAIT_SECONDS
            done = took(unacknowledged)
            unacknowledged = 0
            if done:
                loop.stop()

        def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal unacknowledged, last
            taken.append(bytes(body))
            unacknowledged, last = unacknowledged + 1, method.delivery_tag
            if unacknowledged >= every:
                acknowledge()

        def look() -> None:
            acknowledge()
            if time.monotonic() > deadline:
                loop.stop()  # what is missing is found by who counts
            elif loop.connection.is_open:
                loop.later(POLL_SECONDS, look)

        run.begin()
        channel.basic_qos(prefetch_count=count)
        channel.basic_consume(run.queue, take)
        loop.later(POLL_SECONDS, look)

    Loop(run.address, opened).run()
    return taken


def unsettled(address: str, queue: str, group: str) -> int:
    """What the queue still has."""
    connection = pika.BlockingConnection(_parameters(address))
    declared = connection.channel().queue_declare(queue, passive=True)
    connection.close()
    return int(declared.method.message_count)


CLIENTS = Clients(
    prepare=prepare,
    publish={"basic_publish, 1,000 unconfirmed": publish},
    one_by_one={"basic_publish, confirmed": one_by_one},
    replay={"basic_consume": replay},
    member={"basic_consume, 1,000 unacknowledged, one ack for 100": partial(member, count=WINDOW)},
    member_singly={"basic_consume, 1 unacknowledged": partial(member, count=1)},
    unsettled=unsettled,
    once=True,
)
