"""Answering requests in plain code: what `roq.blocking.Cluster.serve` gives. The loop's thread does the work."""

from __future__ import annotations

from types import TracebackType

from roq.client.responder import CLOSE_SECONDS
from roq.client.responder import Request as AsyncRequest
from roq.client.responder import Responder as AsyncResponder
from roq.runtime.loop_thread import LoopThread
from roq.wire.headers import Headers


class Request:
    """See roq.Request. May be answered from any thread."""

    __slots__ = ("_loop", "_request", "payload")

    def __init__(self, loop: LoopThread, request: AsyncRequest) -> None:
        self._loop, self._request, self.payload = loop, request, request.payload

    @property
    def topic(self) -> str:
        """See roq.Request.topic."""
        return self._request.topic

    @property
    def headers(self) -> dict[str, str | bytes]:
        """See roq.Request.headers."""
        return self._request.headers

    @property
    def seconds_left(self) -> float:
        """See roq.Request.seconds_left."""
        return self._request.seconds_left

    def reply(self, payload: bytes = b"", headers: Headers | None = None) -> None:
        """See roq.Request.reply."""
        self._loop.call(self._request.reply(payload, headers))

    def fail(self, reason: str) -> None:
        """See roq.Request.fail."""
        self._loop.call(self._request.fail(reason))


class Responder:
    """See roq.Responder: iterate over requests, also from several threads, and answer each."""

    def __init__(self, loop: LoopThread, responder: AsyncResponder) -> None:
        self._loop, self._responder = loop, responder

    @property
    def id(self) -> int:
        """See roq.Responder.id."""
        return self._responder.id

    def __enter__(self) -> Responder:
        self._loop.call(self._responder.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Responder:
        return self

    def __next__(self) -> Request:
        if (request := self.next_request()) is None:
            raise StopIteration
        return request

    def next_request(self) -> Request | None:
        """See roq.Responder.next_request."""
        request = self._loop.call(self._responder.next_request())
        return None if request is None else Request(self._loop, request)

    def stop(self) -> None:
        """See roq.Responder.stop."""
        self._loop.soon(self._responder.stop)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """See roq.Responder.close."""
        self._loop.call(self._responder.close(timeout_seconds))
