"""Cards: who somebody is and what they may do, signed by the cluster's authority. Pure.

    authority   an Ed25519 key, kept offline: it signs cards and access lists
    card        name, role, CURVE key, rights and when they end: shown to every server, in CURVE's INITIATE
    access list which cards are revoked, and those of programs that can't show theirs; the highest version counts

A right is for queues by name, or by how their names begin: `orders`, `orders.*`, `*`. What no right allows is denied.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
from nacl import bindings
from nacl.exceptions import BadSignatureError

from roq.errors import AccessDenied, CallError, CardRevoked
from roq.wire.limits import PROPERTIES_BYTES_MAX

S = TypeVar("S", bound=msgspec.Struct)
CARD_PROPERTY = b"x-roq-card"
CLOCK_SECONDS = 300.0  # clocks may differ by so much
GRANTS_MAX = 100  # of one card: it is sent with every connection
PUBLISH_RATE_MIN = 100_000  # bytes per second: with less, what has been read already would take many seconds


class SecurityMode(StrEnum):
    """Whom a daemon lets in. CARDS: who shows one, and it has its own; NONE: everybody, which must be said; MIXED: both, while
    a cluster is being given cards."""

    CARDS = "cards"
    NONE = "none"
    MIXED = "mixed"


class CardRole(StrEnum):
    """What a card's holder is."""

    CLIENT = "client"
    HOST = "host"  # its HCM and all its processes; the card's name is the host's
    GCM = "gcm"


class Right(StrEnum):
    """What may be done with a queue, a work queue or a shuffle."""

    ADMIN = "admin"  # create, remove, configure, purge; with `*` also the cluster and its hosts
    DESCRIBE = "describe"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    PUT = "put"
    LEASE = "lease"
    READ = "read"  # what is recorded
    SHUFFLE_WRITE = "shuffle-write"
    SHUFFLE_READ = "shuffle-read"


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One right. names: `orders`, `orders.*`, `*`."""

    right: Right
    names: str

    def covers(self, right: Right, name: str) -> bool:
        """Whether it allows this. name "*": all there are."""
        if right is not self.right:
            return False
        return name.startswith(self.names[:-1]) if self.names.endswith("*") else name == self.names


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """What all programs with cards of one name may use of each server, which is a port of a process. 0: no bound of its own."""

    connections: int = 0
    publish_bytes_per_second: int = 0  # through one Exchange

    def check(self) -> None:
        """Raises CallError."""
        if self.connections < 0 or 0 < self.publish_bytes_per_second < PUBLISH_RATE_MIN or self.publish_bytes_per_second < 0:
            raise CallError(
                f"a quota is a number of connections, and {PUBLISH_RATE_MIN:,} bytes per second or more to publish; 0: no bound"
            )


NO_QUOTA = Quota()


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What is signed. id: random, named by revocations; key: X25519, 32 bytes; begins, expires: seconds since 1970."""

    id: str
    name: str
    role: CardRole
    key: bytes
    grants: tuple[Grant, ...]
    begins: float
    expires: float
    quota: Quota = NO_QUOTA

    def allows(self, right: Right, name: str) -> bool:
        """Whether its holder may do that with what has this name."""
        return any(grant.covers(right, name) for grant in self.grants)

    def check(self, right: Right, name: str) -> None:
        """Raises AccessDenied."""
        if not self.allows(right, name):
            raise AccessDenied(f"{self.name} has no right to {right} {'everything' if name == '*' else repr(name)}")

    def check_time(self, now: float) -> None:
        """now: seconds since 1970. Raises AccessDenied."""
        if now < self.begins - CLOCK_SECONDS:
            ahead = self.begins - now
            raise AccessDenied(f"the card of {self.name} begins in {ahead:.0f} s: is the clock wrong?")
        if now > self.expires:
            raise AccessDenied(f"the card of {self.name} expired {now - self.expires:.0f} s ago: ask for a new one")


REVOKED = "was revoked"  # how the reason ends for which a server refuses such a card


def denial(reason: str) -> type[AccessDenied]:
    """What it is that a server refuses a connection for this reason, which is all that ZMTP's ERROR has."""
    return CardRevoked if reason.endswith(REVOKED) else AccessDenied


class AccessList(msgspec.Struct, frozen=True, array_like=True):
    """revoked: ids of cards. admitted: signed cards of programs that can't show theirs, known by their keys."""

    version: int = 0
    revoked: tuple[str, ...] = ()
    admitted: tuple[bytes, ...] = ()


def new_card(
    name: str,
    role: CardRole,
    key: bytes,
    grants: Iterable[Grant],
    begins: float,
    expires: float,
    quota: Quota = NO_QUOTA,
) -> Card:
    """Raises CallError: too many grants, names that can't be meant, or such a quota."""
    quota.check()
    kept = tuple(dict.fromkeys(grants))
    if len(kept) > GRANTS_MAX:
        raise CallError(f"a card has at most {GRANTS_MAX} rights, got {len(kept)}: use names that end with *")
    for grant in kept:
        if not grant.names or "*" in grant.names[:-1]:
            raise CallError(f"{grant.names!r} names no queues: a name, how names begin (`orders.*`), or `*`")
    return Card(secrets.token_hex(8), name, role, key, kept, begins, expires, quota)


def sign(what: msgspec.Struct, authority_secret: bytes) -> bytes:
    """The bytes that `verify` takes."""
    return bindings.crypto_sign(msgspec.msgpack.encode(what), authority_secret)


def verify(signed: bytes, authorities: Sequence[bytes], kind: type[S]) -> S:
    """What one of these authorities has signed. Raises AccessDenied."""
    for authority in authorities:
        try:
            return msgspec.msgpack.decode(bindings.crypto_sign_open(signed, authority), type=kind)
        except (BadSignatureError, ValueError):
            continue
        except msgspec.MsgspecError:
            raise AccessDenied("what the authority has signed is of another kind or version") from None
    raise AccessDenied("another authority has signed it: is it for another cluster?")


def verify_card(signed: bytes, key: bytes, authorities: Sequence[bytes], now: float) -> Card:
    """The card of whoever has this key. now: seconds since 1970. Raises AccessDenied."""
    if len(signed) > PROPERTIES_BYTES_MAX:
        raise AccessDenied(f"a card of {len(signed)} bytes")
    card = verify(signed, authorities, Card)
    if card.key != key:
        raise AccessDenied(f"the card of {card.name} was shown by somebody else")
    card.check_time(now)
    return card
