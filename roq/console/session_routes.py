"""Signing in and out: /v1/session."""

from __future__ import annotations

import base64
import binascii

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from roq.console.answers import answer, body_of, done, gives, takes
from roq.console.context import Console, Visit, check_token, console_of, tokens_of, visit_of
from roq.console.errors import LinkUsed, NotSignedIn
from roq.console.gate import is_secure, peer_of
from roq.console.identity import ANYBODY, Person, SignInKind
from roq.errors import AccessDenied
from roq.runtime.audit import turned_away
from roq.runtime.installation import installed_version
from roq.wire.card import CardRole

router = APIRouter()


class RightRow(msgspec.Struct, frozen=True):
    """As `roq access grant` takes it."""

    right: str
    names: str


class SessionView(msgspec.Struct, frozen=True):
    """Who asks. login: how people are known (none, card, proxy). writable: whether the console changes anything. rights: none
    with login "none" means all. csrf: for X-CSRF-Token, "" without a session. expires: of the card, Unix seconds, None: never.
    token: for programs, `Authorization: Bearer`; only in the answer to a sign-in."""

    signed_in: bool
    login: SignInKind
    name: str
    writable: bool
    rights: tuple[RightRow, ...]
    csrf: str
    expires: float | None
    cluster: str
    version: str
    token: str = ""


class PresentedCard(msgspec.Struct, frozen=True):
    """A card file, of which these two are looked at; or the ticket of a link that the console printed. Nothing at all where the
    cluster has no security."""

    card: str = ""
    secret: str = ""
    ticket: str = ""


@router.get("/v1/session", responses=gives(SessionView, "Who asks, signed in or not"))
async def show_session(request: Request) -> Response:
    """Who asks. Without a session to sign in for, one begins here: its cookie and its CSRF token."""
    console = console_of(request)
    try:
        visit = await visit_of(request)
    except NotSignedIn:
        return answer(_view(console, None, ""))
    for token in tokens_of(request, console.settings.cookie):
        if token and console.sessions.person(token) == visit.person:
            return answer(_view(console, visit.person, token))
    return _begun(request, console, visit.person, tell=False)


@router.post("/v1/session", responses=gives(SessionView, "Signed in"), openapi_extra=takes(PresentedCard))
async def sign_in(request: Request) -> Response:
    """Present a card file, as it is. The session ends with its card, after 8 hours without a request, or with the console."""
    console, told = console_of(request), await body_of(request, PresentedCard)
    if console.settings.kind is not SignInKind.CARD:
        return _begun(request, console, (await visit_of(request)).person, tell=True)
    if not is_secure(request.scope, console.listening):
        raise AccessDenied("a card is presented over TLS or this machine's loopback only: somebody else has read this one")
    await console.source.take_access()
    try:
        person = presented(console, told)
    except (AccessDenied, LinkUsed) as denied:  # counted behind the look: who is wrong shuts nobody else out
        peer = peer_of(request.scope)
        console.attempts.check(peer)
        console.attempts.failed(peer)
        turned_away(denied, b"")
        raise
    return _begun(request, console, person, tell=True)


@router.delete("/v1/session", responses=gives(None, "Signed out", 204), status_code=204)
async def sign_out(request: Request) -> Response:
    """The session is over."""
    visit: Visit = await visit_of(request)
    check_token(request, visit)
    visit.console.sessions.end(visit.token)
    response = done()
    response.delete_cookie(visit.console.settings.cookie, path="/", httponly=True, samesite="strict")
    return response


def presented(console: Console, told: PresentedCard) -> Person:
    """Whose card it is. Raises AccessDenied, LinkUsed."""
    security = console.source.security
    if security is None:
        return ANYBODY
    if told.ticket and console.link is not None:
        return console.link.redeem(told.ticket)
    try:
        card = security.presented(base64.b64decode(told.card, validate=True), base64.b64decode(told.secret, validate=True))
    except (binascii.Error, ValueError):
        raise AccessDenied("this is no card file: `roq access grant` writes one") from None
    if card.role is not CardRole.CLIENT:
        raise AccessDenied(f"the card of {card.name} is that of a {card.role}: people and programs have their own")
    return Person(card.name, card)


def _begun(request: Request, console: Console, person: Person, *, tell: bool) -> Response:
    token = console.sessions.open(person)
    found = _view(console, person, token)
    response = answer(msgspec.structs.replace(found, token=token) if tell else found)
    tls = console.listening.secure or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(console.settings.cookie, token, path="/", httponly=True, samesite="strict", secure=tls)
    return response


def _view(console: Console, person: Person | None, token: str) -> SessionView:
    card = person.card if person is not None else None
    return SessionView(
        signed_in=person is not None,
        login=console.settings.kind,
        name=person.name if person is not None else "",
        writable=console.settings.writable,
        rights=tuple(RightRow(grant.right, grant.names) for grant in card.grants) if card is not None else (),
        csrf=console.sessions.csrf(token) if token else "",
        expires=card.expires if card is not None and card.id else None,
        cluster=console.source.address,
        version=installed_version(),
    )
