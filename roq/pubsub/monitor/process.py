"""Monitor process: shell around the membership machine and the StatMonitor.

Sockets: `clients` (everybody of the queue), `kpis` (broadcast, one record a second), `control` (Shutdown Monitor), and two
links to each Exchange (watch.py). Nothing is decided here: who belongs to the queue is in membership.py, what a Monitor that
takes over knows in takeover.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from roq.errors import CallError, NotReady, ProcessFailed, RoqError
from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.records import CARRYING, AnswerDue, Instruction, Notify, Retire, Unwatch, WatchExchange
from roq.pubsub.monitor.responders import ResponderList
from roq.pubsub.monitor.statistics import Statistics
from roq.pubsub.monitor.takeover import FormerExchanges, HeardSubscribers, Takeover
from roq.pubsub.monitor.watch import ExchangeWatch
from roq.pubsub.monitor.watermarks import Watermarks
from roq.runtime.backoff import delays
from roq.runtime.links import Broadcaster
from roq.runtime.liveness import BEAT_SECONDS, beat_on_lease, open_board
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.rpc import RpcServer
from roq.runtime.run import Tasks, run
from roq.runtime.security import process_security
from roq.runtime.shutdown import ShutdownMonitor, ask
from roq.wire import frame as frames
from roq.wire import kpi as kpi_wire
from roq.wire import monitor as wire
from roq.wire.assignment import FormerProcess, MonitorRole, ProcessSpec
from roq.wire.card import Card, Right
from roq.wire.frame import FrameKind, Header
from roq.wire.limits import DECISIONS_KEPT
from roq.wire.process import ChildSpec, FenceProcess, Named, ProcessDone
from roq.wire.rights import ADMINISTRATIVE, allow_at_monitor, check_member

log = logger(__name__)
MONITOR_ID = 1  # publisher id on RETIRE; a random publisher id is never this small by more than a 2⁻⁶⁴ chance
STILL_SECONDS = 1.5 * BEAT_SECONDS  # between two looks at the clock, of which there is one a beat at least
FENCE_CONNECT_SECONDS = 1.0  # one try; a host that is off does not even refuse
FENCE_ASK_SECONDS = 3.0  # it answers once, before it ends: what it says then is worth a wait
FENCE_FIRST_SECONDS, FENCE_LAST_SECONDS = 0.05, 1.0  # between tries


class Monitor:
    """One queue's Monitor, on the running loop."""

    def __init__(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        self._spec, self._stop = spec, stop
        process = self._process = spec.process
        self.counters = Counters()
        self._refusals = Refusals(log, self.counters)
        self._statistics = Statistics()
        self._heard_subscribers = HeardSubscribers()
        self._restarted = spec.restarted  # in this term
        self._due: float | None = None  # when `_timer` looks
        self._timer: asyncio.TimerHandle | None = None
        self._membership = self._fresh_membership(None, spec.restarted or process.term > 1, sought=not spec.restarted)
        self._responders = ResponderList(self._membership)
        self._watches: dict[str, ExchangeWatch] = {}
        self._marks_watched = False
        self._watermarks = Watermarks()
        self._decisions: deque[kpi_wire.Decision] = deque(maxlen=DECISIONS_KEPT)
        self._kpi: kpi_wire.QueueKpi | None = None
        self._looked = time.monotonic()
        self._tasks = Tasks(lambda error: stop.set())
        self._control = ShutdownMonitor(
            process.name,
            spec.address,
            spec.ports["control"],
            stop,
            self.counters,
            self._configure,
            process.term,
            self._fenced,
        )
        self._rights, self._security = allow_at_monitor(process.queue), process_security()
        let_in = partial(check_member, right=Right.DESCRIBE, name=process.queue)
        self._kpis = Broadcaster(spec.address, spec.ports["kpis"], let_in=let_in)
        self._server = RpcServer(
            spec.address,
            spec.ports["clients"],
            wire.Request,
            self._handle,
            wire.NoticeToMonitor,
            self._notice,
            self.counters,
            allow=self._allow,
            audited=ADMINISTRATIVE,
        )

    def _fresh_membership(self, expected: dict[int, float] | None, takes_over: bool, sought: bool) -> Membership:
        nowhere = wire.ExchangeAddress("", "", 0, 0)
        settings = self._process.settings
        use = wire.PublisherWelcome(self._process.term, 0, nowhere, settings.overflow, settings.max_frame_bytes)
        if not takes_over:
            return Membership(self._process.term, use)
        now = time.monotonic()
        lives = [life for life in self._process.former if life.exchange]
        return Membership(self._process.term, use, Takeover(now, expected, FormerExchanges(lives, now), sought))

    def _fenced(self, term: int) -> Named | None:
        """The queue is led elsewhere: everybody shall look there at once. Whom the Monitor of that term has to wait for."""
        self._tell_standby(term)
        if self._process.role is MonitorRole.BACKUP:
            return None
        named = self._membership.named(self._now())
        return msgspec.structs.replace(named, all=named.all and term == self._process.term + 1)

    def _tell_standby(self, term: int) -> None:
        """This Monitor ends, and leads no more: nobody has to find that out by its silence."""
        standby = self._membership.standby(self._now(), term)
        for peer in self._membership.peers():
            self._server.notify(peer, standby)

    async def _fence(self, former: FormerProcess, term: int) -> None:
        """What lives on at a lost host ends now if it can be reached, else with its lease."""
        await fence(former, term, lambda named: self._expect(named, term))
        if term == self._process.term:
            self._membership.takeover.former.gone(former.exchange, former.host)
            self._look()

    def _expect(self, named: Named, term: int) -> None:
        """The Monitor that was fenced has named its subscribers. Others may have joined an earlier process of ours."""
        if term == self._process.term:
            fields = {"term": term, "subscribers": len(named.subscribers), "all": named.all}
            log.info("the fenced Monitor named its subscribers", extra={"fields": fields})
            named = msgspec.structs.replace(named, all=named.all and not self._restarted)
            self._membership.takeover.expect(named, self._now())
            self._look()

    def _fence_all(self) -> None:
        if self._process.role is MonitorRole.ACTIVE:
            for former in self._process.former:
                self._tasks.start(self._fence(former, self._process.term), f"fence {former.name}")

    def _configure(self, process: ProcessSpec) -> None:
        """A backup is activated, a term begins, or the queue's Monitors changed."""
        before, self._process = self._process, process
        if (process.role, process.term) != (before.role, before.term):
            log.info("role changed", extra={"fields": {"role": str(process.role), "term": process.term}})
            for watch in self._watches.values():
                watch.close()
            self._watches.clear()
            self._statistics = Statistics()
            self._watermarks = Watermarks()  # a publisher that has not rejoined yet is not gone
            activated = (before.role, process.role) == (MonitorRole.BACKUP, MonitorRole.ACTIVE)
            expected = self._heard_subscribers.expected(time.monotonic()) if activated else None
            self._membership = self._fresh_membership(expected, takes_over=True, sought=activated)
            self._responders = ResponderList(self._membership)
            self._heard_subscribers = HeardSubscribers()
            self._restarted = False
            self._look_when_due()
            self._fence_all()
        elif process.former != before.former:
            self._membership.takeover.former.keep({(one.exchange, one.host) for one in process.former})
        if process.role is MonitorRole.ACTIVE and process.monitors != before.monitors:
            for peer in self._membership.peers():
                self._server.notify(peer, wire.Monitors(process.term, process.monitors))

    def _allow(self, card: Card, request: Any) -> None:
        self._rights(card, request)
        if self._security is not None and (member := wire.spoken_for(request)) is not None:
            self._security.check_member(card, self._process.queue, member)

    # --- requests and notices -----------------------------------------------------------------------------------------

    async def _handle(self, peer: bytes, request: Any) -> msgspec.Struct:
        try:
            return await self._carry_out(peer, request)
        finally:
            self._look_when_due()  # who joins may change when that is

    async def _carry_out(self, peer: bytes, request: Any) -> msgspec.Struct:
        now = self._now()
        if self._process.role is MonitorRole.BACKUP and not isinstance(request, wire.Describe):
            raise NotReady("this is a backup Monitor: ask the active one")
        match request:
            case wire.JoinPublisher():
                self._perform(self._membership.fence(request, peer, now))
                welcome = self._membership.join_publisher(request, peer, now)
                if request.protocol < wire.PROTOCOL_0_2:
                    self._watch_marks()
                self._statistics.join_publisher(request.publisher, now, request.path)
                return msgspec.structs.replace(welcome, monitors=self._process.monitors, monitor=wire.SERVER_PROTOCOL)
            case wire.JoinSubscriber():
                self._responders.joins(request)
                joined = self._membership.join_subscriber(request, peer, now)
                return msgspec.structs.replace(joined, monitors=self._process.monitors)
            case wire.Leave(member):
                self._perform(self._membership.leave(member, now))
                self._perform(self._responders.left(member, now))
                self._statistics.forget(member)
                return wire.Left()
            case wire.ListResponders():
                return self._responders.notice()
            case wire.RecordDecision(decision):
                self._remember(decision)
                return wire.Recorded()
            case wire.Describe():
                return self._describe(now)
            case _:
                return await self._await(request, now)

    async def _await(self, request: wire.Move | wire.Drain | wire.AwaitExchange, now: float) -> msgspec.Struct:
        waiter: asyncio.Future[msgspec.Struct] = asyncio.get_running_loop().create_future()
        match request:
            case wire.Move(moves):
                instructions = self._membership.move(moves, waiter, now)
            case wire.Drain(exchange):
                instructions = self._membership.drain(exchange, waiter, now)
            case wire.AwaitExchange(exchange):
                instructions = self._membership.await_active(exchange, waiter, now)
        self._perform(instructions)
        try:
            return await waiter
        finally:
            self._membership.forget(waiter)

    def _notice(self, peer: bytes, notice: Any) -> None:
        now = self._now()
        if self._process.role is MonitorRole.BACKUP:
            if not isinstance(notice, wire.ExchangeReport | wire.PathsFenced):
                self._server.notify(peer, wire.Standby(self._process.term))
            if isinstance(notice, wire.SubscriberReport):
                self._heard_subscribers.heard(notice.subscriber, now)
            return
        match notice:
            case wire.PublisherReport():
                self._perform(self._membership.publisher_report(notice, peer, now))
                if notice.publisher in self._membership.publishers:
                    self._statistics.report_publisher(notice, now)
            case wire.SubscriberReport():
                self._perform(self._membership.subscriber_report(notice, peer, now))
                self._perform(self._responders.reported(notice, now))
                if (subscriber := self._membership.subscribers.get(notice.subscriber)) is not None:
                    self._statistics.report_subscriber(notice, now, subscriber.told)
            case wire.ExchangeReport():
                self._perform(self._membership.exchange_report(notice, now, peer))
                self._statistics.report_exchange(notice, now)
            case wire.PathsFenced(token, publisher, path):
                self._membership.fences.done(publisher, path, token)

    def _control_frame(self, exchange: str, header: Header, body: memoryview, frame: bytes) -> None:
        """A publisher's control frame came out of an Exchange. Raises FrameError."""
        now = self._now()
        match header.kind:
            case FrameKind.FIN:
                self._perform(self._membership.fin_seen(header.publisher, header.path, exchange, now))
            case FrameKind.MARK:
                self._perform(self._membership.mark_seen(header.publisher, header.path, frames.mark_body(body)))
            case FrameKind.OPEN:
                opening = frames.opening_body(body)
                self._perform(self._membership.open_seen(header.publisher, header.path, exchange, opening, now))
            case FrameKind.WATERMARK if (known := self._membership.exchanges.get(exchange)) is not None:
                self._watermarks.saw(known.address.token, header, frames.watermark_body(body), frame, now)

    def _watch_marks(self) -> None:
        """There is a publisher of version 0.1, which Exchanges confirm nothing."""
        if not self._marks_watched:
            self._marks_watched = True
            for watch in self._watches.values():
                watch.hear_marks()

    def _exchange_heard(self, token: str) -> None:
        self._perform(self._membership.exchange_heard(token, self._now()))

    def _connected(self) -> None:
        """An Exchange takes what the Monitor has to say."""
        self._perform(self._membership.retiring())

    def _remember(self, decision: kpi_wire.Decision) -> None:
        """A decision, or the outcome of one already remembered (same time and cause)."""
        for place, known in enumerate(self._decisions):
            if (known.time, known.cause) == (decision.time, decision.cause):
                self._decisions[place] = decision
                return
        self._decisions.append(decision)

    # --- doing --------------------------------------------------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Notify(peer, notice):
                    if not self._server.notify(peer, notice):
                        self.counters["notices_undelivered"] += 1
                case WatchExchange(exchange):
                    heard = (self._control_frame, self._connected, self._exchange_heard)
                    self._watches[exchange.token] = ExchangeWatch(exchange, MONITOR_ID, self._refusals, *heard)
                    if self._marks_watched:
                        self._watches[exchange.token].hear_marks()
                case Unwatch(exchange):
                    if (old := self._watches.pop(exchange.token, None)) is not None:
                        old.close()
                        self._statistics.forget(exchange.id)
                case Retire(exchange):
                    if (watch := self._watches.get(exchange.token)) is not None:
                        watch.send(FrameKind.RETIRE)
                case AnswerDue(waiter, reply):
                    self._answer(waiter, reply)

    def _answer(self, waiter: Any, reply: msgspec.Struct | RoqError) -> None:
        if not waiter.done():
            if isinstance(reply, RoqError):
                waiter.set_exception(reply)
            else:
                waiter.set_result(reply)

    def _now(self) -> float:
        """Monotonic seconds. If this process stood still since it looked last, the membership is told: it was deaf then."""
        now = time.monotonic()
        still = now - self._looked
        if still > STILL_SECONDS:
            log.warning("event loop stalled", extra={"fields": {"seconds": round(still, 1)}})
            self._membership.stood_still(still, now)
        self._looked = now
        return now

    def _look(self) -> None:
        """Time has passed for which something waited."""
        self._due = None
        if self._process.role is MonitorRole.ACTIVE and not self._stop.is_set():
            self._perform(self._membership.tick(self._now()))
            self._look_when_due()

    def _look_when_due(self) -> None:
        """What waits for nothing but time goes on then, not only at the next tick."""
        due = self._membership.takeover.due(time.monotonic())
        if due is None or due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._due, self._timer = due, loop.call_later(due - time.monotonic() + 0.01, self._look)  # its clock may be early

    def _tick(self) -> None:
        now = self._now()
        if self._process.role is MonitorRole.BACKUP:
            self._heard_subscribers.forget(now)
            return
        self._perform(self._membership.tick(now))
        self._perform(self._responders.tick(self._server.connected, now))
        try:
            self._membership.check()
            self._responders.check()
        except AssertionError:  # it goes on: a Monitor that ends would only make things worse
            self.counters["invariants_broken"] += 1
            log.exception("membership invariant violated", extra={"fields": {"queue": self._process.queue}})
        self._repeat_watermarks(now)
        states = {id: str(exchange.state) for id, exchange in self._membership.exchanges.items()}
        queue, term = self._process.queue, self._process.term
        self._kpi = self._statistics.snapshot(now, time.time(), queue, term, states)
        self._kpis.send((queue.encode(), kpi_wire.encode(self._kpi)))

    def _repeat_watermarks(self, now: float) -> None:
        exchanges = self._membership.exchanges.values()
        known = [one.address.token for one in exchanges]
        carrying = [one.address.token for one in exchanges if one.state in CARRYING]
        for token, frame in self._watermarks.due(now, known, carrying, self._membership.publishers.__contains__):
            if (watch := self._watches.get(token)) is not None:
                watch.send_frame(frame)

    async def serve(self) -> None:
        """Until stopped."""
        board = open_board(self._spec)
        self._look_when_due()
        self._fence_all()
        try:
            await beat_on_lease(board, self._spec, self._stop, self._tick)
        finally:
            await self._tasks.stop()
            for watch in self._watches.values():
                watch.close()
            self._tell_standby(self._process.term)  # and from here on nobody joins
            self._server.close()
            self._kpis.close()
            self._control.close()
            board.close()

    def _describe(self, now: float) -> wire.QueueView:
        membership = self._membership
        exchanges = tuple(
            wire.ExchangeView(
                one.address,
                one.host,
                str(one.state),
                membership.load(one.address.id),
                sum(one.address.token in subscriber.attached for subscriber in membership.subscribers.values()),
            )
            for one in membership.exchanges.values()
        )
        publishers = [
            wire.MemberView(id, "publisher", (one.exchange,), one.path, not one.target, now - one.last_report)
            for id, one in membership.publishers.items()
        ]
        subscribers = [
            wire.MemberView(id, "subscriber", tuple(sorted(one.attached)), 0, one.told, now - one.last_report)
            for id, one in membership.subscribers.items()
        ]
        process = self._process
        return wire.QueueView(
            process.queue,
            process.term,
            process.settings.overflow,
            exchanges,
            (*publishers, *subscribers),
            tuple(self._decisions),
            self._kpi,
            dict(self.counters),
        )


async def fence(former: FormerProcess, term: int, on_named: Callable[[Named], None]) -> None:
    """End what lives on at a lost host: the process is told the higher term, and is known to have ended when nothing listens.
    Returns then, or when its lease must be over. on_named: called once with the subscribers that a Monitor names before it
    ends: its successor knows nobody else who could."""
    fields = {"process": former.name, "host": former.host, "term": term}
    obeyed = False
    try:
        async with asyncio.timeout(former.lease_seconds):
            for wait in delays(FENCE_FIRST_SECONDS, FENCE_LAST_SECONDS):
                try:
                    named = await _ask_to_end(former, term) if former.port else None
                except ProcessFailed:
                    log.info("process of a lost host has ended", extra={"fields": fields})
                    return
                if named is not None and not obeyed:
                    obeyed = True
                    on_named(named)
                await asyncio.sleep(wait)
    except TimeoutError:
        log.warning("process of a lost host is unreachable and its lease is over", extra={"fields": fields})


async def _ask_to_end(former: FormerProcess, term: int) -> Named | None:
    """What it answers if it obeys, None if it says nothing of use. Raises ProcessFailed when it has ended."""
    try:
        async with asyncio.timeout(FENCE_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(former.address, former.port)
    except ConnectionRefusedError:
        raise ProcessFailed(f"nothing listens at {former.address}:{former.port} any more") from None
    except (OSError, TimeoutError):
        return None
    writer.close()
    try:
        answer = await ask(former.address, former.port, FenceProcess(former.name, term), FENCE_ASK_SECONDS)
    except CallError as error:
        raise ProcessFailed("another process listens there by now") from error
    except RoqError as error:
        log.info("process of a lost host is not fenced yet", extra={"fields": {"process": former.name, "reason": str(error)}})
        return None
    return answer.named if isinstance(answer, ProcessDone) else None  # it has ended when nothing listens any more


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises PortTaken."""
    await Monitor(spec, stop).serve()


def main(spec: ChildSpec) -> int:
    """Entry point of the forked child; its exit code."""
    return run(lambda stop: serve(spec, stop))
