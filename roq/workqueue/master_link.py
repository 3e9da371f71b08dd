"""How a blocking client reaches the active master of a work queue, whichever process that is just now.

A request is sent again, with the same numbers, until it is answered or its time is over: after silence, after NotLeader (the
GCM then tells who leads), and after a refusal that is only temporary. Not covered: what is asked (remote.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import (
    Closed,
    DeadlineExceeded,
    FrameError,
    Overloaded,
    RoqError,
    StorageFailed,
    StorageFull,
    TemporaryError,
    Unavailable,
)
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.runtime.blocking_connection import BlockingConnection, ConnectionPool, StopEvent
from roq.runtime.loop_thread import LoopThread
from roq.wire import gcm
from roq.wire import master as wire
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import error_of, open_envelope
from roq.wire.work_queue import TaskSettings, WorkQueueRecord

T = TypeVar("T", bound=msgspec.Struct)
SILENCE_SECONDS = 0.3  # beyond the wait that was asked for, before a request is sent again; doubled each time
SILENCE_MAX_SECONDS = 2.0
PROGRESS_BYTES = 16 * 1024  # of an answer, within SILENCE_SECONDS: the master is not silent
LOOK_SECONDS = 0.3  # of silence between two questions to the GCM whether another master leads
LOCATE_SECONDS = 5.0  # one question to the GCM
LOOK_SECONDS_MIN = 0.1  # the shortest one
PATIENCE_SECONDS = 30.0  # a request that nobody answers for longer fails: longer than any fail-over


class MasterLink:
    """`zookeeper`: "h1:p,h2:p[/chroot]". beside: another link, of the same cluster, that is closed after this one: both ask the
    GCM by the same connection. Any thread."""

    def __init__(
        self, zookeeper: str, name: str, patience_seconds: float = PATIENCE_SECONDS, beside: MasterLink | None = None
    ) -> None:
        self.name = name
        self.patience_seconds = patience_seconds
        self._stop = StopEvent()
        self.connections = ConnectionPool(self._stop)
        self._owner = beside is None
        self._loop: LoopThread = LoopThread(f"roq {name}") if beside is None else beside._loop
        self._gcm: GcmClient = GcmClient(zookeeper) if beside is None else beside._gcm
        self._locating = threading.Lock()
        self._endpoint = ""
        self._located = 0.0  # monotonic seconds: when the GCM was asked last, in vain or not
        self._unfound = "nobody was asked yet"

    def open(
        self,
        settings: TaskSettings | None,
        write_quorum: int = 0,
        ack_quorum: int = 0,
        standbys: int | None = None,
        inline_bytes: int = 0,
        asked: tuple[str, ...] | None = None,
        shards: int = 0,
    ) -> WorkQueueRecord:
        """Create the work queue unless it exists. asked, shards: see CreateWorkQueue.

        Raises WorkQueueConflict, InvalidName, NoHosts, Unavailable."""
        others = write_quorum, ack_quorum, standbys, inline_bytes
        request = gcm.CreateWorkQueue(self.name, new_token(), settings, *others, asked, None, shards)
        info = self._ask_gcm(request, self.patience_seconds)
        self._endpoint = _active(info)
        return info.record

    def describe(self) -> WorkQueueRecord:
        """The record, as it is now. Raises WorkQueueNotFound, Unavailable."""
        return self._ask_gcm(gcm.DescribeWorkQueue(self.name), LOCATE_SECONDS).record

    def ask(
        self,
        make: Callable[[int], wire.Request],
        expect: type[T],
        wait_seconds: float = 0.0,
        patience_seconds: float | None = None,
    ) -> T:
        """The active master's answer to make(again), `again` being 0 for the first try and 1 for all others.

        wait_seconds: how long the master may take. patience_seconds: None: the link's. Raises what the master refuses, Closed,
        or Unavailable.
        """
        patience = self.patience_seconds if patience_seconds is None else patience_seconds
        deadline = time.monotonic() + wait_seconds + patience
        silence, pauses, again = SILENCE_SECONDS, delays(0.02, 0.25), 0
        body = make(0)
        while True:
            endpoint = self._endpoint or self._locate("", deadline)
            connection = self.connections.take(endpoint)
            failure: RoqError
            try:
                now = time.monotonic() + wait_seconds
                reply = self._once(connection, body, min(deadline, now + silence), now + SILENCE_SECONDS, deadline)
                if isinstance(reply, expect):
                    return reply
                raise FrameError(f"{type(reply).__name__} in reply to {type(body).__name__}")
            except DeadlineExceeded as error:
                failure, silence = error, min(2 * silence, SILENCE_MAX_SECONDS)
            except TemporaryError as error:
                failure, silence = error, SILENCE_SECONDS
            finally:
                self.connections.give(connection)
            if not again:
                again, body = 1, make(1)
            pause = next(pauses)
            if time.monotonic() + pause >= deadline:
                if isinstance(failure, StorageFull | StorageFailed):
                    raise failure
                raise Unavailable(f"work queue {self.name!r} gave no answer: {failure}") from failure
            if not isinstance(failure, Overloaded):  # which only the active master is
                self._locate(endpoint, deadline)
            self.pause(pause)

    def _once(
        self, connection: BlockingConnection, body: wire.Request, deadline: float, look: float, limit: float
    ) -> msgspec.Struct:
        """Until `deadline`, put off to `limit` at most while a large answer comes in; or until the GCM, asked from `look` on,
        says that another one leads. Sending does not count, as long as the master leads."""
        id, began, endpoint = next(connection.ids), time.monotonic(), connection.endpoint

        def wait_on() -> bool:
            now = time.monotonic()
            return now < limit and self._locate(endpoint, min(limit, now + LOOK_SECONDS)) == endpoint

        connection.send(wire.seal_call(id, body), wait_on)
        took = time.monotonic() - began  # it is no silence of the master, which may have had others to read
        deadline, look = min(limit, deadline + took), look + took
        received = connection.received
        while True:
            parts = connection.receive(min(deadline, look))
            if parts is None:
                now = time.monotonic()
                if now >= deadline and connection.received - received >= PROGRESS_BYTES:
                    received, deadline = connection.received, min(limit, now + SILENCE_SECONDS)
                    continue
                if (
                    now < deadline
                    and self._locate(connection.endpoint, min(deadline, now + LOOK_SECONDS)) == connection.endpoint
                ):
                    look = time.monotonic() + LOOK_SECONDS
                    continue
                raise DeadlineExceeded(f"no answer to {type(body).__name__} from {endpoint}")
            try:
                answer = wire.open_answer(parts[-1])
            except UNDECODABLE:
                envelope = open_envelope(parts[-1])  # an error, or nothing we know
                if envelope.id == id:
                    raise error_of(envelope.body) from None
                continue
            if answer.id == id:
                return answer.body

    def pause(self, seconds: float) -> None:
        """Raises Closed when the link is closed meanwhile."""
        if self._stop.wait(seconds):
            raise Closed(f"work queue {self.name!r} was closed")

    def _locate(self, stale: str, deadline: float) -> str:
        """The active master's endpoint, as the GCM knows it; asked once for all threads that got no answer from `stale`.

        It is still `stale` if the GCM knows no other, or can't be asked until `deadline`. Raises Unavailable if there is none.
        """
        pauses = delays(0.05, 0.5)
        while True:
            began = time.monotonic()
            if self._locating.acquire(timeout=max(0.0, deadline - began)):
                try:
                    if self._located < began and self._endpoint in ("", stale):
                        self._look(stale, max(LOOK_SECONDS_MIN, min(LOCATE_SECONDS, deadline - time.monotonic())))
                finally:
                    self._locating.release()
            if found := self._endpoint or stale:
                return found
            pause = next(pauses)
            if time.monotonic() + pause >= deadline:
                raise Unavailable(f"no master of work queue {self.name!r} can be found: {self._unfound}")
            self.pause(pause)

    def _look(self, stale: str, seconds: float) -> None:
        """Ask the GCM once."""
        try:
            found = _active(self._ask_gcm(gcm.DescribeWorkQueue(self.name), seconds))
            if found and stale and found != stale:
                self.connections.drop(stale)
            self._endpoint = found or self._endpoint
            self._unfound = "none is active"
        except (Unavailable, DeadlineExceeded) as error:
            self._unfound = str(error)
        finally:
            self._located = time.monotonic()

    def _ask_gcm(self, request: msgspec.Struct, seconds: float) -> gcm.WorkQueueInfo:
        return self._loop.call(self._gcm.request(request, gcm.WorkQueueInfo, seconds))

    def close(self) -> None:
        """Whoever waits gets Closed."""
        self._stop.set()
        self.connections.close()
        if self._owner:
            self._loop.loop.call_soon_threadsafe(self._gcm.close)
            self._loop.stop()


def _active(info: gcm.WorkQueueInfo) -> str:
    return info.masters[0].endpoint() if info.masters and info.masters[0].active else ""
