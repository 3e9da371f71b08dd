"""What is done, how much of it, and how it is checked. Pure.

A payload is 100 bytes: its number from 0, the nanoseconds of the machine's monotonic clock at which it was published if
somebody wants to know, zeros.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from enum import StrEnum

import msgspec

SIZE, WINDOW = 100, 1000  # bytes of a payload; messages that are published at once, or read at once
MARK = struct.Struct("<QQ")
PADDING = bytes(SIZE - MARK.size)
QUEUE_TOPIC = "bench.t0"
MEMBERS = (1, 4)


class Wrong(RuntimeError):
    """Messages are missing, repeated, out of order or not acknowledged: the rate means nothing."""


class Scenario(StrEnum):
    """What is measured."""

    PUBLISH = "confirmed publish, 1,000 outstanding"
    ONE_BY_ONE = "confirmed publish, one by one"
    REPLAY = "replay from the start"
    GROUP = "group with acks"
    GROUP_SINGLY = "group with acks, one by one"
    LIVE = "recording on and off"
    AWAY = "away and back"


class Size(msgspec.Struct, frozen=True):
    """How much. publish_seconds: a publisher ends after so long, or after `messages`. fill_seconds: at most, for what is stored
    before it is read. rate: messages/s while a subscriber is away. quiet_seconds: how long a quiet machine is waited for."""

    messages: int = 1_000_000
    one_by_one: int = 20_000
    group_messages: int = 200_000
    group_singly: int = 4_000
    publish_seconds: float = 3.0
    fill_seconds: float = 30.0
    live_seconds: float = 3.0
    latency_seconds: float = 8.0
    away_seconds: float = 60.0
    rate: int = 20_000
    quiet_seconds: float = 15.0


FULL = Size()
QUICK = Size(20_000, 200, 5_000, 200, 0.5, 3.0, 0.3, 1.0, 2.0, 5_000, 0.0)


class Found(msgspec.Struct, frozen=True):
    """One way of doing it in one run. flushes: of the whole disk, per message. cores: busy, by the clients and by all else."""

    way: str
    messages: int
    seconds: float
    p50_us: float | None = None
    p99_us: float | None = None
    flushes: float | None = None
    client_cores: float = 0.0
    other_cores: float = 0.0

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds


def payloads(first: int, count: int, now_ns: int = 0) -> list[bytes]:
    """`count` payloads, numbered from `first`."""
    pack, padding = MARK.pack, PADDING
    return [pack(number, now_ns) + padding for number in range(first, first + count)]


def windows(count: int) -> Iterable[list[bytes]]:
    """`count` payloads from number 0, WINDOW at a time."""
    return [payloads(first, min(WINDOW, count - first)) for first in range(0, count, WINDOW)]


def published_ns(payload: bytes) -> int:
    """When it was published."""
    return int(MARK.unpack_from(payload)[1])


def numbers(taken: Iterable[bytes]) -> array[int]:
    """Of these payloads. Raises Wrong if one is of another size."""
    found = array("Q")
    for payload in taken:
        if len(payload) != SIZE:
            raise Wrong(f"a payload of {len(payload)} bytes, {SIZE} were published")
        found.append(MARK.unpack_from(payload)[0])
    return found


def check_sequence(found: array[int], first: int, count: int) -> None:
    """Each of `count` numbers from `first`, once, in order. Raises Wrong, naming the first place that is wrong."""
    if found == array("Q", range(first, first + count)):
        return
    for place, number in enumerate(found):
        if number != first + place or place >= count:
            raise Wrong(f"of messages {first} to {first + count - 1}, {number} came where {first + place} was due")
    raise Wrong(f"{len(found)} messages of {count} came")


def check_shared(found: Iterable[array[int]], count: int) -> None:
    """Each of `count` numbers from 0 went to one member. Raises Wrong."""
    together = array("Q", sorted(number for part in found for number in part))
    if together == array("Q", range(count)):
        return
    missing, repeated = count - len(set(together)), len(together) - len(set(together))
    raise Wrong(f"of {count} messages to share, {missing} are missing and {repeated} came again")


def without_repeats(first: array[int], second: array[int]) -> array[int]:
    """What came before a break and after it, where the second part may begin with the last ones of the first again."""
    again = next((place for place, number in enumerate(second) if not first or number > first[-1]), len(second))
    return first + second[again:]
