"""`roq doctor`, copies: may a disk be replaced now, and if not, what lacks copies on which hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from roq.cli.finding import Finding, good, warning, wrong
from roq.client.cluster import Cluster
from roq.coordination.locate import GcmClient
from roq.errors import DataLost, RoqError
from roq.runtime.rpc import RpcClient
from roq.wire import gcm, shuffle
from roq.wire import master as wire
from roq.wire.shuffle import ShuffleState

ANSWER_SECONDS = 10.0  # a master asks all stores before it answers
ASKED_AT_ONCE = 32
SHOWN_MAX = 5  # shortages of one queue
WAIT = "replace no further disk until this is gone; it is copied again by itself"


class CopiesOf(msgspec.Struct, frozen=True):
    """What was found out about one work queue or shuffle. error: why nothing was; lost: it says that data are gone."""

    subject: str
    shortages: Sequence[wire.Shortage] = ()
    error: str = ""
    lost: bool = False


async def read_copies(cluster: Cluster, zookeeper: str) -> list[CopiesOf]:
    """Of all work queues and sealed shuffles. Raises RoqError if no GCM answers."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)
    queues = await asyncio.gather(*(_of_queue(info, gate) for info in await cluster.work_queues()))
    leader = GcmClient(zookeeper)
    try:
        listed = (await leader.request(gcm.ListShuffles(), gcm.ShuffleList, ANSWER_SECONDS)).shuffles
        sealed = [one.name for one in listed if one.state is ShuffleState.SEALED]
        infos = [await leader.request(gcm.DescribeShuffle(name), gcm.ShuffleInfo, ANSWER_SECONDS) for name in sealed]
    finally:
        leader.close()
    endpoints = {host: endpoint for info in infos for host, endpoint in info.followers.items()}
    views = dict(zip(endpoints, await asyncio.gather(*(_view(one, gate) for one in endpoints.values())), strict=True))
    return [*queues, *(shuffle_copies(info, views) for info in infos)]


async def _view(endpoint: str, gate: asyncio.Semaphore) -> shuffle.FollowerView | None:
    async with gate:
        client = RpcClient(endpoint, shuffle.Reply)
        try:
            return await client.request(shuffle.DescribeFollower(), shuffle.FollowerView, ANSWER_SECONDS)
        except RoqError:
            return None
        finally:
            client.close()


def shuffle_copies(info: gcm.ShuffleInfo, views: Mapping[str, shuffle.FollowerView | None]) -> CopiesOf:
    """Which ranges of a sealed shuffle have too few complete holders. Pure. views: by host; None: no answer."""
    id, wanted = info.description.id, info.description.spec.replicas
    bad = {
        host
        for one in info.description.ranges
        for host in one.holders
        if host not in info.followers or (view := views.get(host)) is None or not view.compared or id in view.lacking
    }
    short: dict[int, list[tuple[str, ...]]] = {}  # copies -> hosts without one, per range
    for one in info.description.ranges:
        missing = tuple(host for host in one.holders if host in bad)
        if (copies := len(one.holders) - len(missing)) < wanted:
            short.setdefault(copies, []).append(missing)
    shortages = [
        wire.Shortage(f"{len(some)} ranges", copies, wanted, tuple(sorted({host for hosts in some for host in hosts})))
        for copies, some in sorted(short.items())
    ]
    return CopiesOf(f"shuffle {info.description.name}", shortages)


async def _of_queue(info: gcm.WorkQueueInfo, gate: asyncio.Semaphore) -> CopiesOf:
    subject = f"work queue {info.record.name}"
    if not info.ready or not info.masters:
        return CopiesOf(subject, error="has no active master")
    async with gate:
        client = RpcClient(info.masters[0].endpoint(), wire.Reply)
        try:
            return CopiesOf(subject, (await client.request(wire.GetCopies(), wire.Copies, ANSWER_SECONDS)).shortages)
        except RoqError as error:
            return CopiesOf(subject, error=str(error), lost=isinstance(error, DataLost))
        finally:
            client.close()


def check_copies(found: Sequence[CopiesOf]) -> list[Finding]:
    """One finding if everything is complete, else one for each that is not. Pure."""
    findings = []
    for one in found:
        subject = f"Copies of {one.subject}"
        if one.lost:
            findings.append(wrong(subject, one.error, "replace no disk, and bring back the one that was taken out last"))
        elif one.error:
            findings.append(warning(subject, f"are not known: {one.error}", "replace no disk until they are"))
        elif one.shortages:
            shown = [_shown(shortage) for shortage in one.shortages[:SHOWN_MAX]]
            left = len(one.shortages) - len(shown)
            told = "; ".join([*shown, f"and {left} more"] if left else shown)
            few = any(not shortage.hosts for shortage in one.shortages)
            findings.append(warning(subject, told, f"{WAIT}{', if there are enough hosts with room' if few else ''}"))
    if not findings and found:
        findings.append(
            good("Copies", f"{len(found)} work queues and shuffles have all of theirs: one disk may be replaced now")
        )
    return findings


def _shown(shortage: wire.Shortage) -> str:
    where = f", missing on {', '.join(shortage.hosts)}" if shortage.hosts else ", no further host has one"
    return f"{shortage.what}: {shortage.copies} of {shortage.wanted} copies{where}"
