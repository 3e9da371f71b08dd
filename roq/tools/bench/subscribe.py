"""A subscriber's reading loops: every message is counted by number; what is not the next one goes through the Account.

Flat out, the number is the SDK's sequence and the latency, looked at once in PAUSE_EVERY messages, is counted from the
opening of the message's batch. Stamped loads carry number and time of the load generator's own in every payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any

from roq.pubsub.subscriber import Subscriber
from roq.tools.bench.accounting import Account, stream_of
from roq.tools.bench.load import STAMP, Load

WATCH_SECONDS = 0.05  # how often a subscriber that misses messages looks whether more came


async def read(subscriber: Subscriber, account: Account, load: Load) -> None:
    """Read until everything announced has arrived, or for ever."""
    if load.stamped:
        await (_stamped_batches(subscriber, account) if load.batch else _stamped(subscriber, account))
    else:
        await (_plain_batches(subscriber, account) if load.batch else _plain(subscriber, account))


async def _plain(subscriber: Subscriber, account: Account) -> None:
    tally = account.nobody
    async for message in subscriber:
        if message.sequence == tally.next and message.publisher == tally.stream:
            tally.next += 1
        else:
            tally = account.take(message.publisher, message.sequence)
        if tally.next > tally.limit and account.pause(tally, time.monotonic_ns(), time.time_ns() - message.timestamp):
            return


async def _plain_batches(subscriber: Subscriber, account: Account) -> None:
    tally = account.nobody
    async for batch in subscriber.batches():
        for message in batch:
            if message.sequence == tally.next and message.publisher == tally.stream:
                tally.next += 1
            else:
                tally = account.take(message.publisher, message.sequence)
            if tally.next > tally.limit and account.pause(tally, time.monotonic_ns(), time.time_ns() - message.timestamp):
                return


async def _stamped(subscriber: Subscriber, account: Account) -> None:
    async for message in subscriber:
        if _count_stamped(account, message.payload):
            return


async def _stamped_batches(subscriber: Subscriber, account: Account) -> None:
    async for batch in subscriber.batches():
        for message in batch:
            if _count_stamped(account, message.payload):
                return


def _count_stamped(account: Account, payload: bytes) -> bool:
    now = time.monotonic_ns()
    publisher, topic, number, sent = STAMP.unpack_from(payload)
    return account.pause(account.take(stream_of(publisher, topic), number), now, now - sent)


async def finish(reading: asyncio.Task[None], account: Account, ends: Awaitable[dict[int, int]], idle_seconds: float) -> None:
    """Wait until everything arrived, or nothing more came for `idle_seconds` after the publishers' ends were known."""
    telling = asyncio.ensure_future(ends)
    either: set[asyncio.Future[Any]] = {reading, telling}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            account.set_ends(await telling)
            await _until_idle(reading, account, idle_seconds)
    finally:
        telling.cancel()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def _until_idle(reading: asyncio.Task[None], account: Account, idle_seconds: float) -> None:
    seen, since = account.progress, time.monotonic()
    while not reading.done() and not account.complete:
        await asyncio.wait({reading}, timeout=WATCH_SECONDS)
        now = time.monotonic()
        if account.progress != seen:
            seen, since = account.progress, now
            account.last_ns = time.monotonic_ns()
        elif now - since >= idle_seconds:
            return
