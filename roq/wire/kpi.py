"""Key performance indicators: what StatMonitor publishes once a second, and what `roq policy replay` reads (JSON lines).

Rates are per second over the last interval, fractions 0..1, lags and latencies in seconds, memory in bytes.
The stream is a PUB socket: parts [queue name UTF-8, msgpack QueueKpi]; anyone may subscribe. StatMonitor knows no groups: the
ScalingProcess adds them, for policies with rules for them, to what it decides on and what the history keeps.

A cluster that keeps its history has two recorded queues of its own, whose topics are names of queues, and whose payloads are
JSON: HISTORY_KPIS of QueueKpi, one a second, HISTORY_DECISIONS of QueueDecision, one when it is begun and one with its outcome.
"""

from __future__ import annotations

import msgspec

from roq.errors import FrameError
from roq.ids import RESERVED
from roq.wire.decoding import UNDECODABLE

HISTORY_KPIS = RESERVED + "kpi"
HISTORY_DECISIONS = RESERVED + "decisions"
HISTORY_QUEUES = (HISTORY_DECISIONS, HISTORY_KPIS)


class ExchangeKpi(msgspec.Struct, frozen=True):
    """One Exchange. Messages and bytes *in* come from its publishers' reports, the rest from the Exchange itself."""

    id: str
    host: str
    state: str  # starting, active, draining
    publishers: int
    messages_per_second: float
    bytes_per_second: float
    bytes_out_per_second: float
    cpu_fraction: float
    memory_bytes: int


class PublisherKpi(msgspec.Struct, frozen=True):
    """One publisher."""

    id: int
    exchange: str
    messages_per_second: float
    bytes_per_second: float
    blocked_fraction: float
    dropped: int  # messages it gave up since it joined


class SubscriberKpi(msgspec.Struct, frozen=True):
    """One subscriber."""

    id: int
    ready: bool
    messages_per_second: float
    bytes_per_second: float
    lag_seconds: float  # age of the newest message it has delivered, when it delivered it
    latency_p50_seconds: float
    latency_p99_seconds: float
    lost: int  # since it joined
    duplicated: int  # since it joined, dropped before delivery


class HostKpi(msgspec.Struct, frozen=True):
    """One host that runs an Exchange of the queue."""

    host: str
    cpu_fraction: float
    memory_fraction: float
    exchanges: int
    exchanges_max: int


class GroupKpi(msgspec.Struct, frozen=True):
    """One group of a recorded queue, as its master told. waiting: ready and delayed messages in the group; lag: messages that
    are not in it yet; behind_seconds: age of the one that comes into it next; oldest_seconds: of the oldest ready one. -1: not
    known, or there is none. silent_seconds: since its master told anything, if that is so long that nothing is known."""

    name: str
    waiting: int
    lag: int = -1
    behind_seconds: float = -1.0
    oldest_seconds: float = -1.0
    silent_seconds: float = 0.0


class QueueTotals(msgspec.Struct, frozen=True):
    """Since the queue's Monitor started, members that left included: messages and bytes sent by publishers, messages taken by
    subscribers (each counts), messages that publishers gave up, messages that were reported to subscribers as lost. As members
    report them, once a second: what a subscriber did between its last report and its end is missing."""

    messages: int = 0
    bytes: int = 0
    delivered: int = 0
    dropped: int = 0
    missed: int = 0


class QueueKpi(msgspec.Struct, frozen=True):
    """One second of one queue. time: seconds since 1970."""

    queue: str
    time: float
    term: int
    messages_per_second: float
    bytes_per_second: float
    delivered_per_second: float
    lost: int
    exchanges: tuple[ExchangeKpi, ...]
    publishers: tuple[PublisherKpi, ...]
    subscribers: tuple[SubscriberKpi, ...]
    hosts: tuple[HostKpi, ...]
    totals: QueueTotals = QueueTotals()
    groups: tuple[GroupKpi, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """One scaling decision and its cause, in words people can check against the numbers."""

    time: float
    action: str  # "scale-out", "rebalance", "scale-in", "hold"
    cause: str
    exchange: str = ""  # created or drained
    host: str = ""
    moves: tuple[tuple[int, str], ...] = ()  # (publisher, Exchange it goes to)
    outcome: str = ""  # what became of it, empty while under way


class QueueDecision(Decision, frozen=True, kw_only=True):
    """A decision in HISTORY_DECISIONS; (queue, time, cause) names it."""

    queue: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QueueKpi).decode


def encode(kpi: QueueKpi) -> bytes:
    """Second part of a message of the KPI stream."""
    return _encode(kpi)


def decode(data: bytes) -> QueueKpi:
    """The KPIs in a message of the stream; raises FrameError."""
    try:
        return _decode(data)
    except UNDECODABLE as error:
        raise FrameError(f"not a KPI record: {error}") from None


def from_json_line(line: str | bytes) -> QueueKpi:
    """One recorded line, or message of HISTORY_KPIS; raises FrameError."""
    try:
        return msgspec.json.decode(line, type=QueueKpi)
    except UNDECODABLE as error:
        raise FrameError(f"not a KPI record: {error}") from None


def decision_from_json(payload: bytes) -> QueueDecision:
    """A message of HISTORY_DECISIONS; raises FrameError."""
    try:
        return msgspec.json.decode(payload, type=QueueDecision)
    except UNDECODABLE as error:
        raise FrameError(f"not a scaling decision: {error}") from None
