"""Which tapes a queue has, as the GCM tells it: in parts that fit into a message, and once for all who ask at about one time.

Readers of one queue look again and again, each for itself; those of one process take each other's answers, as far as they are
new enough.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from roq.coordination.locate import GcmClient
from roq.coordination.parts import all_parts
from roq.wire import gcm

REQUEST_SECONDS = 10.0


class FoundTapes(NamedTuple):
    """began, began_ms: when they were asked for (monotonic seconds; milliseconds since 1970): what was there then is listed."""

    tapes: gcm.Tapes
    began: float
    began_ms: int


async def describe_tapes(client: GcmClient, queue: str, timeout_seconds: float = REQUEST_SECONDS) -> gcm.Tapes:
    """All of them. timeout_seconds: for each part. Raises QueueNotFound, NotRecorded, AccessDenied, Unavailable,
    DeadlineExceeded."""

    async def ask(before: gcm.Tapes | None) -> gcm.Tapes:
        after = before.views[-1].log if before is not None else ""
        return await client.request(gcm.DescribeTapes(queue, after), gcm.Tapes, timeout_seconds)

    parts = await all_parts(ask, lambda part: part.tapes)  # of other ones, if the queue was created anew meanwhile
    views = tuple(chain.from_iterable(part.views for part in parts))
    stores = dict(chain.from_iterable(part.stores.items() for part in parts))
    return msgspec.structs.replace(parts[-1], views=views, stores=stores)


class SharedLook:
    """Of one queue, by one client."""

    def __init__(self) -> None:
        self._found: FoundTapes | None = None
        self._asking: asyncio.Task[FoundTapes] | None = None
        self._began = 0.0  # when that did (monotonic)

    async def look(self, client: GcmClient, queue: str, since: float) -> FoundTapes:
        """See look_at_tapes."""
        while self._found is None or self._found.began < since:
            if self._asking is None or self._asking.done():
                self._began = time.monotonic()
                self._asking = asyncio.get_running_loop().create_task(self._ask(client, queue), name=f"tapes of {queue}")
                self._asking.add_done_callback(_was_heard)
            began, asking = self._began, self._asking
            await asyncio.wait({asking})
            if began >= since:
                return asking.result()
        return self._found

    async def _ask(self, client: GcmClient, queue: str) -> FoundTapes:
        began, began_ms = self._began, time.time_ns() // 1_000_000
        self._found = FoundTapes(await describe_tapes(client, queue), began, began_ms)
        return self._found


def _was_heard(asking: asyncio.Task[FoundTapes]) -> None:
    if not asking.cancelled():
        asking.exception()  # whoever asked may be gone


_LOOKS: WeakKeyDictionary[GcmClient, dict[str, SharedLook]] = WeakKeyDictionary()


async def look_at_tapes(client: GcmClient, queue: str, since: float) -> FoundTapes:
    """As they were at that time or later (monotonic), asked for once for all who share the client. Raises as describe_tapes."""
    return await _LOOKS.setdefault(client, {}).setdefault(queue, SharedLook()).look(client, queue, since)
