"""The verdict: what became of every message, per subscriber and in sum. Pure.

lost        acked, never delivered, and no gap reported
unknown     published, not acked, not delivered, not reported
duplicated  delivered again
reordered   delivered after a later one of the same publisher
adds_up     delivered + reported_gaps == published, and nothing that was reported as lost was delivered

What a run of roq chaos checks, by the names of RELIABILITY 1.3:
D1 no acknowledged loss        lost
D2 order per publisher         reordered
D3 no duplicates               duplicated
D4 nothing damaged or unknown  foreign: size, publisher and number of every message
D5 every gap is reported           adds_up; and reported only where a fault was longer than a publisher remembers: gaps
D6 memory is bounded           resources.py: no process ever has more than MEMORY_MAX
C1 to C4, C7                   invariants.py
C5, C6                         administration.py
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import starmap

import msgspec

from roq.tools.chaos.history import FaultDone, Sent, SubscriberHistory
from roq.tools.chaos.schedule import ChaosKind, Role

REPORTED_WITHIN_SECONDS = 15.0  # after a fault's end: paths are proved again, held messages are given up
EXAMPLES = 5  # ranges named per problem
COUNTS = ("published", "acked", "delivered", "lost", "duplicated", "reordered", "unknown", "reported_gaps", "foreign")


class MessageCounts(msgspec.Struct, frozen=True):
    """What became of the messages."""

    published: int
    acked: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    unknown: int
    reported_gaps: int
    foreign: int
    adds_up: bool


class Share(MessageCounts, frozen=True):
    """One subscriber's messages. examples: where the first violations are."""

    silence_seconds: float
    examples: tuple[str, ...] = ()


class Gap(msgspec.Struct, frozen=True):
    """One gap that was reported to a subscriber, `t` seconds after the start. fault: when the fault began that may have
    caused it, None: no fault can have."""

    t: float
    subscriber: int
    publisher: int
    first: int
    last: int
    messages: int
    fault: float | None


class Verdict(MessageCounts, frozen=True):
    """All subscribers together. published, acked: each message once; the others: summed over the subscribers."""

    subscribers: tuple[Share, ...]

    def problems(self) -> list[str]:
        """One line per violation; empty if all is well."""
        names = ("lost", "duplicated", "reordered", "foreign")
        found = [f"{getattr(self, name)} messages {name}" for name in names if getattr(self, name)]
        if not self.adds_up:
            found.append("delivered + reported does not make published")
        return found + [f"subscriber {at}: {text}" for at, share in enumerate(self.subscribers) for text in share.examples]


class Numbers:
    """A set of message numbers kept as ranges, so that millions of them in a few pieces cost nothing.

    Whole numbers from 1. Ranges are inclusive, disjoint, sorted and not adjacent."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """First and last of each range."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def overlap(self, first: int, last: int) -> int:
        """How many numbers of first..last are in."""
        low, high = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        pieces = zip(self._firsts[low:high], self._lasts[low:high], strict=True)
        return sum(min(last, end) - max(first, start) + 1 for start, end in pieces)

    def add(self, first: int, last: int) -> None:
        """Put first..last in; nothing if last < first."""
        if last < first:
            return
        low, high = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high], self._lasts[low:high] = [first], [last]

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges of first..last that are not in."""
        found = []
        for start, end in self.ranges():
            if start > last:
                break
            if start > first:
                found.append((first, start - 1))
            first = max(first, end + 1)
        return [*found, (first, last)] if first <= last else found


class LoadOutcome(StrEnum):
    """UNDECIDED: nothing is known to be wrong, but not all of it could be found out in the time there was."""

    PASSED = "passed"
    FAILED = "FAILED"
    UNDECIDED = "not decided"


class LoadVerdict(msgspec.Struct, frozen=True):
    """What became of one load. counts: by their names in prose. problems: what is wrong; undecided: what could not be found
    out, in words."""

    load: str
    outcome: LoadOutcome
    counts: Mapping[str, int]
    problems: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


def decide(load: str, counts: Mapping[str, int], problems: Sequence[str], undecided: Sequence[str]) -> LoadVerdict:
    """FAILED as soon as anything is wrong."""
    outcome = LoadOutcome.FAILED if problems else LoadOutcome.UNDECIDED if undecided else LoadOutcome.PASSED
    return LoadVerdict(load, outcome, counts, tuple(problems), tuple(undecided))


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """How many numbers these disjoint ranges hold."""
    return sum(last - first + 1 for first, last in ranges)


def judge(sent: Sequence[Sent], heard: Sequence[SubscriberHistory]) -> Verdict:
    """The verdict on one run whose every subscriber subscribed to everything before the first message."""
    shares = tuple(_share(sent, one) for one in heard)
    sums = {name: sum(getattr(share, name) for share in shares) for name in COUNTS}
    sums |= {"published": sum(one.published for one in sent), "acked": sum(one.acked for one in sent)}
    return Verdict(**sums, adds_up=all(share.adds_up for share in shares), subscribers=shares)


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict on several loads."""
    if len(verdicts) == 1:
        return verdicts[0]
    shares = tuple(share for one in verdicts for share in one.subscribers)
    adds_up = all(one.adds_up for one in verdicts)
    sums = {name: sum(getattr(one, name) for one in verdicts) for name in COUNTS}
    return Verdict(**sums, adds_up=adds_up, subscribers=shares)


def gaps(
    heard: Sequence[SubscriberHistory], faults: Sequence[FaultDone], *, ring_seconds: float
) -> tuple[tuple[Gap, ...], list[str]]:
    """Every gap that was reported, with the latest fault that cut messages' ways for as long as a publisher remembers; as
    problems, those reported when no such fault was on or just over: all others must lose nothing."""
    cuts = [fault for fault in faults if fault.seconds >= ring_seconds and _cuts_ways(fault)]
    found, problems = [], []
    for subscriber, one in enumerate(heard):
        for lost in one.reported:
            long = [fault for fault in cuts if fault.t <= lost.t]
            cause = long[-1] if long and lost.t <= long[-1].t + long[-1].seconds + REPORTED_WITHIN_SECONDS else None
            gap = Gap(lost.t, subscriber, lost.publisher, lost.first, lost.last, lost.messages, cause.t if cause else None)
            found.append(gap)
            if cause is None:
                problems.append(
                    f"subscriber {subscriber}: {lost.messages} messages reported lost at {lost.t:.1f} s, no long fault was on"
                )
    return tuple(found), problems


def _cuts_ways(fault: FaultDone) -> bool:
    """Whether messages can't pass some Exchange meanwhile."""
    if fault.kind in (ChaosKind.KILL, ChaosKind.PAUSE):
        return fault.role in (Role.EXCHANGE, Role.HOST)
    on_host = fault.role in (Role.EXCHANGE, Role.MONITOR, Role.MASTER, Role.HOST)  # the whole machine, with its Exchanges
    return fault.kind != ChaosKind.CUT_FROM_ZOOKEEPER and on_host


def _share(sent: Sequence[Sent], heard: SubscriberHistory) -> Share:
    delivered = lost = duplicated = reordered = unknown = 0
    examples: list[str] = []
    adds_up = True
    for publisher, (published, acked) in enumerate(sent):
        got, again, late = arrivals(heard.runs[publisher])
        told = [one for one in heard.reported if one.publisher == publisher]
        known = Numbers([*got.ranges(), *((one.first, one.last) for one in told)])
        missing, pending = known.missing(1, acked), known.missing(acked + 1, published)
        both = [one for one in told if got.overlap(one.first, one.last) > one.last - one.first + 1 - one.messages]
        reported = sum(one.messages for one in told)
        if len(got) + reported != published or both:
            adds_up = False
            examples.append(f"publisher {publisher}: {len(got)} delivered + {reported} reported of {published} published")
        delivered, lost, unknown = delivered + len(got), lost + count(missing), unknown + count(pending)
        duplicated, reordered = duplicated + len(again), reordered + len(late)
        named = (("lost", missing), ("unknown", pending), ("duplicated", again.ranges()), ("reordered", late.ranges()))
        examples += [f"publisher {publisher}: {ranges_text(what, ranges)}" for what, ranges in named if ranges]
        examples += [
            f"publisher {publisher}: reported as lost but delivered {one.first}..{one.last}" for one in both[:EXAMPLES]
        ]
    return Share(
        published=sum(one.published for one in sent),
        acked=sum(one.acked for one in sent),
        delivered=delivered,
        lost=lost,
        duplicated=duplicated,
        reordered=reordered,
        unknown=unknown,
        reported_gaps=sum(one.messages for one in heard.reported),
        foreign=heard.foreign,
        adds_up=adds_up and heard.foreign == 0,
        silence_seconds=round(heard.silence_seconds, 3),
        examples=tuple(examples),
    )


def arrivals(runs: Iterable[tuple[int, int]]) -> tuple[Numbers, Numbers, Numbers]:
    """What came, what came again, and what came late: after a later one of the same publisher."""
    got, again, late = Numbers(), Numbers(), Numbers()
    highest = 0
    for first, last in runs:
        new = got.missing(first, last)
        for start, end in Numbers(new).missing(first, last):
            again.add(start, end)
        for start, end in new:
            late.add(start, min(end, highest))
            got.add(start, end)
        highest = max(highest, last)
    return got, again, late


def ranges_text(what: str, ranges: Sequence[tuple[int, int]]) -> str:
    """What, and the first ranges of it."""
    more = ", …" if len(ranges) > EXAMPLES else ""
    return f"{what} {', '.join(starmap('{}..{}'.format, ranges[:EXAMPLES]))}{more}"
