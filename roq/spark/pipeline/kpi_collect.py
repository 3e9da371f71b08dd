"""Recording queues' KPI streams for a time: one line of JSON per second and queue, as `roq queue kpis` prints them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from roq.client.cluster import Cluster, connect
from roq.errors import CallError, DeadlineExceeded, QueueStopped, TemporaryError
from roq.runtime.backoff import delays

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 5.0  # without a record, the stream's address is asked for again


def collect(zookeeper: str, queues: Sequence[str], seconds: float, into: Path) -> int:
    """Append the records of these queues (none named: of all there are) to a file; how many. A queue whose Monitor is away
    is asked again. Raises RoqError: no cluster, no such queue, not one record within the time."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("a") as lines:
        return asyncio.run(_collect(zookeeper, queues, seconds, lines))


async def _collect(zookeeper: str, queues: Sequence[str], seconds: float, lines: TextIO) -> int:
    async with connect(zookeeper, connect_seconds=CONNECT_SECONDS) as cluster:
        chosen = list(queues) or [queue.record.name for queue in await cluster.queues()]
        if not chosen:
            raise CallError("the cluster has no queues")
        for name in chosen:
            await cluster.queue(name)  # raises QueueNotFound
        counts = await asyncio.gather(*(_record(cluster, name, seconds, lines) for name in chosen))
    if not sum(counts):
        raise DeadlineExceeded(f"no KPI record of {', '.join(chosen)} within {seconds:g} s")
    return sum(counts)


async def _record(cluster: Cluster, queue: str, seconds: float, lines: TextIO) -> int:
    loop, count, waits = asyncio.get_running_loop(), 0, delays()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        stream = cluster.kpis(queue)
        try:
            while True:
                left = max(0.0, end - loop.time())
                kpi = await asyncio.wait_for(anext(stream), min(left, SILENT_SECONDS))
                lines.write(msgspec.json.encode(kpi).decode() + "\n")
                lines.flush()
                count, waits = count + 1, delays()
        except TimeoutError:
            continue  # its Monitor may have moved
        except (TemporaryError, QueueStopped):
            await asyncio.sleep(min(left, next(waits)))
    return count
