"""The shells of a queue's members, for queue_twin.py: what they hold, and what is on its way to them and from them."""

from __future__ import annotations

from collections import deque
from typing import Any

from roq.pubsub.path import PathMachine
from roq.wire import monitor as wire
from roq.wire.frame import FrameKind
from roq.wire.monitor import ExchangeAddress


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
        self.told = False  # that it is ready, by whatever Monitor
        self.started = False  # has been told so ever
        self.heard = -1e9  # when a Monitor heard of it last
        self.passed_by: set[str] = set()  # tokens: carried without it while it was silent, under a Monitor that has ended since
