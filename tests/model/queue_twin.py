"""A queue in small: the real membership machine, real path machines, and twins of everybody's shell, for random walks.

Every method of `Queue` without an underscore is something that may happen. What has to hold is asserted on the way:
no RETIRE while a publisher that the Monitor knows may still send through the Exchange; no first frame on an Exchange that a
living ready subscriber has not proved; nobody is told that it is ready while a publisher sends where it is not attached. The
Monitor may be restarted, and be replaced by one on another host while an Exchange of the lost one lives on (`former`), with
publishers on it that hear nothing of the new Monitor. When it is fenced, its Monitor names its subscribers; a replay must not
begin without one that lived, as long as that one may come back. `rest` brings everything to an end, at which the Monitor has
to be right about everybody. Not covered: the messages themselves (moves.py), and frames between a crash and the Monitor's
hearing of it.
"""

from __future__ import annotations

from roq.errors import RoqError
from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.records import (
    CARRYING,
    PROVING_SECONDS,
    PROVING_SILENT_SECONDS,
    AnswerDue,
    ExchangeState,
    Instruction,
    Notify,
    Retire,
)
from roq.pubsub.monitor.takeover import EXPECTED_SECONDS, LIVING_SECONDS, FormerExchanges, Takeover
from roq.pubsub.path import CloseLink, OpenLink, Reuse, SendFin, SendOpen
from roq.pubsub.path import Instruction as PathInstruction
from roq.wire import monitor as wire
from roq.wire.assignment import FormerProcess, Overflow
from roq.wire.frame import FrameKind, PathOpening
from roq.wire.monitor import ExchangeAddress
from roq.wire.process import Named
from tests.model.queue_members import AWAY_SECONDS, Away, Link, PublisherTwin, SubscriberTwin

EXCHANGES, PUBLISHERS, SUBSCRIBERS = "ABC", (11, 12), (21, 22)
LATE_SECONDS = 4.0  # after a Monitor's start an Exchange may report no sooner
STEP_SECONDS = 0.5
FENCE_SECONDS = 8.0  # until a former Exchange has stopped by itself
USE = wire.PublisherWelcome(1, 0, ExchangeAddress("", "", 0, 0), Overflow.DROP, 1000)


class Queue:
    """One queue: its Monitor's machine and everybody else's shell."""

    def __init__(self) -> None:
        self.now = 100.0
        self.term = 1
        self.monitor = Membership(self.term, USE)
        self.alive: dict[str, ExchangeAddress] = {}
        self.incarnation = 0
        self.frames_in: dict[str, int] = {}  # of an Exchange's present life
        self.started: set[str] = set()
        self.publishers = {id: PublisherTwin() for id in PUBLISHERS}
        self.subscribers = {id: SubscriberTwin() for id in SUBSCRIBERS}
        self.retiring: set[str] = set()  # tokens
        self.late: dict[str, float] = {}  # Exchanges that do not report before then
        self.former: dict[str, float] = {}  # Exchanges that a replaced Monitor left behind: when they stop by themselves
        self.recorded: set[str] = set()  # by the GCM: all that were left behind at hosts that are not back
        self.begun = -1e9
        self.left = Named({}, False)  # what the replaced Monitor will say when it is fenced
        self.missed: dict[int, float] = {}  # those that lived before: until when the new Monitor waits for them
        self.come_over: set[int] = set()  # publishers that obeyed that Monitor until then
        self.away = Away()
        self.drains: dict[str, str] = {}  # waiter → Exchange
        self.asked = 0

    # --- the Monitor's shell ------------------------------------------------------------------------------------------

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Notify(peer, notice):
                    id = int(peer)
                    if isinstance(notice, wire.Heard) and id in self.subscribers:
                        self.tell(id, notice.ready)
                    (self.publishers if id in self.publishers else self.subscribers)[id].notices.append(notice)
                case Retire(exchange):
                    self.no_one_sends_through(exchange)
                    self.retiring.add(exchange.token)
                case AnswerDue(waiter):
                    self.drains.pop(str(waiter), None)

    def tell(self, id: int, ready: bool) -> None:
        """A subscriber is told whether it is ready. One that was before knows its publishers, and sees what it missed."""
        twin = self.subscribers[id]
        if ready and not twin.started and not twin.failed:
            for publisher, sender in self.publishers.items():
                current = sender.machine.current
                if current is not None and self.alive.get(current.id) == current:
                    proved = twin.attachments.get(current.token, False)
                    assert proved, f"{id} is told that it is ready, but {publisher} sends through {current.id}"
        twin.told = ready
        twin.started = twin.started or ready

    def passing_by_is_counted(self) -> None:
        """What carries messages without a subscriber that was ready ever: it will be told so."""
        carrying = self.monitor.carrying()
        for id, known in self.monitor.subscribers.items():
            twin = self.subscribers[id]
            missed = {token for token in carrying - known.attached if not twin.attachments.get(token)}
            if twin.started and not twin.failed and known.reported and missed:
                assert known.passed_by, f"{id} is not told that it was passed by"

    def no_one_sends_through(self, exchange: ExchangeAddress) -> None:
        for id, twin in self.publishers.items():
            if id in self.monitor.publishers and self.alive.get(exchange.id) == exchange:
                paths = [path for path, link in twin.links.items() if link.exchange == exchange]
                current = [path for path in paths if path in (twin.machine.path, twin.machine.target_path)]
                used = [path for path in current if path not in twin.machine.leaving]
                waiting = [path for path in paths if twin.links[path].frames]
                assert not used, f"RETIRE through {exchange.id}: publisher {id} sends there on paths {used}"
                assert not waiting, f"RETIRE through {exchange.id}: publisher {id} has sent there on paths {waiting}"

    # --- Exchanges ----------------------------------------------------------------------------------------------------

    def report_exchange(self, id: str) -> None:
        totals = (self.frames_in[id], 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0)
        self.perform(self.monitor.exchange_report(wire.ExchangeReport(self.alive[id], "h", *totals), self.now))

    def monitor_hears(self, id: str) -> None:
        """Its subscription has come to the Exchange, and its word back."""
        if id in self.alive and id not in self.former:
            self.perform(self.monitor.exchange_heard(self.alive[id].token, self.now))

    def exchange_starts(self, id: str) -> None:
        """Or restarts on the same ports: publishers' links break, what was under way is gone."""
        known = self.monitor.exchanges.get(id)
        if known is not None and known.state is ExchangeState.DRAINED:
            return  # it has been removed
        self.incarnation += 1
        self.frames_in[id] = 0
        self.started.add(id)
        self.alive[id] = ExchangeAddress(id, "127.0.0.1", 1, 2, self.incarnation)
        self.lose_frames(id)
        self.late.pop(id, None)
        self.former.pop(id, None)
        self.recorded.discard(id)
        self.report_exchange(id)

    def exchange_dies(self, id: str) -> None:
        self.alive.pop(id, None)
        self.former.pop(id, None)
        self.lose_frames(id)

    def lose_frames(self, exchange: str) -> None:
        for link in [link for twin in self.publishers.values() for link in twin.links.values()]:
            if link.exchange.id == exchange:
                link.lose()

    def exchange_forwards(self, id: int, told: bool) -> None:
        """The oldest frame of the publisher's oldest path. told: whether the Monitor gets to see it."""
        for _, link in sorted(self.publishers[id].links.items()):
            if link.frames:
                self.forward(id, link, told)
                return

    def newest_path_is_faster(self, id: int) -> None:
        for _, link in sorted(self.publishers[id].links.items(), reverse=True):
            if link.frames:
                self.forward(id, link, True)
                return

    def forward(self, id: int, link: Link, told: bool) -> None:
        kind, path, finished = link.frames.popleft()
        self.frames_in[link.exchange.id] += 1
        link.confirmed += [path] if kind is FrameKind.FIN else []
        if told and kind is FrameKind.FIN:
            self.perform(self.monitor.fin_seen(id, path, link.exchange.id, self.now))
        elif told and kind is FrameKind.OPEN:
            self.perform(self.monitor.open_seen(id, path, link.exchange.id, PathOpening("", finished), self.now))

    # --- publishers ---------------------------------------------------------------------------------------------------

    def direct(self, id: int, instructions: list[PathInstruction]) -> None:
        twin = self.publishers[id]
        for instruction in instructions:
            match instruction:
                case OpenLink(exchange, path):
                    assert path not in twin.links
                    twin.links[path] = Link(exchange)
                case SendOpen(path, _, finished):
                    self.is_proved(id, twin.links[path].exchange, path == 1)
                    self.send(twin.links[path], FrameKind.OPEN, path, finished)
                    twin.lost = ""
                    self.publisher_reports(id)
                case SendFin(path):
                    self.send(twin.links[path], FrameKind.FIN, path, False)
                case Reuse(old, new):
                    twin.links[new] = twin.links.pop(old)
                case CloseLink(path):
                    del twin.links[path]
        twin.machine.check()

    def send(self, link: Link, kind: FrameKind, path: int, finished: bool) -> None:
        if self.alive.get(link.exchange.id) == link.exchange:  # else it goes nowhere
            link.frames.append((kind, path, finished))

    def link_breaks(self, id: int) -> None:
        """The publisher notices that an Exchange is not the one it was connected to, or is no more."""
        twin = self.publishers[id]
        for path, link in sorted(twin.links.items()):
            if self.alive.get(link.exchange.id) != link.exchange:
                self.lose(id, path)
                return

    def lose(self, id: int, path: int) -> None:
        twin = self.publishers[id]
        twin.lost = twin.links[path].exchange.token
        self.direct(id, twin.machine.lost(path))
        self.publisher_reports(id)

    def is_proved(self, publisher: int, exchange: ExchangeAddress, new: bool) -> None:
        """new: the subscribers know nothing of this publisher, so nobody would see what it misses."""
        known = self.monitor.exchanges.get(exchange.id)
        if self.alive.get(exchange.id) != exchange or known is None or self.now - known.proving_since > PROVING_SECONDS:
            return
        for id, reader in self.subscribers.items():
            lives = self.now - reader.heard <= PROVING_SILENT_SECONDS
            waited_for = reader.told and lives and (new or id in self.monitor.subscribers)
            to_come = self.now < self.missed.get(id, 0.0) and id not in self.monitor.subscribers
            passed_by = reader.failed or exchange.token in reader.passed_by
            if (waited_for or (to_come and publisher in self.come_over)) and not passed_by:
                proved = reader.attachments.get(exchange.token, False)
                assert proved, f"{exchange.id} carries messages that subscriber {id} can't get"

    def publisher_joins(self, id: int) -> None:
        """For the first time, again after it was forgotten, or once more because the answer was late."""
        twin = self.publishers[id]
        if self.obeys_former(twin):
            return
        current = twin.machine.current
        if twin.machine.closing:
            twin = self.publishers[id] = PublisherTwin()
            self.perform(self.monitor.leave(id, self.now))
            current = None
        self.away.found(id, self.now)
        try:
            place = (current.id, current.token) if current else ("", "")
            request = wire.JoinPublisher(id, twin.machine.path, *place, wire.PROTOCOL, before=twin.before)
            twin.notices.append(self.monitor.join_publisher(request, b"%d" % id, self.now))
            twin.joined = True
        except RoqError:
            pass

    def exchange_welcomes(self, id: int) -> None:
        twin = self.publishers[id]
        for path, link in list(twin.links.items()):
            if not link.welcomed and self.alive.get(link.exchange.id) == link.exchange:
                link.welcomed = True
                self.direct(id, twin.machine.attached(path))

    def publisher_reports(self, id: int) -> None:
        twin = self.publishers[id]
        if twin.joined and not self.obeys_former(twin):
            current = twin.machine.current
            place = (twin.machine.path, current.id if current else "", twin.lost, len(twin.machine.leaving))
            twin.reports.append(wire.PublisherReport(id, *place, 0, 0, 0, 0.0))

    def report_arrives(self, id: int) -> None:
        if self.publishers[id].reports:
            report = self.publishers[id].reports.popleft()
            self.perform(self.monitor.publisher_report(report, b"%d" % id, self.now))

    def notice_arrives(self, id: int) -> None:
        twin = self.publishers[id]
        match twin.notices.popleft() if twin.notices else None:
            case wire.PublisherWelcome() | wire.Relocate() as place:
                for path in [path for path, link in twin.links.items() if link.exchange.token == place.abandon]:
                    if path in twin.links:
                        self.lose(id, path)
                self.direct(id, twin.machine.assign(place.exchange, place.path))
            case wire.Rejoin():
                self.publisher_joins(id)

    def confirmation_arrives(self, id: int) -> None:
        for link in list(self.publishers[id].links.values()):
            if link.confirmed:
                self.direct(id, self.publishers[id].machine.forwarded(link.confirmed.popleft()))

    def publisher_gives_up_on_fin(self, id: int) -> None:
        """Its bound is over; the FIN was dropped for the Monitor, or is gone with the Exchange."""
        twin = self.publishers[id]
        for path in list(twin.machine.leaving):
            if not twin.links[path].frames:
                self.direct(id, twin.machine.forwarded(path))

    def publisher_closes(self, id: int) -> None:
        twin = self.publishers[id]
        if twin.joined:
            self.direct(id, twin.machine.close())

    def closed_publisher_leaves(self, id: int) -> None:
        twin = self.publishers[id]
        if twin.machine.closing and not twin.machine.leaving:
            twin.joined = False
            twin.reports.clear()
            self.perform(self.monitor.leave(id, self.now))

    # --- subscribers --------------------------------------------------------------------------------------------------

    def subscriber_joins(self, id: int) -> None:
        twin = self.subscribers[id]
        if twin.failed:
            twin = self.subscribers[id] = SubscriberTwin()
            self.perform(self.monitor.leave(id, self.now))
        while twin.reports:  # they were sent before, on the same connection
            self.subscriber_report_arrives(id)
        if not twin.joined:
            self.away.found(id, self.now)
            try:
                request = wire.JoinSubscriber(id, (">",), twin.started, wire.PROTOCOL, before=twin.before)
                twin.notices.append(self.monitor.join_subscriber(request, b"%d" % id, self.now))
                twin.joined = True
            except RoqError:
                pass

    def subscriber_takes_notice(self, id: int) -> None:
        twin = self.subscribers[id]
        match twin.notices.popleft() if twin.notices else None:
            case wire.SubscriberWelcome() | wire.Exchanges() as notice:
                twin.take_list(notice, self.now)
            case wire.Rejoin():
                twin.joined = False
                self.subscriber_joins(id)

    def attachments_are_proved(self, id: int) -> None:
        self.subscribers[id].prove({exchange.token for exchange in self.alive.values()} - self.retiring)
        self.subscriber_reports(id)

    def retire_arrives(self, id: int) -> None:
        self.subscribers[id].leave_retired(self.retiring)
        self.subscriber_reports(id)

    def subscriber_reports(self, id: int) -> None:
        self.subscribers[id].report(id, self.now)

    def subscriber_report_arrives(self, id: int) -> None:
        if self.subscribers[id].reports:
            report = self.subscribers[id].reports.popleft()
            self.subscribers[id].heard = self.now
            self.perform(self.monitor.subscriber_report(report, b"%d" % id, self.now))

    def subscriber_gives_up(self, id: int) -> None:
        """SlowSubscriber: it detaches from everything, and goes on reporting."""
        self.subscribers[id].failed = True
        self.subscribers[id].attachments.clear()
        self.subscriber_reports(id)

    # --- other Monitors -----------------------------------------------------------------------------------------------

    def monitor_restarts(self, late: str) -> None:
        """It knows nothing any more; one Exchange reports late to it."""
        self.missed.clear()
        self.left = Named(self.left.subscribers, False)
        self._begin(sought=False)
        if late in self.alive:
            self.late[late] = self.now + LATE_SECONDS

    def monitor_is_replaced(self, lost: str) -> None:
        """The host of the Monitor and of this Exchange counts as lost; both live on until they are fenced."""
        if lost in self.alive and not self.former:
            self.former[lost] = self.now + FENCE_SECONDS
            self.recorded.add(lost)
            self.left = self.monitor.named(self.now)
            self.missed.clear()
            self._begin(sought=True)

    def host_stops(self, lost: str, told: tuple[int, ...]) -> None:
        """That of the only Monitor, and of this Exchange. The Monitor tells its members that it ends, and how many subscribers
        there are; only these get to hear it, the others find out by its silence."""
        self.exchange_dies(lost)
        living = [id for id, one in self.subscribers.items() if one.told and self.now - one.heard <= LIVING_SECONDS]
        self.missed, self.come_over = dict.fromkeys(living, self.now + AWAY_SECONDS), set(PUBLISHERS)
        self.left = Named({}, False)
        word = self.monitor.standby(self.now, self.term)
        self.away.begin([*self.publishers.items(), *self.subscribers.items()], word, told, self.now)
        self._begin(sought=True)

    def _come_back(self) -> None:
        """Who has looked for the Monitor for long enough, and publishers whose reports it does not know."""
        away = self.away.members if self.now >= self.away.until else set()
        late = PUBLISHERS if self.now >= self.begun + AWAY_SECONDS else ()
        unknown = {id for id in late if self.publishers[id].joined and id not in self.monitor.publishers}
        for id in sorted(away | unknown):
            (self.publisher_joins if id in PUBLISHERS else self.subscriber_joins)(id)
            for _ in range(len(self.publishers[id].notices) if id in PUBLISHERS else 0):
                self.notice_arrives(id)
            if (self.publishers.get(id) or self.subscribers[id]).joined:
                self.away.members.discard(id)

    def _begin(self, sought: bool) -> None:
        """A new process of the Monitor. The GCM gives it what lives on at hosts that are not back, as often as it starts."""
        for id, known in self.monitor.subscribers.items():
            silent = self.now - self.subscribers[id].heard > PROVING_SILENT_SECONDS
            missed = self.monitor.carrying() - known.attached if silent else set()
            self.subscribers[id].passed_by.update(missed)
        left = [FormerProcess(f"exchange/q/{id}", "h", id, lease_seconds=FENCE_SECONDS) for id in sorted(self.recorded)]
        self.term += sought
        self.monitor = Membership(self.term, USE, Takeover(self.now, None, FormerExchanges(left, self.now), sought))
        self.begun = self.now
        self.drains.clear()
        self.retiring.clear()

    def somebody_is_served(self, id: int) -> None:
        """3 s after its Exchange died a publisher knows where to go on."""
        assert any(isinstance(one, wire.Relocate) for one in self.publishers[id].notices), f"publisher {id} waits for the dead"

    def obeys_former(self, twin: PublisherTwin) -> bool:
        current = twin.machine.current
        return current is not None and current.id in self.former and self.alive.get(current.id) == current

    def former_is_fenced(self) -> None:
        """The new Monitor has seen to it."""
        for id in list(self.former):
            self.come_over = {publisher for publisher, twin in self.publishers.items() if self.obeys_former(twin)}
            self.exchange_dies(id)
            self.monitor.takeover.former.gone(id, "h")
            self.monitor.takeover.expect(self.left, self.now)
            living = [one for one, silent in self.left.subscribers.items() if silent <= LIVING_SECONDS]
            self.missed = dict.fromkeys(living, self.now + EXPECTED_SECONDS)

    # --- orders and time ----------------------------------------------------------------------------------------------

    def move(self, id: int, exchange: str) -> None:
        self.asked += 1
        self.perform(self.monitor.move([(id, exchange)], f"move {self.asked}", self.now))

    def drain(self, exchange: str) -> None:
        self.asked += 1
        try:
            self.drains[f"drain {self.asked}"] = exchange
            self.perform(self.monitor.drain(exchange, f"drain {self.asked}", self.now))
        except RoqError:
            self.drains.pop(f"drain {self.asked}")

    def second_passes(self, seconds: float) -> None:
        """In steps that are short beside every bound."""
        for step in [STEP_SECONDS] * round(seconds / STEP_SECONDS):
            self.now += step
            for id in [id for id, until in self.former.items() if self.now >= until]:
                self.exchange_dies(id)
            for id in self.alive:
                if id not in self.former and self.now >= self.late.get(id, 0.0):
                    self.report_exchange(id)
            self._come_back()
            self.perform(self.monitor.tick(self.now))

    def calm_second(self) -> None:
        self.calm()
        self.second_passes(1.0)

    # --- the end ------------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Everything under way arrives."""
        for exchange in EXCHANGES:
            self.monitor_hears(exchange)
        for id in PUBLISHERS:
            self.publisher_reports(id)
            left = 10
            while (left := left - 1) >= 0 and not self.publishers[id].is_quiet(self.alive):
                self.notice_arrives(id)
                self.confirmation_arrives(id)
                self.exchange_welcomes(id)
                self.exchange_forwards(id, True)
                self.link_breaks(id)
                self.report_arrives(id)
            self.publisher_gives_up_on_fin(id)
            self.closed_publisher_leaves(id)
        for id in SUBSCRIBERS:
            for _ in range(10):
                self.subscriber_takes_notice(id)
            self.attachments_are_proved(id)
            self.retire_arrives(id)
            while self.subscribers[id].reports:
                self.subscriber_report_arrives(id)

    def rest(self) -> None:
        self.former_is_fenced()
        for exchange in self.started - self.alive.keys():
            self.exchange_starts(exchange)
        for _ in range(40):
            self.calm()
            self.second_passes(1.0)
            self.monitor.check()
        active = [id for id, one in self.monitor.exchanges.items() if one.state is ExchangeState.ACTIVE]
        for id, twin in self.publishers.items():
            current, known = twin.machine.current, self.monitor.publishers.get(id)
            if current is not None and known is not None:
                assert (known.path, known.exchange) == (twin.machine.path, current.id), f"the Monitor is wrong about {id}"
                state = self.monitor.exchanges[current.id].state
                assert not active or state in CARRYING, f"publisher {id} stays on an Exchange that is {state}"
        for id, reader in self.subscribers.items():
            subscriber = self.monitor.subscribers.get(id)
            if subscriber is not None and active and not reader.failed:
                assert subscriber.ready, f"subscriber {id} never got ready"
        unanswered = [exchange for exchange in self.drains.values() if [id for id in active if id != exchange]]
        assert not unanswered, f"never drained: {unanswered}"
