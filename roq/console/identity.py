"""Who somebody is at the console, and the sessions of those who are signed in. No IO.

    none    the cluster has no security: everybody is ANYBODY, and may what the console may
    card    a card file is presented; its rights are its holder's
    proxy   a proxy in front says who it is (a header), a file says what that name may (users.py)

A card is proved to be one's own by presenting its file, secret key included, over TLS or this machine's loopback. A challenge
would keep the secret in the browser, but against whom? The page that answered it comes from the console, which could as well
read it; and curl, or a program without an SDK, could not answer it. Of the file nothing is kept but the card itself: name,
rights, end, id. What is done is done by the console's own card after the holder's rights were checked by the very tables that
the cluster's servers check (roq/wire/rights.py), and is written down with the holder's name.

Whoever starts a console in a terminal on the machine itself gets a link that signs in as the console's own card, once.

A session is a random token, in a cookie or as `Authorization: Bearer`; only its hash is kept. Its CSRF token is an HMAC of it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from roq.console.errors import LinkUsed, TooManyAttempts
from roq.wire.card import Card, CardRole, Grant, Right

SESSIONS_MAX = 1000  # the one that was used longest ago goes first
PERSONS_SESSIONS_MAX = 50  # of one person's, before other people's: a program may sign in each time it runs
IDLE_SECONDS = 8 * 3600.0
LINK_SECONDS = 600.0  # a link that nobody has followed by then signs nobody in
ATTEMPTS_MAX, ATTEMPTS_SECONDS = 10, 60.0  # wrong cards from one address
ADDRESSES_MAX = 10_000  # whose wrong cards are counted
ANYBODY_NAME = "anybody"


class SignInKind(StrEnum):
    """How people are known."""

    NONE = "none"
    CARD = "card"
    PROXY = "proxy"


class Person(msgspec.Struct, frozen=True):
    """card: None where the cluster has no security; of a proxy's user one that nobody signed."""

    name: str
    card: Card | None = None


ANYBODY = Person(ANYBODY_NAME)


def proxied(name: str, grants: tuple[Grant, ...]) -> Person:
    """Whom a proxy vouches for."""
    return Person(name, Card("", name, CardRole.CLIENT, b"", grants, 0.0, float("inf")))


class SignedInSession(msgspec.Struct):
    """used: when it was asked with last, on the clock of Sessions."""

    person: Person
    used: float


class Sessions:
    """Of one console: they end with it. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._found: OrderedDict[bytes, SignedInSession] = OrderedDict()  # by hash, the one used longest ago first

    def open(self, person: Person) -> str:
        """Its token. The one that this person used longest ago ends if there are PERSONS_SESSIONS_MAX."""
        token = secrets.token_urlsafe(32)
        own = [name for name, one in self._found.items() if one.person == person]
        for name in own[: max(0, len(own) + 1 - PERSONS_SESSIONS_MAX)]:
            del self._found[name]
        self._found[_hash(token)] = SignedInSession(person, self._clock())
        while len(self._found) > SESSIONS_MAX:
            self._found.popitem(last=False)
        return token

    def person(self, token: str) -> Person | None:
        """None: it is over, or never was."""
        name, now = _hash(token), self._clock()
        session = self._found.get(name)
        if session is None:
            return None
        if now - session.used > IDLE_SECONDS:
            del self._found[name]
            return None
        session.used = now
        self._found.move_to_end(name)
        return session.person

    def end(self, token: str) -> None:
        """Signed out."""
        self._found.pop(_hash(token), None)

    def csrf(self, token: str) -> str:
        """What a page sends back with whatever changes something."""
        return hmac.new(self._key, token.encode(), hashlib.sha256).hexdigest()

    def proves(self, token: str, csrf: str) -> bool:
        """Whether it is that of this session."""
        return hmac.compare_digest(self.csrf(token).encode(), csrf.encode(errors="replace"))

    def cards(self) -> list[Card]:
        """Of all who are signed in by one, each once, by name."""
        found = {one.person.card.id: one.person.card for one in self._found.values() if one.person.card is not None}
        return sorted((card for card in found.values() if card.id), key=lambda card: card.name)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Attempts:
    """Wrong cards by the address they came from."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises TooManyAttempts."""
        times, now = self._failed.get(address), self._clock()
        while times and now - times[0] > ATTEMPTS_SECONDS:
            times.popleft()
        if times and len(times) >= ATTEMPTS_MAX:
            raise TooManyAttempts

    def failed(self, address: str) -> None:
        """One more."""
        self._failed.setdefault(address, deque(maxlen=ATTEMPTS_MAX)).append(self._clock())
        self._failed.move_to_end(address)
        while len(self._failed) > ADDRESSES_MAX:
            self._failed.popitem(last=False)


class SignInLink:
    """For whoever started the console: its holder is signed in as `person`, once, within LINK_SECONDS."""

    def __init__(self, person: Person, clock: Callable[[], float]) -> None:
        self.ticket = secrets.token_urlsafe(24)
        self._person, self._clock, self._until = person, clock, clock() + LINK_SECONDS

    @property
    def name(self) -> str:
        """Of whom it signs in."""
        return self._person.name

    def redeem(self, ticket: str) -> Person:
        """Raises LinkUsed."""
        good = hmac.compare_digest(self.ticket.encode(), ticket.encode(errors="replace"))
        if not good or self._clock() > self._until:
            raise LinkUsed
        self._until = float("-inf")
        return self._person


def names_shown(person: Person, right: Right) -> Callable[[str], bool]:
    """Whether what has a name may be shown to this person: asked of thousands at once."""
    card = person.card
    if card is None or card.allows(right, "*"):
        return lambda name: True
    return lambda name: card.allows(right, name)
