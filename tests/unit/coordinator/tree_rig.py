"""A tree with two sessions, and what would be written down of it."""

from __future__ import annotations

from roq.coordinator.changes import encode
from roq.coordinator.tree import Outcome, Tree
from roq.wire.zookeeper import (
    OPEN_ACL,
    CreateRequest,
    ErrorResponse,
    EventType,
    ExistsRequest,
    GetChildren,
    NamesReply,
    Reply,
    Request,
    Stat,
    StatReply,
)

ONE, TWO = 11, 22  # sessions, and the connections they are watched from
AT = 1_700_000_000_000


class Driven:
    """A tree with two sessions; remembers every transaction, as the journal would."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.log: list[bytes] = []
        self.now = AT
        for session in (ONE, TWO):
            self.log.append(encode(self.tree.open_session(session, b"p" * 16, 4000, self.now)))

    def outcome(self, request: Request, session: int = ONE) -> Outcome:
        self.now += 1
        outcome = self.tree.handle(session, session, request, self.now)
        if outcome.transaction is not None:
            self.log.append(encode(outcome.transaction))
        self.tree.check()
        return outcome

    def ask(self, request: Request, session: int = ONE) -> Reply:
        return self.outcome(request, session).reply

    def fired(self, request: Request, session: int = ONE) -> list[tuple[int, EventType, str]]:
        outcome = self.outcome(request, session)
        assert not isinstance(outcome.reply, ErrorResponse)
        return list(outcome.firings)

    def stat(self, path: str) -> Stat:
        reply = self.ask(ExistsRequest(path, False))
        assert isinstance(reply, StatReply)
        return reply.stat

    def names(self, path: str) -> tuple[str, ...]:
        reply = self.ask(GetChildren(path, False, False))
        assert isinstance(reply, NamesReply)
        return reply.names


def create(path: str, data: bytes | None = b"", flags: int = 0, with_stat: bool = False) -> CreateRequest:
    return CreateRequest(path, data, OPEN_ACL, flags, with_stat)
