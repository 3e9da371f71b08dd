"""A model of a producer: its lives, the GCM's record, two Exchanges with their tapes, and the Monitor's fences.

A life publishes the messages of its source behind the number that it begins with, on one Exchange after the other. What it
sent lies on its connection, then with the Exchange, then on the tape; it hears of that, and keeps it at the GCM. It may be
killed, or live on without knowing that another life was opened. Exchanges die, too, and begin anew without what they had
not stored. The records are those of gcm/producers.py, the fences and what is found on tapes those of the product; a life's
connections are described here as producer_sender.py has them.

What is checked: what is on the tapes is always all up to some number (P1); nothing of another life is on them twice (P2), nor
comes when a later life has begun (P3), whose number is the last one there is (P4); a life that is left alone stores all (P5).
Not covered: clocks, so which part of the tapes is read; readers (tapes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from gcm.producers import ProducerRecord, keep_in, open_record
from roq.errors import ProducerFenced
from roq.pubsub.monitor.fences import Fences
from roq.pubsub.producer_tail import StoredNumbers
from roq.wire.frame import encode_data
from roq.wire.producers import KeepProducer, OpenProducer
from roq.wire.recording import encode_entry
from roq.wire.zmtp import frame
from tests.model.moves import Breach

T = TypeVar("T")
ID = 7
NOWHERE = -1
OPENED, RUNNING, DEAD = "opened", "running", "dead"


class ProducersConfig(NamedTuple):
    """last: message of the source. lives, kills, deaths (of Exchanges), moves: how many at most. The rest are the rules: only
    tests switch one off."""

    last: int = 2
    lives: int = 2
    kills: int = 1
    deaths: int = 0
    moves: int = 0
    cut: bool = True  # an Exchange ends the connections of lives before
    await_stored: bool = True  # and says so when what it took of them is stored
    in_turn: bool = True  # a path opens when everything on the one before is stored
    confirmed: bool = True  # only what is stored is kept
    read: bool = True  # the tapes are read unless the life before was closed
    refuse: bool = True  # the Monitor lets no life before onto another Exchange
    inherit: bool = True  # behind a life that has begun nothing the next one looks for what that would have looked for


class Life(NamedTuple):
    """above: its paths are. begun: behind this number. made: last number there is. sent, heard: last one that was sent, that it
    knows to be stored. at: the Exchange it is on. waits: opens its path there when this number is stored; left: the Exchange of
    the path before."""

    phase: str
    above: int
    kept: int
    settled: bool
    begun: int = 0
    made: int = 0
    sent: int = 0
    heard: int = 0
    at: int = NOWHERE
    waits: int = 0
    left: int = NOWHERE
    acks: frozenset[int] = frozenset()


Stored = tuple[int, int]  # life, number


class ProducersWorld(NamedTuple):
    """flights: of each life, by Exchange, what is on its connection. taken, tapes: by Exchange. fenced: by Exchange, paths up
    to this one, which those of a life that has begun nothing and of the next one are both above."""

    record: ProducerRecord | None
    lives: tuple[Life, ...]
    flights: tuple[tuple[tuple[int, ...], ...], ...]
    taken: tuple[tuple[Stored, ...], ...]
    tapes: tuple[tuple[Stored, ...], ...]
    fenced: tuple[int, ...]
    kills: int
    deaths: int
    moves: int


Step = tuple[bool, str, ProducersWorld]


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    """With that value there."""
    return (*values[:at], value, *values[at + 1 :])


class ProducersModel:
    """See search.Explorable."""

    def __init__(self, config: ProducersConfig) -> None:
        self.config = config

    def start(self) -> ProducersWorld:
        """Nobody has opened the name."""
        c = self.config
        return ProducersWorld(None, (), (), ((), ()), ((), ()), (0, 0), c.kills, c.deaths, c.moves)

    def steps(self, world: ProducersWorld) -> Iterator[Step]:
        """See Explorable."""
        if len(world.lives) < self.config.lives:
            yield not world.lives, "open", self._opened(world)
        for who, life in enumerate(world.lives):
            if life.phase == OPENED:
                yield from self._joining(world, who, life)
            elif life.phase == RUNNING:
                yield from self._running(world, who, life)
        for exchange in (0, 1):
            yield from self._exchange(world, exchange)

    def _opened(self, world: ProducersWorld) -> ProducersWorld:
        who = len(world.lives)
        record = open_record(world.record, OpenProducer("q", "p", str(who)), ID, 0.0)
        began_nothing = world.record is not None and not world.record.turn
        life = Life(OPENED, record.path, record.number, record.settled or (began_nothing and not self.config.inherit))
        flights = (*world.flights, ((), ()))
        return world._replace(record=record, lives=(*world.lives, life), flights=flights)

    # --- lives --------------------------------------------------------------------------------------------------------

    def _joining(self, world: ProducersWorld, who: int, life: Life) -> Iterator[Step]:
        for exchange in (0, 1):
            if exchange in life.acks:
                continue
            before = [one for one, other in enumerate(world.lives) if other.above < life.above]
            if world.fenced[exchange] < life.above:
                yield True, f"{exchange} fences for {who}", self._fence(world, life.above, before, exchange)
            elif not self.config.await_stored or not any(one in before for one, _ in world.taken[exchange]):
                yield True, f"{exchange} says so", self._with(world, who, life._replace(acks=life.acks | {exchange}))
        if len(life.acks) == 2:
            yield True, f"{who} begins", self._begin(world, who, life)

    def _fence(self, world: ProducersWorld, above: int, before: list[int], exchange: int) -> ProducersWorld:
        world = world._replace(fenced=put(world.fenced, exchange, above))
        for who in before if self.config.cut else ():
            world = world._replace(flights=put(world.flights, who, put(world.flights[who], exchange, ())))
            world = self._broken(world, who, exchange)
        return world

    def _begin(self, world: ProducersWorld, who: int, life: Life) -> ProducersWorld:
        number, found = life.kept, StoredNumbers(ID)
        if self.config.read and not life.settled:
            for tape in world.tapes:
                for _, one in tape:
                    found.take(encode_entry(1, [frame(encode_data(b"t", ID, 1, one, 0, 0, [b""], 0))]))
            number = found.behind(number).number
        after = self._keep(world, who, life._replace(begun=number, sent=number, heard=number), number)
        stored = max((one for tape in world.tapes for _, one in tape), default=0)
        if after.lives[who].phase == RUNNING and number != stored:
            raise Breach(f"P4: life {who} begins behind {number}")
        return after

    def _running(self, world: ProducersWorld, who: int, life: Life) -> Iterator[Step]:
        stored = self._stored_by(world, who, life)
        if stored > life.heard:
            yield True, f"{who} hears {stored}", self._with(world, who, life._replace(heard=stored))
        kept = life.heard if self.config.confirmed else life.sent
        if kept > life.kept:
            yield False, f"{who} keeps {kept}", self._keep(world, who, life, kept)
        if life.heard == life.made > life.begun and life.kept == life.heard and not life.waits:
            yield False, f"{who} closes", self._keep(world, who, life, kept, closed=True)
        if world.kills:
            yield False, f"{who} is killed", self._with(world, who, life._replace(phase=DEAD))._replace(kills=world.kills - 1)
        if life.at == NOWHERE:
            if not self._refused(world, who):
                for exchange in (0, 1):
                    yield True, f"{who} goes to {exchange}", self._with(world, who, life._replace(at=exchange, sent=life.heard))
            else:
                yield True, f"{who} is refused", self._with(world, who, life._replace(phase=DEAD))
        elif self.config.cut and world.fenced[life.at] > life.above:  # it opens its path there
            yield True, f"{life.at} refuses {who}", self._with(world, who, life._replace(at=NOWHERE, left=NOWHERE, waits=0))
        elif life.sent < self.config.last and life.heard >= life.waits:
            number = life.sent + 1
            flights = put(world.flights[who], life.at, (*world.flights[who][life.at], number))
            after = life._replace(sent=number, made=max(life.made, number), waits=0)
            sent = self._with(world, who, after)._replace(flights=put(world.flights, who, flights))
            yield True, f"{who} sends {number}", sent
        if life.at != NOWHERE and world.moves and life.sent > life.heard and not life.waits:
            waits = life.sent if self.config.in_turn else 0
            moved = life._replace(at=1 - life.at, left=life.at, waits=waits)
            yield False, f"{who} moves", self._with(world, who, moved)._replace(moves=world.moves - 1)

    def _refused(self, world: ProducersWorld, who: int) -> bool:
        """Whether the Monitor knows of a later life."""
        fences = Fences()
        for life in world.lives:
            fences.add(ID, life.above)
        return self.config.refuse and fences.refuses(ID, world.lives[who].above)

    def _stored_by(self, world: ProducersWorld, who: int, life: Life) -> int:
        mine, number = {one for tape in world.tapes for other, one in tape if other == who}, life.heard
        while number + 1 in mine:
            number += 1
        return number

    def _keep(self, world: ProducersWorld, who: int, life: Life, number: int, *, closed: bool = False) -> ProducersWorld:
        turn = 1 + (0 if world.record is None else world.record.turn)
        request = KeepProducer("q", "p", str(who), turn, number, True, life.above + 1, closed=closed)
        try:
            record = keep_in(world.record, request, 0.0)
        except ProducerFenced:
            return self._with(world, who, life._replace(phase=DEAD))
        life = life._replace(kept=number, phase=DEAD if closed else RUNNING)
        return self._with(world, who, life)._replace(record=record)

    # --- Exchanges ----------------------------------------------------------------------------------------------------

    def _exchange(self, world: ProducersWorld, exchange: int) -> Iterator[Step]:
        for who, flights in enumerate(world.flights):
            if flights[exchange]:
                first, *rest = flights[exchange]
                taken = put(world.taken, exchange, (*world.taken[exchange], (who, first)))
                after = put(world.flights, who, put(flights, exchange, tuple(rest)))
                yield True, f"{exchange} takes {first} of {who}", world._replace(flights=after, taken=taken)
        if world.taken[exchange]:
            (who, number), *others = world.taken[exchange]
            self._check_stored(world, who, number)
            tapes = put(world.tapes, exchange, (*world.tapes[exchange], (who, number)))
            yield True, f"{number} is stored", world._replace(tapes=tapes, taken=put(world.taken, exchange, tuple(others)))
        if world.deaths:
            yield False, f"{exchange} dies", self._died(world._replace(deaths=world.deaths - 1), exchange)

    def _check_stored(self, world: ProducersWorld, who: int, number: int) -> None:
        there = {one: life for tape in world.tapes for life, one in tape}
        if number > len(there) + 1:
            raise Breach(f"P1: {number} is stored, and {len(there) + 1} is not")
        if there.get(number, who) != who:
            raise Breach(f"P2: {number} is stored by lives {there[number]} and {who}")
        if any(life.phase == RUNNING and later > who for later, life in enumerate(world.lives)):
            raise Breach(f"P3: {number} of life {who} is stored, and a later one has begun")

    def _died(self, world: ProducersWorld, exchange: int) -> ProducersWorld:
        world = world._replace(taken=put(world.taken, exchange, ()), fenced=put(world.fenced, exchange, 0))
        for who, flights in enumerate(world.flights):
            world = world._replace(flights=put(world.flights, who, put(flights, exchange, ())))
            life = world.lives[who]
            if life.phase == OPENED:
                world = self._with(world, who, life._replace(acks=life.acks - {exchange}))
            world = self._broken(world, who, exchange)
        return world

    def _broken(self, world: ProducersWorld, who: int, exchange: int) -> ProducersWorld:
        """Its connection there ended: what it has not heard of is sent again."""
        life = world.lives[who]
        if life.phase == RUNNING and exchange in (life.at, life.left if life.heard < life.sent else NOWHERE):
            world = self._with(world, who, life._replace(at=NOWHERE, left=NOWHERE, waits=0))
        return world

    @staticmethod
    def _with(world: ProducersWorld, who: int, life: Life) -> ProducersWorld:
        return world._replace(lives=put(world.lives, who, life))

    def end(self, world: ProducersWorld) -> None:
        """See Explorable."""
        last = world.lives[-1]
        stored = {one for tape in world.tapes for _, one in tape}
        if last.phase == RUNNING and stored != set(range(1, self.config.last + 1)):
            raise Breach(f"P5: the last life is done, and {sorted(stored)} are stored")
