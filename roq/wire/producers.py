"""Producers: publishers with a name, in the conversation with the Global Configuration Manager (roq/wire/gcm.py).

publisher    OpenProducer → ProducerGrant, then KeepProducer → Done once in a while
anybody      ListProducers → Producers, ForgetProducer → Done

A publisher publishes as long as it has kept within LEASE_SECONDS. So all that is on the tapes behind the `number` that is kept
was written from the time before it on, and LEASE_SECONDS after it at most, but for the differences between clocks.
"""

from __future__ import annotations

import msgspec

LEASE_SECONDS = 30.0  # who could not keep for so long publishes nothing more until it could
LIFE_BITS = 12  # of a path's number: paths of one life of a producer, as long as it keeps which one it is on
LIVES_MAX = 1 << 32 - LIFE_BITS


class OpenProducer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Publish under this name from now on: whoever did before does not any more. Answered with ProducerGrant. holder: drawn
    anew by whoever opens it, so the same request again is harmless. owner: for people. holds: it has opened it already and
    asks for another proof; raises ProducerFenced if it has it no more."""

    queue: str
    name: str
    holder: str
    owner: str = ""
    holds: bool = False


class ProducerGrant(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to OpenProducer. publisher: its id. path: its paths are above this one. number: of its last message that is known
    to be stored. exchange: that it was on last, "" if it was on none. settled: nothing is stored behind it; else what is was
    written within since..until (seconds since 1970, of the GCM's clocks). proof: that the id was given to who asked."""

    publisher: int
    path: int
    number: int
    exchange: str
    settled: bool
    since: float
    until: float
    proof: bytes = b""


class KeepProducer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep what its holder has stored. turn: 1, 2, … of each holder; one that was overtaken changes nothing. number: of its
    last message that is stored with all before it. fresh: everything behind it was sent after the turn before was answered (or
    the opening was). path: that it is on, through this Exchange. closed: it publishes nothing more. Raises ProducerFenced."""

    queue: str
    name: str
    holder: str
    turn: int
    number: int
    fresh: bool
    path: int
    exchange: str = ""
    closed: bool = False


class ListProducers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Producers of a queue, by name. after: the last one of the answer before, if there were more."""

    queue: str
    after: str = ""


class ForgetProducer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep nothing of this name any more; who holds it is fenced. Answered with Done also if there is none."""

    queue: str
    name: str


class ProducerView(msgspec.Struct, frozen=True, array_like=True):
    """A producer. number: of its last message that is kept as stored; there may be more behind it unless it is closed. owner:
    who opened it last, at `opened`; kept: when that was kept (seconds since 1970)."""

    name: str
    number: int
    closed: bool
    owner: str
    opened: float
    kept: float


class Producers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListProducers; more: ask again, after the last one."""

    views: tuple[ProducerView, ...]
    more: bool = False
