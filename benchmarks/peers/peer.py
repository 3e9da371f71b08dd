"""What a peer is, and the paced and flat-out loops of those with a blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from roq.tools.bench.load import STAMP, TICK_SECONDS, Load, Pace
from roq.tools.bench.protocol import PublishOrder, SubscribeOrder

Handle = Callable[[bytes], bool]  # True: that was the last
ReadyCall = Callable[[], None]
FOREVER = (1 << 30, 1 << 40)  # limits on messages and bytes that never bite


class Peer(NamedTuple):
    """One system's client. server: the kind in servers.py it needs."""

    server: str
    subscribe: Callable[[SubscribeOrder, Handle, ReadyCall], None]
    publish: Callable[[PublishOrder, ReadyCall], int]


def payloads(load: Load, index: int) -> Iterator[bytes | None]:
    """The load's payloads for a blocking client: all at once, or paced and stamped. None marks the end of what is due now."""
    if not load.rate:
        payload = bytes(load.size)
        for _ in range(load.messages):
            yield payload
        yield None
        return
    padding = bytes(load.size - STAMP.size)
    pace = Pace(load.rate, load.messages, time.monotonic_ns())
    number = 0
    while not pace.finished:
        for _ in range(pace.due(time.monotonic_ns())):
            number += 1
            yield STAMP.pack(index, 0, number, time.monotonic_ns()) + padding
        yield None
        time.sleep(TICK_SECONDS)
