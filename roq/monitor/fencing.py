"""Ending what lives on at a lost host: the process is told the higher term, and is known to have ended when nothing listens."""

from __future__ import annotations

import asyncio

from roq.errors import CallError, RoqError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.shutdown import ask
from roq.wire import process as wire
from roq.wire.assignment import FormerProcess

log = logger(__name__)
CONNECT_SECONDS = 1.0  # one try; a host that is off does not even refuse
ASK_SECONDS = 1.0
FIRST_SECONDS, LAST_SECONDS = 0.05, 1.0  # between tries


async def fence(former: FormerProcess, term: int) -> None:
    """Return when the process is known to have ended, or its lease must have."""
    fields = {"process": former.name, "host": former.host, "term": term}
    try:
        async with asyncio.timeout(former.lease_seconds):
            for wait in delays(FIRST_SECONDS, LAST_SECONDS):
                if former.port and await _has_ended(former, term):
                    log.info("process of a lost host has ended", extra={"fields": fields})
                    return
                await asyncio.sleep(wait)
    except TimeoutError:
        log.warning("process of a lost host can't be reached; its lease is over", extra={"fields": fields})


async def _has_ended(former: FormerProcess, term: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(former.address, former.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    try:
        await ask(former.address, former.port, wire.Fence(former.name, term), ASK_SECONDS)
    except CallError:
        return True  # another process listens there by now
    except RoqError as error:
        log.info("process of a lost host does not obey yet", extra={"fields": {"process": former.name, "reason": str(error)}})
    return False  # it has ended when nothing listens any more
