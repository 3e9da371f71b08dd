"""The Monitor's own two sockets at each Exchange: probes go in at the front, control frames come out of the back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from roq.errors import FrameError
from roq.runtime.observe import Refusals
from roq.runtime.sockets import Link, probe_socket, subscriber_socket
from roq.wire import frame as frames
from roq.wire.frame import FrameKind, Header
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.monitor import ExchangeAddress

log = logging.getLogger(__name__)
HEARD = (
    FrameKind.PROBE,
    FrameKind.OPEN,
    FrameKind.FIN,
    FrameKind.MARK,
    FrameKind.WATERMARK,
)  # not the bundles of a replay: their bytes are none of the Monitor's


class ExchangeWatch:
    """`on_control(exchange id, header, body, frame)` for a publisher's control frame, may raise FrameError; `on_connected()`
    once probes go in; `on_probe(token)` for a probe that came back out."""

    def __init__(
        self,
        exchange: ExchangeAddress,
        monitor_id: int,
        refusals: Refusals,
        on_control: Callable[[str, Header, memoryview, bytes], None],
        on_connected: Callable[[], None],
        on_probe: Callable[[str], None],
    ) -> None:
        self.exchange = exchange
        self._id, self._refusals = monitor_id, refusals
        self._on_control, self._on_connected, self._on_probe = on_control, on_connected, on_probe
        self._front_socket = probe_socket()
        self._front_socket.connect(exchange.front_endpoint())
        self._front = Link(self._front_socket, self._welcome)
        back = subscriber_socket(CONTROL_BYTES_MAX)
        for kind in HEARD:
            back.subscribe(frames.control_prefix(kind))
        back.connect(exchange.back_endpoint())
        self._back = Link(back, self._frame)

    def _welcome(self, parts: list[bytes]) -> None:
        if parts[0] == b"\x01":
            self._on_connected()

    def _frame(self, parts: list[bytes]) -> None:
        try:
            _, header, body = frames.parse(parts[0])
            if header.kind == FrameKind.PROBE:
                if (token := frames.text_body(body)) == self.exchange.token:
                    self._on_probe(token)
            elif header.publisher != self._id:
                self._on_control(self.exchange.id, header, body, parts[0])
        except FrameError as error:
            self._refusals.note("undecodable_frame", error)

    def send(self, kind: FrameKind) -> None:
        """PROBE or RETIRE, behind everything that passed the Exchange's front before."""
        self.send_frame(frames.encode_control(kind, self._id, 0, 0, self.exchange.token, time.time_ns()))

    def send_frame(self, frame: bytes) -> None:
        """Any control frame; not sent if the Exchange takes nothing now (all of ours are repeated)."""
        try:
            self._front_socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("exchange is full: the frame is repeated later")

    def close(self) -> None:
        """Close both sockets."""
        self._front.close()
        self._back.close()
