"""What a Monitor that takes over knows of the time before it: whom a backup has heard, whom to wait for, which Exchanges may
live on at a lost host. Pure.

Subscribers are expected because somebody has named them: this Monitor itself, if it was a backup that they reported to, or
the one before it when it was fenced (process.py); or because they have reported, and not joined yet. Those that were alive a
moment ago are waited for, as long as a new publisher would be: a replay that begins without them is lost to them. If whoever
named them knew all that there are, nothing has to be waited for once they are back. A Monitor that is stopped has nobody to
name them to: it tells each how many there are, and they tell that here.

A host counts as lost when its HCM's session has ended; its processes may live on, with publishers that obey the old Monitor.
Such an Exchange is over once it is known to have ended, or once its lease must have run out: the processes of a host end by
themselves when their HCM has not renewed it (HeartbeatBoard.renew_lease). Each side counts on its own monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping

from roq.runtime.liveness import FailureDetector
from roq.wire.assignment import FormerProcess
from roq.wire.monitor import ReadyCount
from roq.wire.process import Named

REJOIN_SECONDS = 1.5  # after a Monitor's start: its members rejoin within a report's interval
NOBODY_SECONDS = 3.0  # that long if no subscriber has: they may only be slow to notice
NEWCOMER_SECONDS = 5.0  # what may harm in silence waits for the slowest: 3 s until it looks for its Monitor, and two tries
KNOWN_SECONDS = 2.0  # after the first report everybody else has told a backup of itself too
HEARD_SECONDS = 5.0  # a subscriber that has been silent for longer is not waited for
EXPECTED_SECONDS = 5.0  # 3 s until a client looks for its Monitor, and two tries
LIVING_SECONDS = 2.5  # whoever has been silent for longer may be dead: the living don't wait for it


class HeardSubscribers:
    """The subscribers that have reported to a backup."""

    def __init__(self) -> None:
        self._first = 0.0
        self._detector = FailureDetector[int]()

    def heard(self, subscriber: int, now: float) -> None:
        """A subscriber has reported."""
        self._first = self._first or now
        self._detector.heard(subscriber, now)

    def forget(self, now: float) -> None:
        """Once a second: whoever has been silent for long."""
        self._detector.forget_silent(HEARD_SECONDS, now)

    def expected(self, now: float) -> dict[int, float] | None:
        """Who will come back if this Monitor is activated now, and when each was heard last. None if this backup can't know."""
        if not self._first or now - self._first < KNOWN_SECONDS:
            return None
        self.forget(now)
        return dict(self._detector.last) or None  # nobody at all: rather this process stood still than that all have left


class ExpectedSubscribers:
    """Named at `now` (monotonic seconds) by somebody who knew all; heard: when each was heard last, None if nobody has yet.
    sought: they have to look for this Monitor, which is not where the one before it was."""

    def __init__(self, heard: Mapping[int, float] | None = None, now: float = 0.0, sought: bool = False) -> None:
        self._sought = sought
        self._found = math.inf  # when the first member had found this Monitor
        self._named: set[int] = set()
        self._returned: set[int] = set()
        self._counted: set[int] = set()  # those of them that know that the Monitor before has counted them
        self._living_count = 0  # as that one said
        self._living: set[int] = set()
        self.awaited_until = 0.0  # monotonic seconds
        self._all = False
        if heard is not None:
            self.add(heard, now)
            self._all = True

    @property
    def all(self) -> frozenset[int] | None:
        """Every one that there is, None if that is not known."""
        return frozenset(self._named) if self._all else None

    def add(self, heard: Mapping[int, float], now: float) -> None:
        """Named as well, by somebody who may not know all."""
        self._named.update(heard)
        self._living.update(one for one, last in heard.items() if now - last <= LIVING_SECONDS)
        self.awaited_until = now + EXPECTED_SECONDS

    def returns(self, now: float, before: ReadyCount | None, subscriber: int | None) -> None:
        """A member of the time before asks to join. before: what the Monitor right before this one told it."""
        self._found = min(self._found, now)
        if subscriber is not None:
            self._returned.add(subscriber)
        if not self._sought or self._all or before is None:
            return
        if before.living > self._living_count:
            self._living_count, self.awaited_until = before.living, now + EXPECTED_SECONDS
        if subscriber is not None:
            self._counted.add(subscriber)
            if len(self._counted) == before.all:
                self._named, self._all = set(self._counted), True

    def reported(self, subscriber: int, now: float) -> None:
        """It lives, and has been told to join. It is waited for once: one may report for ever and never join."""
        if subscriber not in self._named:
            self.add({subscriber: now}, now)

    def left(self, subscriber: int) -> None:
        """It has said good-bye."""
        self._named.discard(subscriber)
        self._counted.discard(subscriber)
        self._living.discard(subscriber)

    def all_in(self, present: Container[int]) -> bool:
        """Whether they are known, and all of them are back."""
        return self._all and all(one in present for one in self._named)

    def awaited(self, present: Container[int], now: float) -> bool:
        """Whether one that lives is still to come back, and not too late."""
        if now >= self.awaited_until:
            return False
        return len(self._returned) < self._living_count or any(one not in present for one in self._living)

    def until(self, seconds: float, begun: float) -> float:
        """When they have had so many seconds to come back, as far as is known by now. If nobody named them and each has to look
        for this Monitor, after the same silence, these count from when the first had found it; EXPECTED_SECONDS are enough in
        any case."""
        if self._sought and not self._all:
            begun = max(begun, min(self._found, begun + EXPECTED_SECONDS - seconds))
        return begun + seconds

    def stood_still(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        self.awaited_until += seconds
        self._found += seconds


class FormerExchanges:
    """The Exchanges `lives` of lost hosts, whose leases end at most their lease_seconds from `now` (monotonic seconds)."""

    def __init__(self, lives: Iterable[FormerProcess] = (), now: float = 0.0) -> None:
        self._ends = {(life.exchange, life.host): now + life.lease_seconds for life in lives}

    def gone(self, exchange: str, host: str) -> None:
        """It has ended, or obeys this Monitor."""
        self._ends.pop((exchange, host), None)

    def keep(self, lives: Collection[tuple[str, str]]) -> None:
        """Only these (Exchange, host) are still meant: the hosts of the others are back, and stopped them before."""
        self._ends = {life: until for life, until in self._ends.items() if life in lives}

    def left(self, now: float) -> tuple[str, ...]:
        """Those that may still carry messages, in words."""
        return tuple(
            f"Exchange {exchange} of the lost host {host}, which may go on for {until - now:.0f} s"
            for (exchange, host), until in self._ends.items()
            if now < until
        )


class Takeover:
    """Of a Monitor that took over from another one at `begun` (monotonic seconds; None: it is the first one of a new queue).
    expected: subscribers that will come back, and when each was heard last; None if nobody can name them. former: what that
    one's host may have left behind. sought: see ExpectedSubscribers. present, in all methods: the subscribers that are back."""

    def __init__(
        self,
        begun: float | None = None,
        expected: Mapping[int, float] | None = None,
        former: FormerExchanges | None = None,
        sought: bool = False,
    ) -> None:
        self.begun = begun
        self.former = former or FormerExchanges()
        self._expected = ExpectedSubscribers(expected, begun or 0.0, sought)

    def young(self, seconds: float, now: float) -> bool:
        """Whether it is no longer ago than that."""
        return self.begun is not None and now - self.begun < seconds

    def returns(self, now: float, before: ReadyCount | None, subscriber: int | None = None) -> None:
        """See ExpectedSubscribers."""
        self._expected.returns(now, before, subscriber)

    def reported(self, subscriber: int, now: float) -> None:
        """A subscriber lives that has not joined."""
        if self.begun is not None:
            self._expected.reported(subscriber, now)

    def left(self, member: int) -> None:
        """It has said good-bye."""
        self._expected.left(member)

    def expect(self, named: Named, now: float) -> None:
        """A Monitor before this one names the subscribers it had."""
        heard = {subscriber: now - silent for subscriber, silent in named.subscribers.items()}
        if named.all:
            self._expected = ExpectedSubscribers(heard, now)
        else:
            self._expected.add(heard, now)

    @property
    def all(self) -> frozenset[int] | None:
        """Every subscriber that there was, None if that is not known."""
        return self._expected.all

    def awaited(self, present: Container[int], now: float) -> bool:
        """Whether one that lives is still to come back, and not too late."""
        return self._expected.awaited(present, now)

    def back(self, seconds: float, present: Container[int], now: float) -> bool:
        """Whether they are all back, or have had so many seconds and none that lives is awaited."""
        if self.begun is None or self._expected.all_in(present):
            return True
        return now >= self._expected.until(seconds, self.begun) and not self.awaited(present, now)

    def waits(self, now: float) -> tuple[str, ...]:
        """Why nobody new is told that it is ready: what may carry messages and can't be proved."""
        young = self.young(NEWCOMER_SECONDS, now)
        return (*self.former.left(now), *(("Exchanges that may not have reported to the new Monitor yet",) if young else ()))

    def stood_still(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long."""
        if self.begun is not None:
            self.begun = min(now, self.begun + seconds)
        self._expected.stood_still(seconds)

    def due(self, now: float) -> float | None:
        """When something may go on next for which nothing but time is waited, as far as is known by now; None if never."""
        if self.begun is None:
            return None
        times = [self._expected.until(seconds, self.begun) for seconds in (REJOIN_SECONDS, NOBODY_SECONDS, NEWCOMER_SECONDS)]
        return min((time for time in (*times, self._expected.awaited_until) if time > now), default=None)
