"""What `roq metrics` serves, and where it is read: an HTTP server for Prometheus and for autoscalers (extra `metrics`).

    /metrics                        everything, for Prometheus (roq/client/metrics.py says what)
    /v1/queues/NAME/status          a queue of the cluster, as `roq queue ls --json` has it
    /v1/work-queues/NAME/status     a work queue's counts; NAME: of one of the cluster's, or its address, percent-encoded
    /health                         200 while this program runs

Requests come in threads of their own; what they ask for is read in the program's loop: all of it for /metrics, once for all who
ask within a second, else only what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

from roq.cli.output import say
from roq.cli.task_address import counts, opened
from roq.client.cluster import connect
from roq.client.metrics import ScrapedSources, families
from roq.client.overview import Overview, QueueRow, read_overview, read_queue
from roq.client.shard_answers import status_of
from roq.errors import RoqError
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.runtime.scraping import Answer, ReadOnce, json_answer, metrics_answer, serving
from roq.wire import master
from roq.wire.gcm import WorkQueueInfo
from roq.wire.task import Status

T = TypeVar("T")

SOURCE_SECONDS = 2.5  # a source that needs longer did not answer: autoscalers wait for 3 s, and the cluster is asked twice
OVERVIEW_SECONDS = 8.0  # of a cluster in which many Monitors hang; Prometheus waits for 10 s
COUNTED_SECONDS = 60.0  # for so long the last count of a folder is given that takes longer
KEPT_SECONDS = 1.0  # what was read is given to all who ask within this time

log = logger(__name__)

# --- reading ----------------------------------------------------------------------------------------------------------


class Sources:
    """A cluster, and work queues on this machine. These are opened for each look and closed again: a log that others have
    closed everywhere recovers when it is opened anew, and a folder may be another one by then."""

    def __init__(self, cluster: str | None, queues: Sequence[str]) -> None:
        self._address, self._queues = cluster, tuple(dict.fromkeys(queues))
        self._cluster = None if cluster is None else connect(cluster, connect_seconds=SOURCE_SECONDS)
        self._masters = RpcPool(master.Reply, SOURCE_SECONDS)
        self._looks: dict[str, asyncio.Future[Status]] = {}  # under way, by address: a folder may not answer for long
        self._counted: dict[str, tuple[float, Status]] = {}  # and what was counted last, when
        self._found = ReadOnce(self._read, KEPT_SECONDS)

    async def read(self) -> ScrapedSources:
        """Everything, now or not long ago."""
        return await self._found.get()

    async def _read(self) -> ScrapedSources:
        overview, theirs, ours = await asyncio.gather(
            self._overview(), self._of_cluster(), asyncio.gather(*(self.status(address) for address in self._queues))
        )
        statuses = {**theirs, **dict(zip(self._queues, ours, strict=True))}
        up = {name: status is not None for name, status in statuses.items()}
        if self._address is not None:
            up[self._address] = overview is not None
        return ScrapedSources(up, overview, {name: status for name, status in statuses.items() if status is not None})

    async def _overview(self) -> Overview | None:
        if self._cluster is None:
            return None
        return await _answered(read_overview(self._cluster), OVERVIEW_SECONDS, self._address)

    async def _of_cluster(self) -> dict[str, Status | None]:
        if self._cluster is None:
            return {}
        found = await _answered(self._cluster.work_queues(), SOURCE_SECONDS, self._address)
        names = [info.record.name for info in found or ()]
        statuses = await asyncio.gather(*(self._asked(info) for info in found or ()))
        return dict(zip(names, statuses, strict=True))

    async def _asked(self, info: WorkQueueInfo) -> Status | None:
        """Of its master. Opening it would create it if somebody has just removed it."""
        if not info.masters or not info.masters[0].active:
            return None
        return await _answered(status_of(self._masters, info), SOURCE_SECONDS, info.record.name)

    async def queue(self, name: str) -> QueueRow | None:
        """One queue of the cluster; None if it is not known or its Monitor does not answer."""
        if self._cluster is None:
            return None
        found = await _answered(read_queue(self._cluster, name), SOURCE_SECONDS, name)
        return None if found is None or found.summary.problem else found.summary

    async def status(self, name: str) -> Status | None:
        """Of one work queue; None if it is not known or does not answer."""
        if name not in self._queues:
            if self._cluster is None:
                return None
            info = await _answered(self._cluster.work_queue(name), SOURCE_SECONDS, name)
            return None if info is None else await self._asked(info)
        look = self._looks.get(name)
        if look is None:
            look = self._looks[name] = asyncio.ensure_future(asyncio.to_thread(_look, name))
            look.add_done_callback(partial(self._looked, name))
        found = await _answered(asyncio.shield(look), SOURCE_SECONDS, name)
        if found is None and name in self._counted:  # with a million files it may take longer than anybody waits
            when, last = self._counted[name]
            found = last if time.monotonic() - when < COUNTED_SECONDS else None
        return found

    def _looked(self, name: str, look: asyncio.Future[Status]) -> None:
        del self._looks[name]
        if look.cancelled():
            return
        if look.exception() is None:  # if it failed, whoever waited has the error
            self._counted[name] = (time.monotonic(), look.result())
        else:
            self._counted.pop(name, None)

    async def close(self) -> None:
        """Let go of everything."""
        async with self._found.lock:
            self._masters.close()
            if self._cluster is not None:
                await self._cluster.close()


async def _answered(asked: Awaitable[T], seconds: float, source: str | None) -> T | None:
    """What it answers; None if it does not, which is logged."""
    try:
        async with asyncio.timeout(seconds):
            return await asked
    except (RoqError, OSError, TimeoutError) as error:
        log.warning("source did not answer", extra={"fields": {"source": source, "reason": str(error) or "in time"}})
        return None


def _look(address: str) -> Status:
    with opened(address) as queue:
        return queue.status()


# --- serving ----------------------------------------------------------------------------------------------------------


async def answer(sources: Sources, path: str, accept: str) -> Answer:
    """To a GET of this path, percent-encoded as it came."""
    match path.strip("/").split("/"):
        case ["metrics"]:
            return metrics_answer(families(await sources.read()), accept)
        case ["v1", "queues", name, "status"]:
            return json_answer(await sources.queue(unquote(name)))
        case ["v1", "work-queues", name, "status"]:
            status = await sources.status(unquote(name))
            return json_answer(status and numbers(status))
        case ["health"]:
            return json_answer({"status": "ok"})
        case _:
            return json_answer(None)


def numbers(status: Status) -> dict[str, float]:
    """For autoscalers, which take nothing else."""
    found = {**counts(status), "oldest_seconds": status.oldest_seconds or 0.0}
    return {name: value for name, value in found.items() if value is not None}


@contextlib.asynccontextmanager
async def serving_sources(sources: Sources, host: str, port: int) -> AsyncIterator[int]:
    """Served until left, then closed; the port. Raises PortTaken."""
    try:
        async with serving(partial(answer, sources), host, port) as bound:
            yield bound
    finally:
        await sources.close()


async def serve(cluster: str | None, queues: Sequence[str], host: str, port: int) -> None:
    """Until SIGTERM or SIGINT. Raises PortTaken."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving_sources(Sources(cluster, queues), host, port) as bound:
        shown = f"[{host}]" if ":" in host else host
        say(f"roq metrics: http://{shown}:{bound}/metrics")
        await stop.wait()
