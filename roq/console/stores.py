"""What each host's store says of itself. All are asked side by side; it takes LOOK_SECONDS at most, however many hang.

Not covered: which copies are missing (`roq doctor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from roq.errors import RoqError
from roq.runtime.rpc import OnDisconnect, RpcClient, answered_within
from roq.wire import store
from roq.wire.assignment import ProcessKind, ProcessState
from roq.wire.gcm import HostInfo

STORE_SECONDS = 2.0  # a store that needs longer is shown as not answering
LOOK_SECONDS = 6.0  # for the answers of all
ASKED_AT_ONCE = 64
PORT = "clients"
NOT_ASKED = "it was not asked in time: too many others do not answer"


class StoreRow(msgspec.Struct, frozen=True):
    """A host's store. problem: why it does not answer, then all numbers are None. journal_bytes: of its journal's files, of
    which live_bytes are needed; blobs: big payloads and snapshots; logs: of which it has a segment, None of an older store;
    damages: of the journal, known ones."""

    host: str
    answers: bool
    problem: str
    disk_free_bytes: int | None = None
    journal_bytes: int | None = None
    live_bytes: int | None = None
    blobs: int | None = None
    blob_bytes: int | None = None
    segments: int | None = None
    logs: int | None = None
    damages: int | None = None


class StorePlace(NamedTuple):
    """Where a host's store serves; problem: why it does not."""

    host: str
    endpoint: str
    problem: str


def store_place(info: HostInfo) -> StorePlace | None:
    """None: a host that has just come has no store yet. Pure."""
    if not info.alive:
        return StorePlace(info.host, "", "its host is away")
    report = info.report
    found = next((one for one in report.processes if one.kind is ProcessKind.STORE), None) if report is not None else None
    if report is None or found is None:
        return None
    if found.state is not ProcessState.RUNNING or PORT not in found.ports:
        return StorePlace(info.host, "", f"its process is {found.state}{f': {found.error}' if found.error else ''}")
    return StorePlace(info.host, f"tcp://{report.address}:{found.ports[PORT]}", "")


async def read_stores(hosts: Iterable[HostInfo]) -> tuple[StoreRow, ...]:
    """Of all hosts that have one, in their order."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)
    places = [place for place in map(store_place, hosts) if place is not None]
    asked = [asyncio.create_task(_ask(place, gate)) for place in places]
    await answered_within(LOOK_SECONDS, asked)
    return tuple(
        StoreRow(place.host, answers=False, problem=NOT_ASKED) if task.cancelled() else task.result()
        for place, task in zip(places, asked, strict=True)
    )


async def _ask(place: StorePlace, gate: asyncio.Semaphore) -> StoreRow:
    if place.problem:
        return StoreRow(place.host, answers=False, problem=place.problem)
    async with gate:
        client = RpcClient(place.endpoint, store.Reply, on_disconnect=OnDisconnect.FAIL)
        try:
            return store_row(place.host, await client.request(store.DescribeStore(), store.StoreView, STORE_SECONDS))
        except RoqError as error:
            return StoreRow(place.host, answers=False, problem=str(error))
        finally:
            client.close()


def store_row(host: str, told: store.StoreView) -> StoreRow:
    """What it answered. Pure."""
    return StoreRow(
        host,
        answers=True,
        problem="",
        disk_free_bytes=told.bytes_free,
        journal_bytes=told.journal_bytes,
        live_bytes=told.live_bytes,
        blobs=told.blobs,
        blob_bytes=told.blob_bytes,
        segments=told.segments,
        logs=told.logs,
        damages=told.counters.get("damages", 0),
    )
