"""Fetching what another store holds: closed segments and blobs. What comes is checked before it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from roq.errors import StorageFailed
from roq.log.store.blobs import BlobFolder
from roq.runtime.rpc import RpcClient
from roq.wire import store as wire

PART_SECONDS = 10.0  # the source's answer

Missing = Callable[[str, int, int], list[tuple[int, int]]]
AddCopy = Callable[[str, int, list[int], list[bytes]], Awaitable[None]]


async def copy_segment(order: wire.CopySegment, source: RpcClient, missing: Missing, add: AddCopy) -> None:
    """Fetch the entries of `order` that are missing here. Raises StorageFailed if the source lacks some of them too."""
    lacking = []
    for first, last in missing(order.segment, order.first, order.last):
        position = first
        while position <= last:
            part = await source.request(wire.Read(order.segment, position, last), wire.Entries, PART_SECONDS)
            if part.entries:
                await add(order.segment, position, part.crcs, part.entries)
                position += len(part.entries)
            if part.missing:
                lacking.append(position)
                position += 1
    if lacking:
        raise StorageFailed(f"{order.source} lacks {len(lacking)} entries of {order.segment}, {lacking[0]} first")


async def copy_blob(blob: str, source: RpcClient, blobs: BlobFolder) -> None:
    """Fetch a blob. Raises TaskNotFound, StorageFailed of the source."""
    offset, total = 0, 1
    while offset < total:
        part = await source.request(wire.GetBlob(blob, offset, wire.BLOB_PART_BYTES), wire.BlobPart, PART_SECONDS)
        total = part.total
        if total and not part.data:
            raise StorageFailed(f"blob {blob} ends early at its source")
        await asyncio.to_thread(blobs.put, blob, offset, total, part.crc, part.data)
        offset += len(part.data)
        if not total:
            return
