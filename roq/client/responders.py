"""Which server a request goes to, and what is under way at each: one caller's view of a queue's responders. Pure.

Of the servers that match topic and group the one with the fewest requests under way is chosen; among equals the one whose turn
was longest ago; one that the Monitor doubts only if there is no other. A request that its caller gave up counts until its
answer comes, or for LATE_SECONDS: a server that hangs gets no more of them than others that are slow.

Invariant (`check`): a server's `under_way` is the number of requests that are with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roq.pubsub.subscription import TopicFilter
from roq.wire import monitor as wire

LATE_SECONDS = 30.0
LATE_MAX = 10_000  # given up and remembered; beyond it the oldest are forgotten
ROUTES_KEPT = 10_000  # topics whose servers are remembered


class _Server:
    """One that the Monitor has named."""

    __slots__ = ("doubted", "filter", "id", "listed", "service", "turn", "under_way")

    def __init__(self, view: wire.ResponderView) -> None:
        self.id, self.service, self.doubted = view.subscriber, view.service, view.doubted
        self.filter = TopicFilter(view.service.topics)
        self.listed = True  # in the newest list
        self.under_way = 0
        self.turn = 0  # number of the request that it got last


class ResponderTable:
    """Made empty; requests are known by their numbers, which grow."""

    def __init__(self) -> None:
        self.complete = False  # what is not in it does not exist
        self._servers: dict[int, _Server] = {}
        self._routes: dict[tuple[str, str | None], list[_Server]] = {}
        self._at: dict[int, _Server] = {}  # who has each request
        self._late: dict[int, float] = {}  # given up by their callers, oldest first: until when they count

    def told(self, notice: wire.Responders) -> list[int]:
        """The Monitor's newest list: servers of it that had requests and are gone; see `lose`."""
        self._routes.clear()
        self.complete = notice.complete
        gone = dict(self._servers) if notice.complete else {}
        for view in notice.responders:
            gone.pop(view.subscriber, None)
            known = self._servers.get(view.subscriber)
            if known is not None and known.service == view.service:
                known.doubted, known.listed = view.doubted, True
                continue
            fresh = self._servers[view.subscriber] = _Server(view)
            if known is not None:  # it cannot change what it serves; whoever says so is believed
                fresh.under_way, fresh.turn = known.under_way, known.turn
                self._at.update((number, fresh) for number, server in self._at.items() if server is known)
        for server in gone.values():
            server.listed = False
            if not server.under_way:
                del self._servers[server.id]
        return [server.id for server in gone.values() if server.under_way]

    def choose(self, topic: str, group: str | None, but: Collection[int] = ()) -> int | None:
        """A server for a request on this topic, of any group if None is named; None: there is none."""
        route = self._routes.get((topic, group))
        if route is None:
            if len(self._routes) >= ROUTES_KEPT:
                self._routes.clear()
            encoded = topic.encode()
            route = self._routes[topic, group] = [
                one
                for one in self._servers.values()
                if one.listed and group in (None, one.service.group) and one.filter.wants(encoded)
            ]
        able: Iterable[_Server] = [one for one in route if one.id not in but] if but else route
        chosen = min(able, key=lambda one: (one.doubted, one.under_way, one.turn), default=None)
        return None if chosen is None else chosen.id

    def begin(self, number: int, server: int, now: float) -> None:
        """This request goes to a server that was chosen just now."""
        if self._late:
            self._forget_late(now)
        chosen = self._servers[server]
        chosen.under_way, chosen.turn = chosen.under_way + 1, number
        self._at[number] = chosen

    def end(self, number: int) -> int | None:
        """It was answered, or never sent: the server that had it, None if it is not known any more."""
        server = self._at.pop(number, None)
        self._late.pop(number, None)
        if server is None:
            return None
        server.under_way -= 1
        if not server.under_way and not server.listed:
            self._servers.pop(server.id, None)
        return server.id

    def give_up(self, number: int, now: float) -> None:
        """Nobody waits for its answer any more."""
        if number in self._at:
            self._late[number] = now + LATE_SECONDS
            self._forget_late(now)

    def _forget_late(self, now: float) -> None:
        while self._late:
            oldest = next(iter(self._late))
            if self._late[oldest] > now and len(self._late) <= LATE_MAX:
                return
            self.end(oldest)

    def lose(self, server: int) -> list[int]:
        """Requests that a server had which is gone; none if it is listed again."""
        lost = self._servers.get(server)
        if lost is None or lost.listed:
            return []
        numbers = [number for number, one in self._at.items() if one is lost]
        for number in numbers:
            self.end(number)
        return numbers

    def check(self) -> None:
        """The invariant; AssertionError if it is broken."""
        for server in {*self._servers.values(), *self._at.values()}:
            assert server.under_way == sum(one is server for one in self._at.values()), f"{server.id} is miscounted"
            assert server.listed or server.under_way, f"{server.id} is gone and kept"
        assert self._late.keys() <= self._at.keys(), "a request is late and over"
