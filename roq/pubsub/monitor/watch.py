"""The Monitor's own two links to each Exchange: what it says goes in at the front, control frames come out of the back."""

from __future__ import annotations

import time
from collections.abc import Callable

from roq.errors import FrameError
from roq.runtime.links import PublisherLink, SubscriberLink
from roq.runtime.observe import Refusals, logger
from roq.wire import frame as frames
from roq.wire.frame import SUBSCRIBE_ALL, FrameKind, Header
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.monitor import ExchangeAddress

log = logger(__name__)
HEARD = (  # ATTACHED comes last: then the others are active
    FrameKind.OPEN,
    FrameKind.FIN,
    FrameKind.WATERMARK,
    FrameKind.ATTACHED,
)  # not the bundles of a replay: their bytes are none of the Monitor's


class _Front(PublisherLink):
    """on_connected() once the Exchange takes frames."""

    def __init__(self, endpoint: str, on_connected: Callable[[], None]) -> None:
        self._on_connected = on_connected
        super().__init__(endpoint)

    def told(self, message: bytes) -> None:
        if message == SUBSCRIBE_ALL:
            self._on_connected()


class ExchangeWatch:
    """`on_control(exchange id, header, body, frame)` for a publisher's control frame, may raise FrameError; `on_connected()`
    once the Exchange takes frames; `on_attached(token)` once control frames come."""

    def __init__(
        self,
        exchange: ExchangeAddress,
        monitor_id: int,
        refusals: Refusals,
        on_control: Callable[[str, Header, memoryview, bytes], None],
        on_connected: Callable[[], None],
        on_attached: Callable[[str], None],
    ) -> None:
        self.exchange = exchange
        self._id, self._refusals = monitor_id, refusals
        self._on_control, self._on_attached = on_control, on_attached
        self._front = _Front(exchange.front_endpoint(), on_connected)
        prefixes = [frames.control_prefix(kind) for kind in HEARD]
        self._back = SubscriberLink(exchange.back_endpoint(), prefixes, self._came, CONTROL_BYTES_MAX)

    def _came(self, messages: list[list[bytes]]) -> None:
        for parts in messages:
            self._frame(parts)

    def _frame(self, parts: list[bytes]) -> None:
        try:
            _, header, body = frames.parse(parts[0])
            if header.kind == FrameKind.ATTACHED:
                if (token := frames.text_body(body)) == self.exchange.token:
                    self._on_attached(token)
            elif header.publisher != self._id:
                self._on_control(self.exchange.id, header, body, parts[0])
        except FrameError as error:
            self._refusals.note("undecodable_frame", error)

    def hear_marks(self) -> None:
        """From now on MARKs come too."""
        self._back.subscribe(frames.control_prefix(FrameKind.MARK))

    def send(self, kind: FrameKind) -> None:
        """RETIRE, behind everything that passed the Exchange's front before."""
        self.send_frame(frames.encode_control(kind, self._id, 0, 0, self.exchange.token, time.time_ns()))

    def send_frame(self, frame: bytes) -> None:
        """Any control frame; not sent if the Exchange takes nothing now (all of ours are repeated)."""
        if self._front.open and not self._front.waiting_bytes:
            self._front.send(frame)

    def close(self) -> None:
        """Close both links."""
        self._front.close()
        self._back.close()
