"""Conversation between a queue's Monitor and everybody who belongs to the queue (Monitor ROUTER ↔ DEALER).

    publisher   REQUEST JoinPublisher → PublisherWelcome    NOTICE PublisherReport (1/s)   ← Heard, Relocate, Rejoin,
                                                                                           ProducerReplaced
    subscriber  REQUEST JoinSubscriber → SubscriberWelcome  NOTICE SubscriberReport (1/s+) ← Heard, Exchanges, Evicted, Rejoin
    both        REQUEST Leave → Left
    caller      is a subscriber that asks for it: ← Responders; REQUEST ListResponders → Responders
    Exchange    NOTICE ExchangeReport (at start and 1/s), PathsFenced    ← FencePublisher
    scaling/CLI REQUEST Move | Drain | AwaitExchange | RecordDecision | Describe → Moved | Drained | Recorded | QueueView

All state is sent whole (level-triggered): the newest notice of a kind makes the earlier ones superfluous.
"""

from __future__ import annotations

import msgspec

from roq.wire.assignment import MonitorAddress, Overflow
from roq.wire.kpi import Decision, QueueKpi
from roq.wire.member_id import MemberId, Proof

# What a member understands. 1: version 0.1; the Monitor confirms its MARKs and FINs, and it reads neither bundles nor headers.
# 2: the Exchange confirms; data frames may be bundled, and have headers.
PROTOCOL = PROTOCOL_0_2 = 2
# What a Monitor or an Exchange understands, as it says itself. 2: producers; their lives before are ended (FencePublisher).
SERVER_PROTOCOL = SERVER_FENCES = 2


class ExchangeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where an Exchange serves: `front` takes publishers, `back` subscribers."""

    id: str
    address: str
    front: int
    back: int
    incarnation: int = 0  # one life of the Exchange's process

    @property
    def token(self) -> str:
        """Names this life of the Exchange: attachments to an earlier one prove nothing."""
        return f"{self.id}/{self.incarnation:x}"

    def front_endpoint(self) -> str:
        """ZeroMQ endpoint for publishers."""
        return f"tcp://{self.address}:{self.front}"

    def back_endpoint(self) -> str:
        """ZeroMQ endpoint for subscribers."""
        return f"tcp://{self.address}:{self.back}"


# --- publishers -------------------------------------------------------------------------------------------------------


class ReadyCount(msgspec.Struct, frozen=True, array_like=True):
    """Of the subscribers that were told that they are ready, so many lived when the Monitor of this term ended. all: with the
    silent ones; None if there may have been others."""

    term: int
    living: int
    all: int | None


class JoinPublisher(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I want to publish. A publisher that rejoins after silence says where it is: path > 0 and its Exchange."""

    publisher: int
    path: int = 0
    exchange: str = ""
    token: str = ""  # of the Exchange's life it is connected to
    protocol: int = 1
    needs: int = 1  # as in PublisherReport.protocol
    above: int = 0  # of a producer: its paths are above this one, and nobody of this id publishes on lower ones any more
    prefer: str = ""  # Exchange it was on last: what it left there comes before what follows
    before: ReadyCount | None = None  # as the Monitor it was with said when it ended
    proof: Proof = b""  # in a secured cluster: that the id is its own


class PublisherWelcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Publish there, on this path. (A rejoining publisher keeps path and Exchange unless the Exchange is gone.)"""

    term: int
    path: int
    exchange: ExchangeAddress
    overflow: Overflow
    max_frame_bytes: int
    monitors: tuple[MonitorAddress, ...] = ()
    abandon: str = ""  # as in Relocate
    protocol: int = 1  # what every subscriber understands; 0: not known yet, go on as before
    monitor: int = 1  # what this Monitor understands (SERVER_PROTOCOL)


class PublisherReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Totals since the publisher was made, and where it publishes."""

    publisher: int
    path: int
    exchange: str  # "" while it has none
    lost: str  # token of the Exchange whose link broke, "" if none did since the last path was opened
    leaving: int  # earlier paths whose FIN is not confirmed
    messages: int
    bytes: int
    dropped: int
    blocked_seconds: float
    protocol: int = 1  # what a subscriber has to understand that is to read it: 2 once a message had headers
    proof: Proof = b""  # as in JoinPublisher


class Relocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on with this path on this Exchange: a planned move, or `abandon` (a token) the Exchange you are on, which is gone:
    then replay."""

    term: int
    path: int
    exchange: ExchangeAddress
    abandon: str = ""


class Forwarded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To a publisher of protocol 1: everything on `path` up to the FIN (mark 0) or MARK `mark` has passed the Exchange."""

    path: int
    mark: int


class ProducerReplaced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To a publisher: another one of this id has joined since. The GCM knows who."""

    term: int


# --- subscribers ------------------------------------------------------------------------------------------------------


class Service(msgspec.Struct, frozen=True, array_like=True):
    """What a subscriber serves: requests on topics that match one of these filters, as one of a group."""

    group: str
    topics: tuple[str, ...]


class JoinSubscriber(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I want to subscribe."""

    subscriber: int
    topics: tuple[str, ...]
    returning: bool = False  # an earlier Monitor had told it that it is ready
    protocol: int = 1
    service: Service | None = None  # requests reach it on a topic of its own, see requests.py
    before: ReadyCount | None = None  # as in JoinPublisher
    proof: Proof = b""  # as in JoinPublisher


class SubscriberWelcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Attach to all of these; you are ready when every one has proved itself."""

    term: int
    version: int
    exchanges: tuple[ExchangeAddress, ...]
    overflow: Overflow
    max_frame_bytes: int
    monitors: tuple[MonitorAddress, ...] = ()


class SubscriberReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Totals since the subscriber was made; `attached`: tokens of Exchanges that said
    so. Detached ones are left out."""

    subscriber: int
    version: int  # of the newest Exchanges list seen
    attached: tuple[str, ...]
    messages: int
    bytes: int
    lost: int
    duplicated: int
    lag_seconds: float
    latency_p50_seconds: float
    latency_p99_seconds: float
    sent: float = 0.0  # by the subscriber's own clock
    serving: bool = False  # takes requests: knows that it is ready, and does not leave
    responders: int = -1  # version of the newest Responders seen; -1: does not want to know
    proof: Proof = b""  # as in JoinPublisher


class Exchanges(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The queue's Exchanges from now on."""

    term: int
    version: int
    exchanges: tuple[ExchangeAddress, ...]


class ResponderView(msgspec.Struct, frozen=True, array_like=True):
    """One server of requests, as the Monitor sees it. doubted: it is silent or not connected; better ask another."""

    subscriber: int
    service: Service
    doubted: bool = False


class Responders(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who serves requests from now on. complete: who is not named is gone; else only not known to this Monitor yet."""

    term: int
    version: int
    complete: bool
    responders: tuple[ResponderView, ...]


class Evicted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """You stopped reading for too long; the others went on without you."""

    silent_seconds: float


# --- both -------------------------------------------------------------------------------------------------------------


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I am closing. member: publisher or subscriber id."""

    member: int
    proof: Proof = b""  # as in JoinPublisher


class Left(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Good-bye."""


class Heard(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to every report: I live. ready (subscribers): every Exchange that carries messages has proved itself to you,
    and every one added later will before it carries any. waits: what keeps it from being ready beside its own proofs.
    gone (publishers): token of the Exchange you were on, with paths up to gone_path, which is lost; what you send there
    arrives nowhere, even if your connection shows nothing. answers (subscribers): when the report was sent, 0 if it is
    no answer; passed_by: how often since you joined an Exchange may have carried messages though you had not proved it.
    protocol (publishers): what every subscriber understands, 0 if that is not known yet."""

    term: int
    ready: bool
    waits: tuple[str, ...] = ()
    gone: str = ""
    gone_path: int = 0
    answers: float = 0.0
    passed_by: int = 0
    protocol: int = 1


class Rejoin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I lead this queue under `term` and don't know you (I was restarted or activated): join again, here."""

    term: int = 0


class Standby(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I don't lead: ask who does. A backup Monitor's answer to every report, and the last word of one that ends."""

    term: int
    ready: ReadyCount | None = None  # by one that ends: to be told to the one that follows


class Monitors(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The queue's Monitors from now on, the active one first: listen to all of them, obey the highest term."""

    term: int
    monitors: tuple[MonitorAddress, ...]


# --- Exchanges --------------------------------------------------------------------------------------------------------


class ExchangeReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I am here, and how I am. Totals since the Exchange started; host_* are the host's, from its HCM."""

    exchange: ExchangeAddress
    host: str
    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    cpu_seconds: float
    memory_bytes: int
    host_cpu_fraction: float
    host_memory_fraction: float
    host_exchanges: int
    host_exchanges_max: int
    protocol: int = 1  # what it understands (SERVER_PROTOCOL)


class FencePublisher(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To an Exchange: take nothing more of this publisher's paths up to this one. Answered with PathsFenced."""

    publisher: int
    path: int


class PathsFenced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This life of the Exchange takes nothing more of them, and what it took is stored."""

    token: str
    publisher: int
    path: int


# --- scaling process and command line ---------------------------------------------------------------------------------


class Move(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Move these publishers: (publisher, Exchange). Answered when every FIN was seen (or the publisher left)."""

    moves: tuple[tuple[int, str], ...]


class Moved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Done; `refused` tells which were not possible and why."""

    moved: int
    refused: tuple[str, ...] = ()


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Empty this Exchange: move its publishers, let subscribers finish and detach. Answered when it can be stopped."""

    exchange: str


class Drained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing passes through the Exchange any more."""


class AwaitExchange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with Recorded when this Exchange is active: every ready subscriber has proved it; with DeadlineExceeded
    after 20 s."""

    exchange: str


class RecordDecision(msgspec.Struct, frozen=True, tag="Record", array_like=True):
    """Remember this scaling decision."""

    decision: Decision


class Recorded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Done."""


class ListResponders(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who serves requests? Answered with Responders."""


class Describe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How is the queue?"""


class MemberView(msgspec.Struct, frozen=True, array_like=True):
    """One publisher or subscriber as the Monitor sees it."""

    id: int
    role: str
    exchanges: tuple[str, ...]
    path: int
    ready: bool
    silent_seconds: float


class ExchangeView(msgspec.Struct, frozen=True, array_like=True):
    """One Exchange as the Monitor sees it."""

    exchange: ExchangeAddress
    host: str
    state: str
    publishers: int
    attached: int


class QueueView(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The Monitor's whole knowledge, for people."""

    queue: str
    term: int
    overflow: Overflow
    exchanges: tuple[ExchangeView, ...]
    members: tuple[MemberView, ...]
    decisions: tuple[Decision, ...]
    kpi: QueueKpi | None
    counters: dict[str, int]


Request = JoinPublisher | JoinSubscriber | Leave | ListResponders | Move | Drain | AwaitExchange | RecordDecision | Describe
NoticeToMonitor = PublisherReport | SubscriberReport | ExchangeReport | PathsFenced
Reply = PublisherWelcome | SubscriberWelcome | Left | Responders | Moved | Drained | Recorded | QueueView
NoticeToMember = (
    Relocate | Forwarded | ProducerReplaced | Exchanges | Responders | Evicted | Rejoin | Standby | Monitors | Heard
)


def spoken_for(said: object) -> MemberId | None:
    """In whose name this is said; None if it is about no member."""
    match said:
        case JoinPublisher(id) | PublisherReport(id) | JoinSubscriber(id) | SubscriberReport(id) | Leave(id):
            return MemberId(id, said.proof)
    return None
