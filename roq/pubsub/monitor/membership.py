"""Who belongs to a queue, who publishes where, and how that changes without loss. Pure: no IO, no clock.

Theory of operation. An Exchange starts as STARTING; it becomes ACTIVE, and so a target for publishers, once every ready
subscriber has proved its attachment (the Exchange told it that it is attached, and it has reported that), and so has the
Monitor: else a publisher's first and last words might pass before it listens. A subscriber becomes ready
once it has proved its attachment to every ACTIVE or DRAINING Exchange; from then on nothing carries messages before it has
proved it. Moves and joining subscribers exclude each other (for a bounded time), so that nobody who attaches to the
Exchanges one after the other misses a part of a stream that moves between them. A move tells the publisher where to go; it
is over when the publisher's FIN came out of the old Exchange. Draining moves every publisher away; then RETIRE is sent
through the Exchange, behind everything else; when every subscriber has detached after reading it, the Exchange is DRAINED
and may be stopped. The living never wait long for the dead: an Exchange becomes ACTIVE without the proof of a subscriber that
is silent; that one is not ready any more, and sees from the numbers what it missed.

A Monitor that takes over from another one (`begun`) knows neither the subscribers nor the publishers yet, nor what its
predecessor left behind. Until they had time to come back, no Exchange becomes ACTIVE, no publisher begins (what it sent would
be unknown to the subscribers that are missing, a silent loss), and nobody new is told that it is ready: publishers may be on
an Exchange that has not reported yet. Those that may carry messages of that time have to be proved though they are STARTING.

Invariants (`check`): publishers are on Exchanges that exist; nobody is moved to an Exchange that is not ACTIVE; an Exchange
that carries messages is proved by every ready subscriber. While `_settled`, nothing waits for what a subscriber reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from roq.errors import (
    DeadlineExceeded,
    ExchangeNotFound,
    IncompatibleVersion,
    LastExchange,
    NotReady,
    PublisherNotFound,
    RoqError,
)
from roq.pubsub.monitor.fences import Fences, still_taking
from roq.pubsub.monitor.records import (
    CARRYING,
    JOINING_SECONDS,
    PROVING_SECONDS,
    AnswerDue,
    Exchange,
    ExchangeEvent,
    ExchangeState,
    Instruction,
    Notify,
    PendingRequest,
    PublisherRecord,
    Retire,
    SubscriberRecord,
    Unwatch,
    WatchExchange,
)
from roq.pubsub.monitor.takeover import LIVING_SECONDS, NEWCOMER_SECONDS, NOBODY_SECONDS, REJOIN_SECONDS, Takeover
from roq.wire import monitor as wire
from roq.wire.frame import PathOpening
from roq.wire.process import Named

EXCHANGE_SILENT_SECONDS = 3.5  # an Exchange that has not reported for this long is gone
PUBLISHER_SILENT_SECONDS = 10.0  # a publisher that has not reported for this long has left without a good-bye
SUBSCRIBER_SILENT_SECONDS = 30.0  # the user's loop may be busy; then it is evicted so that the others can go on
EXCHANGE_GONE_SECONDS = 15.0  # for so long subscribers keep their place at a dead Exchange whose publishers must replay
LINK_SECONDS = 0.5  # an Exchange that reports so long after a link to it broke is alive
JOINING_ALL_SECONDS = 5.0  # moves wait this long while one joins after the other, as a consumer does that crashes at once
MOVE_SECONDS = 10.0  # a publisher that has not ended its path by then is not counted as moved
# Longer than whoever asks waits; without a bound of our own, requests whose asker is gone would use up the places for requests.
MOVE_ANSWER_SECONDS = 40.0
DRAIN_ANSWER_SECONDS = 90.0
ACTIVE_ANSWER_SECONDS = 20.0


class Membership:
    """All of one queue. Every method returns what is to be done, in order."""

    def __init__(
        self,
        term: int,
        terms_of_use: wire.PublisherWelcome,
        takeover: Takeover | None = None,
    ) -> None:
        """`terms_of_use`: a welcome of which only term, overflow and max_frame_bytes are used. takeover: of another Monitor."""
        self.takeover = takeover or Takeover()
        self.term = term
        self.version = 1
        self._use = terms_of_use
        self.exchanges: dict[str, Exchange] = {}
        self.publishers: dict[int, PublisherRecord] = {}  # the target of one that is moved carries, if it is still there
        self.fences = Fences()
        self.subscribers: dict[int, SubscriberRecord] = {}  # a ready one is attached to all that carries
        self._behind: dict[int, int] = {}  # subscribers that understand less than this version does: what they understand
        self._waiting: list[PendingRequest] = []
        self._settled = False  # nothing waits for a subscriber: what one reports changes nothing but itself
        self._joined = 0.0  # when a subscriber did last
        self._held_since: float | None = None  # since when something has waited for subscribers that join
        self._started = self.takeover.begun or 0.0

    # --- Exchanges ----------------------------------------------------------------------------------------------------

    def exchange_report(self, report: wire.ExchangeReport, now: float, peer: bytes = b"") -> list[Instruction]:
        """An Exchange lives. A new one, or a new life of one, has to be proved."""
        address = report.exchange
        known = self.exchanges.get(address.id)
        if known is not None and known.address == address:
            known.last_report, known.peer = now, peer
            return []
        out: list[Instruction] = []
        if known is not None:
            out.append(Unwatch(known.address))
        fresh = Exchange(address, report.host, now, peer, report.protocol)
        if self.takeover.begun is not None and known is None:  # later: one that has forwarded anything was known to somebody
            fresh.may_carry = self.takeover.young(NEWCOMER_SECONDS, now) or report.frames_in > 0
        if known is not None:  # another life of it: its publishers replay once it, or another one, is proved
            self._lose(known.address, now)
            fresh.state = known.state
            fresh.on(ExchangeEvent.RESTARTED)
        self.exchanges[address.id] = fresh
        self.takeover.former.gone(address.id, report.host)  # it obeys this Monitor, and is proved like any other
        self.version += 1
        fresh.listed = self.version
        for one in self.subscribers.values():  # whoever kept it unlisted may be about to leave it
            one.attached -= {address.token}
        out.append(WatchExchange(address))
        out += self._tell_subscribers()
        return out + self._settle(now)

    def exchange_heard(self, token: str, now: float) -> list[Instruction]:
        """This Exchange has told the Monitor that it hears what comes through."""
        exchange = self.exchanges.get(token.rpartition("/")[0])
        if exchange is None or exchange.address.token != token or exchange.heard:
            return []
        exchange.heard = True
        return self._settle(now)

    def _tell_subscribers(self) -> list[Instruction]:
        notice = wire.Exchanges(self.term, self.version, self.visible())
        return [Notify(subscriber.peer, notice) for subscriber in self.subscribers.values()]

    def peers(self) -> list[bytes]:
        """Everybody who can be told something."""
        return [one.peer for one in self.publishers.values()] + [one.peer for one in self.subscribers.values()]

    def visible(self) -> tuple[wire.ExchangeAddress, ...]:
        """The Exchanges that subscribers shall be attached to."""
        return tuple(one.address for one in self.exchanges.values() if one.state is not ExchangeState.DRAINED)

    # --- publishers ---------------------------------------------------------------------------------------------------

    def join_publisher(self, request: wire.JoinPublisher, peer: bytes, now: float) -> wire.PublisherWelcome:
        """Assign an Exchange, or confirm the one a rejoining publisher is on. Raises NotReady; for a producer ProducerFenced,
        IncompatibleVersion."""
        self._started = self._started or now
        if request.path:
            self.takeover.returns(now, self._last(request.before))
        self._check_fences(request, now)
        if not request.path and not self.all_back(now):
            raise NotReady("this Monitor has taken over: not every subscriber may have come back to it yet")
        here = self.exchanges.get(request.exchange) if request.path else None
        if request.path and (here is None or request.token != here.address.token):
            return self._join_after_loss(request, peer, now)
        known = self.publishers.get(request.publisher)
        if here is not None and here.state in (ExchangeState.STARTING, *CARRYING):
            exchange, path = here, request.path
            here.may_carry = True
        else:
            last = self.exchanges.get(known.exchange if known and request.above else request.prefer)
            stays = last is not None and last.state is ExchangeState.ACTIVE and not request.path
            exchange = last if last is not None and stays else self._least_loaded(request.exchange)
            # of a producer nobody has used the path behind `above`: there its subscribers need not wait for one in between
            before = known.path if known and here is None and not request.above else 0
            path = max(request.path, request.above, before) + 1
        publisher = PublisherRecord(peer, exchange.address.id, path, now, request.protocol, request.needs)
        if known is not None:
            publisher.offered = known.offered
            publisher.offer(known.exchange, known.path)  # it may have come there in the meantime
        if here is not None and here is not exchange:
            publisher.path, publisher.exchange = request.path, request.exchange  # and its FIN has to come through there
            self._send_to(publisher, exchange.address.id, now)
        self.publishers[request.publisher] = publisher
        use = self._use
        terms = (use.overflow, use.max_frame_bytes, (), "", self.understood(now))
        return wire.PublisherWelcome(self.term, path, exchange.address, *terms)

    def fence(self, request: wire.JoinPublisher, peer: bytes, now: float) -> list[Instruction]:
        """A publisher joins: what is told before it is let in. Whoever was one of its id before publishes nothing more."""
        known = self.publishers.get(request.publisher)
        if self.fences.refuses(request.publisher, request.above):
            return [Notify(peer, wire.ProducerReplaced(self.term))]
        if not request.above:
            return []
        self.fences.add(request.publisher, request.above)
        out: list[Instruction] = []
        if known is not None and known.path <= request.above and known.peer != peer:
            known.target, known.relocated, known.path = "", False, request.above
            out.append(Notify(known.peer, wire.ProducerReplaced(self.term)))
        tell = wire.FencePublisher(request.publisher, request.above)
        return out + [Notify(one.peer, tell) for one in self._unfenced(request.publisher, now)]

    def _unfenced(self, publisher: int, now: float) -> list[Exchange]:
        living = {one.address.token: one for one in self.exchanges.values() if now - one.last_report <= EXCHANGE_SILENT_SECONDS}
        return [living[token] for token in self.fences.open(publisher, living)]

    def _check_fences(self, request: wire.JoinPublisher, now: float) -> None:
        self.fences.check_newest(request.publisher, request.above)
        young = self.takeover.young(EXCHANGE_SILENT_SECONDS, now)  # some may not have reported yet
        if request.above and not request.path and ((unfenced := self._unfenced(request.publisher, now)) or young):
            raise still_taking(unfenced)

    def _join_after_loss(self, request: wire.JoinPublisher, peer: bytes, now: float) -> wire.PublisherWelcome:
        """Its Exchange is gone, or is another life of it, and it may not know: it replays on the next path. Right after a start
        of this Monitor that may only mean that the Exchange, or subscribers, have not come back to it yet."""
        exchange = self._least_loaded()
        young = now - self._started < REJOIN_SECONDS or self.takeover.awaited(self.subscribers, now)
        if young and (request.exchange or not self._all_back_on(exchange)):  # it names none if it knows that the link is lost
            raise NotReady("not everybody may have come back yet: it would replay to some subscribers only")
        if self._joining(now):
            raise NotReady("a subscriber is just joining: it would miss the beginning of the replay")
        known = self.publishers.get(request.publisher)
        publisher = PublisherRecord(peer, exchange.address.id, request.path + 1, now, request.protocol, request.needs)
        self.publishers[request.publisher] = publisher
        if known is not None:
            publisher.offered = known.offered  # it may be on its way there
        publisher.offer(exchange.address.id, publisher.path)
        terms = (self._use.overflow, self._use.max_frame_bytes, (), request.token, self.understood(now))
        return wire.PublisherWelcome(self.term, publisher.path, exchange.address, *terms)

    def _all_back_on(self, exchange: Exchange) -> bool:
        """Whether everybody there is was named, and hears what comes through this Exchange."""
        named, token = self.takeover.all, exchange.address.token
        return named is not None and all(id in self.subscribers and token in self.subscribers[id].attached for id in named)

    def _least_loaded(self, but: str = "") -> Exchange:
        active = [e for e in self.exchanges.values() if e.state is ExchangeState.ACTIVE and e.address.id != but]
        if not active:
            raise NotReady("the queue has no active Exchange yet")
        return min(active, key=lambda exchange: (self.load(exchange.address.id), exchange.address.id))

    def load(self, exchange: str) -> int:
        """Publishers on an Exchange or on their way to it."""
        return sum((publisher.target or publisher.exchange) == exchange for publisher in self.publishers.values())

    def publisher_report(self, report: wire.PublisherReport, peer: bytes, now: float) -> list[Instruction]:
        """A publisher lives, and says where it is."""
        publisher = self.publishers.get(report.publisher)
        if self.fences.refuses(report.publisher, report.path):
            return [Notify(peer, wire.ProducerReplaced(self.term))]
        if publisher is None:
            return [Notify(peer, wire.Rejoin(self.term))]
        publisher.peer, publisher.last_report, publisher.needs = peer, now, report.protocol
        lost, understood = publisher.lost, self.understood(now)
        heard = wire.Heard(self.term, True, gone=lost, gone_path=publisher.lost_path, protocol=understood)
        out: list[Instruction] = [Notify(peer, heard)]
        if report.lost and not report.exchange and not self._dealt_with(report, publisher):
            publisher.lose(report.lost, report.path, now)
        if report.path >= publisher.path and not report.leaving and report.exchange in self.exchanges:
            # no FIN is under way, so it knows best: it never used its last path, took another one, or gave up on the FIN
            publisher.is_on(report.path, report.exchange)
            publisher.offered = {offer: path for offer, path in publisher.offered.items() if path > report.path}
        if publisher.relocated and report.path <= publisher.path:
            out.append(self._relocate(publisher))  # it may have missed the notice; a repetition changes nothing
        return out + self._settle(now)

    def _dealt_with(self, report: wire.PublisherReport, publisher: PublisherRecord) -> bool:
        """Whether it reports a loss for which it has been given its next path already, not one of that path's own link."""
        if report.path >= publisher.path:
            return False
        here = self.exchanges.get(publisher.exchange)
        return report.path < publisher.opened or (here is not None and report.lost != here.address.token)

    def _send_to(self, publisher: PublisherRecord, exchange: str, now: float) -> None:
        publisher.target, publisher.relocated, publisher.deadline = exchange, True, now + MOVE_SECONDS
        publisher.offer(exchange, publisher.path + 1)

    def _relocate(self, publisher: PublisherRecord) -> Instruction:
        target = self.exchanges[publisher.target].address
        return Notify(publisher.peer, wire.Relocate(self.term, publisher.path + 1, target, publisher.lost))

    def fin_seen(self, id: int, path: int, exchange: str, now: float) -> list[Instruction]:
        """A publisher's FIN came out of an Exchange: everything before it has been forwarded."""
        publisher = self.publishers.get(id)
        if publisher is None:
            return []
        if publisher.offered.get(exchange, path + 1) <= path:
            del publisher.offered[exchange]
        if publisher.target and publisher.exchange == exchange and path == publisher.path:
            publisher.exchange, publisher.path = publisher.target, path + 1
            publisher.target, publisher.relocated = "", False
        return self._confirmed(publisher, path, 0) + self._settle(now)

    def mark_seen(self, id: int, path: int, mark: int) -> list[Instruction]:
        """A publisher's MARK came out of its Exchange."""
        publisher = self.publishers.get(id)
        return [] if publisher is None else self._confirmed(publisher, path, mark)

    def _confirmed(self, publisher: PublisherRecord, path: int, mark: int) -> list[Instruction]:
        """Exchanges tell all others themselves."""
        return [Notify(publisher.peer, wire.Forwarded(path, mark))] if publisher.protocol < wire.PROTOCOL_0_2 else []

    def open_seen(self, id: int, path: int, exchange: str, opening: PathOpening, now: float) -> list[Instruction]:
        """A publisher's OPEN came out of an Exchange: there it is, even if it was told otherwise since. Who subscribes
        there from now on doesn't see this OPEN."""
        publisher = self.publishers.get(id)
        if publisher is None or exchange not in self.exchanges:
            return []
        publisher.opened = max(publisher.opened, path)
        if path == publisher.path or (path > publisher.path and not opening.finished):
            publisher.is_on(path, exchange)
            publisher.offered = {offer: number for offer, number in publisher.offered.items() if number != path}
        elif path == publisher.path + 1 and self.exchanges[exchange].state in CARRYING:
            publisher.target, publisher.relocated = exchange, True  # its FIN is still to come
            publisher.deadline = now + MOVE_SECONDS
        return self._settle(now)

    # --- subscribers --------------------------------------------------------------------------------------------------

    def understood(self, now: float) -> int:
        """What every subscriber understands; 0 while some of another Monitor may not have come back."""
        return min(self._behind.values(), default=wire.PROTOCOL) if self.all_back(now) else 0

    def join_subscriber(self, request: wire.JoinSubscriber, peer: bytes, now: float) -> wire.SubscriberWelcome:
        """Note a subscriber; it is ready when it has proved its attachments. Raises NotReady while publishers move,
        IncompatibleVersion if it can't read what they send."""
        if request.returning or request.protocol < wire.PROTOCOL_0_2:  # those of 0.1 don't say whether they return
            self.takeover.returns(now, self._last(request.before), request.subscriber)
        needed = max((one.needs for one in self.publishers.values()), default=1)
        if request.protocol < needed:
            raise IncompatibleVersion("publishers of this queue send headers, RoQ 0.1 can't read them: upgrade this subscriber")
        if any(one.relocated or one.opening(now) for one in self.publishers.values()):
            raise NotReady("publishers are being moved: try again")
        self.subscribers[request.subscriber] = SubscriberRecord(peer, now, request.returning)
        self._behind.pop(request.subscriber, None)
        if request.protocol < wire.PROTOCOL:
            self._behind[request.subscriber] = request.protocol
        self._joined = now
        use = self._use
        return wire.SubscriberWelcome(self.term, self.version, self.visible(), use.overflow, use.max_frame_bytes)

    def subscriber_report(self, report: wire.SubscriberReport, peer: bytes, now: float) -> list[Instruction]:
        """A subscriber lives, and says what it has proved."""
        subscriber = self.subscribers.get(report.subscriber)
        if subscriber is None:
            self.takeover.reported(report.subscriber, now)
            return [Notify(peer, wire.Rejoin(self.term))]
        subscriber.peer, subscriber.last_report = peer, now
        subscriber.attached = frozenset(report.attached)
        if subscriber.returning and not subscriber.reported:
            subscriber.may_miss(self._possibly_carrying())  # an earlier Monitor may have let them carry without it
        subscriber.reported = True
        subscriber.attached -= {one.address.token for one in self.exchanges.values() if one.listed > report.version}
        if carrying := self.carrying():
            subscriber.ready = carrying <= subscriber.attached  # one that gave up detaches from all
        waits = () if subscriber.returning else self.takeover.waits(now)
        subscriber.tell(subscriber.ready and not waits and self._possibly_carrying() <= subscriber.attached)
        heard = wire.Heard(self.term, subscriber.told, waits, answers=report.sent, passed_by=subscriber.passed_by)
        out: list[Instruction] = [Notify(peer, heard)]
        if report.version < self.version:
            out.append(Notify(peer, wire.Exchanges(self.term, self.version, self.visible())))
        return out if self._settled else out + self._settle(now)

    def leave(self, member: int, now: float) -> list[Instruction]:
        """A member said good-bye, or is taken for gone."""
        self.publishers.pop(member, None)
        self.subscribers.pop(member, None)
        self._behind.pop(member, None)
        self.takeover.left(member)
        return self._settle(now)

    # --- requests of the scaling process and of people ----------------------------------------------------------------

    def move(self, moves: Iterable[tuple[int, str]], waiter: Hashable, now: float) -> list[Instruction]:
        """Move publishers; answered when every one has moved or is given up."""
        moving: set[tuple[int, str]] = set()
        refused: list[str] = []
        for id, target in moves:
            try:
                self._start_move(id, target)
                if self.publishers[id].target:
                    moving.add((id, target))
            except RoqError as error:
                refused.append(f"{id:016x} to {target}: {error}")
        self._waiting.append(PendingRequest(waiter, "move", now + MOVE_ANSWER_SECONDS, "", frozenset(moving), tuple(refused)))
        return self._settle(now)

    def _start_move(self, id: int, target: str) -> None:
        publisher, exchange = self.publishers.get(id), self.exchanges.get(target)
        if publisher is None:
            raise PublisherNotFound(f"no publisher {id:016x} in this queue")
        if exchange is None or exchange.state is not ExchangeState.ACTIVE:
            raise ExchangeNotFound(f"no active Exchange {target!r} in this queue")
        if publisher.lost:
            raise NotReady("its Exchange was lost: it is being placed anew")
        if publisher.target:
            raise NotReady(f"it is already on its way to {publisher.target}")
        if publisher.exchange != target:
            publisher.target = target

    def drain(self, id: str, waiter: Hashable, now: float) -> list[Instruction]:
        """Empty an Exchange. Raises ExchangeNotFound, LastExchange, NotReady."""
        exchange = self.exchanges.get(id)
        if exchange is None:
            raise ExchangeNotFound(f"no Exchange {id!r} in this queue")
        others = [one for one in self.exchanges.values() if one is not exchange and one.state is ExchangeState.ACTIVE]
        if not others and exchange.state in (ExchangeState.ACTIVE, ExchangeState.STARTING):
            raise LastExchange(f"Exchange {id!r} is the queue's only active one")
        if exchange.state is ExchangeState.STARTING and self._used(id):
            raise NotReady(f"Exchange {id!r} has come back with publishers on it, and not every subscriber has")
        out: list[Instruction] = []
        if exchange.on(ExchangeEvent.DRAIN) and exchange.state is ExchangeState.RETIRING:
            out.append(Retire(exchange.address))
        self._waiting.append(PendingRequest(waiter, "drain", now + DRAIN_ANSWER_SECONDS, id))
        return out + self._settle(now)

    def await_active(self, id: str, waiter: Hashable, now: float) -> list[Instruction]:
        """Answered when the Exchange is active (it may not even have reported yet)."""
        self._waiting.append(PendingRequest(waiter, "active", now + ACTIVE_ANSWER_SECONDS, id))
        return self._settle(now)

    def forget(self, waiter: Hashable) -> None:
        """Whoever asked is gone."""
        self._waiting = [one for one in self._waiting if one.waiter != waiter]

    # --- what follows from what ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Once a second: who has fallen silent, what has taken too long, which proofs are missing."""
        out: list[Instruction] = []
        for id, exchange in list(self.exchanges.items()):
            if (silent := now - exchange.last_report) <= EXCHANGE_SILENT_SECONDS:
                continue
            self._lose(exchange.address, now)
            exchange.proving_since = now
            exchange.on(ExchangeEvent.SILENT)
            replay_due = any(publisher.lost == exchange.address.token for publisher in self.publishers.values())
            if silent > EXCHANGE_GONE_SECONDS or not replay_due:
                del self.exchanges[id]
                self.version += 1
                out.append(Unwatch(exchange.address))
                out += self._tell_subscribers()
        for member, publisher in list(self.publishers.items()):
            if now - publisher.last_report > PUBLISHER_SILENT_SECONDS:
                del self.publishers[member]
            elif publisher.target not in self.exchanges or (publisher.relocated and now > publisher.deadline):
                publisher.target, publisher.relocated = "", False
        for member, subscriber in list(self.subscribers.items()):
            silent = now - subscriber.last_report
            if silent > SUBSCRIBER_SILENT_SECONDS:
                del self.subscribers[member]
                self._behind.pop(member, None)
                out.append(Notify(subscriber.peer, wire.Evicted(silent)))
        self._forget_carrying(now)
        return out + self._settle(now) + self._tell_ready(now) + self.retiring()

    def stood_still(self, seconds: float, now: float) -> None:
        """This Monitor was not running for so long: what nobody heard was no silence, and no move was late."""
        members: list[Exchange | PublisherRecord | SubscriberRecord] = [*self.exchanges.values(), *self.publishers.values()]
        for one in (*members, *self.subscribers.values()):
            one.last_report = min(now, one.last_report + seconds)
        for publisher in self.publishers.values():
            publisher.deadline += seconds
            publisher.lost_at = min(now, publisher.lost_at + seconds)
        for exchange in self.exchanges.values():
            exchange.proving_since = min(now, exchange.proving_since + seconds)
        for subscriber in self.subscribers.values():
            subscriber.joined = min(now, subscriber.joined + seconds)
        self.takeover.stood_still(seconds, now)
        if self._held_since is not None:
            self._held_since = min(now, self._held_since + seconds)

    def retiring(self) -> list[Instruction]:
        """What has to be sent through Exchanges again and again: RETIRE until everybody has left."""
        return [Retire(one.address) for one in self.exchanges.values() if one.state is ExchangeState.RETIRING]

    def carrying(self) -> set[str]:
        """Tokens of the Exchanges that a subscriber has to be attached to before it is ready."""
        return {one.address.token for one in self.exchanges.values() if one.state in CARRYING}

    def _possibly_carrying(self) -> set[str]:
        """Those, and of Exchanges that may have carried messages before this Monitor: before it is told that it is ready."""
        starting = [one for one in self.exchanges.values() if one.state is ExchangeState.STARTING and one.may_carry]
        return self.carrying() | {one.address.token for one in starting}

    def _lose(self, address: wire.ExchangeAddress, now: float) -> None:
        """This life of an Exchange is over: whoever was on it has to replay, whoever was on the way to it is not any more."""
        for publisher in self.publishers.values():
            publisher.offered.pop(address.id, None)
            if publisher.target == address.id:
                publisher.target, publisher.relocated = "", False
            if publisher.exchange == address.id:
                publisher.lose(address.token, publisher.path, now)

    def _forget_carrying(self, now: float) -> None:
        """An Exchange that is not proved carries nothing if nobody has said in time to be on it."""
        used = {publisher.exchange for publisher in self.publishers.values()}
        for id, exchange in self.exchanges.items():
            exchange.may_carry &= id in used or now - exchange.proving_since < NEWCOMER_SECONDS

    def _settle(self, now: float) -> list[Instruction]:
        out = self._activate(now)
        for exchange in self.exchanges.values():
            if exchange.state in (ExchangeState.DRAINING, ExchangeState.RETIRING, ExchangeState.DRAINED):
                self._empty(exchange)  # a publisher that was forgotten may have come back to it
            if exchange.state is ExchangeState.DRAINING and not self._used(exchange.address.id):
                exchange.on(ExchangeEvent.UNUSED)
                out.append(Retire(exchange.address))
            if exchange.state is ExchangeState.RETIRING and self._left(exchange):
                exchange.on(ExchangeEvent.DETACHED)
                self.version += 1
                out.append(Unwatch(exchange.address))
                out += self._tell_subscribers()
        out += self._relocations(now) + self._answers(now)
        self._settled = self._nothing_pending()
        return out

    def _activate(self, now: float) -> list[Instruction]:
        """Exchanges that are proved by now take publishers; whoever is ready with that is told so."""
        starting = [one for one in self.exchanges.values() if one.state is ExchangeState.STARTING and self._proved(one, now)]
        for exchange in starting:
            exchange.on(ExchangeEvent.PROVED)
            for one in self.subscribers.values():  # those that were not waited for
                one.may_miss((exchange.address.token,))
        if not starting:
            return []
        carrying = self.carrying()
        fresh = [one for one in self.subscribers.values() if not one.ready and carrying <= one.attached]
        for one in fresh:  # had proved all before it carried anything
            one.ready = True
        return self._tell_ready(now) if fresh else []

    def _nothing_pending(self) -> bool:
        """Whether `_settle` has nothing to do, whatever subscribers report and however much time passes. With thousands of them
        nearly all calls of it would be for their reports, and each looks at all of them."""
        steady = (ExchangeState.ACTIVE, ExchangeState.DRAINED)
        return (
            not self._waiting
            and all(one.state in steady for one in self.exchanges.values())
            and not any(one.lost or (one.target and not one.relocated) for one in self.publishers.values())
        )

    def _tell_ready(self, now: float) -> list[Instruction]:
        """Tell those that are ready and have not been told."""
        waits, possible = bool(self.takeover.waits(now)), self._possibly_carrying()
        untold = [one for one in self.subscribers.values() if one.ready and not one.told and (one.returning or not waits)]
        ready = [one for one in untold if possible <= one.attached]
        for subscriber in ready:
            subscriber.tell(True)
        return [Notify(subscriber.peer, wire.Heard(self.term, True)) for subscriber in ready]

    # --- what a Monitor that has taken over does not know yet -----------------------------------------------------------

    def all_back(self, now: float) -> bool:
        """Whether every subscriber of the time before this Monitor has come back, or is not waited for any more. Then a new
        publisher may begin: nobody who subscribed before would miss it without knowing."""
        return self.takeover.back(NEWCOMER_SECONDS, self.subscribers, now)

    def _last(self, before: wire.ReadyCount | None) -> wire.ReadyCount | None:
        """What the Monitor right before this one said; others may have come since an earlier one."""
        return before if before is not None and before.term == self.term - 1 else None

    def named(self, now: float) -> Named:
        """For the Monitor that follows: the subscribers that had been told that they are ready. Not all that there may be, as
        long as those of the Monitor before this one may still come back."""
        ready = {id: one for id, one in self.subscribers.items() if one.ready or one.told or one.returning}
        return Named({id: now - one.last_report for id, one in ready.items()}, self.all_back(now))

    def standby(self, now: float, term: int) -> wire.Standby:
        """What every member is told when this Monitor ends."""
        named = self.named(now)
        living = sum(silent <= LIVING_SECONDS for silent in named.subscribers.values())
        return wire.Standby(term, wire.ReadyCount(self.term, living, len(named.subscribers) if named.all else None))

    def _relocations(self, now: float) -> list[Instruction]:
        """Tell those who are to move, unless a subscriber is just joining, or is about to."""
        if not any(self._destination(one) for one in self.publishers.values()):
            return []
        if self._joining(now) or self.takeover.awaited(self.subscribers, now):
            return []
        out: list[Instruction] = []
        for publisher in self.publishers.values():
            if target := self._destination(publisher):
                self._send_to(publisher, target, now)
                out.append(self._relocate(publisher))
        return out

    def _destination(self, publisher: PublisherRecord) -> str:
        """Where this publisher is to be told to go on, "" if nowhere."""
        if publisher.lost and not publisher.target:
            return self._replacement(publisher)
        return publisher.target if publisher.target in self.exchanges and not publisher.relocated else ""

    def _replacement(self, publisher: PublisherRecord) -> str:
        """Where a publisher shall go whose Exchange was lost, "" while there is nothing: the same one first, in its new life or
        if it has shown since that only the link had broken; else the one with the least load."""

        def usable(one: Exchange) -> bool:
            alive = one.last_report - publisher.lost_at > LINK_SECONDS
            return one.state is ExchangeState.ACTIVE and (one.address.token != publisher.lost or alive)

        found = [one.address.id for one in self.exchanges.values() if usable(one)]
        return min(found, key=lambda id: (id != publisher.exchange, self.load(id), id), default="")

    def _joining(self, now: float) -> bool:
        """Whether what is due waits for a subscriber that is just joining. When one has joined after the other for long enough
        since the first wait, there is a time in which nobody is waited for, and all that is due goes on."""
        recently = now - self._joined < JOINING_SECONDS
        if not recently or not any(not one.ready and now - one.joined < JOINING_SECONDS for one in self.subscribers.values()):
            self._held_since = None
            return False
        if self._held_since is None or now - self._held_since >= JOINING_ALL_SECONDS + JOINING_SECONDS:
            self._held_since = now
        return now - self._held_since < JOINING_ALL_SECONDS

    def _proved(self, exchange: Exchange, now: float) -> bool:
        """Whether this Exchange may take publishers: it lives, the Monitor hears it, and nobody is waited for any more. One
        that is dead or frozen is not, nor for ever one that reads nothing although others do: it is not ready then, and sees
        from the numbers what it missed. Nor, for ever, are those that join one after the other."""
        known = self.takeover.back(REJOIN_SECONDS if self.subscribers else NOBODY_SECONDS, self.subscribers, now)
        if now - exchange.last_report > EXCHANGE_SILENT_SECONDS or not known or not exchange.heard:
            return False
        subscribers, token = self.subscribers.values(), exchange.address.token
        missing = [one for one in subscribers if token not in one.attached and one.waited_for(now)]
        if missing and now - exchange.proving_since > PROVING_SECONDS:
            return not any(one.ready or one.returning for one in missing) or any(token in one.attached for one in subscribers)
        return not missing

    def _used(self, exchange: str) -> bool:
        """Whether a publisher's FIN may still have to come through this Exchange."""
        return any(exchange in (one.exchange, one.target, *one.offered) for one in self.publishers.values())

    def _left(self, exchange: Exchange) -> bool:
        token = exchange.address.token
        return all(token not in one.attached for one in self.subscribers.values())

    def _empty(self, exchange: Exchange) -> None:
        for id, publisher in self.publishers.items():
            if publisher.exchange == exchange.address.id and not publisher.target:
                try:
                    self._start_move(id, self._least_loaded(exchange.address.id).address.id)
                except NotReady:
                    return  # another Exchange must become active first; asked again then

    def _answers(self, now: float) -> list[Instruction]:
        replies = [(one, self._reply(one, now)) for one in self._waiting]
        self._waiting = [one for one, reply in replies if reply is None]
        return [AnswerDue(one.waiter, reply) for one, reply in replies if reply is not None]

    def _reply(self, request: PendingRequest, now: float) -> msgspec.Struct | RoqError | None:
        """What to answer, None while it is not carried out and its time is not over."""
        exchange = self.exchanges.get(request.subject)
        state = exchange.state if exchange is not None else None
        moving = any(self.publishers[id].target for id, _ in request.moves if id in self.publishers)
        if request.kind == "move" and not moving:
            at = {id: one.exchange for id, _ in request.moves if (one := self.publishers.get(id)) is not None}
            failed = [(id, target) for id, target in sorted(request.moves) if at.get(id) != target]
            refused = tuple(f"{id:016x} to {target}: it did not move in time or left" for id, target in failed)
            return wire.Moved(len(request.moves) - len(failed), request.refused + refused)
        if request.kind == "active" and state is ExchangeState.ACTIVE:
            return wire.Recorded()
        if request.kind == "drain" and state in (None, ExchangeState.DRAINED):
            return wire.Drained()
        if now < request.deadline:
            return None
        told = f"Exchange {request.subject!r} is {state or 'not known'}" if request.subject else "not all moved"
        return DeadlineExceeded(f"{request.kind} was not done in time: {told}")

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        members: list[Exchange | PublisherRecord | SubscriberRecord] = [*self.exchanges.values(), *self.publishers.values()]
        for one in (*members, *self.subscribers.values()):
            one.check()
        for id, publisher in self.publishers.items():
            if publisher.target and publisher.target in self.exchanges:
                state = self.exchanges[publisher.target].state
                assert state in CARRYING, f"publisher {id} is moved to an Exchange that is {state}"
        for subscriber in self.subscribers.values():
            unproved = self.carrying() - subscriber.attached if subscriber.ready else ()
            assert not unproved, f"{', '.join(unproved)} carries unproved"
