"""Reading a queue's KPI stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import zmq

from roq.errors import FrameError
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.sockets import Link, control_socket
from roq.wire import kpi as wire
from roq.wire.assignment import MonitorAddress

log = logger(__name__)
RECORDS_KEPT = 60  # read ahead of a slow reader; older ones are dropped


async def kpi_stream(address: MonitorAddress, queue: str) -> AsyncIterator[wire.QueueKpi]:
    """Records as they come, for ever."""
    socket = control_socket(zmq.SUB)
    socket.subscribe(queue.encode())
    socket.connect(address.kpis_endpoint())
    records: deque[wire.QueueKpi] = deque(maxlen=RECORDS_KEPT)
    arrived = asyncio.Event()
    refusals = Refusals(log, Counters())

    def take(parts: list[bytes]) -> None:
        try:
            record = wire.decode(parts[-1])
        except FrameError as error:
            refusals.note("undecodable", error)
            return
        if record.queue == queue:
            records.append(record)
            arrived.set()

    link = Link(socket, take)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            while records:
                yield records.popleft()
    finally:
        link.close()
