"""beanstalkd through greenstalk. It has no batches: a window is put and taken one by one."""

from __future__ import annotations

import greenstalk

RESERVE_SECONDS = 30


def prepare(address: str, queue: str) -> None:
    """Nothing: a tube comes into being by itself."""


class Beanstalk:
    """See clients.client."""

    def __init__(self, address: str, queue: str, index: int) -> None:
        host, port = address.rsplit(":", 1)
        self._client = greenstalk.Client((host, int(port)), encoding=None, use=queue, watch=queue)

    def put(self, payload: bytes) -> None:
        self._client.put(payload)

    def take(self) -> bytes:
        job = self._client.reserve(RESERVE_SECONDS)
        self._client.delete(job)
        return bytes(job.body)

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        for _ in range(count):
            self.put(payload)

    def take_many(self, count: int, window: int) -> None:
        for _ in range(count):
            self.take()

    def close(self) -> None:
        self._client.close()
