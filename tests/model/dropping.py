"""What a full subscriber's position says, every interleaving: breadth-first search over the real ledger of what an Exchange has
dropped for it (dropped.py) and the real order machine.

One publisher sends messages over two topics through one Exchange, which writes each as an entry of its tape, drops frames for
the subscriber while that is full, and says what is stored; also while it is full, when too much was dropped. The publisher has
begun before the subscriber or after it, and may end its path. Frames come in the order in which they were sent. The model plays
the Exchange's connection (forwarder.SubscriberPeer). Whoever goes on at a position gets what lies behind it; so at each
position all before it was given, or reported as lost. What the subscriber reads depends on the order of the frames alone, and
nobody looks at what it has read: it reads at once, and no interleaving is left out that could show anything else. Not covered:
connections that break, several Exchanges, watermarks of the publisher's own, which come later than all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from roq.errors import MessagesLost
from roq.pubsub.exchange.dropped import DroppedTopics
from roq.pubsub.order import FrameEvent, OrderMachine
from roq.wire.frame import FrameKind, encode_control, encode_data, opening_body, parse, watermark_body
from roq.wire.frame import PathOpening as Opening
from tests.model.machines import PUBLISHER, topic_of
from tests.model.moves import Breach

BODIES: dict[FrameKind, Callable[[memoryview], object]] = {FrameKind.OPEN: opening_body, FrameKind.WATERMARK: watermark_body}


class DroppingConfig(NamedTuple):
    """How much may happen: messages, times at which the subscriber is full. met: the subscriber gets the beginning of the path.
    tell: the rule. name_first: its part for publishers that were not met."""

    messages: int = 6
    full: int = 2
    met: bool = True
    tell: bool = True
    name_first: bool = True


class DroppingState(NamedTuple):
    """stored: entries that are. way: frames on their way to the subscriber, which has read those of `read`. dropped: since it
    was told. withheld: up to where it will be told that all is stored, 0: nothing waits."""

    sent: int = 0
    ended: bool = False
    stored: int = 0
    full: bool = False
    times: int = 0
    way: tuple[bytes, ...] = ()
    read: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()
    withheld: int = 0
    position: int = 0


def data_frame(number: int) -> bytes:
    return encode_data(topic_of(number), PUBLISHER, 1, number, max(0, number - 2), (number - 1) // 2, [b"x"], 0)


def taped_frame(entry: int) -> bytes:
    return encode_control(FrameKind.TAPED, 0, 0, entry, "A", 0)


def _named(watermark: bytes) -> tuple[int, dict[str, tuple[int, int]]]:
    _, header, body = parse(watermark)
    return header.sequence, watermark_body(body)


@cache
def accounted(read: tuple[bytes, ...]) -> frozenset[int]:
    """Numbers that the real order machine has given, or reported as lost, after these frames."""
    machine = OrderMachine(lambda exchange: True, lambda topic: True)
    numbers = set[int]()
    for frame in read:
        topic, header, body = parse(frame)
        decode = BODIES.get(FrameKind(header.kind))
        extra = None if decode is None else decode(body)
        for output in machine.handle(FrameEvent(topic, header, None, extra), 0.0):
            if isinstance(output, MessagesLost):
                lost = range(output.first, output.last + 1)
                numbers.update(number for number in lost if topic_of(number) == output.topic.encode())
            else:
                numbers.add(output.event.header.sequence)
        machine.check()
    return frozenset(numbers)


class DroppingModel:
    """The steps that are possible in a state, and what is to be true at an end."""

    def __init__(self, config: DroppingConfig) -> None:
        self.config = config

    def start(self) -> DroppingState:
        """The subscriber is attached, and the publisher begins, unless it has."""
        opening = encode_control(FrameKind.OPEN, PUBLISHER, 1, 0, Opening("", False), 0)
        return DroppingState(way=(opening,) if self.config.met else ())

    def steps(self, state: DroppingState) -> Iterator[tuple[bool, str, DroppingState]]:
        """Everything that may happen next, but what is on its way is read before."""
        if state.way:
            yield True, "the subscriber reads", self._read(state)
            return
        if state.sent < self.config.messages:
            yield False, f"m{state.sent + 1} is forwarded", self._forward(state, state.sent + 1)
        elif not state.ended:
            fin = encode_control(FrameKind.FIN, PUBLISHER, 1, state.sent, None, 0)
            yield False, "the path ends", state._replace(ended=True, way=(*state.way, fin))
        if state.stored < state.sent:
            yield True, f"m{state.stored + 1} is stored", self._stored(state, state.stored + 1)
        if state.full:
            yield True, "the subscriber has room", self._tell(state)._replace(full=False)
            if state.dropped and self.config.tell:
                yield False, "too much was dropped", self._tell(state)
        elif state.times < self.config.full:
            yield False, "the subscriber is full", state._replace(full=True, times=state.times + 1)

    def _forward(self, state: DroppingState, number: int) -> DroppingState:
        state, frame = state._replace(sent=number), data_frame(number)
        if state.full:
            return state._replace(dropped=(*state.dropped, frame))
        return state._replace(way=(*state.way, frame))

    def _stored(self, state: DroppingState, entry: int) -> DroppingState:
        state = state._replace(stored=entry)
        if state.dropped and self.config.tell:
            return state._replace(withheld=entry)
        return state._replace(way=(*state.way, taped_frame(entry)))

    def _tell(self, state: DroppingState) -> DroppingState:
        ledger = DroppedTopics()
        if not state.dropped or not self.config.tell:
            return state._replace(dropped=())
        for frame in state.dropped:
            ledger.add(frame)
        told = ledger.watermarks(0)
        if not self.config.name_first:
            told = [encode_control(FrameKind.WATERMARK, PUBLISHER, 1, *_named(frame), 0) for frame in told]
        told += [taped_frame(state.withheld)] if state.withheld else []
        return state._replace(way=(*state.way, *told), dropped=(), withheld=0)

    def _read(self, state: DroppingState) -> DroppingState:
        frame, state = state.way[0], state._replace(way=state.way[1:])
        _, header, _ = parse(frame)
        if header.kind != FrameKind.TAPED:
            return state._replace(read=(*state.read, frame))
        if missing := set(range(1, header.sequence + 1)) - accounted(state.read):
            raise Breach(f"the position is behind m{header.sequence}; nobody has said that m{min(missing)} is missing")
        return state._replace(position=header.sequence)

    def end(self, state: DroppingState) -> None:
        """Nothing must happen any more."""
        if state.position != state.sent:
            raise Breach(f"the position stands at m{state.position}, and m{state.sent} is stored")
