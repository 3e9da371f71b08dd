"""Redis Streams with a consumer group, through redis-py and hiredis."""

from __future__ import annotations

from typing import Any, cast

import redis

GROUP, FIELD = "workers", "d"
SOCKET_SECONDS = 60


def _connect(address: str) -> redis.Redis:
    host, port = address.rsplit(":", 1)
    return redis.Redis(host, int(port), protocol=2, socket_timeout=SOCKET_SECONDS)


def prepare(address: str, queue: str) -> None:
    """Make the stream and its group."""
    connection = _connect(address)
    connection.xgroup_create(queue, GROUP, id="$", mkstream=True)
    connection.close()


class RedisStreams:
    """See clients.client."""

    def __init__(self, address: str, queue: str, index: int) -> None:
        self._redis, self._queue, self._name = _connect(address), queue, f"worker-{index}"
        self._redis.ping()

    def put(self, payload: bytes) -> None:
        self._redis.xadd(self._queue, {FIELD: payload})

    def take(self) -> bytes:
        ((identity, fields),) = self._read(1)
        self._redis.xack(self._queue, GROUP, identity)
        return fields[FIELD.encode()]

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        for start in range(0, count, window):
            pipeline = self._redis.pipeline(transaction=False)
            for _ in range(min(window, count - start)):
                pipeline.xadd(self._queue, {FIELD: payload})
            pipeline.execute()

    def take_many(self, count: int, window: int) -> None:
        taken = 0
        while taken < count:
            found = self._read(window)
            self._redis.xack(self._queue, GROUP, *[identity for identity, _ in found])
            taken += len(found)

    def _read(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = cast(Any, self._redis.xreadgroup(GROUP, self._name, {self._queue: ">"}, count=count))
        return cast(list[tuple[bytes, dict[bytes, bytes]]], answer[0][1])

    def close(self) -> None:
        self._redis.close()
