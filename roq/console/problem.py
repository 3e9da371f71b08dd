"""An error as a problem of RFC 9457 (application/problem+json): RoQ's name for it, what happened, what to do. Pure."""

from __future__ import annotations

import msgspec

from roq import errors
from roq.cli.output import NEXT_STEP
from roq.console.errors import ConsoleRefusal, SlowReader, TooManyAttempts, TooManyBodies, TooManyStreams
from roq.errors import RoqError

PROBLEM_TYPE = "application/problem+json"
TRY_AGAIN = "try again"
LOOK_FIRST = "look whether it has taken effect before it is tried again"
FIX = "GET /v1/openapi.json says what each request takes"
STATUS: tuple[tuple[type[RoqError], int], ...] = (  # the first that fits
    (errors.AccessDenied, 403),
    (errors.PayloadTooLarge, 413),
    (errors.NotRecorded, 409),
    (errors.QueueStopped, 409),
    (errors.LastExchange, 409),
    (TooManyAttempts, 429),
    (TooManyBodies, 429),
    (TooManyStreams, 429),
    (SlowReader, 429),
    (errors.DeadlineExceeded, 504),
    (errors.IncompatibleVersion, 501),
    (errors.CallError, 400),
    (errors.LeaseLost, 409),
    (errors.TemporaryError, 503),
)
ADVICE: tuple[tuple[type[RoqError], str], ...] = (
    (errors.AccessDenied, "sign in with a card that has this right; `roq access grant` makes one"),
    (errors.NotRecorded, "`roq queue record` records a queue, `roq history on` the cluster's history"),
    (errors.IncompatibleVersion, "upgrade what is older: `roq upgrade check` shows what that is"),
    (errors.InvalidPolicy, "`roq policy init` writes one with every field and its unit"),
    (errors.DeadlineExceeded, LOOK_FIRST),
    (errors.CallError, FIX),
)


class Problem(msgspec.Struct, frozen=True):
    """title: the error's name; detail: what happened; advice: what to do; instance: the path that was asked."""

    type: str
    title: str
    status: int
    detail: str
    advice: str
    instance: str = ""


def problem_of(error: RoqError, instance: str = "") -> Problem:
    """Of what was raised."""
    name = type(error).__name__
    return Problem(f"urn:roq:problem:{name}", name, status_of(error), str(error), advice_on(error), instance)


def status_of(error: RoqError) -> int:
    """HTTP's. What is not there is 404, what is otherwise 409, whatever its class; unknown errors are ours: 500."""
    if isinstance(error, ConsoleRefusal):
        return error.status
    name = type(error).__name__
    if name.endswith("NotFound") and isinstance(error, errors.CallError):
        return 404
    if name.endswith(("Conflict", "Sealed", "NotSealed")):
        return 409
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def advice_on(error: RoqError) -> str:
    """What the command line says of it, too."""
    if isinstance(error, ConsoleRefusal):
        return error.advice
    known = next((text for kind, text in (*NEXT_STEP, *ADVICE) if isinstance(error, kind)), "")
    return known or TRY_AGAIN
