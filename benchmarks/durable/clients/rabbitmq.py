"""RabbitMQ through pika: durable queue, persistent messages, publisher confirms, consumer acknowledgments."""

from __future__ import annotations

from typing import Any

import pika

PERSISTENT = pika.BasicProperties(delivery_mode=2)
ACK_EVERY = 100  # messages; an acknowledgment covers all before it


def _parameters(address: str) -> pika.URLParameters:
    parameters = pika.URLParameters(address)
    parameters.heartbeat = 0
    return parameters


def prepare_quorum(address: str, queue: str) -> None:
    """Declare a quorum queue."""
    _declare(address, queue, "quorum")


def prepare_classic(address: str, queue: str) -> None:
    """Declare a classic queue."""
    _declare(address, queue, "classic")


def _declare(address: str, queue: str, kind: str) -> None:
    connection = pika.BlockingConnection(_parameters(address))
    connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
    connection.close()


class RabbitMQ:
    """See clients.client."""

    def __init__(self, address: str, queue: str, index: int) -> None:
        self._address, self._queue = address, queue
        self._connection = pika.BlockingConnection(_parameters(address))
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()

    def put(self, payload: bytes) -> None:
        self._channel.basic_publish("", self._queue, payload, PERSISTENT)

    def take(self) -> bytes:
        while True:
            method, _, body = self._channel.basic_get(self._queue)
            if method is not None:
                self._channel.basic_ack(method.delivery_tag)
                return bytes(body)

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        _Stream(self._address, self._queue).put(count, payload, window)

    def take_many(self, count: int, window: int) -> None:
        _Stream(self._address, self._queue).take(count, window)

    def close(self) -> None:
        self._channel.close()
        self._connection.close()


class _Stream:
    """Many messages over one connection with callbacks, the way pika does it fast."""

    def __init__(self, address: str, queue: str) -> None:
        self._address, self._queue = address, queue
        self._unconfirmed: dict[int, None] = {}
        self._sent = self._taken = 0
        self._connection: Any = None

    def _run(self, opened: Any) -> None:
        self._connection = pika.SelectConnection(
            _parameters(self._address),
            on_open_callback=lambda connection: connection.channel(on_open_callback=opened),
            on_close_callback=lambda connection, _: connection.ioloop.stop(),
        )
        self._connection.ioloop.start()

    def put(self, count: int, payload: bytes, window: int) -> None:
        """Publish with at most `window` unconfirmed."""

        def fill(channel: Any) -> None:
            while self._sent < count and len(self._unconfirmed) < window:
                self._sent += 1
                self._unconfirmed[self._sent] = None
                channel.basic_publish("", self._queue, payload, PERSISTENT)

        def opened(channel: Any) -> None:
            def confirmed(frame: Any) -> None:
                tag = frame.method.delivery_tag
                if frame.method.multiple:
                    while self._unconfirmed and next(iter(self._unconfirmed)) <= tag:
                        del self._unconfirmed[next(iter(self._unconfirmed))]
                else:
                    self._unconfirmed.pop(tag, None)
                if self._sent < count:
                    fill(channel)
                elif not self._unconfirmed:
                    self._connection.close()

            channel.confirm_delivery(confirmed)
            fill(channel)

        self._run(opened)

    def take(self, count: int, window: int) -> None:
        """Consume with `window` unacknowledged."""

        def opened(channel: Any) -> None:
            def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
                self._taken += 1
                if self._taken >= count or self._taken % ACK_EVERY == 0:
                    channel.basic_ack(method.delivery_tag, multiple=True)
                if self._taken == count:
                    self._connection.close()

            channel.basic_qos(prefetch_count=window)
            channel.basic_consume(self._queue, take)

        self._run(opened)
