"""Counting what arrived: lost, duplicated, reordered by number, and latency percentiles. Pure; reads no clock.

A *stream* is a series of messages numbered from 1 without holes: all messages of one publisher (numbered by the SDK), or of
one publisher on one topic (numbered by the load generator in the payload). The subscriber's loop handles the next expected
number itself, in two comparisons, and calls `take` for anything else:

    number == tally.next    counted by raising tally.next
    number >  tally.next    the numbers between are missing, until they arrive (reordered) or the end (lost)
    number <  tally.next    missing so far: reordered; else: duplicated
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

from roq.tools.bench.load import Load, on_topic

PAUSE_EVERY = 256  # messages of one stream between two looks at the clock
SAMPLES_KEPT = 1_000_000  # latencies one subscriber keeps; beyond that, every second one, then every fourth…
WARM_UP_FRACTION = 0.1  # first latencies left out: connections and caches warm up
NEVER = (1 << 63) - 1


class Tally:
    """What arrived of one stream. `limit`: number after which the reader shall pause; `end`: last number, NEVER if unknown."""

    __slots__ = ("_gaps", "duplicated", "end", "limit", "missing", "next", "reordered", "stream")

    def __init__(self, stream: int, end: int = NEVER) -> None:
        self.stream, self.end = stream, end
        self.next = 1
        self.limit = min(PAUSE_EVERY, end)
        self.missing = self.duplicated = self.reordered = 0
        self._gaps: list[tuple[int, int]] = []  # missing numbers below `next`, sorted, first and last of each gap

    @property
    def distinct(self) -> int:
        """Different messages that arrived."""
        return self.next - 1 - self.missing

    @property
    def complete(self) -> bool:
        """Everything up to the known end arrived."""
        return self.distinct >= self.end

    def take(self, number: int) -> None:
        """Count message `number`, whatever it is."""
        if number >= self.next:
            if number > self.next:
                self._gaps.append((self.next, number - 1))
                self.missing += number - self.next
            self.next = number + 1
        elif self._fill(number):
            self.missing -= 1
            self.reordered += 1
        else:
            self.duplicated += 1

    def _fill(self, number: int) -> bool:
        at = bisect_right(self._gaps, (number, NEVER)) - 1
        if at < 0 or not self._gaps[at][0] <= number <= self._gaps[at][1]:
            return False
        first, last = self._gaps[at]
        self._gaps[at : at + 1] = [gap for gap in ((first, number - 1), (number + 1, last)) if gap[0] <= gap[1]]
        return True

    def move_limit(self) -> None:
        """Pause again after PAUSE_EVERY more numbers, at the end, and at each message that comes after the last one."""
        self.limit = min(self.next - 1 + PAUSE_EVERY, self.end)

    def lost(self, published: int) -> int:
        """How many of `published` messages never arrived."""
        return published - self.distinct


class LatencySamples:
    """Latencies in nanoseconds, bounded: when full, every second one is kept and the rest of the run is sampled as thinly."""

    def __init__(self, kept: int = SAMPLES_KEPT) -> None:
        self._kept, self._stride, self._skip = kept, 1, 0
        self.values = array("q")

    def add(self, nanoseconds: int) -> None:
        """One latency."""
        if self._skip:
            self._skip -= 1
            return
        self._skip = self._stride - 1
        self.values.append(nanoseconds)
        if len(self.values) >= self._kept:
            self.values = self.values[::2]
            self._stride *= 2
            self._skip = self._stride - 1

    def settled(self) -> list[int]:
        """The latencies without the warm-up, sorted."""
        return sorted(self.values[int(len(self.values) * WARM_UP_FRACTION) :])


class Account:
    """All streams one subscriber hears. `foreign`: messages of streams nobody announced."""

    def __init__(self, ends: dict[int, int]) -> None:
        self._tallies = {stream: Tally(stream, end) for stream, end in ends.items()}
        self.samples = LatencySamples()
        self.last_ns = 0  # monotonic, of the newest counted look at the clock
        self.foreign = 0
        self._nobody = Tally(-1, 0)

    @property
    def nobody(self) -> Tally:
        """A tally no message fits, to begin a loop with."""
        return self._nobody

    def take(self, stream: int, number: int) -> Tally:
        """Count a message that is not the next of the stream read last; the tally of its stream."""
        tally = self._tallies.get(stream)
        if tally is None:
            self.foreign += 1
            return self._nobody
        tally.take(number)
        return tally

    def pause(self, tally: Tally, now_ns: int, latency_ns: int) -> bool:
        """Note time and latency of the message just counted; True when everything has arrived."""
        if tally.stream == self._nobody.stream:
            return False
        self.last_ns = now_ns
        self.samples.add(latency_ns)
        tally.move_limit()
        return tally.next > tally.end and self.complete

    @property
    def complete(self) -> bool:
        """Every stream's end is known and reached, without holes."""
        return all(tally.complete for tally in self._tallies.values())

    @property
    def progress(self) -> int:
        """Grows with every message."""
        return sum(tally.distinct + tally.duplicated for tally in self._tallies.values()) + self.foreign

    def set_ends(self, ends: dict[int, int]) -> None:
        """The publishers have ended with these numbers."""
        for stream, end in ends.items():
            tally = self._tallies[stream]
            tally.end = end
            tally.move_limit()

    def totals(self) -> tuple[int, int, int]:
        """(delivered, duplicated, reordered); delivered counts every message once."""
        tallies = self._tallies.values()
        return (
            sum(tally.distinct for tally in tallies),
            sum(tally.duplicated for tally in tallies),
            sum(tally.reordered for tally in tallies),
        )


def stream_of(publisher: int, topic: int) -> int:
    """The stream of a stamped payload."""
    return publisher << 32 | topic


def stream_ends(load: Load, publishers: dict[int, int], published: dict[int, int]) -> dict[int, int]:
    """Last number of every stream a subscriber hears. publishers: SDK id by index; published: messages by index, or empty
    while unknown."""
    ends: dict[int, int] = {}
    for index, identity in publishers.items():
        count = published.get(index, NEVER)
        if not load.stamped:
            ends[identity] = count
            continue
        for topic in range(load.topics):
            ends[stream_of(index, topic)] = NEVER if count == NEVER else on_topic(count, load.topics, topic)
    return ends


def percentile(ordered: list[int], fraction: float) -> int | None:
    """The value below which `fraction` of the sorted values lie; None without values."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


def latency_us(samples: Iterable[int]) -> dict[str, float | None]:
    """p50, p99 and p999 in microseconds of latencies in nanoseconds."""
    ordered = sorted(samples)
    found = {name: percentile(ordered, fraction) for name, fraction in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {name: None if value is None else round(value / 1000, 1) for name, value in found.items()}


def thin(ordered: list[int], most: int) -> list[int]:
    """At most `most` of the sorted values, evenly spaced in rank, so that percentiles stay what they are."""
    if len(ordered) <= most:
        return ordered
    return [ordered[index * len(ordered) // most] for index in range(most)]
