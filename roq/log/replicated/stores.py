"""Connections to stores by host name: notices go out, answers come back with the host's name; requests; blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from roq.errors import DataLost, LogUnavailable, RoqError, StorageFailed, TaskNotFound
from roq.log.replicated.directory import Directory
from roq.runtime.rpc import RpcClient
from roq.wire import store as wire

T = TypeVar("T", bound=msgspec.Struct)
REQUEST_SECONDS = 5.0
PART_SECONDS = 15.0  # one part of a blob: the last one waits for the disk


class Stores:
    """Open connections of one program. `on_notice(host, notice)`: answers to entries sent."""

    def __init__(self, directory: Directory, on_notice: Callable[[str, Any], None] | None = None) -> None:
        self.directory = directory
        self._on_notice = on_notice
        self._clients: dict[str, RpcClient] = {}

    def _client(self, host: str) -> RpcClient:
        endpoint = self.directory.endpoint(host)
        client = self._clients.get(host)
        if client is not None and endpoint in (None, client.endpoint):
            return client
        if endpoint is None:
            raise LogUnavailable(f"the store of host {host} is not known")
        if client is not None:
            client.close()
        notice = partial(self._on_notice, host) if self._on_notice is not None else None
        client = RpcClient(endpoint, wire.Reply, wire.NoticeToWriter, notice, watched=True)
        self._clients[host] = client
        return client

    def send(self, host: str, add: wire.Add) -> None:
        """Send entries; what is lost on the way is never answered."""
        try:
            self._client(host).notify(add)
        except LogUnavailable:
            return

    async def request(self, host: str, request: wire.Request, expect: type[T], seconds: float = REQUEST_SECONDS) -> T:
        """One request. Raises what the store raised, LogUnavailable, Unavailable, DeadlineExceeded."""
        return await self._client(host).request(request, expect, seconds)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # --- blobs --------------------------------------------------------------------------------------------------------

    async def put_blob(
        self, hosts: Iterable[str], blob: str, data: bytes | memoryview, enough: int | None = None
    ) -> tuple[str, ...]:
        """Store a blob on all of `hosts`; those where it is durable. Raises the last error if fewer than `enough` (default
        all) have it."""
        hosts = tuple(hosts)
        crc = await asyncio.to_thread(crc32, data) if len(data) > wire.BLOB_PART_BYTES else crc32(data)
        results = await asyncio.gather(*(self._put(host, blob, data, crc) for host in hosts), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        stored = tuple(host for host, result in zip(hosts, results, strict=True) if not isinstance(result, BaseException))
        if errors and (len(stored) < (len(hosts) if enough is None else enough) or not isinstance(errors[-1], RoqError)):
            raise errors[-1]
        return stored

    async def _put(self, host: str, blob: str, data: bytes | memoryview, crc: int) -> None:
        total, offset = len(data), 0
        while offset < total or not offset:
            part = bytes(data[offset : offset + wire.BLOB_PART_BYTES])
            await self.request(host, wire.PutBlob(blob, offset, total, crc, part), wire.StoreDone, PART_SECONDS)
            offset += len(part)
            if not total:
                return

    async def get_blob(self, hosts: Iterable[str], blob: str) -> bytes:
        """The blob from the first host that has it complete. Raises DataLost (every host says that it is damaged or not there),
        LogUnavailable (some do not answer)."""
        errors: dict[str, RoqError] = {}
        for host in hosts:
            try:
                return await self._get(host, blob)
            except RoqError as failed:
                errors[host] = failed
        reasons = "; ".join(f"{host}: {error}" for host, error in errors.items()) or "it has no host"
        if all(isinstance(error, StorageFailed | TaskNotFound) for error in errors.values()):
            raise DataLost(f"{blob} is damaged or missing on every host that should hold it: {reasons}")
        raise LogUnavailable(f"{blob} can't be read now: {reasons}")

    async def _get(self, host: str, blob: str) -> bytes:
        parts: list[bytes] = []
        offset, total, crc = 0, 1, 0
        while offset < total:
            part = await self.request(host, wire.GetBlob(blob, offset, wire.BLOB_PART_BYTES), wire.BlobPart, PART_SECONDS)
            total, crc = part.total, part.crc
            if not part.data:
                break
            parts.append(part.data)
            offset += len(part.data)
        data = b"".join(parts)
        if len(data) != total or crc32(data) != crc:
            raise StorageFailed(f"blob {blob} on host {host} is damaged")
        return data

    async def copy_blob(self, source: str, target: str, blob: str, seconds: float = 60.0) -> None:
        """Have `target` fetch the blob from `source`."""
        endpoint = self.directory.endpoint(source)
        if endpoint is None:
            raise LogUnavailable(f"the store of host {source} is not known")
        await self.request(target, wire.CopyBlob(blob, endpoint), wire.StoreDone, seconds)

    async def delete_blob(self, hosts: Iterable[str], blob: str) -> tuple[str, ...]:
        """Delete it where possible; the hosts where it is gone for sure."""
        hosts = tuple(hosts)
        results = await asyncio.gather(
            *(self.request(host, wire.DeleteBlob(blob), wire.StoreDone) for host in hosts), return_exceptions=True
        )
        return tuple(host for host, result in zip(hosts, results, strict=True) if not isinstance(result, BaseException))

    async def inventory(self, host: str, prefix: str) -> list[wire.BlobView]:
        """All blobs on the host whose name begins with `prefix`."""
        found: list[wire.BlobView] = []
        while True:
            part = await self.request(host, wire.ListBlobs(prefix, found[-1].blob if found else ""), wire.BlobList)
            found += part.blobs
            if len(part.blobs) < wire.LIST_COUNT_MAX:
                return found
