"""The real PathMachine and OrderMachine as functions over frozen values, for the search in moves.py.

A machine is thawed from a tuple, does one thing, passes its own `check()` and is frozen again; the same thing done to the
same value is looked up. Messages alternate over two topics, so a number is all there is to know of one. Not covered: what
happens between the machines, see moves.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from roq.errors import MessagesLost
from roq.pubsub.order import HELD_FRAME_BYTES, TOPIC_BYTES, Deliver, FrameEvent, KnownPublisher, OrderMachine, OrderSafeguards
from roq.pubsub.path import Instruction, PathMachine, PathSafeguards, PathState
from roq.wire.frame import FrameKind, Header, PathOpening
from roq.wire.monitor import ExchangeAddress

NAMES = "ABC"
ADDRESSES = tuple(ExchangeAddress(name, "", 0, 0) for name in NAMES)
TOPICS = (b"even", b"odd")
PUBLISHER = 7
NOWHERE = -1


class Frame(NamedTuple):
    """What travels. number: of the message, or the last number before for control frames."""

    kind: FrameKind
    path: int = 0
    number: int = 0
    left: int = NOWHERE
    finished: int = 0

    def __str__(self) -> str:
        what = f"m{self.number}" if self.kind == FrameKind.DATA else self.kind.name
        promise = "" if self.kind != FrameKind.OPEN or self.path == 1 else ", after FIN" if self.finished else ", broken"
        return f"{what}(path {self.path}{promise})" if self.path else what


def bit(number: int) -> int:
    """The message as a member of a set."""
    return 1 << number


def topic_of(number: int) -> bytes:
    """Messages alternate over the topics."""
    return TOPICS[number % 2]


@cache
def numbers(topics: tuple[bytes, ...], first: int, last: int) -> int:
    """The set of the messages first..last on these topics."""
    return sum(bit(number) for number in range(first, last + 1) if topic_of(number) in topics)


@cache
def event_of(frame: Frame) -> FrameEvent:
    """The frame as the subscriber's shell hands it over."""
    if frame.kind == FrameKind.DATA:
        n = frame.number
        header = Header(1, FrameKind.DATA, PUBLISHER, frame.path, n, max(0, n - 2), (n - 1) // 2, 1, 0)
        return FrameEvent(topic_of(n), header, frame)
    header = Header(1, frame.kind, PUBLISHER, frame.path, frame.number, 0, 0, 0, 0)
    left = "" if frame.left == NOWHERE else NAMES[frame.left]
    return FrameEvent(b"", header, frame, PathOpening(left, bool(frame.finished)))


# --- the subscriber's machine -----------------------------------------------------------------------------------------

Known = tuple[bytes, int, int]


class Order(NamedTuple):
    """What an OrderMachine knows of the publisher."""

    path: int
    baseline: int | None
    begun: int
    delivered: int
    finished: bool
    topics: tuple[Known, ...]
    replays: bool
    held: tuple[tuple[int, tuple[Frame, ...]], ...]
    openings: tuple[tuple[int, str, bool], ...]
    waiting: bool
    met: float
    doubtful: bool


Doubts = tuple[tuple[str, int], ...] | None  # (topic, last number reported); None: nothing passed it by


class Heard(NamedTuple):
    """What came of one step: the new values, numbers delivered, (topic, first, last, count) told lost."""

    order: Order | None
    doubts: Doubts
    delivered: tuple[int, ...]
    lost: tuple[tuple[bytes, int, int, int], ...]


def thaw_order(
    order: Order | None, doubts: Doubts, proved: int, topics: tuple[bytes, ...], safeguards: OrderSafeguards
) -> OrderMachine:
    """`proved`: set of Exchanges the subscriber is attached to, one bit each."""
    machine = OrderMachine(lambda id: bool(proved & bit(NAMES.index(id))), topics.__contains__, safeguards)
    machine._doubts = None if doubts is None else {(PUBLISHER, topic): last for topic, last in doubts}
    if order is not None:
        publisher = KnownPublisher()
        publisher.path, publisher.baseline, publisher.begun = order.path, order.baseline, order.begun
        publisher.delivered, publisher.finished = order.delivered, order.finished
        publisher.topics = {topic: [last, sent] for topic, last, sent in order.topics}
        publisher.held = {path: [event_of(frame) for frame in frames] for path, frames in order.held}
        publisher.openings = {path: PathOpening(left, finished) for path, left, finished in order.openings}
        if order.waiting:
            publisher.waiting_since = 0.0
            machine.waiting.add(PUBLISHER)
        publisher.replays = order.replays
        publisher.met, publisher.doubtful = order.met, order.doubtful
        machine.known_bytes = sum(TOPIC_BYTES + len(topic) for topic in publisher.topics)
        machine.held_bytes = HELD_FRAME_BYTES * sum(len(frames) for _, frames in order.held)
        machine.publishers[PUBLISHER] = publisher
    return machine


def freeze_order(machine: OrderMachine) -> Order | None:
    publisher = machine.publishers.get(PUBLISHER)
    if publisher is None:
        return None
    return Order(
        publisher.path,
        publisher.baseline,
        publisher.begun,
        publisher.delivered,
        publisher.finished,
        tuple(sorted((topic, last, sent) for topic, (last, sent) in publisher.topics.items())),
        publisher.replays,
        tuple(sorted((path, tuple(event.body for event in events)) for path, events in publisher.held.items())),
        tuple(sorted((path, opening.left, opening.finished) for path, opening in publisher.openings.items())),
        publisher.waiting_since is not None,
        publisher.met,
        publisher.doubtful,
    )


def freeze_doubts(machine: OrderMachine) -> Doubts:
    return None if machine._doubts is None else tuple(sorted((topic, last) for (_, topic), last in machine._doubts.items()))


@cache
def hear(
    order: Order | None,
    doubts: Doubts,
    proved: int,
    topics: tuple[bytes, ...],
    safeguards: OrderSafeguards,
    what: Frame | str,
    sent: int = 0,
    now: float = 0.0,
) -> Heard:
    """One step of the real machine. what: a frame, "detached", "expire", "watermark" (of `sent` messages), or "doubt":
    since 0.0 messages may have passed it by."""
    machine = thaw_order(order, doubts, proved, topics, safeguards)
    if isinstance(what, Frame):
        event = event_of(what)
        if what.kind == FrameKind.DATA and machine.accept(event.topic, event.header):
            outputs: list[Deliver | MessagesLost] = [Deliver(event)]
        else:
            outputs = machine.handle(event, now)
    elif what == "detached":
        outputs = machine.detached(0.0)
    elif what == "expire":
        outputs = machine.expire(1.0, 1.0, 1.0, lambda left: 0.0)
    elif what == "doubt":
        outputs = machine.doubt(0.0, now)
    else:
        last = {topic_of(number).decode(): (number, (number + 1) // 2) for number in (sent - 1, sent) if number > 0}
        header = Header(1, FrameKind.WATERMARK, PUBLISHER, order.path if order is not None else 1, sent, 0, 0, 0, 0)
        outputs = machine.handle(FrameEvent(b"", header, None, last), now)
    machine.check()
    delivered = tuple(one.event.body.number for one in outputs if isinstance(one, Deliver))
    lost = tuple((one.topic.encode(), one.first, one.last, one.count) for one in outputs if isinstance(one, MessagesLost))
    return Heard(freeze_order(machine), freeze_doubts(machine), delivered, lost)


# --- the publisher's machine ------------------------------------------------------------------------------------------


class Path(NamedTuple):
    """A PathMachine."""

    path: int = 0
    current: int = NOWHERE
    target: int = NOWHERE
    target_path: int = 0
    leaving: tuple[tuple[int, int], ...] = ()
    state: PathState = PathState.JOINING


def _address(exchange: int) -> ExchangeAddress | None:
    return None if exchange == NOWHERE else ADDRESSES[exchange]


def _number(address: ExchangeAddress | None) -> int:
    return NOWHERE if address is None else NAMES.index(address.id)


@cache
def direct(
    path: Path, safeguards: PathSafeguards, what: str, number: int = 0, exchange: int = NOWHERE
) -> tuple[Path, tuple[Instruction, ...]]:
    """One step of the real machine. what: "assign", "welcome", "attached", "forwarded" or "close"; number: of the path."""
    machine = PathMachine(safeguards)
    machine.path, machine.target_path, machine.state = path.path, path.target_path, path.state
    machine.current, machine.target = _address(path.current), _address(path.target)
    machine.leaving = {number: ADDRESSES[left] for number, left in path.leaving}
    match what:
        case "assign":
            instructions = machine.assign(ADDRESSES[exchange], number)
        case "welcome":
            instructions = [*machine.welcome(number), *machine.assign(ADDRESSES[exchange], number)]
        case "attached":
            instructions = machine.attached(number)
        case "forwarded":
            instructions = machine.forwarded(number)
        case _:
            instructions = machine.close()
    machine.check()
    leaving = tuple(sorted((number, _number(left)) for number, left in machine.leaving.items()))
    frozen = Path(machine.path, _number(machine.current), _number(machine.target), machine.target_path, leaving, machine.state)
    return frozen, tuple(instructions)
