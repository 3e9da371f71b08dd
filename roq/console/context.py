"""What every route stands on: the console itself, who asks, whether that person may, and what is written down of it.

A request that changes something needs a console that is writable, the session's CSRF token (or a Bearer token, which no page of
another site can make a browser send), and the right that the cluster itself would ask for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import Depends
from starlette.requests import HTTPConnection, Request

from roq.console.errors import CsrfMissing, NotSignedIn, ReadOnlyConsole
from roq.console.gate import SAFE, ListenPolicy
from roq.console.hub import Hub, Streams
from roq.console.identity import ANYBODY, Attempts, Person, Sessions, SignInKind, SignInLink
from roq.console.publishing import Publishers
from roq.console.source import ConsoleSource
from roq.console.users import Users, user
from roq.errors import AccessDenied, RoqError
from roq.runtime.audit import acted
from roq.wire import rights

BEARER = "bearer "
CSRF_HEADER = "x-csrf-token"
RIGHTS_SECONDS = 3.0  # between two looks whether who reads a stream still may


class ConsoleSettings(NamedTuple):
    """What its operator said. header: the proxy's, "" for none; authority: whose cards are listed, None: of nobody."""

    writable: bool
    kind: SignInKind
    header: str
    users: Users
    authority: Path | None
    cookie: str


class Console(NamedTuple):
    """All of one console."""

    settings: ConsoleSettings
    listening: ListenPolicy
    source: ConsoleSource
    hub: Hub
    streams: Streams
    sessions: Sessions
    attempts: Attempts
    publishers: Publishers
    link: SignInLink | None


class Visit(NamedTuple):
    """One request. token: of its session, "" if there is none."""

    console: Console
    person: Person
    token: str

    @property
    def source(self) -> ConsoleSource:
        """The cluster."""
        return self.console.source

    def may(self, request: msgspec.Struct) -> None:
        """What the leading GCM would be asked. Raises AccessDenied."""
        if self.person.card is not None:
            rights.for_names(rights.GCM)(self.person.card, request)

    def may_at_monitor(self, queue: str, request: Any) -> None:
        """The same of a queue's Monitor."""
        if self.person.card is not None:
            rights.allow_at_monitor(queue)(self.person.card, request)

    def may_at_master(self, name: str, request: Any) -> None:
        """The same of a work queue's master."""
        if self.person.card is not None:
            rights.allow_at_master(name)(self.person.card, request)

    def may_read(self, queue: str) -> None:
        """What a store would be asked for what is recorded. Raises AccessDenied."""
        if self.person.card is not None:
            rights.check(self.person.card, rights.FILLS, queue)

    @contextmanager
    def acts(self, request: msgspec.Struct) -> Iterator[None]:
        """Around what changes the cluster: it is written down, with this person's name and, where it failed, why."""
        try:
            yield
        except BaseException as error:  # the cluster may have done it, whatever ended us
            acted(self.person.card, request, type(error).__name__)
            raise
        finally:
            self.source.has_changed()  # perhaps
        acted(self.person.card, request)


def console_of(connection: HTTPConnection) -> Console:
    """Of the application that was asked."""
    console: Console = connection.app.state.console
    return console


def tokens_of(connection: HTTPConnection, cookie: str) -> tuple[str, str]:
    """(token of a program, token of a page), "" each if there is none."""
    told = connection.headers.get("authorization", "")
    bearer = told[len(BEARER) :].strip() if told.lower().startswith(BEARER) else ""
    return bearer, connection.cookies.get(cookie, "")


async def visit_of(connection: HTTPConnection) -> Visit:
    """Raises NotSignedIn."""
    console = console_of(connection)
    bearer, page = tokens_of(connection, console.settings.cookie)
    token = next((one for one in (bearer, page) if one and console.sessions.person(one) is not None), "")
    if console.settings.kind is SignInKind.NONE:
        still_good(console, ANYBODY, token)
        return Visit(console, ANYBODY, token)
    if console.settings.kind is SignInKind.PROXY:
        names = connection.headers.getlist(console.settings.header)  # two: one of them is not the proxy's
        return Visit(console, user(names[0] if len(names) == 1 else "", console.settings.users), token)
    person = console.sessions.person(token) if token else None
    if person is None:
        raise NotSignedIn("nobody is signed in here, or the session is over")
    await console.source.take_access()
    still_good(console, person, token)
    return Visit(console, person, token)


def still_good(console: Console, person: Person, token: str) -> None:
    """Raises NotSignedIn: the card ended, or was revoked; or the cluster has got cards since the console began without."""
    kind, security = console.settings.kind, console.source.security
    if kind is SignInKind.NONE and security is not None:
        raise NotSignedIn("this cluster has cards now, and lets in who shows one: start the console again")
    if kind is not SignInKind.CARD:
        return
    if console.sessions.person(token) is None or person.card is None or security is None:
        raise NotSignedIn("the session is over")
    try:
        security.check_good(person.card)
    except AccessDenied as error:
        raise NotSignedIn(str(error)) from None


async def until_ended(visit: Visit) -> str:
    """Why a stream of this person's has to end, once it has to."""
    ending = asyncio.ensure_future(visit.console.hub.closed.wait())
    try:
        while True:
            ended, _ = await asyncio.wait({ending}, timeout=RIGHTS_SECONDS)
            if ended:
                return "the console ends"
            if visit.console.settings.kind is SignInKind.CARD:
                await visit.source.take_access()
            still_good(visit.console, visit.person, visit.token)
    except RoqError as error:
        return str(error)
    finally:
        ending.cancel()


def check_token(connection: HTTPConnection, visit: Visit) -> None:
    """Raises CsrfMissing."""
    sessions = visit.console.sessions
    bearer, page = tokens_of(connection, visit.console.settings.cookie)
    if bearer and sessions.person(bearer) == visit.person:
        return  # another Bearer token is the proxy's
    if not page or sessions.person(page) != visit.person:
        raise CsrfMissing("there is no session: GET /v1/session begins one")
    if not sessions.proves(page, connection.headers.get(CSRF_HEADER, "")):
        raise CsrfMissing


async def reading(request: Request) -> Visit:
    """Who looks. What is asked by POST all the same comes from this console's own pages."""
    visit = await visit_of(request)
    if request.method not in SAFE:
        check_token(request, visit)
    return visit


async def changing(request: Request) -> Visit:
    """Who changes something."""
    visit = await reading(request)
    if not visit.console.settings.writable:
        raise ReadOnlyConsole
    return visit


Reader = Annotated[Visit, Depends(reading)]
Writer = Annotated[Visit, Depends(changing)]
