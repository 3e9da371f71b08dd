"""Reading the past, every interleaving: breadth-first search over the real order machine, which is fed as past.py does it.

A history is scripted: what publishers sent through which Exchange, in the order in which that came out. Each Exchange writes it
to its tape, with the time of its own clock, several frames to an entry or each alone. One subscriber reads the tapes merged by
these times, then what comes live of the Exchanges that still are. Everything else is open, and all of it is tried: what is an
entry, how the clocks differ, where a tape ends and the present begins, when an Exchange is attached, when a tape that nobody
writes is closed, when somebody looks whether a wait has ended. In a *lagging* world a tape may also stand still for a time:
what comes next on it is no part of the merge then.

A reader that follows what is *stored* is never attached. It sees the end of a tape by looks that may begin as late as is
possible: what it does not see was written UNCONFIRMED_MS before the look at most; or its Exchange is gone, and what it wrote
last is sent again elsewhere.

With *again* the reader may go at any time, and another one begins at its position, which is known late of what came live. It
may get again what the first one had, and hear that nobody knows whether there was more; it gets what that one had not.

At an end each message of each publisher was given once and in order, none was reported lost, and nothing is held. No wait is
ended by time (`expire`): what was held must come free by what was read, but for a FIN from before the position.

The script: blocks "A: open1 m1 m2 fin1" in the order of true time. open2-A: the path before, through A, was ended with FIN;
open2!A: it broke, and what follows is sent again from there on; ~open2-A: it began unrecorded; m3: a message, of the path
opened there last; w1-2: a watermark of path 1, up to m2; "q" before it: of a second publisher; taped: up to here it is on the
tape, whatever comes live; end: that, and the Exchange is gone or retired. Not covered: what a tape has lost, bounds of memory
and time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import combinations, product
from typing import Any, NamedTuple

from roq.errors import MessagesLost
from roq.pubsub.order import (
    FOREVER,
    HELD_FRAME_BYTES,
    TOPIC_BYTES,
    Deliver,
    FrameEvent,
    KnownPublisher,
    OrderMachine,
    OrderSafeguards,
)
from roq.pubsub.tape import SKEW_MS, UNCONFIRMED_MS, has_older
from roq.wire.frame import FrameKind, Header, PathOpening
from tests.model.machines import topic_of
from tests.model.moves import Breach
from tests.model.state import put

BEGIN_MS = 1_000_000
READING, CLOSED, LIVE = range(3)  # of a tape: may be read; nobody writes it; is done with
TOKEN = re.compile(r"(q?)(open|m|w|fin)(\d+)(?:([-!])(\w+))?")
UNRECORDED = "~"
Origin = tuple[str, int]


class TapedFrame(NamedTuple):
    """publisher: 0 or 1. number: of the message, or of the last one before. left: of an OPEN."""

    kind: FrameKind
    publisher: int
    path: int
    number: int
    left: str = ""
    finished: bool = False

    def __str__(self) -> str:
        what = f"m{self.number}" if self.kind == FrameKind.DATA else f"{self.kind.name}({self.left or self.number})"
        return f"{'pq'[self.publisher]}:{what}/{self.path}"


class TapedEntry(NamedTuple):
    """written: by the Exchange's own clock. at: the same by the reader's."""

    written: int
    at: int
    frames: tuple[TapedFrame, ...]


class History(NamedTuple):
    """By Exchange: what came out of it, with true times, and how much of that is on its tape whatever comes live. ended: those
    that are not there any more. sent: messages by publisher."""

    streams: dict[str, list[tuple[int, TapedFrame]]]
    taped: dict[str, int]
    ended: frozenset[str]
    sent: tuple[int, ...]


def history_of(script: str) -> History:
    """Read a script; a frame comes out one unit of time after the one before."""
    streams: dict[str, list[tuple[int, TapedFrame]]] = {}
    taped, ended, time = dict[str, int](), set[str](), 0
    for block in script.split("|"):
        name, *tokens = block.replace(":", " ").split()
        stream, unrecorded = streams.setdefault(name, []), list[TapedFrame]()
        for at, token in enumerate(tokens):
            if token in ("end", "taped"):
                taped[name] = len(stream)
                ended.update([name] if token == "end" else [])
                continue
            time += 1
            earlier = [*unrecorded, *(frame for _, frame in stream)]
            frame = _frame(token.removeprefix(UNRECORDED), tokens[at + 1 :], earlier)
            if token.startswith(UNRECORDED):
                unrecorded.append(frame)
            else:
                stream.append((time, frame))
    messages = [frame for stream in streams.values() for _, frame in stream if frame.kind == FrameKind.DATA]
    sent = tuple(max((frame.number for frame in messages if frame.publisher == who), default=0) for who in (0, 1))
    return History(streams, taped, frozenset(ended), sent)


def _frame(token: str, later: list[str], earlier: list[TapedFrame]) -> TapedFrame:
    """later, earlier: of the same block, of the same Exchange."""
    found = TOKEN.fullmatch(token)
    assert found is not None, token
    publisher, what, number = len(found[1]), found[2], int(found[3])
    mine = [frame for frame in earlier if frame.publisher == publisher]
    if what == "m":
        return TapedFrame(FrameKind.DATA, publisher, [frame.path for frame in mine if frame.kind == FrameKind.OPEN][-1], number)
    if what == "open":  # it says what the path begins after
        first = next((int(one.lstrip("qm")) for one in later if re.fullmatch(rf"{found[1]}m\d+", one)), 1)
        return TapedFrame(FrameKind.OPEN, publisher, number, first - 1, found[5] or "", found[4] == "-")
    if what == "w":
        return TapedFrame(FrameKind.WATERMARK, publisher, number, int(found[5]))
    return TapedFrame(FrameKind.FIN, publisher, number, max((frame.number for frame in mine), default=0))


class TapedWorld(NamedTuple):
    """One history as it was written. now: when everything live comes, by the subscriber's clock. again: what was left by a
    path that broke is sent again from this number on, by Exchange and publisher."""

    names: tuple[str, ...]
    entries: tuple[tuple[TapedEntry, ...], ...]
    ended: frozenset[str]
    sent: tuple[int, ...]
    taped: tuple[int, ...]
    now: int
    again: dict[tuple[str, int], int]
    label: str


class TapesConfig(NamedTuple):
    """What is tried. pace: milliseconds between two frames. together: whether entries may have several of them. lagging,
    stored, again: see above. see_ends, margin_ms: the rules of a tape's end."""

    histories: tuple[str, ...]
    paces: tuple[int, ...] = (1, SKEW_MS // 2, 2 * SKEW_MS)
    offsets: tuple[int, ...] = (0, SKEW_MS)
    together: bool = True
    lagging: bool = False
    stored: bool = False
    again: bool = False
    see_ends: bool = True
    margin_ms: int = UNCONFIRMED_MS
    order: OrderSafeguards = OrderSafeguards()


def worlds(config: TapesConfig) -> Iterator[TapedWorld]:
    """Every way in which a history may have been written."""
    for script, pace in product(config.histories, config.paces):
        history = history_of(script)
        names = tuple(sorted(history.streams))
        streams = [history.streams[name] for name in names]
        last = max(time for stream in streams for time, _ in stream)
        for cuts in product(*(list(_cuts(len(stream), config.together)) for stream in streams)):
            for offsets in product(config.offsets, repeat=len(names) + 1):
                if min(offsets):
                    continue  # the same as all of them earlier
                entries = tuple(
                    tuple(
                        _entry(stream[begin:end], pace, offset, offsets[-1]) for begin, end in zip((0, *cut), cut, strict=False)
                    )
                    for stream, cut, offset in zip(streams, cuts, offsets, strict=False)
                )
                taped = tuple(
                    sum(begin < history.taped.get(name, 0) for begin in (0, *cut[:-1]))
                    for name, cut in zip(names, cuts, strict=True)
                )
                now = BEGIN_MS + (last + 1) * pace + offsets[-1]
                label = f"{script}; pace {pace}, clocks {offsets}, entries {cuts}"
                yield TapedWorld(names, entries, history.ended, history.sent, taped, now, _again(history), label)


def _cuts(count: int, together: bool) -> Iterator[tuple[int, ...]]:
    """Where entries may end."""
    if not together or not count:
        yield tuple(range(1, count + 1))
        return
    for some in range(count):
        for ends in combinations(range(1, count), some):
            yield (*ends, count)


def _entry(frames: list[tuple[int, TapedFrame]], pace: int, offset: int, readers: int) -> TapedEntry:
    """An entry is written when the last frame of it has come. offset, readers: of the clocks."""
    time = BEGIN_MS + frames[-1][0] * pace
    return TapedEntry(time + offset, time + readers, tuple(frame for _, frame in frames))


def _again(history: History) -> dict[tuple[str, int], int]:
    opened = [frame for stream in history.streams.values() for _, frame in stream if frame.kind == FrameKind.OPEN]
    broken = sorted((frame for frame in opened if frame.left and not frame.finished), key=lambda frame: -frame.number)
    return {(frame.left, frame.publisher): frame.number + 1 for frame in broken}


@cache
def event_of(frame: TapedFrame, origin: Origin | None = None) -> FrameEvent:
    """As the subscriber hands it over."""
    kind, publisher, path, n, left, finished = frame
    if kind == FrameKind.DATA:
        header = Header(1, kind, publisher, path, n, max(0, n - 2), (n - 1) // 2, 1, 0)
        return FrameEvent(topic_of(n), header, frame, origin=origin)
    header = Header(1, kind, publisher, path, n, 0, 0, 0, 0)
    if kind == FrameKind.OPEN:
        return FrameEvent(b"", header, frame, PathOpening(left, finished), origin=origin)
    last = {topic_of(number).decode(): (number, (number + 1) // 2) for number in (n - 1, n) if number > 0}
    return FrameEvent(b"", header, frame, last, origin=origin)


# --- the machine as a value -------------------------------------------------------------------------------------------


ENTERED = ["path", "amid", "entered", "past_path", "baseline", "begun"]
PLAIN = [*ENTERED, "delivered", "finished", "forgotten", "replays", "waiting_since"]


class KnownThen(NamedTuple):
    """What the machine knows of one publisher. plain: the values of PLAIN."""

    id: int
    plain: tuple[Any, ...]
    topics: tuple[tuple[bytes, int, int], ...]
    held: tuple[tuple[int, tuple[TapedFrame, ...]], ...]
    openings: tuple[tuple[int, PathOpening], ...]
    origins: tuple[tuple[int, Origin], ...]


class ReadTape(NamedTuple):
    """As far as the machine asks for it."""

    written: int
    seen: int
    ended: bool


def thaw(known: Iterable[KnownThen], machine: OrderMachine) -> None:
    """Make the machine know that."""
    for then in known:
        publisher = machine.publishers[then.id] = KnownPublisher()
        for name, value in zip(PLAIN, then.plain, strict=True):
            setattr(publisher, name, value)
        publisher.topics = {topic: [last, sent] for topic, last, sent in then.topics}
        publisher.held = {path: [event_of(frame) for frame in frames] for path, frames in then.held}
        publisher.openings, publisher.origins = dict(then.openings), dict(then.origins)
        machine.known_bytes += sum(TOPIC_BYTES + len(topic) for topic in publisher.topics)
        machine.held_bytes += HELD_FRAME_BYTES * sum(map(len, publisher.held.values()))
        if publisher.held:
            machine.waiting.add(then.id)


def freeze(machine: OrderMachine) -> tuple[KnownThen, ...]:
    """What it knows."""
    return tuple(
        KnownThen(
            id,
            tuple(getattr(publisher, name) for name in PLAIN),
            tuple(sorted((topic, last, sent) for topic, (last, sent) in publisher.topics.items())),
            tuple(sorted((path, tuple(event.body for event in events)) for path, events in publisher.held.items())),
            tuple(sorted(publisher.openings.items())),
            tuple(sorted(publisher.origins.items())),
        )
        for id, publisher in sorted(machine.publishers.items())
    )


def hear(
    safeguards: OrderSafeguards,
    known: tuple[KnownThen, ...],
    attached: tuple[str, ...],
    reading: tuple[tuple[str, ReadTape], ...],
    frames: tuple[TapedFrame, ...],
    origin: Origin,
    begun_amid: bool = False,
    *,
    over: bool = False,
) -> tuple[tuple[KnownThen, ...], tuple[tuple[int, int], ...]]:
    """These frames, or none: somebody looks whether a wait has ended. What is known then, and (publisher, number) of what was
    given. begun_amid: it began at a position. over: all was read, and it has waited long enough."""
    tapes = dict(reading)
    machine = OrderMachine(
        attached.__contains__, lambda topic: True, safeguards, lambda exchange, origin: has_older(tapes, exchange, origin)
    )
    thaw(known, machine)
    machine.amid = begun_amid
    if begun_amid and all(tape.ended for tape in tapes.values()):
        lived = {id: publisher.past_path for id, publisher in machine.publishers.items() if publisher.past_path}
        machine.live()
        for id, path in lived.items():  # it was live before
            machine.publishers[id].past_path = path
    outputs = [] if frames else machine.detached(0.0)
    if over:
        outputs += machine.expire(1.0, 0.0, 0.0, lambda exchange: 0.0)
    for frame in frames:
        event = event_of(frame, origin)
        if frame.kind == FrameKind.DATA and machine.accept(event.topic, event.header):
            outputs.append(Deliver(event))
        else:
            outputs += machine.handle(event, 0.0)
    machine.check()
    given = []
    for output in outputs:
        if isinstance(output, MessagesLost):
            if begun_amid and not output.count:
                continue
            raise Breach(f"m{output.first}..m{output.last} of {output.topic} are reported lost")
        given.append((output.event.header.publisher, output.event.header.sequence))
    return freeze(machine), tuple(given)


# --- the search -------------------------------------------------------------------------------------------------------


class TapesState(NamedTuple):
    """world: its number, -1 at the start. By Exchange: entries that were read, up to when its end was seen, how its tape is,
    whether it is attached, what it must have read before the rest may come live: what is older. live: what it had read then.
    before: what the reader before had, by publisher; None: this is the first one."""

    world: int
    read: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    tapes: tuple[int, ...] = ()
    attached: tuple[bool, ...] = ()
    older: tuple[int, ...] = ()
    live: tuple[int, ...] = ()
    known: tuple[KnownThen, ...] = ()
    last: tuple[int, ...] = (0, 0)
    before: tuple[int, ...] | None = None


class TapesModel:
    """The steps that are possible in a state, and what is to be true at an end."""

    def __init__(self, config: TapesConfig) -> None:
        self.config = config
        self.worlds = list(worlds(config))
        self._heard = cache(partial(hear, config.order))

    def start(self) -> TapesState:
        """Nothing is decided."""
        return TapesState(-1)

    def steps(self, state: TapesState) -> Iterator[tuple[bool, str, TapesState]]:
        """Everything that may happen next."""
        if state.world < 0:
            for number, world in enumerate(self.worlds):
                count = len(world.names)
                tapes, attached = (READING,) * count, (False,) * count
                begun = TapesState(number, (0,) * count, (0,) * count, tapes, attached, world.taped, (0,) * count)
                yield True, world.label, begun
            return
        world = self.worlds[state.world]
        for x, name in enumerate(world.names):
            yield from self._read(state, world, x)
            if self.config.stored and self.config.see_ends:
                yield from self._see(state, world, x)
            if name in world.ended:
                yield from self._close(state, world, x)
            elif not self.config.stored:
                yield from self._attach(state, world, x)
        if any(then.held for then in state.known):
            settled = self._hear(state, world, ())
            yield settled != state, "looks whether a wait has ended", settled
        if self.config.again and state.before is None:
            yield from self._again(state, world)

    def _again(self, state: TapesState, world: TapedWorld) -> Iterator[tuple[bool, str, TapesState]]:
        """Another reader begins at a position of this one: before what it holds; where it is live, anywhere in what came."""
        held = {frame for then in state.known for _, frames in then.held for frame in frames}
        count = len(world.names)
        reached: list[Iterable[int]] = []
        for entries, read, tape, live in zip(world.entries, state.read, state.tapes, state.live, strict=True):
            waits = next((x for x, entry in enumerate(entries[:read]) if held.intersection(entry.frames)), read)
            reached.append(range(min(live, waits), waits + 1) if tape == LIVE else (waits,))
        now = max((e.at for entries, read in zip(world.entries, state.read, strict=True) for e in entries[:read]), default=0)
        older = tuple(sum(entry.at <= now for entry in entries) for entries in world.entries)
        begun = TapesState(
            state.world,
            seen=(0,) * count,
            tapes=tuple(READING if tape == LIVE else tape for tape in state.tapes),
            attached=(False,) * count,
            older=tuple(map(max, older, state.older)),
            live=(0,) * count,
            before=state.last,
        )
        for position in product(*reached):
            yield False, f"begins again behind {position}", begun._replace(read=position)

    def _next(self, state: TapesState, world: TapedWorld, x: int) -> TapedEntry | None:
        entries, read = world.entries[x], state.read[x]
        return entries[read] if read < len(entries) else None

    def _tape(self, state: TapesState, x: int, what: int) -> TapesState:
        return state._replace(tapes=put(state.tapes, x, what))

    def _read(self, state: TapesState, world: TapedWorld, x: int) -> Iterator[tuple[bool, str, TapesState]]:
        entry, tape, name = self._next(state, world, x), state.tapes[x], world.names[x]
        if entry is None:
            return
        read = state._replace(read=put(state.read, x, state.read[x] + 1))
        frames = " ".join(map(str, entry.frames))
        if tape == LIVE:
            yield True, f"reads {frames} from {name}", self._hear(read, world, entry.frames, (name, world.now))
        elif self._is_first(state, world, entry):
            # the tape is not read up to this entry before all of it was taken
            after = self._hear(state, world, entry.frames, (name, entry.written))
            yield True, f"reads {frames} of {entry.written} from the tape of {name}", after._replace(read=read.read)

    def _is_first(self, state: TapesState, world: TapedWorld, entry: TapedEntry) -> bool:
        """Of those that can be read, none was written earlier. In a lagging world the other tapes that somebody writes may
        stand still meanwhile."""
        readable = (CLOSED,) if self.config.lagging else (READING, CLOSED)
        there = [self._next(state, world, x) for x, tape in enumerate(state.tapes) if tape in readable]
        return all(other is None or other.written >= entry.written for other in there)

    def _close(self, state: TapesState, world: TapedWorld, x: int) -> Iterator[tuple[bool, str, TapesState]]:
        if state.tapes[x] != CLOSED:
            yield True, f"the tape of {world.names[x]} is closed", self._tape(state, x, CLOSED)

    def _see(self, state: TapesState, world: TapedWorld, x: int) -> Iterator[tuple[bool, str, TapesState]]:
        """The end of what can be read, by a look that began as late as it can have."""
        hidden = world.entries[x][state.read[x] :]
        if state.tapes[x] == CLOSED or (hidden and not self.config.lagging):
            return
        late = [entry.at for entry in hidden if not self._comes_again(world, x, entry)]
        until = min(late) + UNCONFIRMED_MS - self.config.margin_ms - 1 if late else world.now + 2 * (SKEW_MS + UNCONFIRMED_MS)
        if until > state.seen[x]:
            yield not hidden, f"sees the end of the tape of {world.names[x]}", state._replace(seen=put(state.seen, x, until))

    def _comes_again(self, world: TapedWorld, x: int, entry: TapedEntry) -> bool:
        """All of it, through another Exchange."""
        name = world.names[x]
        return name in world.ended and all(
            frame.kind == FrameKind.DATA and frame.number >= world.again.get((name, frame.publisher), FOREVER)
            for frame in entry.frames
        )

    def _attach(self, state: TapesState, world: TapedWorld, x: int) -> Iterator[tuple[bool, str, TapesState]]:
        """The end of its tape, for us, is anywhere."""
        if not state.attached[x]:
            yield True, f"is attached to {world.names[x]}", state._replace(attached=put(state.attached, x, True))
        elif state.tapes[x] != LIVE and state.read[x] >= state.older[x]:
            live = state._replace(live=put(state.live, x, state.read[x]))
            yield True, f"what follows comes live from {world.names[x]}", self._tape(live, x, LIVE)

    def _hear(
        self, state: TapesState, world: TapedWorld, frames: tuple[TapedFrame, ...], origin: Origin = ("", 0), **how: bool
    ) -> TapesState:
        """One step of the real machine: these frames, or the look that follows a step. how: see `hear`."""
        attached = tuple(name for name, is_attached in zip(world.names, state.attached, strict=True) if is_attached)
        amid = state.before is not None
        reading = tuple(self._reading(state, world))
        known, given = self._heard(state.known, attached, reading, frames, origin, amid, **how)
        last, before = state.last, state.before or (0, 0)
        for who, number in given:
            if number <= last[who] or number > max(last[who], before[who]) + 1:
                raise Breach(f"m{number} of {'pq'[who]} is given after m{last[who]}")
            last = put(last, who, number)
        return state._replace(known=known, last=last)

    def _reading(self, state: TapesState, world: TapedWorld) -> Iterator[tuple[str, ReadTape]]:
        """Tapes that are not done with."""
        for x, (name, entries, read, tape) in enumerate(zip(world.names, world.entries, state.read, state.tapes, strict=True)):
            if tape != LIVE:
                written = entries[read - 1].written if read else 0
                yield name, ReadTape(written, state.seen[x], tape == CLOSED and read == len(entries))

    def end(self, state: TapesState) -> None:
        """All was read."""
        world = self.worlds[state.world]
        if state.before is not None:  # what it waits for may have come before its time
            while any(then.held for then in state.known) and (after := self._hear(state, world, (), over=True)) != state:
                state = after
        before = state.before or (0, 0)
        for who, (last, sent) in enumerate(zip(map(max, state.last, before), world.sent, strict=True)):
            if last != sent:
                raise Breach(f"m{last + 1} of {'pq'[who]} was never given")
        if held := [frame for then in state.known for _, frames in then.held for frame in frames]:
            raise Breach(f"holds {' '.join(map(str, held))} for ever")
