"""A publisher's bytes cut into runs: frames in a row that go to the same subscribers, still as they came. Pure.

Frames are not decoded: what decides who gets one is its key, a data frame's topic and the NUL behind it, or the first three
bytes of a control frame. A frame that is not complete yet waits; a large one in the pieces in which it comes. Where it counts
who has sent a frame, that is what follows the key, up to the publisher's id: of the next frame both are compared at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from roq.errors import FrameError
from roq.wire import zmtp
from roq.wire.frame import CONTROL_PREFIX
from roq.wire.limits import SUBSCRIPTION_BYTES_MAX

R = TypeVar("R")
TOPIC_BYTES_MAX = 256  # with the NUL; a foreign frame without one is matched by so many
CONTROL_KEY_BYTES = 3
SENDER_BYTES = 10  # of a data frame's header: version, kind, publisher
IN_PIECES_BYTES = 16 * 1024  # from this size on a frame is not copied together
_CONTROL = CONTROL_PREFIX[0]
_NO_KEY = CONTROL_PREFIX * 300  # what no frame begins with


class FrameRun(NamedTuple, Generic[R]):
    """Whole frames with their ZMTP headers, in pieces. route: who gets them. size: bytes."""

    route: R
    pieces: list[bytes | memoryview]
    frames: int
    size: int


class ForwardedTotals(NamedTuple):
    """Totals since the start: frames and bytes in from publishers, out to subscribers."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0


class FrameRuns(Generic[R]):
    """One publisher's. route(key): who gets what has this key; the same object for the same peers. frame_bytes_max: a frame
    without its ZMTP header. on_control(body): for each control frame as it comes, to be answered once the runs are sent.
    on_sender(beginning): of data, whenever key or sender are others than those of the frame before; its errors are raised.
    pongs: to be sent back."""

    def __init__(
        self,
        route: Callable[[bytes], R],
        frame_bytes_max: int,
        on_control: Callable[[bytes], None],
        on_sender: Callable[[bytes], None] | None = None,
    ) -> None:
        self._route, self._max, self._on_control, self._on_sender = route, frame_bytes_max, on_control, on_sender
        self.pongs: list[bytes] = []
        self._rest = b""
        self._pieces: list[bytes | memoryview] = []  # of a large frame
        self._missing = 0  # bytes of it
        self.unfinished = 0  # bytes of a frame that is not complete

    def feed(self, data: bytes) -> list[FrameRun[R]]:
        """What is complete now. Raises FrameError: the connection is of no use."""
        runs: list[FrameRun[R]] = []
        if self._missing:
            if len(data) < self._missing:
                last = self._pieces[-1]
                if len(last) < zmtp.CHUNK_BYTES_MIN:  # each piece costs some 50 bytes beside itself
                    self._pieces[-1] = bytes(last) + data
                else:
                    self._pieces.append(data)
                self._missing -= len(data)
                self.unfinished += len(data)
                return runs
            data = self._finish(data, runs)
        elif self._rest:
            data = self._rest + data
            self._rest = b""
        rest = self._cut(data, runs)
        self.unfinished = len(rest)
        if rest and not self._begin_large(rest):
            self._rest = bytes(rest)
        return runs

    def _cut(self, data: bytes, runs: list[FrameRun[R]]) -> bytes:
        """The whole frames of data as runs; what is left. The loop that all messages go through."""
        at, start, end, count = 0, 0, len(data), 0
        now: R | None = None
        last, begins_with = _NO_KEY, data.startswith  # key of the frame before, if that was data with a whole topic
        while at + 2 <= end:
            flags = data[at]
            if not flags:
                begin = at + 2
                stop = begin + data[at + 1]
            else:
                if flags & zmtp.LONG and at + 9 > end:
                    break
                begin, stop = self._body(data, at)
            if stop > end:
                break
            if flags & zmtp.COMMAND:
                _add(runs, now, data, start, at, count)
                self._command(data[begin:stop])
                at, start, count = stop, stop, 0
                continue
            if not begins_with(last, begin, stop):
                nul = data.find(0, begin, min(stop, begin + TOPIC_BYTES_MAX))
                if nul >= 0 and data[begin] != _CONTROL:
                    last = key = data[begin : nul + 1]
                    if self._on_sender is not None:
                        self._on_sender(last := data[begin : min(stop, nul + 1 + SENDER_BYTES)])
                else:  # without an end other keys may begin with it
                    last, key = _NO_KEY, self._key(data, begin, stop)
                    if key[:1] == CONTROL_PREFIX:
                        self._on_control(data[begin:stop])
                    elif self._on_sender is not None:
                        self._on_sender(data[begin:stop])
                route = self._route(key)
                if route is not now:
                    _add(runs, now, data, start, at, count)
                    start, count, now = at, 0, route
            at = stop
            count += 1
        _add(runs, now, data, start, at, count)
        return data[at:]

    def _body(self, data: bytes, at: int) -> tuple[int, int]:
        """Where that of a frame with flags begins and ends. Raises FrameError."""
        flags = data[at]
        begin = at + 9 if flags & zmtp.LONG else at + 2
        size = int.from_bytes(data[at + 1 : begin], "big")
        most = SUBSCRIPTION_BYTES_MAX if flags & zmtp.COMMAND else self._max
        if flags & zmtp.MORE or flags > zmtp.COMMAND | zmtp.LONG or size > most:
            raise FrameError(f"a frame of {size} bytes with flags {flags}")
        return begin, begin + size

    def _key(self, data: bytes, begin: int, stop: int) -> bytes:
        if data[begin : begin + 1] == CONTROL_PREFIX and begin < stop:
            return data[begin : min(stop, begin + CONTROL_KEY_BYTES)]
        most = min(stop, begin + TOPIC_BYTES_MAX)
        nul = data.find(0, begin, most)
        return data[begin : most if nul < 0 else nul + 1]

    def _command(self, body: bytes) -> None:
        if body.startswith(b"\x04PING"):
            self.pongs.append(zmtp.frame(b"\x04PONG" + body[7:23], zmtp.COMMAND))

    # --- large frames -------------------------------------------------------------------------------------------------

    def _begin_large(self, rest: bytes) -> bool:
        """Whether the rest is the beginning of one that is worth being kept in pieces."""
        if rest[0] != zmtp.LONG or len(rest) < 9 + TOPIC_BYTES_MAX + SENDER_BYTES:
            return False
        size = int.from_bytes(rest[1:9], "big")
        if size < IN_PIECES_BYTES:
            return False
        self._pieces = [rest]
        self._missing = 9 + size - len(rest)
        return True

    def _finish(self, data: bytes, runs: list[FrameRun[R]]) -> bytes:
        """The large frame is whole with the beginning of data; what is behind it."""
        missing, pieces = self._missing, self._pieces
        pieces.append(_part(data, 0, missing))
        first = bytes(pieces[0])
        route = self._route(self._key(first, 9, len(first)))
        if first[9:10] == CONTROL_PREFIX:
            self._on_control(b"".join(pieces)[9:])
        elif self._on_sender is not None:
            self._on_sender(first[9:])
        runs.append(FrameRun(route, pieces, 1, sum(map(len, pieces))))
        self._missing, self._pieces = 0, []
        return data[missing:]


def _add(runs: list[FrameRun[R]], route: R | None, data: bytes, start: int, stop: int, frames: int) -> None:
    if frames and route is not None:
        runs.append(FrameRun(route, [_part(data, start, stop)], frames, stop - start))


def _part(data: bytes, start: int, stop: int) -> bytes | memoryview:
    """Copied out unless it is most of data: a queue that holds it then holds less than twice its size."""
    size = stop - start
    return data if size == len(data) else memoryview(data)[start:stop] if 2 * size > len(data) else data[start:stop]
