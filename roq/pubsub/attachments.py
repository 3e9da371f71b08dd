"""To which Exchanges a subscriber is attached: to all that its Monitor lists, but for those that have retired. Not covered:
what comes from them.

A Monitor that has just begun may not have heard of every Exchange that lives: who is not on its list is left a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from roq.pubsub.deferred import DeferredWatermarks
from roq.pubsub.links import Attachment
from roq.wire.monitor import ExchangeAddress

LISTING_SECONDS = 3.5  # after a rejoin: until then a new Monitor may not have heard of every Exchange that lives


class Attachments:
    """by_token: what there is. version: of the list. connect(exchange): a new attachment. `now` is monotonic."""

    def __init__(self, connect: Callable[[ExchangeAddress], Attachment]) -> None:
        self.by_token: dict[str, Attachment] = {}
        self.version = 0
        self._connect = connect
        self._listed: dict[str, ExchangeAddress] = {}
        self._retired: set[str] = set()
        self._listing_until = 0.0
        self.deferred = DeferredWatermarks()

    def welcome(self, now: float) -> None:
        """A Monitor lists from the beginning. It may list again what had retired, and use it again."""
        self._retired.clear()
        self._listing_until = now + LISTING_SECONDS if self.by_token else 0.0

    def take(self, version: int, exchanges: Iterable[ExchangeAddress]) -> None:
        """The list, as of now."""
        self.version = version
        self._listed = {exchange.token: exchange for exchange in exchanges}
        self._retired &= self._listed.keys()

    def leave_unlisted(self, heard: float) -> list[Attachment]:
        """Of Exchanges that are gone: another life of them is listed, or the Monitor had its time to hear of them. heard: when
        we heard of the Monitor last; what it has told nobody since may be a longer list."""
        ids = {one.id for one in self._listed.values()}
        unlisted = [token for token in self.by_token if token not in self._listed]
        gone = [token for token in unlisted if heard >= self._listing_until or self.by_token[token].exchange.id in ids]
        return [self.by_token.pop(token) for token in gone]

    def attach(self) -> None:
        """To those that are missing."""
        for token, exchange in self._listed.items():
            if token not in self.by_token and token not in self._retired:
                self.by_token[token] = self._connect(exchange)

    def retire(self, token: str) -> None:
        """Nothing comes through this Exchange any more."""
        self._retired.add(token)
        self.by_token.pop(token, None)
        self.deferred.retired(token)

    def are_proved(self, exchange: str) -> bool:
        """Whether one to a life of this Exchange is."""
        return any(one.proved and one.exchange.id == exchange for one in self.by_token.values())

    def prove(self, attachment: Attachment, now: float) -> bool:
        """Its Exchange answers all subscriptions. Whether it had not been proved before."""
        attachment.taped = False  # a connection that was made anew says anew where it begins
        if attachment.answered:
            self.deferred.anew(attachment.exchange.token, now)
        first, attachment.proved, attachment.answered = not attachment.proved, True, True
        return first

    def read_at(self) -> float:
        """When everything that had come was read last; 0.0 if there is nothing to read from."""
        return min((one.read_at for one in self.by_token.values() if one.proved), default=0.0)

    def unread_at(self, exchange: str, unread: Collection[Attachment], now: float) -> float:
        """When frames that had come from this Exchange (or "": from any) last lay unread. unread: where some do."""
        those = [one for one in self.by_token.values() if exchange in ("", one.exchange.id)]
        if any(one in unread or one.looking for one in those):
            return now
        return max((one.unread_at for one in those), default=0.0)

    def attached(self) -> tuple[str, ...]:
        """Tokens of those that are proved."""
        return tuple(token for token, one in self.by_token.items() if one.proved)

    def look_if_quiet(self, now: float) -> None:
        """See Attachment."""
        for attachment in self.by_token.values():
            attachment.look_if_quiet(now)

    def proved(self) -> dict[str, bool]:
        """By Exchange's id."""
        return {one.exchange.id: one.proved for one in self.by_token.values()}

    def close(self) -> None:
        """All of them."""
        for attachment in self.by_token.values():
            attachment.close()
        self.by_token.clear()
