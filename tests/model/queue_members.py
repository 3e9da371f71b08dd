"""The shells of a queue's members, for queue_twin.py: what they hold, and what is on its way to them and from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from roq.pubsub.attachments import LISTING_SECONDS
from roq.pubsub.path import PathMachine
from roq.wire import monitor as wire
from roq.wire.frame import FrameKind
from roq.wire.monitor import ExchangeAddress

AWAY_SECONDS = 4.0  # 3 s of silence until a member looks for its Monitor, and a try
SPREAD_SECONDS = 1.2  # the silence counts from a member's last answer, which each has had in the second before


class Link:
    """A publisher's connection for one path."""

    def __init__(self, exchange: ExchangeAddress) -> None:
        self.exchange = exchange
        self.welcomed = False
        self.frames: deque[tuple[FrameKind, int, bool]] = deque()  # kind, path, whether the path before was finished
        self.confirmed: deque[int] = deque()  # paths whose FIN the Exchange has forwarded; on their way back

    def lose(self) -> None:
        """The Exchange is gone with all that was under way."""
        self.frames.clear()
        self.confirmed.clear()


class PublisherTwin:
    """A publisher's shell."""

    def __init__(self) -> None:
        self.machine = PathMachine()
        self.links: dict[int, Link] = {}
        self.notices: deque[Any] = deque()
        self.reports: deque[wire.PublisherReport] = deque()
        self.joined = False
        self.lost = ""
        self.before: wire.ReadyCount | None = None  # the last word of a Monitor that was stopped

    def is_quiet(self, alive: Mapping[str, ExchangeAddress]) -> bool:
        """Nothing is on its way to it or from it, nor is there an Exchange that it has still to hear from, or to miss."""
        return not (self.notices or self.reports) and all(
            link.welcomed and not link.frames and not link.confirmed and alive.get(link.exchange.id) == link.exchange
            for link in self.links.values()
        )


class SubscriberTwin:
    """A subscriber's shell. attachments: token → proved."""

    def __init__(self) -> None:
        self.version = 0
        self.listed: dict[str, str] = {}  # token → Exchange
        self.listing_until = 0.0
        self.attachments: dict[str, bool] = {}
        self.retired: set[str] = set()
        self.notices: deque[Any] = deque()
        self.reports: deque[wire.SubscriberReport] = deque()
        self.joined = self.failed = False
        self.before: wire.ReadyCount | None = None  # as a publisher's
        self.told = False  # that it is ready, by whatever Monitor
        self.started = False  # has been told so ever
        self.heard = -1e9  # when a Monitor heard of it last
        self.passed_by: set[str] = set()  # tokens: carried without it while it was silent, under a Monitor that has ended since

    def take_list(self, notice: wire.SubscriberWelcome | wire.Exchanges, now: float) -> None:
        """The Exchanges to be attached to; a welcome lists from the beginning."""
        if isinstance(notice, wire.Exchanges) and notice.version < self.version:
            return
        self.version = notice.version
        if isinstance(notice, wire.SubscriberWelcome):
            self.retired.clear()
            self.listing_until = now + LISTING_SECONDS if self.attachments else 0.0
        self.listed = {exchange.token: exchange.id for exchange in notice.exchanges}
        self._leave_unlisted(now)
        wanted = [token for token in self.listed if token not in self.retired and not self.failed]
        self.attachments = {**dict.fromkeys(wanted, False), **self.attachments}

    def _leave_unlisted(self, now: float) -> None:
        """After a rejoin it keeps for a while what the Monitor may only not have heard of yet."""
        over = now >= self.listing_until
        for token in [token for token in self.attachments if token not in self.listed]:
            if over or token.rpartition("/")[0] in self.listed.values():
                del self.attachments[token]

    def prove(self, serving: set[str]) -> None:
        """By what came through these."""
        for token in self.attachments.keys() & serving:
            self.attachments[token] = True

    def leave_retired(self, retiring: set[str]) -> None:
        """RETIRE came through these."""
        for token in self.attachments.keys() & retiring:
            del self.attachments[token]
            self.retired.add(token)

    def report(self, id: int, now: float) -> None:
        """As of now, to the Monitor that it has joined."""
        self._leave_unlisted(now)
        if self.joined:
            attached = tuple(token for token, proved in self.attachments.items() if proved)
            self.reports.append(wire.SubscriberReport(id, self.version, attached, 0, 0, 0, 0, 0.0, 0.0, 0.0))


Members = Iterable[tuple[int, PublisherTwin | SubscriberTwin]]


class Away:
    """Members that have to look for a new Monitor: it is elsewhere. until: by then all have found it."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self._told: set[int] = set()  # those that don't find out by its silence
        self.until = -1e9

    def begin(self, members: Members, word: wire.Standby, to: Iterable[int], now: float) -> None:
        """All that had joined the one before; `to` these it has told so. What else was on its way is gone."""
        self.until = now + AWAY_SECONDS
        self._told.clear()
        for id, twin in members:
            if twin.joined:
                self.members.add(id)
                twin.joined = False
                twin.notices.clear()
                twin.reports.clear()
                twin.before = word.ready if id in to else None
                self._told.update({id} & {*to})

    def found(self, id: int, now: float) -> None:
        """This one asks the new Monitor: the others that the silence tells will soon."""
        if id in self.members - self._told:
            self.until = min(self.until, now + SPREAD_SECONDS)
