"""A model of transactions: clients, masters that are replaced and do not know it, forwarders and a destination's tape, with the
fold and its outbox inside.

Clients commit, and send it again; a master writes Commits, which count when they are durable; its forwarder opens the producer,
proves that the log is its own, reads the producer's last number, publishes, and writes down what is on the tape. Any master may
crash, or go on as a zombie when another has its log; a forwarder may die alone; the queue may be created anew.

What is checked: of each transaction everything happens or nothing, once, in the order of the log. Not covered: how a producer
is fenced (tapes.py), lease requests (groups.py), the requests' way (integration tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from roq.workqueue.fold import Fold
from roq.workqueue.outbox import Destination
from roq.workqueue.records import (
    POP_SHIFT,
    CommitTransaction,
    FeedMessage,
    OutboxForwarded,
    Outgoing,
    Pop,
    Record,
    Requeue,
    Use,
    decode,
    encode,
)
from roq.workqueue.state import State
from tests.model.moves import Breach

QUEUE, POISON = "q", "!"  # the destination; a topic that no queue takes
CLOSED, OPENED, PROVED = range(3)
FIRST, SECOND = 8, 9  # members


class TransactionConfig(NamedTuple):
    """topics: of what each transaction publishes. acks: it acks a message of a group, too. sends: of each request. pending:
    records that are not durable, at most. expiries: of the first lease, whose message goes to another member, which commits the
    same. forgets: a destination that nothing waits for is forgotten. The rest: how often. The rules are switched off by tests
    alone."""

    topics: tuple[str, ...] = ("t", "t")
    acks: bool = True
    sends: int = 2
    pending: int = 1
    expiries: int = 0
    crashes: int = 0
    takeovers: int = 0  # that leave a zombie
    deaths: int = 0  # of forwarders
    recreations: int = 0
    forgets: bool = False
    idle_only: bool = True
    only_durable: bool = True
    prove_after_open: bool = True
    read_number: bool = True
    compare_tapes: bool = True
    certain: bool = True
    fence: bool = True
    fold: type[Fold] = Fold


class Forwarding(NamedTuple):
    """A forwarder. sent: messages published and not written down."""

    phase: int = CLOSED
    sent: int = 0


class MasterView(NamedTuple):
    """A master. base: what it knows as durable. pending: what it has applied beyond that."""

    base: bytes
    pending: tuple[bytes, ...] = ()
    forwarding: Forwarding = Forwarding()


class TransactionWorld(NamedTuple):
    """owner: has the log. zombie: had it. sends: left, by client. life: of the destination; tape: what its producer has
    published there; before: on tapes that are gone. holder: who has opened the producer last."""

    owner: MasterView
    zombie: MasterView | None
    sends: tuple[int, ...]
    life: int
    tape: tuple[str, ...]
    before: tuple[str, ...]
    holder: str
    expiries: int
    crashes: int
    takeovers: int
    deaths: int
    recreations: int


Step = tuple[bool, str, TransactionWorld]
LogView = tuple[bytes, tuple[bytes, ...]]  # as MasterView has it


class TransactionModel:
    """See search.Explorable."""

    def __init__(self, config: TransactionConfig) -> None:
        self.config = config
        self.names = [str(number) for number, _ in enumerate(config.topics)]
        self._folds: dict[LogView, Fold] = {}  # few beside the worlds; nobody changes one
        self._durable_numbers: dict[LogView, int] = {}

    def start(self) -> TransactionWorld:
        """Every message is leased."""
        c, state = self.config, State()
        if c.acks:
            for number, _ in enumerate(c.topics, 1):
                state.apply(FeedMessage(0, 5, number, b"", "s", 0, False))
            for number, _ in enumerate(c.topics, 1):
                state.apply(Pop(0, FIRST, number, 1, 1000))
        clients = len(c.topics) + (1 if c.expiries else 0)
        counts = (c.expiries, c.crashes, c.takeovers, c.deaths, c.recreations)
        return TransactionWorld(MasterView(state.dump()), None, (c.sends,) * clients, 1, (), (), "", *counts)

    def steps(self, world: TransactionWorld) -> Iterator[Step]:
        """See Explorable."""
        owner, c = world.owner, self.config
        if owner.pending:
            yield True, "a record is durable", self._durable(world)
        if world.crashes:
            yield (
                False,
                "crash",
                world._replace(owner=MasterView(owner.base), holder=_without(world), crashes=world.crashes - 1),
            )
        if world.takeovers and world.zombie is None:
            holder = {"owner": "zombie"}.get(world.holder, world.holder)
            taken = world._replace(owner=MasterView(owner.base), zombie=owner, takeovers=world.takeovers - 1)
            yield False, "another master takes over", taken._replace(holder=holder)
        if world.recreations:
            anew = world._replace(life=world.life + 1, tape=(), before=(*world.before, *world.tape))
            yield False, "the queue is created anew", anew._replace(recreations=world.recreations - 1)
        if len(owner.pending) < c.pending:
            yield from self._clients(world)
        yield from self._forwarders(world)

    # --- clients ------------------------------------------------------------------------------------------------------

    def _clients(self, world: TransactionWorld) -> Iterator[Step]:
        fold = self._fold(world.owner)
        if world.expiries and (delivery := _leased(fold, 1, FIRST)):
            expired = Requeue(0, delivery, FIRST, fold.leased[delivery].due)
            yield False, "a lease ends", self._write(world._replace(expiries=world.expiries - 1), expired)
        if self.config.expiries and fold.ready.count:
            yield True, "its message is leased again", self._write(world, Pop(0, SECOND, 1, 1, 1000))
        for client, left in enumerate(world.sends):
            if left:
                yield from self._send(world, client)

    def _send(self, world: TransactionWorld, client: int) -> Iterator[Step]:
        """Each client's transaction is its first one. The last client is the member that gets the first message again."""
        fold, member = self._fold(world.owner), FIRST if client < len(self.names) else SECOND
        place = client if member == FIRST else 0
        deliveries: tuple[tuple[int, int], ...] = ()
        if self.config.acks:
            if member == SECOND and not _leased(State.load(world.owner.base).fold, 1, SECOND):
                return  # it knows of what is durable
            lsn = len(self.names) + place + 1  # of the Pop, at the start
            known = lsn << POP_SHIFT if member == FIRST else _leased(fold, 1, SECOND)
            deliveries = ((known, member),)
        sends = tuple(left - (one == client) for one, left in enumerate(world.sends))
        after, label = world._replace(sends=sends), f"client {client} commits {place}"
        if fold.transactions.seen(100 + client, 1) is not Use.NEW or fold.lost(deliveries):
            yield True, label + ", in vain", after
            return
        outgoing = (Outgoing(QUEUE, ((self.config.topics[place], self.names[place].encode()),)),)
        yield True, label, self._write(after, CommitTransaction(0, 100 + client, 1, deliveries, outgoing))

    # --- forwarders ---------------------------------------------------------------------------------------------------

    def _forwarders(self, world: TransactionWorld) -> Iterator[Step]:
        for must, label, after, owner in self._forward(world, world.owner, "owner"):
            assert owner is not None, "who owns the log may go on"
            yield must, f"owner's forwarder {label}", after._replace(owner=owner)
        if world.zombie is not None:
            for must, label, after, zombie in self._forward(world, world.zombie, "zombie"):
                yield must, f"zombie's forwarder {label}", after._replace(zombie=zombie)

    def _forward(
        self, world: TransactionWorld, master: MasterView, name: str
    ) -> Iterator[tuple[bool, str, TransactionWorld, MasterView | None]]:
        """Whether it must happen, what it is, what comes of it, and of the master. None: it ends."""
        one, c, owns = master.forwarding, self.config, name == "owner"
        there = self._fold(master).outbox.destinations.get(QUEUE)
        durable = self._durable_number(master)
        if c.forgets and there is not None and not one.sent and not (there.waiting and c.idle_only):
            forgotten = self._with(master, OutboxForwarded(0, QUEUE, "", there.sent, 0))
            yield False, "forgets the destination", world, forgotten._replace(forwarding=Forwarding())
        if there is None or (there.sent + one.sent >= durable and not one.sent):
            return
        if one.phase == CLOSED:
            after = world._replace(holder=name)
            if c.prove_after_open:
                yield owns, "opens the producer", after, master._replace(forwarding=Forwarding(OPENED))
            else:
                yield from self._attach(after, master._replace(forwarding=Forwarding(PROVED)), there, durable, owns=owns)
            return
        if world.deaths and owns:
            died = world._replace(deaths=world.deaths - 1, holder=_without(world))
            yield False, "dies", died, master._replace(forwarding=Forwarding())
        if c.fence and world.holder != name:
            yield owns, "is fenced", world, master._replace(forwarding=Forwarding())
        elif one.phase == OPENED:
            if not owns:
                yield False, "hears that the log is another's", world, None
            elif not master.pending:
                yield from self._attach(world, master._replace(forwarding=Forwarding(PROVED)), there, durable, owns=owns)
        else:
            yield from self._publish(world, master, there, durable, owns=owns)

    def _attach(
        self, world: TransactionWorld, master: MasterView, there: Destination, durable: int, *, owns: bool
    ) -> Iterator[tuple[bool, str, TransactionWorld, MasterView]]:
        tapes = str(world.life) if self.config.compare_tapes else "1"
        if self.config.read_number:
            number, known = there.attached(tapes, len(world.tape), durable)
        else:
            number, known = there.sent, there.tapes == tapes
        if known and number == there.sent:
            yield owns, "attaches", world, master
            return
        written = self._with(master, OutboxForwarded(0, QUEUE, tapes, number, len(world.tape)))
        if not known and self.config.certain:  # nothing more until the record is durable: as if all happened in one step
            if not owns:
                return
            written = written._replace(base=self._dump(written), pending=())
        yield owns, f"attaches at {number}", world, written

    def _publish(
        self, world: TransactionWorld, master: MasterView, there: Destination, durable: int, *, owns: bool
    ) -> Iterator[tuple[bool, str, TransactionWorld, MasterView | None]]:
        one = master.forwarding
        if there.tapes != str(world.life) and self.config.compare_tapes:
            yield owns, "finds no such queue any more", world, master._replace(forwarding=Forwarding())
            return
        if one.sent:
            record = OutboxForwarded(0, QUEUE, there.tapes, there.sent + one.sent, there.stored + one.sent)
            yield (
                owns,
                "writes down what is stored",
                world,
                self._with(master, record)._replace(forwarding=one._replace(sent=0)),
            )
        if there.sent + one.sent >= durable:
            return
        topic, payload = there.first(one.sent + 1)[-1]
        if topic == POISON:
            if not one.sent and owns and not master.pending:
                given_up = self._with(master, OutboxForwarded(0, QUEUE, there.tapes, there.sent + 1, there.stored))
                yield owns, "gives one up", world, given_up._replace(base=self._dump(given_up), pending=())
            elif not one.sent and not owns:
                yield False, "hears that the log is another's", world, None
            return
        after = world._replace(tape=(*world.tape, payload.decode()))
        self._check_tape(after)
        yield owns, f"publishes {payload.decode()}", after, master._replace(forwarding=one._replace(sent=one.sent + 1))

    def _durable_number(self, master: MasterView) -> int:
        view = master.base, master.pending
        if view not in self._durable_numbers:
            self._durable_numbers[view] = self._count_durable(master)
        return self._durable_numbers[view]

    def _count_durable(self, master: MasterView) -> int:
        fold = self._load(master.base)
        unsure = 0  # messages of commits that are not durable
        for entry in master.pending:
            for record in decode(entry):
                before = fold.outbox.count
                fold.apply(record)
                unsure += fold.outbox.count - before if isinstance(record, CommitTransaction) else 0
        there = fold.outbox.destinations.get(QUEUE)
        return there.last - (unsure if self.config.only_durable else 0) if there else 0

    # --- the log ------------------------------------------------------------------------------------------------------

    def _write(self, world: TransactionWorld, record: Record) -> TransactionWorld:
        return world._replace(owner=self._with(world.owner, record))

    def _with(self, master: MasterView, record: Record) -> MasterView:
        after = master._replace(pending=(*master.pending, encode([record])))
        self._fold(after)
        return after

    def _load(self, data: bytes) -> Fold:
        """With the rules of this search."""
        fold = State.load(data).fold
        if type(fold) is not self.config.fold:
            fold.__class__ = self.config.fold
            fold._handlers = {kind: getattr(fold, call.__name__, call) for kind, call in fold._handlers.items()}
        return fold

    def _fold(self, master: MasterView) -> Fold:
        """The master's state in memory."""
        view = master.base, master.pending
        fold = self._folds.get(view)
        if fold is None:
            fold = self._folds[view] = self._load(master.base)
            for entry in master.pending:
                for record in decode(entry):
                    fold.apply(record)
            if self.config.fold is Fold:
                fold.check()
        return fold

    def _dump(self, master: MasterView) -> bytes:
        return State(self._fold(master)).dump()

    def _durable(self, world: TransactionWorld) -> TransactionWorld:
        owner = world.owner
        first = MasterView(owner.base, owner.pending[:1])
        return world._replace(owner=owner._replace(base=self._dump(first), pending=owner.pending[1:]))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check_tape(self, world: TransactionWorld) -> None:
        if len(set(world.tape)) < len(world.tape):
            raise Breach(f"X1: {world.tape[-1]} is on the tape twice")

    def end(self, world: TransactionWorld) -> None:
        """Every transaction has taken effect, wholly."""
        fold = State.load(world.owner.base).fold
        wanted = {name for name, topic in zip(self.names, self.config.topics, strict=True) if topic != POISON}
        found = {*world.tape, *world.before}
        if found - wanted:
            raise Breach(f"X2: {sorted(found - wanted)} was published by no transaction")
        done = self._committed(fold)
        if missing := (wanted & done) - found:
            raise Breach(f"X3: {sorted(missing)} was committed and never published")
        if extra := found - done:
            raise Breach(f"X4: {sorted(extra)} was published and is not committed")
        if self.config.acks and fold.completed != len(done):
            raise Breach(f"X5: {fold.completed} messages are acked, {len(done)} transactions committed")

    def _committed(self, fold: Fold) -> set[str]:
        clients = len(self.names) + (1 if self.config.expiries else 0)
        done = [client for client in range(clients) if fold.transactions.known.get(100 + client) is not None]
        return {self.names[client if client < len(self.names) else 0] for client in done}


def _without(world: TransactionWorld) -> str:
    """The producer's holder once the owner's forwarder is gone."""
    return "" if world.holder == "owner" else world.holder


def _leased(fold: Fold, number: int, member: int) -> int:
    """The delivery of this message, if the member has it; else 0."""
    for delivery, task in fold.leased.items():
        if task.sequence == number and task.instance == member:
            return delivery
    return 0
