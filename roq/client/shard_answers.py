"""A work queue's masters asked as one: that of every shard, and their answers joined. For whoever looks at many queues and
opens none of them. Not covered: a queue that is used (roq/workqueue/sharded.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from roq.errors import NotReady
from roq.runtime.rpc import RpcPool
from roq.wire import master
from roq.wire.gcm import WorkQueueInfo
from roq.wire.shards import marked, shard_number, unmarked
from roq.wire.task import Status, TaskState
from roq.workqueue.spread import first_views, joined_status


def parts(info: WorkQueueInfo) -> dict[int, WorkQueueInfo]:
    """Its shards by number, each as a work queue; number 0 is itself."""
    return {shard_number(one.record.name): one for one in (info, *info.shards)}


def _endpoint(info: WorkQueueInfo) -> str:
    if not info.masters or not info.masters[0].active:
        raise NotReady(f"no master of {info.record.name} serves just now")
    return info.masters[0].endpoint()


async def _ask(masters: RpcPool, requests: Mapping[str, msgspec.Struct], expect: type[Any]) -> list[Any]:
    if len(requests) == 1:
        ((endpoint, request),) = requests.items()
        return [await masters.request(endpoint, request, expect)]
    return list(await asyncio.gather(*(masters.request(to, request, expect) for to, request in requests.items())))


async def status_of(masters: RpcPool, info: WorkQueueInfo) -> Status:
    """Of all its shards. Raises NotReady, or why one does not answer."""
    endpoints = [_endpoint(one) for one in parts(info).values()]
    found = await _ask(masters, {endpoint: master.GetStatus() for endpoint in endpoints}, master.MasterStatus)
    return found[0].counts() if len(found) == 1 else joined_status(found)


async def peek_at(masters: RpcPool, info: WorkQueueInfo, state: TaskState, count: int) -> list[master.PeekedTask]:
    """The first ones of all its shards. Raises as status_of."""
    endpoints = [_endpoint(one) for one in parts(info).values()]
    asked = master.Peek(str(state), count)
    found = await _ask(masters, dict.fromkeys(endpoints, asked), master.PeekedTasks)
    if len(found) == 1:
        return list(found[0].tasks)
    views = [
        msgspec.structs.replace(one, id=marked(number, one.id))
        for number, some in zip(parts(info), found, strict=True)
        for one in some.tasks
    ]
    return first_views(views, state, count)


async def count_at(
    masters: RpcPool, info: WorkQueueInfo, make: Callable[[list[str] | None], msgspec.Struct], ids: Sequence[str] | None
) -> int:
    """What was done to tasks of these ids, each at its shard; None: at all of them. Raises as status_of."""
    known, chosen = parts(info), dict[int, list[str] | None]()
    if ids is None:
        chosen = dict.fromkeys(known)
    else:
        some: dict[int, list[str]] = {}
        for number, id in map(unmarked, ids):
            some.setdefault(number, []).append(id)
        chosen.update((number, of_shard) for number, of_shard in some.items() if number in known)
    requests = {_endpoint(known[number]): make(of_shard) for number, of_shard in chosen.items()}
    return sum(one.count for one in await _ask(masters, requests, master.Counted)) if requests else 0
