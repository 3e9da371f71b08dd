"""Subscriber's order machine: each publisher's messages in order, once, across moves; gaps are reported. Pure: no IO, no clock.

Theory of operation. A publisher sends along numbered *paths*; path k runs through one Exchange and is FIFO. Within a path
every frame names the number of the payload before it on its topic, so a gap is seen at the next frame of that topic (or at
a watermark). A publisher numbers its payloads over all topics, and they are delivered in that order: once one was delivered, an
older one of another topic is not, though a replay brings it; it is reported as lost. Paths follow each other in two ways,
named by the first frame of the new one (OPEN):

    finished   the old path was ended with FIN: hold the new path's frames until that FIN has come through the old Exchange
    broken     the old Exchange is gone and the publisher replays: go on at once, drop what was delivered already; held
               frames from before the replay's first are delivered before it, for it does not repeat them

A subscriber that is not attached to the old Exchange can't get its FIN and goes on at once. The shell ends a wait for a FIN
that has become too long (`expire`) or holds too much (`relieve`); what is then missing shows as a gap and what comes later is
dropped as late. Time counts only from when everything that came from the old Exchange was read: a FIN that lies unread in our
own buffers is no missing FIN.

A subscriber that begins with the past reads tapes first (past.py), which are slow Exchanges to this machine. Time does not say
there that the path before has ended. A new path waits for that FIN on the tape of the Exchange that was left, to the end of it;
if there is none, a little longer for the replay that follows then. A replay waits until that tape has nothing older any more;
if it is not known where the path before was, all of them; so does a path that began while nothing was recorded.

A publisher first met in the middle of a path is taken from there: its earlier messages were before the subscription. A position
may be further on one tape than on another: a path of which no beginning is seen behind it ended, or was entered, before it.

That is not so after a time in which messages may have passed this subscriber by, though it was ready (it stood still while an
Exchange died, or stopped reading from one that drops; `doubt`). Earlier messages of a publisher first met since then may be
from before our time or from within that time: nobody knows, so they are reported as MessagesLost of 0 messages, topic by
topic, when the topic or a watermark that names it comes. A watermark of a publisher never met says so, too. It ends when the
last watermark that could speak of that time has come (`sweep`). The subscriber learns of such a time late, so `doubt` also
covers what was met since it was last known to be well.

What an Exchange says that it has dropped (a watermark with `previous`) is reported at once, likewise, where numbers don't
show it yet: the subscriber's position moves past it.

Memory is bounded: of publishers that have ended, and of those unheard for longest when there are too many, the topics are
forgotten (`sweep`, `_make_room`), and beyond a number of publishers the oldest altogether. Of forgotten topics remains the
highest number among them: a gap that begins above it is reported as ever; where there may have been one below it, that is
reported as MessagesLost of 0 messages, once the topic is heard of again.

Invariants (`check`): the current path is at least 1, or 0 while it is open where to begin; held paths are all higher than
the current one; the delivered numbers of a publisher only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from roq.errors import MessagesLost
from roq.wire.frame import FrameKind, Header, PathOpening

Origin = tuple[str, int]  # of a frame: the Exchange it came from, and when it came, or was written (milliseconds since 1970)


class FrameEvent(NamedTuple):
    """One frame of `size` bytes on its way through. `extra`: PathOpening for OPEN, {topic: (last, sent)} for WATERMARK.
    `origin`: of OPEN and WATERMARK, of all others while tapes are read."""

    topic: bytes
    header: Header
    body: Any = None
    extra: Any = None
    size: int = 0
    origin: Origin | None = None


class Deliver(NamedTuple):
    """Hand the payloads of this frame to the application, without the first `skip`."""

    event: FrameEvent
    skip: int = 0


Output = Deliver | MessagesLost
PUBLISHERS_KEPT = 50_000  # about 500 bytes each without their topics
KNOWN_BYTES_MAX = 128 * 1024 * 1024  # of what is known of topics: more than 400,000 of them, over all publishers
TOPIC_BYTES = 250  # what one topic of one publisher costs besides its name, about
DOUBTS_KEPT = 100_000  # topics of which it was reported that messages may be missing; beyond, one may be reported twice
HELD_FRAME_BYTES = 512  # what a held frame costs besides its bytes: decoded header and payloads, about
FOREVER = 1 << 62  # milliseconds


class OrderSafeguards(NamedTuple):
    """The rules that make the machine right. Only the model tests switch one off, to see it fail."""

    hold_for_fin: bool = True
    drop_repeats: bool = True
    report_gaps: bool = True
    order_topics: bool = True  # after a change of path no older message of another topic follows a newer one
    await_tapes: bool = True  # no path begins, and no watermark counts, while what was sent before may still lie on a tape
    doubt_strangers: bool = True  # whom we first meet after messages may have passed us by may have sent some of them


class KnownPublisher:
    """What is known of one publisher. topics: [last number, payloads sent on the topic up to it]."""

    __slots__ = (
        "amid",
        "baseline",
        "begun",
        "delivered",
        "doubtful",
        "entered",
        "finished",
        "forgotten",
        "heard",
        "held",
        "met",
        "openings",
        "origins",
        "past_path",
        "path",
        "replays",
        "swept",
        "topics",
        "waiting_since",
    )

    def __init__(self) -> None:
        self.path = 0  # until it is known where to begin
        self.amid = False  # paths of it may have begun before our time, and what came then may come again
        self.entered = False  # a path of it began before our time: so did all that came on those before it
        self.past_path = 0  # the last one of which something had come when the past was over
        self.baseline: int | None = None  # numbers up to this were before our time; None until the first frame says
        self.begun = 0  # the path that said so: those after it repeat them
        self.delivered = 0  # highest number delivered, over all topics
        self.finished = False  # FIN of `path` seen
        self.topics: dict[bytes, list[int]] = {}
        self.forgotten = 0  # highest number known of topics that were forgotten; 0: none was
        self.heard = 0.0  # about when it was heard last
        self.met = 0.0  # when it was heard first
        self.doubtful = False  # messages up to the baseline may have been for us
        self.swept = 0  # `delivered` at the last sweep
        self.replays = False  # `path` repeats what came before it
        self.held: dict[int, list[FrameEvent]] = {}
        self.openings: dict[int, PathOpening] = {}
        self.origins: dict[int, Origin] = {}  # of those, or of a path's first frame
        self.waiting_since: float | None = None


def _lost(publisher: int, topic: str, known: list[int], last: int, sent: int) -> MessagesLost:
    """Everything on the topic after what is known, up to `last`; by then `sent` payloads had been sent on it."""
    # of a topic met in the middle it is not known how many were before our time; the range bounds what is missing
    count = max(1, min(sent - known[1], last - known[0]))
    return MessagesLost(publisher, topic, known[0] + 1, last, count)


class OrderMachine:
    """All publishers of one subscriber.

    attached: the tokens' ids of Exchanges this subscriber is attached to (asked when a path changes).
    unread(exchange, origin): whether that Exchange's tape ("": any other) may have something older than what came from `origin`
    (past.has_older).
    wants: whether the subscriber subscribed to a topic (asked for watermarks).
    since: when recording was switched on last (milliseconds since 1970), 0: it never was off.
    """

    def __init__(
        self,
        attached: Callable[[str], bool],
        wants: Callable[[bytes], bool],
        safeguards: OrderSafeguards = OrderSafeguards(),
        unread: Callable[[str, Origin], bool] = lambda exchange, origin: False,
        since: Callable[[], int] = lambda: 0,
    ) -> None:
        self.publishers: dict[int, KnownPublisher] = {}  # each has a path or holds some; held paths are above its own
        self._unread, self._since = unread, since
        self._attached, self._wants, self._safe = attached, wants, safeguards
        self.amid = False  # while tapes are read, and not from their beginning
        self.entire = False  # they were read from there: nothing was before our time
        self.until_ms = FOREVER  # what is written then or later is another reader's
        self._sees_all = False  # all that Exchanges forwarded since tapes were read came here
        self.duplicated = 0
        self.late = 0
        self.unfinished = 0  # paths that were given up before their FIN came
        self.known_bytes = 0  # of all topics of all publishers, TOPIC_BYTES for each included
        self.forgotten_topics = 0  # for want of room; likewise publishers
        self.forgotten_publishers = 0
        self.waiting: set[int] = set()  # exactly the publishers with held frames
        self._doubts: dict[tuple[int, str], int] | None = None  # reported up to this; None: nothing passed by, none is doubted
        self._doubted = 0.0  # when that was last learnt
        self.held_bytes = 0  # of all held frames, HELD_FRAME_BYTES for each included

    def read_tapes(self, unread: Callable[[str, Origin], bool], since: Callable[[], int], *, entire: bool) -> None:
        """Frames come from tapes, too: from their beginning, or from somewhere on them. Before any does."""
        self._unread, self._since, self.entire, self.amid = unread, since, entire, not entire

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

    def handle(self, event: FrameEvent, now: float) -> list[Output]:
        """Any frame of a publisher. What to deliver and to report, in order."""
        header = event.header
        publisher = self.publishers.get(header.publisher)
        out: list[Output] = []
        if header.kind == FrameKind.WATERMARK and event.origin and self._safe.await_tapes and self._unread("", event.origin):
            return self._dropped(event)  # what else it speaks of may lie on a tape
        if header.kind == FrameKind.WATERMARK and (
            publisher is None or publisher.path == 0 or (publisher.amid and header.path > publisher.path)
        ):
            # the Monitor repeats old ones: it says nothing of where to begin
            if self._doubts is not None and (publisher is None or publisher.doubtful):
                for name, (last, _) in event.extra.items():
                    if self._wants(name.encode()):
                        self._may_be_missing(header.publisher, name, last, out)
                return out
            return self._dropped(event)
        if publisher is None:
            if len(self.publishers) >= PUBLISHERS_KEPT:
                self._forget_publishers()
            publisher = self.publishers[header.publisher] = KnownPublisher()
            publisher.met, publisher.doubtful, publisher.amid = now, self._doubts is not None, self.amid
        publisher.heard = now
        waits = header.kind == FrameKind.DATA and header.path > publisher.path and header.path in publisher.held
        self._take(publisher, event, out)
        if not waits:  # what joins others that wait changes nothing that they wait for: `detached` looks at that
            self._settle(publisher, header.publisher, now, out)
        if self.known_bytes > KNOWN_BYTES_MAX:
            self._make_room(publisher)
        return out

    def _take(self, publisher: KnownPublisher, event: FrameEvent, out: list[Output]) -> None:
        header = event.header
        if header.path < publisher.path or (
            publisher.finished and header.path == publisher.path and header.kind != FrameKind.WATERMARK
        ):
            self.late += header.kind != FrameKind.WATERMARK
            before = header.kind == FrameKind.DATA and header.sequence <= (publisher.baseline or 0)
            if before and header.path < publisher.begun and not publisher.amid and not publisher.entered:
                # not before our time after all, and too late to be given; what is above the baseline shows as a gap
                lost = (event.topic.decode(), header.sequence, header.sequence + header.count - 1, header.count)
                out.append(MessagesLost(header.publisher, *lost))
            elif header.kind == FrameKind.WATERMARK:  # what a replay may still bring is not lost yet
                self._watermark(publisher, event, publisher.delivered if publisher.replays else header.sequence, out)
        elif header.path > publisher.path:
            if header.kind == FrameKind.OPEN:
                publisher.openings[header.path] = event.extra
                if event.origin is not None:
                    publisher.origins[header.path] = event.origin
            elif event.origin is not None and header.path not in publisher.held:  # it began unrecorded
                publisher.origins.setdefault(header.path, event.origin)
            publisher.held.setdefault(header.path, []).append(event)
            self.held_bytes += event.size + HELD_FRAME_BYTES
        elif header.kind == FrameKind.DATA:
            self._data(publisher, event, out)
        elif header.kind == FrameKind.FIN:
            publisher.finished = True
            if publisher.baseline is None:
                publisher.begun, publisher.baseline = header.path, header.sequence
        elif header.kind == FrameKind.WATERMARK:
            self._watermark(publisher, event, header.sequence, out)
        elif header.kind == FrameKind.OPEN and publisher.baseline is None:
            publisher.begun, publisher.baseline = header.path, header.sequence

    def _data(self, publisher: KnownPublisher, event: FrameEvent, out: list[Output]) -> None:
        header = event.header
        if publisher.baseline is None:
            publisher.begun, publisher.baseline = header.path, header.sequence - 1
        known = publisher.topics.get(event.topic)
        if known is None:
            known = self._meet(publisher, event, publisher.baseline, out)
        if publisher.replays and self.entire and (unseen := min(publisher.baseline + 1 - header.sequence, header.count)) > 0:
            first, topic = header.sequence, event.topic.decode()  # not before our time, and something newer was delivered
            out.append(MessagesLost(header.publisher, topic, first, first + unseen - 1, unseen))
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

    def _meet(self, publisher: KnownPublisher, event: FrameEvent, baseline: int, out: list[Output]) -> list[int]:
        """The topic is new to us, or was forgotten: what came before our time on it is no gap."""
        header, forgotten = event.header, publisher.forgotten
        if publisher.doubtful:
            # of a replay of what came before our time only the begin is known here: more of it may follow
            last = min(header.previous, baseline) if header.sequence > baseline else baseline
            self._may_be_missing(header.publisher, event.topic.decode(), last, out)
        if forgotten <= baseline or header.previous <= baseline < forgotten < header.sequence:
            known = [baseline, header.index if header.previous <= baseline else 0]
        elif header.previous > forgotten:
            known = [forgotten, 0]
            if header.index > 1:  # besides the one that is missing, there may have been others up to here
                out.append(MessagesLost(header.publisher, event.topic.decode(), baseline + 1, forgotten, 0))
        else:  # up to here it may have been delivered, or not
            last = header.sequence + header.count - 1
            sent = header.index + max(0, min(forgotten, last) + 1 - header.sequence)
            known = [min(forgotten, last) if header.sequence <= forgotten else header.previous, sent]
            out.append(MessagesLost(header.publisher, event.topic.decode(), baseline + 1, known[0], 0))
        return self._learn(publisher, event.topic, known)

    def _learn(self, publisher: KnownPublisher, topic: bytes, known: list[int]) -> list[int]:
        self.known_bytes += TOPIC_BYTES + len(topic)
        publisher.topics[topic] = known
        return known

    def _watermark(self, publisher: KnownPublisher, event: FrameEvent, up_to: int, out: list[Output]) -> None:
        """Topics of which messages up to the number `up_to` are missing."""
        id = event.header.publisher
        if publisher.baseline is None:
            publisher.begun, publisher.baseline = event.header.path, event.header.sequence
        dropped = event.header.previous
        for name, (last, sent) in event.extra.items():
            news = publisher.baseline < last <= up_to
            if not news and not publisher.doubtful and not dropped:
                continue
            topic = name.encode()
            if not self._wants(topic):
                continue
            known = publisher.topics.get(topic)
            if publisher.doubtful and known is None:
                self._may_be_missing(id, name, min(last, publisher.baseline), out)
            elif dropped and not news and (known is None or last > known[0] or last <= publisher.baseline):
                out.append(MessagesLost(id, name, dropped, last, 0))
            if not news:
                continue
            if known is None:
                known = self._learn(publisher, topic, [max(publisher.baseline, publisher.forgotten), 0])
                doubted = min(last, publisher.forgotten)  # up to here it may have been delivered, or not
                if doubted > publisher.baseline and (last == doubted or sent > 1):
                    out.append(MessagesLost(id, name, publisher.baseline + 1, doubted, 0))
                if last == doubted:
                    known[0], known[1] = last, sent
            if last > known[0]:
                if self._safe.report_gaps:
                    out.append(_lost(id, name, known, last, sent))
                known[0], known[1] = last, sent

    def _dropped(self, event: FrameEvent) -> list[Output]:
        """By an Exchange, if it says so: what it names of those of whom it is not known where they are."""
        id, first = event.header.publisher, event.header.previous
        named = event.extra.items() if first else ()
        return [MessagesLost(id, name, first, last, 0) for name, (last, _) in named if self._wants(name.encode())]

    def doubt(self, well_at: float, now: float) -> list[Output]:
        """Messages may have passed this subscriber by, though it was ready; not so at `well_at`. Of those that it knew then
        their numbers show what is missing."""
        out: list[Output] = []
        if not self._safe.doubt_strangers:
            return out
        self._doubts, self._doubted = self._doubts or {}, now
        for id, publisher in reversed(self.publishers.items()):  # in the order in which they were met
            if publisher.met <= well_at:
                break
            if not publisher.doubtful:
                publisher.doubtful = True
                for topic in publisher.topics:
                    self._may_be_missing(id, topic.decode(), publisher.baseline or 0, out)
        return out

    def _may_be_missing(self, id: int, topic: str, last: int, out: list[Output]) -> None:
        """Messages of a doubtful publisher, or of one never met, on a topic first heard of now; unless it was said before."""
        if self._doubts is None or last <= (reported := self._doubts.get((id, topic), 0)):
            return
        if len(self._doubts) >= DOUBTS_KEPT:
            self._doubts.clear()
        self._doubts[id, topic] = last
        out.append(MessagesLost(id, topic, reported + 1, last, 0))

    def _settle(self, publisher: KnownPublisher, id: int, now: float, out: list[Output]) -> None:
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

    def _next_path(self, publisher: KnownPublisher) -> int:
        """The path to go on with: the newest one that replays all before it, else the lowest held."""
        replays = [path for path, opening in publisher.openings.items() if not opening.finished]
        return max(replays, default=min(publisher.held))

    def _may_advance(self, publisher: KnownPublisher) -> bool:
        """Whether the next path may become the current one."""
        path = self._next_path(publisher)
        if publisher.finished and path == publisher.path + 1:
            return True
        if publisher.origins and self._safe.await_tapes and self._awaited(publisher, path) is not None:
            return False
        if not self._safe.hold_for_fin:
            return True
        # a path in between that we have seen nothing of may still be on its way through the Exchange that was left
        opening = publisher.openings.get(path)
        if opening is None:
            # it began before our time, so those before it ended before our time; or it did so unrecorded
            early = publisher.path == 0 or publisher.amid or self._began_early(publisher, publisher.path)
            return early or path in publisher.origins
        return not opening.finished or not self._attached(opening.left)

    def _awaited(self, publisher: KnownPublisher, path: int) -> tuple[str, Origin] | None:
        """The tape ("": any) that may have more of what came before this path: for what `unread` was true."""
        before = max(1, publisher.path)
        for opened in sorted(one for one in publisher.origins if one <= path):
            opening, origin = publisher.openings.get(opened), publisher.origins[opened]
            if opening is None:
                if publisher.amid:  # it began before our time, but for what began while recording was off
                    origin = origin[0], min(origin[1], self._since())
                if (origin[1] or not publisher.amid) and self._unread("", origin):
                    return "", origin
            elif opened > before + 1 and self._unread("", origin):  # where the path was that we are on is not known
                return "", origin
            elif opening.finished and opened == path:
                # its FIN comes, however late; if it does not, its Exchange is gone, and what is missing is sent again
                left = opening.left  # its tape may not be known yet
                for asked in (left, (origin[0], FOREVER)), (left, origin), ("", ("", origin[1])):
                    if self._unread(*asked):
                        return asked
            elif opening.left and self._unread(opening.left, origin):
                return opening.left, origin
            before = opened
        return None

    def _advance(self, publisher: KnownPublisher, out: list[Output]) -> None:
        before = publisher.path
        path = publisher.path = self._next_path(publisher)
        opening = publisher.openings.get(path)
        amid = publisher.amid or (opening is None and self._began_early(publisher, before))
        publisher.finished, publisher.replays = False, opening is not None and opening.left != "" and not opening.finished
        publisher.waiting_since = None
        if not self._safe.order_topics:
            publisher.delivered = 0
        events = self._take_held(publisher, path)
        overtakes = path not in publisher.origins or publisher.origins[path][1] < self.until_ms
        if amid and before:
            self._begin_amid(publisher, opening, events[0], before)
        elif self.entire and publisher.replays and not publisher.delivered:
            publisher.baseline = None  # what a path said that came to nothing: its replay says it anew
        # overtaken by a replay: it begins at its OPEN, unless it is another reader's
        for passed in sorted(held for held in publisher.held if held < path):
            passing = self._take_held(publisher, passed)
            if amid and (before < passed - 1 or passed not in publisher.openings):
                self._pass_over(publisher, passing[0].header)
            before = passed
            for event in passing:
                if event.header.kind == FrameKind.DATA and (
                    event.header.sequence <= events[0].header.sequence or not overtakes
                ):
                    self._data(publisher, event, out)
        if amid and before < path - 1 and opening is not None:
            self._pass_over(publisher, events[0].header)
        for known in publisher.openings, publisher.origins:
            for opened in [opened for opened in known if opened <= path]:
                del known[opened]
        for event in events:
            self._take(publisher, event, out)

    def _begin_amid(self, publisher: KnownPublisher, opening: PathOpening | None, first: FrameEvent, left: int) -> None:
        """The path began before our time on its tape: so did what is missing before its first frame. Or it repeats what came
        before our time on another tape, and may not have come from that, unless we have seen no beginning of the path behind
        `left`, the one we were on. Or it is the first one of a producer's next life: all before it is stored."""
        header, anew = first.header, opening is not None and not opening.finished
        unseen = left < publisher.path - 1 and left + 1 not in publisher.openings and self._is_past(publisher)
        replays = anew and opening is not None and opening.left != "" and not unseen
        publisher.entered = publisher.entered or opening is None or unseen
        if opening is None or ((anew or unseen) and not publisher.delivered):
            before = header.sequence - (header.kind == FrameKind.DATA)
            if not replays:
                held = [event.header for path, events in publisher.held.items() if path < publisher.path for event in events]
                before = min([before, *(one.sequence - 1 for one in held if one.kind == FrameKind.DATA)])
            publisher.begun, publisher.baseline = header.path, min(before, publisher.baseline or 0) if replays else before
            self._forget_topics(publisher, list(publisher.topics))
        # of a path of which only the end is on its tape for us nothing was delivered, as of one that has its beginning there
        publisher.amid = not publisher.delivered and (opening is not None or header.kind != FrameKind.DATA)

    def _began_early(self, publisher: KnownPublisher, before: int) -> bool:
        """Whether a path of which no beginning came, the first one behind `before` since tapes were read, began before our
        time: where nothing passed us by, we would have seen it."""
        return self._sees_all and self._doubts is None and not self.entire and 0 < before <= publisher.past_path

    def _is_past(self, publisher: KnownPublisher) -> bool:
        """Whether something of the current path may have come while tapes were read."""
        return self.amid or publisher.path <= publisher.past_path

    def _pass_over(self, publisher: KnownPublisher, first: Header) -> None:
        """Paths of which nothing was seen, or not the beginning, may lie before our time on their tapes: nobody knows whether
        what was on them is missing, though something older came again."""
        last, known = first.sequence - (first.kind == FrameKind.DATA), publisher.delivered or publisher.baseline or 0
        if 0 < known < last:
            self._forget_topics(publisher, list(publisher.topics))
            publisher.baseline, publisher.forgotten = known, last

    def live(self) -> None:
        """Tapes are not read any more: what is missing from now on is lost, of whom we had anything and wait for nothing."""
        self.amid, self._sees_all = False, True
        for publisher in self.publishers.values():
            publisher.amid = publisher.amid and not (publisher.delivered and not publisher.held)
            publisher.past_path = max(publisher.held, default=publisher.path)

    def attaching(self) -> None:
        """To an Exchange, anew or for the first time: paths may have begun in what it forwarded before."""
        self._sees_all = False

    def detached(self, now: float) -> list[Output]:
        """An Exchange was left: whoever waited for a FIN from it goes on."""
        out: list[Output] = []
        for id in sorted(self.waiting):
            self._settle(self.publishers[id], id, now, out)
        return out

    def go_on_amid(self, now: float, before_ms: int) -> list[Output]:
        """Whoever went on before that time behind a path that was not seen goes on here, too, once what was written before, by
        any clock, was read: that path, with its FIN, came before our time."""
        out: list[Output] = []
        for id in sorted(self.waiting):
            publisher = self.publishers[id]
            path = self._next_path(publisher)
            opening, origin = publisher.openings.get(path), publisher.origins.get(path)
            unseen = publisher.amid and (not publisher.path or path > publisher.path + 1)
            if not unseen or opening is None or origin is None or not opening.finished or origin[1] >= before_ms:
                continue
            if not self._unread(opening.left, origin):
                self._advance(publisher, out)
                self._settle(publisher, id, now, out)
        return out

    def _take_held(self, publisher: KnownPublisher, path: int) -> list[FrameEvent]:
        events = publisher.held.pop(path)
        self.held_bytes -= sum(event.size + HELD_FRAME_BYTES for event in events)
        return events

    def forget_held(self, since_ms: int) -> None:
        """Of whom only such paths wait as began on a tape at that time or later: they are another reader's."""
        for id in sorted(self.waiting):
            publisher = self.publishers[id]
            if not self._is_held_since(publisher, since_ms):
                continue
            for path in list(publisher.held):
                self._take_held(publisher, path)
                publisher.origins.pop(path, None)
                publisher.openings.pop(path, None)
            self.waiting.discard(id)
            publisher.waiting_since = None
            if not publisher.path:
                del self.publishers[id]

    @staticmethod
    def _is_held_since(publisher: KnownPublisher, time_ms: int) -> bool:
        return all(publisher.origins.get(path, ("", 0))[1] >= time_ms for path in publisher.held)

    def awaits(self) -> set[str]:
        """Ids of the Exchanges from which a FIN is waited for; "" if it is not known which."""
        return {self._left(self.publishers[id]) for id in self.waiting}

    def waits_for_tape(self, exchange: str) -> bool:
        """Whether somebody waits for what may be on the tape of this Exchange."""
        for id in self.waiting:
            publisher = self.publishers[id]
            tape, origin = self._awaited(publisher, self._next_path(publisher)) or (exchange, ("", 0))
            if tape == exchange or (not tape and self._unread(exchange, origin)):
                return True
        return False

    def waits_for_older(self, exchange: str, before_ms: int = FOREVER) -> bool:
        """The same, of what was written before what waits, by any clock: of a tape that is written for ever, too, that ends.
        before_ms: nobody counts who waits only with what was written then or later."""
        for id in self.waiting:
            publisher = self.publishers[id]
            path = self._next_path(publisher)
            if self._is_held_since(publisher, before_ms):
                continue
            tape, origin = self._awaited(publisher, path) or (exchange, ("", 0))
            if tape in ("", exchange) and self._unread(exchange, publisher.origins[path] if origin[1] == FOREVER else origin):
                return True
        return False

    def _left(self, publisher: KnownPublisher) -> str:
        path = self._next_path(publisher)
        opening, awaited = publisher.openings.get(path), self._awaited(publisher, path)
        if awaited is not None:
            return awaited[0]
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

    def _go_on(self, publisher: KnownPublisher, id: int, now: float, out: list[Output]) -> None:
        """Without the FIN."""
        self.unfinished += 1
        self._advance(publisher, out)
        self._settle(publisher, id, now, out)

    def sweep(self, now: float, forget_seconds: float, unread_at: float) -> None:
        """Forget the topics of publishers that have ended and of which nothing was heard for `forget_seconds`, in which
        every watermark of theirs has come; likewise a doubt. unread_at: when anything last lay unread though it had come."""
        if self._doubts is not None and now - max(self._doubted, unread_at) >= forget_seconds:
            self._doubts = None
            for publisher in self.publishers.values():
                publisher.doubtful = False
        for id, publisher in self.publishers.items():
            if publisher.finished and id not in self.waiting:
                if now - max(publisher.heard, unread_at) >= forget_seconds:
                    self._forget_topics(publisher, list(publisher.topics))
            elif publisher.delivered != publisher.swept:
                publisher.swept, publisher.heard = publisher.delivered, now

    def _forget_topics(self, publisher: KnownPublisher, topics: list[bytes]) -> None:
        for topic in topics:
            publisher.forgotten = max(publisher.forgotten, publisher.topics.pop(topic)[0])
            self.known_bytes -= TOPIC_BYTES + len(topic)

    def _make_room(self, newest: KnownPublisher) -> None:
        """Too much is known of topics: forget a quarter, of those first that have ended, or were not heard for longest."""
        enough = KNOWN_BYTES_MAX * 3 // 4
        for publisher in sorted(self.publishers.values(), key=lambda one: (one is newest, not one.finished, one.heard)):
            if self.known_bytes <= enough:
                return
            oldest = sorted(publisher.topics, key=lambda topic: publisher.topics[topic][0])
            while oldest and self.known_bytes > enough:
                some = oldest[: max(1, len(oldest) // 4) if publisher is newest else None]
                del oldest[: len(some)]
                self._forget_topics(publisher, some)
                self.forgotten_topics += len(some)

    def _forget_publishers(self) -> None:
        """Too many are known: forget an eighth of them; a later watermark of theirs reports nothing any more."""
        ids = sorted(
            self.publishers.keys() - self.waiting, key=lambda id: (not self.publishers[id].finished, self.publishers[id].heard)
        )
        for id in ids[: PUBLISHERS_KEPT // 8]:
            self._forget_topics(self.publishers[id], list(self.publishers[id].topics))
            del self.publishers[id]
            self.forgotten_publishers += 1

    def given_up(self) -> dict[str, int]:
        """What was given up to stay within the bounds of time and memory."""
        return {
            "paths_given_up": self.unfinished,
            "topics_forgotten": self.forgotten_topics,
            "publishers_forgotten": self.forgotten_publishers,
        }

    def held_frames(self) -> int:
        """How many frames are held back just now."""
        return sum(len(events) for id in self.waiting for events in self.publishers[id].held.values())

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        for id, publisher in self.publishers.items():
            assert publisher.path >= 1 or publisher.held, f"publisher {id}: nothing is known of it"
            assert all(path > publisher.path for path in publisher.held), f"publisher {id}: holds a path it has passed"
            assert self._doubts is not None or not publisher.doubtful, f"publisher {id}: is doubted though nothing is"
            assert bool(publisher.held) == (id in self.waiting), f"publisher {id}: waiting set is wrong"
        held = [event for one in self.publishers.values() for events in one.held.values() for event in events]
        assert self.held_bytes == sum(event.size + HELD_FRAME_BYTES for event in held), "held bytes are counted wrong"
        topics = [topic for one in self.publishers.values() for topic in one.topics]
        assert self.known_bytes == sum(TOPIC_BYTES + len(topic) for topic in topics), "bytes of topics are counted wrong"
