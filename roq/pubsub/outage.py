"""A wait that has no end of its own, for what is away just now: told in the log while it lasts, as nothing else shows it."""

from __future__ import annotations

import time

from roq.errors import AccessDenied, CardRevoked, ProofRefused, RoqError, TemporaryError
from roq.runtime.observe import logger

QUIET_SECONDS = 10.0  # a GCM that follows another one, or a store that is started anew, is there again by then
GAP_SECONDS = 60.0  # without a failure: the next one begins another outage
WARN_SECONDS = 60.0  # between two warnings

log = logger(__name__)


def may_pass(error: RoqError) -> bool:
    """Whether who was let in before and now meets this may be let in again, and so waits. Not only what is temporary by
    itself: a server's clock may be wrong, a quota be used up, a right be given back. A revoked card is never."""
    refused = isinstance(error, AccessDenied) and not isinstance(error, CardRevoked | ProofRefused)
    return refused or isinstance(error, TemporaryError)


class Outage:
    """what: what can't be done and is tried again. `failed()` at every failure warns once that lasts, then once a minute."""

    def __init__(self, what: str, **fields: str) -> None:
        self._what, self._fields = what, fields
        self._since = self._last = self._warned = float("-inf")

    def wait_out(self, error: RoqError) -> None:
        """`failed()`, if it may pass; else raises the error."""
        if not may_pass(error):
            raise error
        self.failed(error)

    def failed(self, reason: Exception) -> None:
        """Once more."""
        now = time.monotonic()
        if now - self._last > GAP_SECONDS:
            self._since = now
        self._last = now
        lasts = now - self._since >= QUIET_SECONDS and now - self._warned >= WARN_SECONDS
        if lasts:
            self._warned = now
        fields = {**self._fields, "reason": str(reason)}
        (log.warning if lasts else log.info)("%s: waiting, trying again", self._what, extra={"fields": fields})
