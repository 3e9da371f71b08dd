"""Subscriber's order machine: each publisher's messages in order, once, across moves; gaps are told. Pure: no IO, no clock.

Theory of operation. A publisher sends along numbered *paths*; path k runs through one Exchange and is FIFO. Within a path
every frame names the number of the payload before it on its topic, so a gap is seen at the next frame of that topic (or at
a beacon). A publisher numbers its payloads over all topics, and they are delivered in that order: once one was delivered, an
older one of another topic is not, though a replay brings it; it is reported as lost. Paths follow each other in two ways,
told by the first frame of the new one (OPEN):

    finished   the old path was ended with FIN: hold the new path's frames until that FIN has come through the old Exchange
    broken     the old Exchange is gone and the publisher replays: go on at once, drop what was delivered already; held
               frames from before the replay's first are delivered before it, for it does not repeat them

A subscriber that is not attached to the old Exchange can't get its FIN and goes on at once. The shell ends a wait for a FIN
that has become too long (`expire`) or holds too much (`relieve`); what is then missing shows as a gap and what comes later is
dropped as late. Time counts only from when everything that came from the old Exchange was read: a FIN that lies unread in our
own buffers is no missing FIN.

A publisher first met in the middle of a path is taken from there: its earlier messages were before the subscription.

Invariants (`check`): the current path is at least 1, or 0 while it is open where to begin; held paths are all higher than
the current one; the delivered numbers of a publisher only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from roq.errors import MessagesLost
from roq.wire.frame import Header, Kind, PathOpening


class Event(NamedTuple):
    """One frame of `size` bytes on its way through. `extra`: PathOpening for OPEN, {topic: (last, sent)} for BEACON."""

    topic: bytes
    header: Header
    body: Any = None
    extra: Any = None
    size: int = 0


class Deliver(NamedTuple):
    """Hand the payloads of this frame to the application, without the first `skip`."""

    event: Event
    skip: int = 0


Output = Deliver | MessagesLost
HELD_FRAME_BYTES = 512  # what a held frame costs besides its bytes: decoded header and payloads, about


class Safeguards(NamedTuple):
    """The rules that make the machine right. Only the model tests switch one off, to see it fail."""

    hold_for_fin: bool = True
    drop_repeats: bool = True
    report_gaps: bool = True
    order_topics: bool = True  # after a change of path no older message of another topic follows a newer one


class Publisher:
    """What is known of one publisher. topics: [last number, payloads sent on the topic up to it]."""

    __slots__ = ("baseline", "delivered", "finished", "held", "openings", "path", "topics", "waiting_since")

    def __init__(self) -> None:
        self.path = 0  # until it is known where to begin
        self.baseline: int | None = None  # numbers up to this were before our time; None until the first frame tells
        self.delivered = 0  # highest number delivered, over all topics
        self.finished = False  # FIN of `path` seen
        self.topics: dict[bytes, list[int]] = {}
        self.held: dict[int, list[Event]] = {}
        self.openings: dict[int, PathOpening] = {}
        self.waiting_since: float | None = None


def _lost(publisher: int, topic: str, known: list[int], last: int, sent: int) -> MessagesLost:
    """Everything on the topic after what is known, up to `last`; by then `sent` payloads had been sent on it."""
    # of a topic met in the middle it is not known how many were before our time; the range bounds what is missing
    count = max(1, min(sent - known[1], last - known[0]))
    return MessagesLost(publisher, topic, known[0] + 1, last, count)


class OrderMachine:
    """All publishers of one subscriber.

    attached: the tokens' ids of Exchanges this subscriber is attached to (asked when a path changes).
    wants: whether the subscriber subscribed to a topic (asked for beacons).
    """

    def __init__(
        self,
        attached: Callable[[str], bool],
        wants: Callable[[bytes], bool],
        safeguards: Safeguards = Safeguards(),
    ) -> None:
        self.publishers: dict[int, Publisher] = {}
        self._attached, self._wants, self._safe = attached, wants, safeguards
        self.duplicated = 0
        self.late = 0
        self.unfinished = 0  # paths that were given up before their FIN came
        self._ended: dict[int, int] = {}  # publishers that had ended a path at the last sweep
        self.waiting: set[int] = set()  # publishers with held frames
        self.held_bytes = 0  # of all held frames, HELD_FRAME_BYTES for each included

    def accept(self, topic: bytes, header: Header) -> bool:
        """The quick way for an expected data frame: True if it is to be delivered whole, now."""
        _, _, id, path, sequence, previous, index, count, _ = header
        publisher = self.publishers.get(id)
        if publisher is None or publisher.path != path or publisher.finished:
            return False
        known = publisher.topics.get(topic)
        if known is None or known[0] != previous or sequence <= previous or sequence <= publisher.delivered:
            return False
        known[0] = publisher.delivered = sequence + count - 1
        known[1] = index + count
        return True

    def handle(self, event: Event, now: float) -> list[Output]:
        """Any frame of a publisher. What to deliver and to tell, in order."""
        header = event.header
        publisher = self.publishers.get(header.publisher)
        if header.kind == Kind.BEACON and (publisher is None or publisher.path == 0):
            return []  # the Monitor repeats old ones: it tells nothing of where to begin
        if publisher is None:
            publisher = self.publishers[header.publisher] = Publisher()
        out: list[Output] = []
        self._take(publisher, event, out)
        self._settle(publisher, header.publisher, now, out)
        return out

    def _take(self, publisher: Publisher, event: Event, out: list[Output]) -> None:
        header = event.header
        if header.path < publisher.path or (
            publisher.finished and header.path == publisher.path and header.kind != Kind.BEACON
        ):
            self.late += 1
            if header.kind == Kind.DATA and publisher.baseline is not None and header.sequence <= publisher.baseline:
                # not before our time after all, and too late to be given; what is above the baseline shows as a gap
                lost = (event.topic.decode(), header.sequence, header.sequence + header.count - 1, header.count)
                out.append(MessagesLost(header.publisher, *lost))
        elif header.path > publisher.path:
            if header.kind == Kind.OPEN:
                publisher.openings[header.path] = event.extra
            publisher.held.setdefault(header.path, []).append(event)
            self.held_bytes += event.size + HELD_FRAME_BYTES
        elif header.kind == Kind.DATA:
            self._data(publisher, event, out)
        elif header.kind == Kind.FIN:
            publisher.finished = True
            if publisher.baseline is None:
                publisher.baseline = header.sequence
        elif header.kind == Kind.BEACON:
            self._beacon(publisher, event, out)
        elif header.kind == Kind.OPEN and publisher.baseline is None:
            publisher.baseline = header.sequence

    def _data(self, publisher: Publisher, event: Event, out: list[Output]) -> None:
        header = event.header
        if publisher.baseline is None:
            publisher.baseline = header.sequence - 1
        known = publisher.topics.get(event.topic)
        if known is None:
            # the topic is new to us: what came before our time on it is no gap
            sent_before = header.index if header.previous <= publisher.baseline else 0
            known = publisher.topics[event.topic] = [publisher.baseline, sent_before]
        repeated = max(0, min(known[0] + 1 - header.sequence, header.count))
        skip = max(repeated, min(publisher.delivered + 1 - header.sequence, header.count))  # older than what was delivered
        if not self._safe.drop_repeats:
            repeated = skip = 0
        self.duplicated += repeated
        missing, sent = header.previous, header.index
        if skip > repeated:  # no repeat, and too late: a newer message of another topic was delivered
            missing, sent = header.sequence + skip - 1, header.index + skip
        if missing > known[0] and self._safe.report_gaps:
            out.append(_lost(header.publisher, event.topic.decode(), known, missing, sent))
        if repeated < header.count:
            last = header.sequence + header.count - 1
            known[0], known[1] = max(last, known[0]), max(header.index + header.count, known[1])
        if skip < header.count:
            publisher.delivered = max(publisher.delivered, known[0])
            out.append(Deliver(event, skip))

    def _beacon(self, publisher: Publisher, event: Event, out: list[Output]) -> None:
        if publisher.baseline is None:
            publisher.baseline = event.header.sequence
        for name, (last, sent) in event.extra.items():
            topic = name.encode()
            if last <= publisher.baseline or not self._wants(topic):
                continue
            known = publisher.topics.setdefault(topic, [publisher.baseline, 0])
            if last > known[0]:
                if self._safe.report_gaps:
                    out.append(_lost(event.header.publisher, name, known, last, sent))
                known[0], known[1] = last, sent

    def _settle(self, publisher: Publisher, id: int, now: float, out: list[Output]) -> None:
        """Go on to the next path while nothing holds us back."""
        while publisher.held and self._may_advance(publisher):
            self._advance(publisher, out)
        if publisher.held:
            self.waiting.add(id)
            if publisher.waiting_since is None:
                publisher.waiting_since = now
        else:
            self.waiting.discard(id)
            publisher.waiting_since = None

    def _next_path(self, publisher: Publisher) -> int:
        """The path to go on with: the newest one that replays all before it, else the lowest held."""
        replays = [path for path, opening in publisher.openings.items() if not opening.finished]
        return max(replays, default=min(publisher.held))

    def _may_advance(self, publisher: Publisher) -> bool:
        """Whether the next path may become the current one."""
        path = self._next_path(publisher)
        if not self._safe.hold_for_fin or (publisher.finished and path == publisher.path + 1):
            return True
        # a path in between that we have seen nothing of may still be on its way through the Exchange that was left
        opening = publisher.openings.get(path)
        if opening is None:
            return publisher.path == 0  # it began before our time, so those before it ended before our time
        return not opening.finished or not self._attached(opening.left)

    def _advance(self, publisher: Publisher, out: list[Output]) -> None:
        path = publisher.path = self._next_path(publisher)
        publisher.finished = False
        publisher.waiting_since = None
        if not self._safe.order_topics:
            publisher.delivered = 0
        events = self._take_held(publisher, path)
        for passed in sorted(held for held in publisher.held if held < path):  # overtaken by a replay: it begins at its OPEN
            for event in self._take_held(publisher, passed):
                if event.header.kind == Kind.DATA and event.header.sequence <= events[0].header.sequence:
                    self._data(publisher, event, out)
        for opened in [opened for opened in publisher.openings if opened <= path]:
            del publisher.openings[opened]
        for event in events:
            self._take(publisher, event, out)

    def detached(self, now: float) -> list[Output]:
        """An Exchange was left: whoever waited for a FIN from it goes on."""
        out: list[Output] = []
        for id in sorted(self.waiting):
            self._settle(self.publishers[id], id, now, out)
        return out

    def _take_held(self, publisher: Publisher, path: int) -> list[Event]:
        events = publisher.held.pop(path)
        self.held_bytes -= sum(event.size + HELD_FRAME_BYTES for event in events)
        return events

    def awaits(self) -> set[str]:
        """Ids of the Exchanges from which a FIN is waited for; "" if it is not known which."""
        return {self._left(self.publishers[id]) for id in self.waiting}

    def _left(self, publisher: Publisher) -> str:
        opening = publisher.openings.get(self._next_path(publisher))
        return opening.left if opening is not None else ""

    def expire(self, now: float, hold_seconds: float, hold_max_seconds: float, unread: Callable[[str], float]) -> list[Output]:
        """Whoever has waited for a FIN for too long goes on without it: `hold_seconds` since everything from the old
        Exchange was read, or `hold_max_seconds` in any case.

        unread(Exchange's id): when frames from it last lay unread though they had come (`now` if they do); "": from any.
        """
        out: list[Output] = []
        for id in sorted(self.waiting):
            publisher = self.publishers[id]
            since = now if publisher.waiting_since is None else publisher.waiting_since
            if now - since >= hold_max_seconds or now - max(since, unread(self._left(publisher))) >= hold_seconds:
                self._go_on(publisher, id, now, out)
        return out

    def relieve(self, now: float, max_bytes: int) -> list[Output]:
        """While more than `max_bytes` are held: whoever has waited longest goes on without the FIN."""
        out: list[Output] = []
        while self.held_bytes > max_bytes:
            id = min(self.waiting, key=lambda one: (self.publishers[one].waiting_since or 0.0, one))
            self._go_on(self.publishers[id], id, now, out)
        return out

    def _go_on(self, publisher: Publisher, id: int, now: float, out: list[Output]) -> None:
        """Without the FIN."""
        self.unfinished += 1
        self._advance(publisher, out)
        self._settle(publisher, id, now, out)

    def sweep(self) -> None:
        """Forget publishers that had ended their path at the last sweep and have not been heard since."""
        ended = {id: one.path for id, one in self.publishers.items() if one.finished and id not in self.waiting}
        for id in [id for id, path in ended.items() if self._ended.get(id) == path]:
            del self.publishers[id]
        self._ended = {id: path for id, path in ended.items() if id in self.publishers}

    def held_frames(self) -> int:
        """How many frames are held back just now."""
        return sum(len(events) for id in self.waiting for events in self.publishers[id].held.values())

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        for id, publisher in self.publishers.items():
            assert publisher.path >= 1 or publisher.held, f"publisher {id}: nothing is known of it"
            assert all(path > publisher.path for path in publisher.held), f"publisher {id}: holds a path it has passed"
            assert bool(publisher.held) == (id in self.waiting), f"publisher {id}: waiting set is wrong"
        held = [event for one in self.publishers.values() for events in one.held.values() for event in events]
        assert self.held_bytes == sum(event.size + HELD_FRAME_BYTES for event in held), "held bytes are counted wrong"
