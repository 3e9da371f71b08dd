"""Who did what to the cluster, and who was refused: lines of the logger "roq.audit", in a daemon's log.

    administrative request   who, request, what it names (the queue, host …), failure
    connection refused       reason, key; at most one line in LOG_REPEAT_SECONDS, with the total
    request refused          who, request, what it names, the right that is missing; as many lines for each name of a card

Not covered: which requests are administrative (roq/wire/rights.py).
"""

from __future__ import annotations

import logging
from typing import Any

from roq.errors import AccessDenied
from roq.runtime.observe import Counters, Refusals, logger
from roq.wire.card import Card

audit = logger("roq.audit")
audit.setLevel(logging.INFO)  # whatever else is logged
ANYBODY = "anybody"  # in a cluster without security
_refusals = Refusals(audit, Counters())
_NAMES = ("name", "queue", "exchange", "host", "reason", "draining", "version")  # of what requests tell; the rest is data
_OF_QUEUES = ("Queue", "CreateMissing")  # ends of the names of requests whose `name` is a queue's


def acted(card: Card | None, request: Any, failure: str = "") -> None:
    """It was allowed. card: None without security. failure: the error's class; it may have been done all the same."""
    fields = {"who": card.name if card is not None else ANYBODY, **_told(request)}
    if failure:
        fields["failure"] = failure
    audit.info("administrative request", extra={"fields": fields})


def _told(request: Any) -> dict[str, Any]:
    kind = type(request).__name__
    about = {name: value for name in _NAMES if (value := getattr(request, name, "")) not in ("", None)}
    if "name" in about and kind.endswith(_OF_QUEUES):
        about = {"queue": about.pop("name"), **about}  # found by the word that all lines have for it
    return {"request": kind, **about}


def refused(card: Card | None, request: Any, error: AccessDenied) -> None:
    """It was not allowed, and not done."""
    who = card.name if card is not None else ANYBODY
    about = ", ".join(f"{name} {value}" for name, value in _told(request).items())
    _refusals.note(f"request of {who}", f"{about}: {error}")


def turned_away(reason: object, key: bytes) -> None:
    """A connection was refused before it was one, or cut for what came over it. key: the public key that was shown."""
    _refusals.note("connection", f"{reason} (key {key.hex()[:16]})")
