"""The publisher's replay buffer between paths that break: nothing goes unreported, and nothing is confirmed that was lost.

A breadth-first search over the real ReplayBuffer: the shell's part (which frame leaves when) is played here as path_sender.py
does it. One publisher sends numbered messages over two topics; an Exchange is a FIFO inbox, a FIFO pipe to the one subscriber
and one to the Monitor; it may vanish at any time with all three, without a word (its host lost power), and time may pass at any
time. The subscriber is the real OrderMachine. Watermarks are sent for every topic not yet known to have been revealed. At an
end the last path has been read to its end: every message is delivered, or reported as lost, and no flush has confirmed a
message that neither an Exchange handed out nor the flush spoke of.

Not covered: moves and more than one subscriber (test_moves.py), bundles, timing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from roq.errors import MessagesLost
from roq.pubsub.order import Deliver, FrameEvent, OrderMachine
from roq.pubsub.replay_buffer import ENTRY_BYTES, ReplayBuffer, ReplaySafeguards
from roq.wire.frame import FrameKind, Header, PathOpening, encode_data, parse

PUBLISHER = 7
STATES_MAX = 60_000


class Config(NamedTuple):
    """How large the world is. kept: frames the buffer has room for; ageing: steps of time that make confirmed frames old."""

    messages: int
    deaths: int
    kept: int = 9
    ageing: int = 1
    marks: int = 1  # besides the last one
    moves: int = 0
    safeguards: ReplaySafeguards = ReplaySafeguards()
    watermarks_again: bool = True


HEALTHY = {
    "everything fits": Config(messages=2, deaths=1),
    "two breaks": Config(messages=1, deaths=2),
    "the buffer is too small": Config(messages=3, deaths=1, kept=1, ageing=0),
    "too small, and two breaks": Config(messages=2, deaths=2, kept=1, ageing=0),
    "the end of the path before is not confirmed": Config(messages=2, deaths=1, moves=1, ageing=0),
}
TOO_SMALL = Config(messages=2, deaths=1, kept=1, ageing=0)
HARMFUL = {
    "keep_unconfirmed": Config(messages=1, deaths=1, safeguards=ReplaySafeguards(keep_unconfirmed=False)),
    "know_what_is_gone": TOO_SMALL._replace(safeguards=ReplaySafeguards(know_what_is_gone=False)),
    "paths_in_order": Config(messages=1, deaths=1, moves=1, ageing=0, safeguards=ReplaySafeguards(paths_in_order=False)),
    "open_before_unknown": TOO_SMALL._replace(safeguards=ReplaySafeguards(open_before_unknown=False)),
    "watermarks_again": TOO_SMALL._replace(watermarks_again=False),
}


def topic_of(number: int) -> bytes:
    """Messages alternate over two topics."""
    return (b"even", b"odd")[number % 2]


def data(number: int, path: int) -> bytes:
    """All frames have one size, so that room for frames is room for bytes."""
    return encode_data(topic_of(number).ljust(4), PUBLISHER, path, number, max(0, number - 2), (number - 1) // 2, [b"x"], 0)


SIZE = len(data(1, 1))
Frame = tuple[FrameKind, int, int, object]  # kind, path, number of the message or of the MARK, what else there is


class World:
    """One state. Everything is copied for every step, so steps are plain code."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.buffer = ReplayBuffer(0.5, config.kept * (SIZE + ENTRY_BYTES), config.safeguards)
        self.now, self.path, self.linked = 0.0, 0, False
        self.left: deque[Frame] = deque()  # inbox of the Exchange that was left, until its FIN is confirmed
        self.inbox: deque[Frame] = deque()
        self.alive = True
        self.sent, self.deaths, self.moves, self.marks = 0, config.deaths, config.moves, config.marks
        self.revealed: dict[bytes, tuple[int, int]] = {}  # topic: (its last number, the MARK behind the watermark)
        self.order = OrderMachine(lambda exchange: True, lambda topic: True)
        self.delivered: set[int] = set()
        self.told: set[int] = set()
        self.forwarded: set[int] = set()  # what an Exchange handed out
        self.spoken: set[int] = set()  # what a flush failed for
        self.open(broken=False)

    def open(self, *, broken: bool) -> None:
        """The next path, as Lane._open and Lane._replay."""
        self.path, self.linked = self.path + 1, True
        if broken:
            self.buffer.broken()
            if self.config.watermarks_again:
                self.revealed.clear()
        after = self.buffer.opens_after() if broken else self.buffer.sent_to
        self.inbox.append(
            (FrameKind.OPEN, self.path, after, PathOpening("A" if self.path > 1 else "", self.path > 1 and not broken))
        )
        while self.buffer.waiting:
            for frame in self.buffer.take(self.path, SIZE):
                self.inbox.append((FrameKind.DATA, self.path, parse(frame)[1].sequence, None))

    def mark(self) -> None:
        """Watermarks of what has not been revealed, and a MARK behind them."""
        self.marks -= 1
        number = self.buffer.mark(self.path)
        last: dict[bytes, int] = {topic_of(n): n for n in range(1, self.sent + 1)}
        fresh = {topic: n for topic, n in last.items() if self.revealed.get(topic, (0, 0))[0] != n}
        if fresh:
            self.revealed |= {topic: (n, number) for topic, n in fresh.items()}
            body = {topic.decode(): (n, (n + 1) // 2) for topic, n in fresh.items()}
            self.inbox.append((FrameKind.WATERMARK, self.path, self.buffer.sent_to, body))
        self.inbox.append((FrameKind.MARK, self.path, number, None))

    def flush(self) -> None:
        """Somebody waits in flush() all the time: it fails for what is unknown, once."""
        self.buffer.check()
        if (unknown := self.buffer.unknown) is not None:
            self.spoken |= set(range(unknown.first, unknown.last + 1))
            self.buffer.unknown = None

    # --- steps --------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """One message more."""
        self.sent += 1
        frame = data(self.sent, self.path)
        if self.linked:
            self.buffer.sent(frame, self.sent, self.now)
            self.inbox.append((FrameKind.DATA, self.path, self.sent, None))
        else:
            self.buffer.keep(frame, self.sent, self.now)

    def forward(self, inbox: deque[Frame]) -> None:
        """An Exchange hands out its next frame; subscriber and Monitor read it at once."""
        kind, path, number, extra = inbox.popleft()
        if kind == FrameKind.MARK:
            self.buffer.forwarded(path, number)
            return
        sequence = number
        if kind == FrameKind.DATA:
            self.forwarded.add(number)
            header = Header(1, kind, PUBLISHER, path, number, max(0, number - 2), (number - 1) // 2, 1, 0)
            event = FrameEvent(topic_of(number), header)
        else:
            event = FrameEvent(b"", Header(1, kind, PUBLISHER, path, sequence, 0, 0, 0, 0), None, extra)
        for output in self.order.handle(event, 0.0):
            if isinstance(output, MessagesLost):
                mine = {n for n in range(output.first, output.last + 1) if topic_of(n).decode() == output.topic}
                self.told |= mine
            elif isinstance(output, Deliver):
                assert output.event.header.sequence not in self.delivered, "delivered twice"
                self.delivered.add(output.event.header.sequence)
        if kind == FrameKind.FIN:
            self.buffer.forwarded(path, 0)

    def die(self) -> None:
        """The Exchange vanishes with all it has; nobody says so."""
        self.deaths -= 1
        self.alive = False
        self.inbox.clear()

    def notice(self) -> None:
        """The publisher learns of it."""
        self.linked = False
        self.buffer.broken()

    def move(self) -> None:
        """A planned move: what was sent on the Exchange that is left may still be lost with it."""
        self.moves -= 1
        self.buffer.mark(self.path, fin=True)
        self.inbox.append((FrameKind.FIN, self.path, self.buffer.sent_to, None))
        self.left, self.inbox = self.inbox, deque()
        self.open(broken=False)

    def lose_left(self) -> None:
        """The Exchange that was left dies before its FIN is confirmed: the path after it begins again."""
        self.deaths -= 1
        self.left.clear()
        self.open(broken=True)

    def steps(self) -> Iterator[tuple[str, World]]:
        """Everything that may happen next."""
        if self.sent < self.config.messages and not self.left:
            yield from self._after("publish")
        if self.inbox and self.alive and not self.left:
            yield from self._after("forward", "inbox")
        if self.left:
            yield from self._after("forward", "left")
            if self.deaths:
                yield from self._after("lose_left")
            if any(one[0] == FrameKind.MARK for one in self.inbox):
                yield from self._early_mark()
        if self.linked and self.marks and self.sent:
            yield from self._after("mark")
        if self.alive and self.deaths and not self.left:
            yield from self._after("die")
        if not self.alive and self.linked:
            yield from self._after("notice")
        if not self.linked:
            after = copy.deepcopy(self)
            after.alive = True
            after.inbox.clear()
            after.open(broken=True)
            after.flush()
            yield "the next path", after
        if self.now < self.config.ageing:
            after = copy.deepcopy(self)
            after.now += 1.0
            after.buffer.prune(after.now)
            yield "time passes", after
        if self.moves and self.linked and self.alive and not self.left and self.sent:
            yield from self._after("move")

    def _after(self, step: str, inbox: str = "") -> Iterator[tuple[str, World]]:
        after = copy.deepcopy(self)
        if inbox:
            after.forward(getattr(after, inbox))
        else:
            getattr(after, step)()
        after.flush()
        yield f"{step} {inbox}", after

    def _early_mark(self) -> Iterator[tuple[str, World]]:
        """The new Exchange is quicker than the old one: its MARK comes to the Monitor while the subscriber holds its frames."""
        after = copy.deepcopy(self)
        mark = next(one for one in after.inbox if one[0] == FrameKind.MARK)
        after.inbox.remove(mark)
        after.buffer.forwarded(after.path, mark[2])
        yield "an early MARK", after

    def flush_says(self) -> str:
        """What is wrong with a flush() that returned now, "" if nothing."""
        missing = set(range(1, self.buffer.confirmed + 1)) - self.forwarded - self.spoken
        return f"flush() confirms {sorted(missing)}, which no Exchange handed out" if missing else ""

    def end(self) -> str:
        """The last path is read to its end, with its watermarks: what is wrong then, "" if nothing."""
        if not self.linked or not self.alive:
            return ""
        last = copy.deepcopy(self)
        last.mark()
        while last.left:
            last.forward(last.left)
        while last.inbox:
            last.forward(last.inbox)
        missing = set(range(1, last.sent + 1)) - last.delivered - last.told
        if missing:
            return f"{sorted(missing)} were neither delivered nor told"
        room = self.config.kept >= self.config.messages
        return f"{sorted(last.told)} are lost although there was room for them" if room and last.told else ""

    def key(self) -> str:
        """Equal for states that differ in nothing that matters."""
        buffer = {name: str(value) for name, value in vars(self.buffer).items() if name not in ("_marks", "_safe")}
        marks = [(one.number, one.path, one.last, one.done) for one in self.buffer._marks]
        known = self.order.publishers.values()
        order = [(one.path, one.finished, one.baseline, one.begun, one.topics, one.held) for one in known]
        rest = {name: value for name, value in vars(self).items() if name not in ("buffer", "order", "config")}
        return repr((buffer, marks, order, rest))


def harm(config: Config) -> tuple[str, list[str], int]:
    """What goes wrong, the way there, and how many states were seen."""
    start = World(config)
    seen, todo = {start.key()}, deque([(start, [""])])
    while todo and len(seen) < STATES_MAX:
        world, trail = todo.popleft()
        if wrong := world.flush_says() or world.end():
            return wrong, trail, len(seen)
        for label, after in world.steps():
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append((after, [*trail, label]))
    assert not todo, "too large to be searched"
    return "", [], len(seen)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_silent_and_nothing_lost_is_confirmed(name: str) -> None:
    wrong, trail, states = harm(HEALTHY[name])
    assert not wrong, "\n".join((wrong, *trail))
    assert states > 100


@pytest.mark.parametrize("name", HARMFUL)
def test_without_this_safeguard_there_is_harm(name: str) -> None:
    wrong, _, states = harm(HARMFUL[name])
    assert wrong, f"no harm without {name} in {states} states: superfluous, or the model is too small"


def test_the_safeguards_are_all_tried() -> None:
    assert {*ReplaySafeguards._fields, "watermarks_again"} == set(HARMFUL)
