"""What the console refuses by itself, before the cluster is asked. Everything else it says is the cluster's own error."""

from __future__ import annotations

from roq.errors import CallError, TemporaryError


class ConsoleRefusal(CallError):
    """The console takes no such request. status: of HTTP; advice: what to do."""

    status = 400
    advice = "GET /v1/openapi.json says what each request takes"


class NotSignedIn(ConsoleRefusal):
    """Nobody is signed in."""

    status = 401
    advice = "sign in with a card: POST the card file to /v1/session"


class ReadOnlyConsole(ConsoleRefusal):
    """This console only shows."""

    status = 403
    advice = "start it with `roq console --writable`"


class CsrfMissing(ConsoleRefusal):
    """A request that changes something comes without the token of its session."""

    status = 403
    advice = "send `csrf` of GET /v1/session as X-CSRF-Token, or `Authorization: Bearer TOKEN` of POST /v1/session"


class ForeignOrigin(ConsoleRefusal):
    """Another site's page sent this."""

    status = 403
    advice = "use the console's own pages; a program sends no Origin"


class UntrustedPeer(ConsoleRefusal):
    """Only the proxies that this console trusts may ask it."""

    status = 403
    advice = "come through the proxy, or name its addresses with --trusted-proxy"


class UnknownHost(ConsoleRefusal):
    """The console is not known by the name in Host: a page of another name may be behind this."""

    status = 421
    advice = "start the console with `--allow-host NAME` if this name is its own"


class BodyTooLarge(ConsoleRefusal):
    """The request's body is larger than this request takes."""

    status = 413
    advice = "send less at once"


class WrongContentType(ConsoleRefusal):
    """The request's body is JSON, and says so."""

    status = 415
    advice = "send Content-Type: application/json"


class NothingHere(ConsoleRefusal):
    """There is nothing at this path, or not by this method."""

    status = 404


class NotFollowed(ConsoleRefusal):
    """This is no resource that tells what it is when it changes."""

    advice = "name what GET answers with JSON, as /v1/queues/orders; streams, /v1/session and what changes something are not"


class LinkUsed(ConsoleRefusal):
    """This link was used, is over, or is of another console."""

    status = 403
    advice = "start the console again for another link, or present a card"


class BodyTooSlow(ConsoleRefusal):
    """The request's body did not come in time."""

    status = 408
    advice = "send it again, complete"


class LetterTaken(ConsoleRefusal):
    """Something was put in the place of a dead letter that was none any more."""

    status = 409
    advice = "look at the work queue: both may run"


class TooManyBodies(TemporaryError):
    """The bodies of all requests together are as large as this console takes."""


class TooManyAttempts(TemporaryError):
    """Too many cards that were none came from this address: wait a minute."""


class TooManyStreams(TemporaryError):
    """As many streams are open as this console serves: close one."""


class SlowReader(TemporaryError):
    """What this stream had to tell came faster than it was read."""
