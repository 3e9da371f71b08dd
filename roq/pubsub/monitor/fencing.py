"""Ending what lives on at a lost host: the process is told the higher term, and is known to have ended when nothing listens. A
Monitor names its subscribers before it ends: its successor knows nobody else who could."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roq.errors import CallError, ProcessFailed, RoqError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.shutdown import ask
from roq.wire import process as wire
from roq.wire.assignment import FormerProcess

log = logger(__name__)
CONNECT_SECONDS = 1.0  # one try; a host that is off does not even refuse
ASK_SECONDS = 3.0  # it answers once, before it ends: what it says then is worth a wait
FIRST_SECONDS, LAST_SECONDS = 0.05, 1.0  # between tries


async def fence(former: FormerProcess, term: int, on_named: Callable[[wire.Named], None]) -> None:
    """Return when the process is known to have ended, or its lease must have. on_named: called once with what a Monitor says
    that obeys."""
    fields = {"process": former.name, "host": former.host, "term": term}
    obeyed = False
    try:
        async with asyncio.timeout(former.lease_seconds):
            for wait in delays(FIRST_SECONDS, LAST_SECONDS):
                try:
                    named = await _order(former, term) if former.port else None
                except ProcessFailed:
                    log.info("process of a lost host has ended", extra={"fields": fields})
                    return
                if named is not None and not obeyed:
                    obeyed = True
                    on_named(named)
                await asyncio.sleep(wait)
    except TimeoutError:
        log.warning("process of a lost host is unreachable and its lease is over", extra={"fields": fields})


async def _order(former: FormerProcess, term: int) -> wire.Named | None:
    """What it answers if it obeys, None if it says nothing of use. Raises ProcessFailed when it has ended."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(former.address, former.port)
    except ConnectionRefusedError:
        raise ProcessFailed(f"nothing listens at {former.address}:{former.port} any more") from None
    except (OSError, TimeoutError):
        return None
    writer.close()
    try:
        answer = await ask(former.address, former.port, wire.FenceProcess(former.name, term), ASK_SECONDS)
    except CallError as error:
        raise ProcessFailed("another process listens there by now") from error
    except RoqError as error:
        log.info("process of a lost host is not fenced yet", extra={"fields": {"process": former.name, "reason": str(error)}})
        return None
    return answer.named if isinstance(answer, wire.ProcessDone) else None  # it has ended when nothing listens any more
