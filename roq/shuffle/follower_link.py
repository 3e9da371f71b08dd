"""Blocking requests of a client to followers, and to the leader through the GCM. Any thread; every wait has an end.

Not covered: what is asked (cluster_sink.py, cluster_source.py, cluster.py).
"""

from __future__ import annotations

import itertools
import time
from typing import TypeVar

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import Closed, DeadlineExceeded, FrameError, Unavailable
from roq.runtime.line import Bell, Lines
from roq.runtime.loop_thread import LoopThread
from roq.wire import shuffle as wire
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope, seal

T = TypeVar("T", bound=msgspec.Struct)
_decode = msgspec.msgpack.Decoder(wire.Reply).decode


class FollowerLink:
    """zookeeper: "h1:p,h2:p[/chroot]"."""

    def __init__(self, zookeeper: str) -> None:
        self._bell = Bell()
        self._lines = Lines(self._bell)
        self._ids = itertools.count(1)
        self._loop = LoopThread("roq shuffles")
        self._gcm = GcmClient(zookeeper)

    def leader(self, request: msgspec.Struct, expect: type[T], seconds: float) -> T:
        """The leader's answer. Raises its refusal, Unavailable, DeadlineExceeded, Closed."""
        return self._loop.call(self._gcm.request(request, expect, seconds))

    def ask(self, endpoint: str, request: msgspec.Struct, expect: type[T], seconds: float) -> T:
        """A follower's answer, within so many seconds. Raises its refusal, Unavailable, DeadlineExceeded, Closed."""
        line, id, deadline = self._lines.take(endpoint), next(self._ids), time.monotonic() + seconds
        kept = False
        try:
            line.send(seal(EnvelopeKind.REQUEST, id, request), lambda: time.monotonic() < deadline)
            while (parts := line.receive(deadline)) is not None:
                envelope = open_envelope(parts[-1])
                if envelope.id != id:
                    continue
                kept = True
                if envelope.kind == EnvelopeKind.ERROR:
                    raise error_of(envelope.body)
                reply = _decode(envelope.body)
                if not isinstance(reply, expect):
                    raise FrameError(f"{type(reply).__name__} in reply to {type(request).__name__}")
                return reply
            raise DeadlineExceeded(f"no answer to {type(request).__name__} from {endpoint} in {seconds:g} s")
        except UNDECODABLE as error:
            raise Unavailable(f"{endpoint} answered something that can't be read: {error}") from error
        finally:
            if not kept:
                line.close()  # a late answer, which may be large, must not be read before the next one
            self._lines.give(line)

    def pause(self, seconds: float) -> None:
        """Wait. Raises Closed when the link is closed meanwhile."""
        if self._bell.wait(seconds):
            raise Closed("these shuffles were closed")

    def close(self) -> None:
        """Whoever waits gets Closed."""
        if self._bell.rung:
            return
        self._bell.ring()
        self._lines.close()
        self._loop.loop.call_soon_threadsafe(self._gcm.close)
        self._loop.stop()
