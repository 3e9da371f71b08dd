"""What the leading GCM answers in parts that fit into a message, put together: tapes, held names, the cluster and its lists.

A part says what it is of (a snapshot of the cluster, a life of a queue), and whether there are more. Where a later part is of
another one than the first, because that is not kept any more or another GCM leads, the first is asked for again, a few times. A
GCM of 0.1 answers all at once: the first part is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Protocol, TypeVar

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import Unavailable
from roq.runtime.backoff import delays
from roq.wire import gcm
from roq.wire.parts import HOST, QUEUE, WORK_QUEUE

ListingPart = gcm.ClusterView | gcm.Hosts | gcm.Queues | gcm.WorkQueues
TRIES = 8  # a snapshot goes when 16 others were begun later, or with its leader


class AnswerPart(Protocol):
    """One of several."""

    @property
    def more(self) -> bool:
        """There are others behind it."""


P = TypeVar("P", bound=AnswerPart)
L = TypeVar("L", gcm.ClusterView, gcm.Hosts, gcm.Queues, gcm.WorkQueues)


async def all_parts(ask: Callable[[P | None], Awaitable[P]], version: Callable[[P], str]) -> list[P]:
    """In order, all of one version. ask: for the part behind this one; None: the first. Raises what that raises; Unavailable:
    it was another version before all were read, TRIES times."""
    waits = delays(0.02, 1.0)
    for number in range(TRIES):
        if number:
            await asyncio.sleep(next(waits))
        parts = [await ask(None)]
        while parts[-1].more:
            part = await ask(parts[-1])
            if version(part) != version(parts[0]):
                break
            parts.append(part)
        else:
            return parts
    raise Unavailable(f"what was asked for in parts was another before all were read, {TRIES} times")


async def read_cluster(client: GcmClient, timeout_seconds: float) -> gcm.ClusterView:
    """The whole cluster, as it was at its `time`. timeout_seconds: for each part. Raises as GcmClient.request, Unavailable."""
    parts = await _listing(client, gcm.GetCluster, gcm.ClusterView, timeout_seconds)
    return msgspec.structs.replace(
        parts[0],
        hosts=tuple(chain.from_iterable(part.hosts for part in parts)),
        queues=tuple(chain.from_iterable(part.queues for part in parts)),
        work_queues=tuple(chain.from_iterable(part.work_queues for part in parts)),
        snapshot="",
        more=False,
    )


async def read_hosts(client: GcmClient, timeout_seconds: float) -> list[gcm.HostInfo]:
    """All hosts. See read_cluster."""
    parts = await _listing(client, gcm.ListHosts, gcm.Hosts, timeout_seconds)
    return [host for part in parts for host in part.hosts]


async def read_queues(client: GcmClient, timeout_seconds: float) -> list[gcm.QueueInfo]:
    """All queues. See read_cluster."""
    parts = await _listing(client, gcm.ListQueues, gcm.Queues, timeout_seconds)
    return [queue for part in parts for queue in part.queues]


async def read_work_queues(client: GcmClient, timeout_seconds: float) -> list[gcm.WorkQueueInfo]:
    """All work queues. See read_cluster."""
    parts = await _listing(client, gcm.ListWorkQueues, gcm.WorkQueues, timeout_seconds)
    return [queue for part in parts for queue in part.work_queues]


async def _listing(
    client: GcmClient, request: Callable[[str, str], msgspec.Struct], expect: type[L], timeout_seconds: float
) -> list[L]:
    async def ask(before: L | None) -> L:
        after, snapshot = (last_place(before), before.snapshot) if before is not None else ("", "")
        return await client.request(request(after, snapshot), expect, timeout_seconds)

    return await all_parts(ask, _snapshot)


def _snapshot(part: ListingPart) -> str:
    return part.snapshot


def last_place(part: ListingPart) -> str:
    """Of the last one told; "" if none is."""
    infos: tuple[gcm.HostInfo | gcm.QueueInfo | gcm.WorkQueueInfo, ...]
    match part:
        case gcm.ClusterView():
            infos = part.work_queues or part.queues or part.hosts
        case gcm.Hosts(infos) | gcm.Queues(infos) | gcm.WorkQueues(infos):
            pass
    if not infos:
        return ""
    last = infos[-1]
    if isinstance(last, gcm.HostInfo):
        return HOST + last.host
    return (QUEUE if isinstance(last, gcm.QueueInfo) else WORK_QUEUE) + last.record.name
