"""Moves of a publisher between Exchanges, every interleaving: breadth-first search over the real path and order machines.

One publisher sends messages over two topics; Exchanges are a FIFO inbox and a FIFO pipe per subscriber; the Monitor is its
rule (`Rules`). Every step of the network, the Monitor, the subscribers and the faults in the budget may come at any time. A
breach of a promise ends the search with the shortest way to it. Publishing, moving, retiring, joining and faults *may*
happen; all else must, so a state in which nothing must happen any more is an end, at which everything has to be accounted for.

Not covered: batching, time (a hold may expire at any moment), and the publisher's fail-over, whose part `_fail_over` plays
until that code exists: path k+1 on another Exchange, OPEN without the promise of a FIN, all earlier messages again. A watermark
comes to everybody at the end, also to a frozen subscriber of a publisher that it has not met.
"""

from __future__ import annotations

from collections.abc import Iterator

from roq.pubsub.path import CloseLink, Finished, Instruction, OpenLink, PathState, SendFin, SendOpen
from roq.wire.frame import FrameKind
from tests.model.machines import NAMES, NOWHERE, TOPICS, Frame, Order, Path, bit, direct, hear, numbers, topic_of
from tests.model.state import (
    ABSENT,
    ACTIVE,
    GONE,
    JOINING,
    RETIRING,
    STARTING,
    Budget,
    Config,
    Link,
    Pipe,
    Reader,
    State,
    put,
)

SUBSCRIPTIONS: tuple[tuple[bytes, ...], ...] = (TOPICS, TOPICS[1:])
LATE = 1  # the subscriber that may join late, or freeze
ATTACHED, RETIRE = Frame(FrameKind.ATTACHED), Frame(FrameKind.RETIRE)
Step = tuple[bool, str, State]  # whether it must happen, what it is, what comes of it


class Breach(Exception):
    """A promise was broken."""


class Model:
    """The steps that are possible in a state, and what is to be true at an end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._exchanges = range(config.exchanges)
        self._tells_open = config.late or config.retargets > 0

    def start(self) -> State:
        """The publisher was welcomed to A. Every subscriber but a late one is ready there; B and C are starting."""
        config, count = self.config, self.config.exchanges
        there = (True, not config.late)
        proved = [x < config.proved for x in range(count)]
        tokens = sum(bit(x) for x in range(config.proved))
        welcomed, _ = direct(Path(), config.path, "assign", 1, 0)
        state = State(
            path=welcomed,
            sent=0,
            opened=0,
            ended=0,
            alive=True,
            finished=False,
            notices=frozenset(),
            links=(Link(1, 0),),
            pipes=tuple(tuple(() if ready and done else None for ready in there) for done in proved),
            phases=tuple(ACTIVE if done else STARTING for done in proved),
            news=frozenset(),
            placed=(1, 0, NOWHERE),
            offered=frozenset(),
            seen=1,
            frozen=False,
            replayed=0,
            readers=tuple(Reader(proved=tokens, since=0) if ready else Reader() for ready in there),
            budget=Budget(*(getattr(config, name) for name in Budget._fields)),
        )
        while config.met and not all(reader.order for reader in state.readers if reader.since > JOINING):
            state = next(after for _, label, after in self.steps(state) if "B" not in label and "publish m" not in label)
        return state

    def steps(self, state: State) -> Iterator[Step]:
        """Everything that may happen next."""
        if state.alive:
            yield from self._publisher(state)
        yield from self._network(state)
        yield from self._subscriber(state)
        yield from self._monitor(state)
        if state.budget.deaths != self.config.deaths or state.budget.deaths:
            yield from self._deaths(state)

    # --- the publisher ------------------------------------------------------------------------------------------------

    def _publisher(self, state: State) -> Iterator[Step]:
        machine, number = state.path, state.sent + 1
        if machine.current != NOWHERE and number <= self.config.messages:
            yield False, f"publish m{number}", self._send(state._replace(sent=number), FrameKind.DATA, machine.path)
        for notice in state.notices:
            what, path_number, exchange = notice
            rest = state._replace(notices=state.notices - {notice})
            where = f" on {NAMES[exchange]}" if exchange != NOWHERE else ""
            yield True, f"publisher takes {what}(path {path_number}{where})", self._direct(rest, what, path_number, exchange)
        for at, link in enumerate(state.links):
            if not link.welcomed and state.phases[link.exchange] != GONE:
                yield from self._welcome(state._replace(links=put(state.links, at, link._replace(welcomed=True))), link)
        if state.budget.closes and machine.current != NOWHERE:
            yield False, "publisher closes", self._direct(state._replace(budget=state.budget._replace(closes=0)), "close")

    def _welcome(self, state: State, link: Link) -> Iterator[Step]:
        machine, instructions = direct(state.path, self.config.path, "attached", link.path)
        state = state._replace(path=machine)
        label = f"{NAMES[link.exchange]} welcomes the publisher"
        yield True, label, self._perform(state, instructions)
        if state.budget.kills:
            killed = state._replace(budget=state.budget._replace(kills=0), alive=False)
            for done in range(1, len(instructions)):
                after = type(instructions[done - 1]).__name__
                yield False, f"{label}, which is killed after {after}", self._perform(killed, instructions[:done])

    def _direct(self, state: State, what: str, number: int = 0, exchange: int = NOWHERE) -> State:
        machine, instructions = direct(state.path, self.config.path, what, number, exchange)
        return self._perform(state._replace(path=machine), instructions)

    def _perform(self, state: State, instructions: tuple[Instruction, ...]) -> State:
        """As the publisher's shell does."""
        for instruction in instructions:
            match instruction:
                case OpenLink(exchange, number):
                    if any(link.path == number for link in state.links):
                        raise Breach(f"a second link for path {number}")
                    state = state._replace(links=(*state.links, Link(number, NAMES.index(exchange.id))))
                case SendFin(number):
                    state = self._send(state, FrameKind.FIN, number)._replace(ended=number)
                case SendOpen(number, left, finished):
                    if state.opened and number != state.opened + 1:
                        raise Breach(f"path {number} follows path {state.opened}")
                    old = NAMES.index(left) if left else NOWHERE
                    state = self._send(state._replace(opened=number), FrameKind.OPEN, number, old, int(finished))
                case CloseLink(number):
                    if number == state.opened > state.ended:
                        raise Breach(f"closes the link of path {number} without FIN")
                    # whatever has not reached the Exchange is cut off
                    state = state._replace(links=tuple(link for link in state.links if link.path != number))
                case Finished():
                    state = state._replace(finished=True)
        return state

    def _send(self, state: State, kind: FrameKind, number: int, left: int = NOWHERE, finished: int = 0) -> State:
        if number <= state.ended:
            raise Breach(f"{kind.name} is sent on path {number}, which has ended")
        for at, link in enumerate(state.links):
            if link.path == number:
                if not link.welcomed or state.phases[link.exchange] == GONE:
                    return state  # nobody there to take it
                frame = Frame(kind, number, state.sent, left, finished)
                return state._replace(links=put(state.links, at, link._replace(frames=(*link.frames, frame))))
        raise Breach(f"{kind.name} is sent on path {number}, which has no link")

    # --- Exchanges ----------------------------------------------------------------------------------------------------

    def _network(self, state: State) -> Iterator[Step]:
        for at, link in enumerate(state.links):
            if link.frames and state.phases[link.exchange] != GONE:
                taken = state._replace(links=put(state.links, at, link._replace(frames=link.frames[1:])))
                yield from self._forward(taken, link.exchange, link.frames[0])
        for x, phase in enumerate(state.phases):
            for s, pipe in enumerate(state.pipes[x]):
                reader = state.readers[s]
                if phase > ACTIVE or reader.since == ABSENT or (state.frozen and s == LATE):
                    continue
                if pipe is None:
                    yield True, f"s{s} subscribes at {NAMES[x]}", self._fill(state, x, s, ())
                elif not reader.proved & bit(x) and ATTACHED not in pipe:
                    yield True, f"{NAMES[x]} attaches s{s}", self._fill(state, x, s, (*pipe, ATTACHED))

    def _fill(self, state: State, x: int, s: int, pipe: Pipe) -> State:
        return state._replace(pipes=put(state.pipes, x, put(state.pipes[x], s, pipe)))

    def _forward(self, state: State, x: int, frame: Frame) -> Iterator[Step]:
        takers = []
        for s, pipe in enumerate(state.pipes[x]):
            if pipe is not None and (frame.kind != FrameKind.DATA or topic_of(frame.number) in SUBSCRIPTIONS[s]):
                takers.append(s)
        if frame.kind == FrameKind.FIN or (frame.kind == FrameKind.OPEN and self._tells_open):
            state = state._replace(news=state.news | {(frame.kind, frame.path, x)})
        if frame.kind == FrameKind.FIN:  # the Exchange says so on the publisher's own connection
            state = state._replace(notices=state.notices | {("forwarded", frame.path, NOWHERE)})
        yield True, f"{NAMES[x]} forwards {frame}", self._pass_on(state, x, takers, frame)
        if state.budget.drops:
            fewer = state._replace(budget=state.budget._replace(drops=state.budget.drops - 1))
            for s in takers:
                rest = [taker for taker in takers if taker != s]
                yield False, f"{NAMES[x]} forwards {frame}, but drops it for s{s}", self._pass_on(fewer, x, rest, frame)

    def _pass_on(self, state: State, x: int, takers: list[int], frame: Frame) -> State:
        pipes = tuple((*pipe, frame) if s in takers and pipe is not None else pipe for s, pipe in enumerate(state.pipes[x]))
        return state._replace(pipes=put(state.pipes, x, pipes))

    # --- subscribers --------------------------------------------------------------------------------------------------

    def _subscriber(self, state: State) -> Iterator[Step]:
        for x in self._exchanges:
            for s, pipe in enumerate(state.pipes[x]):
                if pipe and not (state.frozen and s == LATE):
                    rest = self._fill(state, x, s, pipe[1:])
                    yield True, f"s{s} reads {pipe[0]} from {NAMES[x]}", self._read(rest, x, s, pipe[0])
        if state.budget.freezes or state.frozen:
            budget = state.budget._replace(freezes=0)
            readers = put(state.readers, LATE, state.readers[LATE]._replace(thawed=state.frozen))
            after = state._replace(frozen=not state.frozen, budget=budget, readers=readers)
            yield False, "s1 goes on" if state.frozen else "s1 freezes", after
        if state.readers[LATE].passed_by and not state.frozen:
            told = put(state.readers, LATE, state.readers[LATE]._replace(passed_by=False))
            yield True, "s1 hears that it was passed by", self._hear(state._replace(readers=told), LATE, "doubt")
        for s, reader in enumerate(state.readers):
            if state.frozen and s == LATE:
                continue
            if reader.order is not None and reader.order.waiting and self._may_expire():
                yield from self._expire(state, s, reader.order)
            for x in self._exchanges:
                # fail-over code to come: the list without the dead Exchange may not overtake the replay
                replaying = reader.order is None or reader.order.path < state.replayed or not state.replayed
                if state.phases[x] == GONE and reader.proved & bit(x) and not replaying:
                    yield True, f"s{s} leaves dead {NAMES[x]}", self._detach(state, x, s)

    def _may_expire(self) -> bool:
        return bool(self.config.drops or self.config.delays or self.config.freezes)

    def _expire(self, state: State, s: int, machine: Order) -> Iterator[Step]:
        on_the_way = [frame for pipes in state.pipes for frame in pipes[s] or ()]
        on_the_way += [frame for link in state.links for frame in link.frames]
        if not any(0 < frame.path < machine.held[0][0] for frame in on_the_way):
            yield True, f"s{s} waits in vain no longer", self._hear(state, s, "expire")
        elif state.budget.delays:
            fewer = state._replace(budget=state.budget._replace(delays=state.budget.delays - 1))
            yield False, f"s{s} waits no longer", self._hear(fewer, s, "expire")

    def _read(self, state: State, x: int, s: int, frame: Frame) -> State:
        if frame.kind == FrameKind.RETIRE:
            return self._detach(self._fill(state, x, s, None), x, s)
        if frame.kind == FrameKind.ATTACHED:
            reader = state.readers[s]
            return self._proofs(state, s, reader._replace(proved=reader.proved | bit(x)))
        return self._hear(state, s, frame)

    def _detach(self, state: State, x: int, s: int) -> State:
        reader = state.readers[s]
        state = state._replace(readers=put(state.readers, s, reader._replace(proved=reader.proved & ~bit(x))))
        return self._hear(state, s, "detached")

    def _hear(self, state: State, s: int, what: Frame | str) -> State:
        return state._replace(readers=put(state.readers, s, self._heard(state.readers[s], s, what, state.sent)))

    def _heard(self, reader: Reader, s: int, what: Frame | str, sent: int) -> Reader:
        machine, doubts, numbers_delivered, lost_ranges = hear(
            reader.order,
            reader.doubts,
            reader.proved,
            SUBSCRIPTIONS[s],
            self.config.order,
            what,
            sent if what == "watermark" else 0,
            float(reader.thawed),
        )
        _, _, _, last, delivered, lost, doubted, *_ = reader
        for number in numbers_delivered:
            if number <= last:
                raise Breach(f"s{s} is given m{number} after m{last}")
            last, delivered = number, delivered | bit(number)
        for topic, first, final, count in lost_ranges:
            told = numbers((topic,), first, final)
            if count == 0:
                if not self.config.freezes or told & (delivered | doubted):
                    raise Breach(f"s{s} is told that m{first}..m{final} may be missing: delivered, doubted before, or no doubt")
                doubted |= told
                continue
            if told & (delivered | lost):
                raise Breach(f"s{s} is told that m{first}..m{final} are lost: delivered or told before")
            if count > told.bit_count() or (not self.config.late and count < told.bit_count()):
                raise Breach(f"s{s} is told that {count} messages of m{first}..m{final} on {topic!r} are lost")
            lost |= told
        if delivered & (lost | doubted):
            raise Breach(f"s{s} is given what it was told to be lost")
        return reader._replace(order=machine, doubts=doubts, last=last, delivered=delivered, lost=lost, doubted=doubted)

    # --- the Monitor --------------------------------------------------------------------------------------------------

    def _proofs(self, state: State, s: int, reader: Reader) -> State:
        carrying = sum(bit(x) for x in self._exchanges if state.phases[x] == ACTIVE)
        if reader.since == JOINING and reader.proved & carrying == carrying:
            reader = reader._replace(since=state.sent)
        readers = put(state.readers, s, reader)
        ready = [one for one in readers if one.since > JOINING]
        phases = tuple(
            ACTIVE if phase == STARTING and all(one.proved & bit(x) for one in ready) else phase
            for x, phase in enumerate(state.phases)
        )
        return state._replace(readers=readers, phases=phases)

    def _monitor(self, state: State) -> Iterator[Step]:
        number, at, target = state.placed
        rules, budget = self.config.rules, state.budget
        settled = state.seen >= number or not self._tells_open or not rules.await_open
        joining = rules.join_apart and any(reader.since == JOINING for reader in state.readers)
        for s, reader in enumerate(state.readers):
            if reader.since == ABSENT and (not rules.join_apart or (target == NOWHERE and settled)):
                joined = put(state.readers, s, reader._replace(since=JOINING))
                yield False, f"s{s} joins", state._replace(readers=joined)
        for one in state.news:
            kind, path_number, x = one
            seen = state._replace(news=state.news - {one})
            if kind == FrameKind.OPEN:
                seen = self._located(seen._replace(seen=max(state.seen, path_number)), path_number, x)
            elif (path_number, x) == (number, at) and target != NOWHERE:
                seen = seen._replace(placed=(number + 1, target, NOWHERE))
            yield True, f"Monitor sees {kind.name}(path {path_number}) come out of {NAMES[x]}", seen
        current = state.path.current
        if state.path.path >= number and not state.path.leaving and current not in (NOWHERE, at):
            yield True, "publisher reports where it is", self._located(state, state.path.path, current)
        for x, phase in enumerate(state.phases):
            if x > 1 and self._is_another(state, x):
                continue
            movable = x != at and (phase == ACTIVE or (phase == STARTING and not rules.prove_before_move)) and not joining
            if budget.moves and target == NOWHERE and movable:
                moving = state._replace(budget=budget._replace(moves=budget.moves - 1))
                yield False, f"Monitor moves the publisher to {NAMES[x]}", self._relocate(moving, x)
            if budget.retargets and target not in (NOWHERE, x) and movable:
                again = state._replace(budget=budget._replace(retargets=0))
                yield False, f"Monitor moves the publisher to {NAMES[x]} instead", self._relocate(again, x)
            offered = rules.remember_offers and any(x == offer for _, offer in state.offered)
            if budget.retires and phase == ACTIVE and x != target and (self._may_leave(target) if x == at else not offered):
                retiring = state._replace(phases=put(state.phases, x, RETIRING), budget=budget._replace(retires=0))
                pipes = tuple(None if pipe is None else (*pipe, RETIRE) for pipe in state.pipes[x])
                retiring = retiring._replace(pipes=put(state.pipes, x, pipes))
                for s, reader in enumerate(state.readers):
                    retiring = self._proofs(retiring, s, reader)
                yield False, f"RETIRE through {NAMES[x]}", retiring
            if phase == RETIRING:
                detached = all(pipe is None for pipe in state.pipes[x])
                if detached or not rules.stop_after_detach:
                    yield False, f"{NAMES[x]} is stopped", self._gone(state, x)
        if budget.changes and not state.opened and state.path.target != NOWHERE and state.phases[state.path.target] == GONE:
            for x in [x for x, phase in enumerate(state.phases) if phase == ACTIVE]:
                yield True, f"another Monitor welcomes the publisher to {NAMES[x]}", self._take_over(state, x)

    def _is_another(self, state: State, x: int) -> bool:
        """It differs from B in nothing but its name: nobody was sent to either yet. What the Monitor may do with it, it may do
        with B."""
        if self.config.deaths or state.budget.moves < self.config.moves:
            return False
        proved = all(bool(reader.proved & bit(x)) == bool(reader.proved & bit(1)) for reader in state.readers)
        return proved and (state.phases[x], state.pipes[x]) == (state.phases[1], state.pipes[1])

    def _take_over(self, state: State, x: int) -> State:
        """It knows nothing of moves, and what the one before has said is not heard any more."""
        budget, notices = state.budget._replace(changes=0), frozenset({("welcome", 1, x)})
        return state._replace(budget=budget, placed=(1, x, NOWHERE), notices=notices, offered=frozenset(), seen=1)

    def _relocate(self, state: State, x: int) -> State:
        number, at, _ = state.placed
        offered = state.offered | {(number + 1, x)} if self.config.retargets else state.offered
        notices = state.notices | {("assign", number + 1, x)}
        return state._replace(placed=(number, at, x), notices=notices, offered=offered)

    def _located(self, state: State, path_number: int, x: int) -> State:
        """The publisher uses this path there."""
        number, at, target = state.placed
        if path_number == number + 1 and state.path.leaving:
            return state._replace(placed=(number, at, x))  # its FIN is still to come
        if path_number < number:
            return state
        offered = frozenset(offer for offer in state.offered if offer[0] > path_number)
        return state._replace(placed=(path_number, x, NOWHERE if x == target else target), offered=offered)

    def _may_leave(self, target: int) -> bool:
        return target != NOWHERE and not self.config.rules.retire_after_fin

    # --- faults -------------------------------------------------------------------------------------------------------

    def _gone(self, state: State, x: int) -> State:
        return state._replace(
            phases=put(state.phases, x, GONE),
            links=tuple(link._replace(frames=()) if link.exchange == x else link for link in state.links),
            pipes=put(state.pipes, x, (None,) * len(SUBSCRIPTIONS)),
            news=frozenset(one for one in state.news if one[2] != x),
        )

    def _deaths(self, state: State) -> Iterator[Step]:
        dead = [x for x in self._exchanges if state.phases[x] == GONE]
        if not dead and (state.opened or state.budget.changes):
            for x in self._exchanges:
                killed = self._gone(state, x)._replace(budget=state.budget._replace(deaths=0))
                yield False, f"{NAMES[x]} is killed", killed
        elif dead and state.opened and not state.replayed:
            for y in self._exchanges:
                if state.phases[y] == ACTIVE or (state.phases[y] == STARTING and self._proved(state, y)):
                    yield True, f"publisher fails over to {NAMES[y]} and replays", self._fail_over(state, dead[0], y)

    def _proved(self, state: State, y: int) -> bool:
        readers = [one for s, one in enumerate(state.readers) if one.since > JOINING and self._waited_for(state, s)]
        return all(one.proved & bit(y) for one in readers)

    def _waited_for(self, state: State, s: int) -> bool:
        return not (state.frozen and s == LATE and self.config.rules.excuse_silent)

    def _fail_over(self, state: State, x: int, y: int) -> State:
        machine = state.path
        number = machine.path + 1
        leaving = tuple(one for one in machine.leaving if one[1] != x)
        opening = Frame(FrameKind.OPEN, number, 0, x, 0)
        link = Link(number, y, True, (opening, *(Frame(FrameKind.DATA, number, n) for n in range(1, state.sent + 1))))
        readers = state.readers
        if not readers[LATE].proved & bit(y) and self.config.freezes:
            readers = put(readers, LATE, readers[LATE]._replace(passed_by=True))
        return state._replace(
            readers=readers,
            path=Path(number, y, leaving=leaving, state=PathState.FLOWING),
            opened=number,
            links=(*(one for one in state.links if any(one.path == left[0] for left in leaving)), link),
            placed=(number, y, NOWHERE),
            replayed=number,
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, state: State) -> None:
        """Nothing must happen any more: is everything accounted for?"""
        if self.config.freezes and GONE in state.phases and not state.replayed and state.opened:
            raise Breach("the publisher waits for the dead")
        if self.config.changes and not state.opened:
            raise Breach("the publisher never begins")
        for s, reader in enumerate(state.readers):
            if reader.since == ABSENT or (state.frozen and s == LATE):
                continue
            if reader.since == JOINING:
                raise Breach(f"s{s} never gets ready")
            wanted = numbers(SUBSCRIPTIONS[s], reader.since + 1, state.sent)
            faults = self.config.drops + self.config.delays + (self.config.freezes if s == LATE else 0)
            if faults and (reader.order is not None or reader.doubts is not None):
                reader = self._heard(reader, s, "watermark", state.sent)
            missing = wanted & ~(reader.delivered | (reader.lost | reader.doubted if faults else 0))
            if missing:
                names = ", ".join(f"m{n}" for n in range(1, state.sent + 1) if missing & bit(n))
                raise Breach(f"s{s} was never given {names}" + (", nor told" if faults else ""))
            if reader.order is not None and reader.order.held:
                raise Breach(f"s{s} holds frames for ever")
        if state.path.state in (PathState.CLOSING, PathState.FINISHED) and state.alive and not state.finished:
            raise Breach("the publisher can't close")
