"""Payloads that do not pass the master (Blizzard): a client of a work queue sends them to a store, and fetches them there.

    put   Reserve at the master ─► upload to the store it named ─► Stored at the master, which has it copied and then logged
    get   the lease names the stores ─► fetch from the first one that has it whole

An upload that breaks is begun again elsewhere; what it left is removed by the master. Not covered: what the master does
(roq/workqueue/master/registry.py), all other verbs (remote.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar
from zlib import crc32

import msgspec

from roq.errors import (
    DataLost,
    RoqError,
    StorageFailed,
    TaskNotFound,
    TemporaryError,
    Unavailable,
)
from roq.runtime.backoff import delays
from roq.runtime.blocking_connection import BlockingConnection
from roq.runtime.observe import logger
from roq.wire import master as wire
from roq.wire import store as store_wire
from roq.wire.task import PayloadReference, StoreAddress, TaskToPut
from roq.workqueue.master_link import MasterLink

PART_SECONDS = 5.0  # one part, on stable storage
TURN_SECONDS = 15.0  # until a store that is sent many parts takes ours
COPY_SECONDS = 30.0  # the stores among themselves
UPLOADS_MIN = 5  # of one payload, each to another store, before it is given up, whatever they took
DAMAGE = (DataLost, StorageFailed, TaskNotFound)  # a store that says so has no copy that is of use

log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
_decode_reply = msgspec.msgpack.Decoder(store_wire.Reply).decode


class BigPayloads:
    """Any thread."""

    def __init__(self, link: MasterLink) -> None:
        self._link = link

    def put(self, producer: int, sequence: int, task: TaskToPut) -> wire.TasksAdded:
        """Store the payload and add the task. What is told as repeated was used by somebody else.

        Raises Unavailable, or why the last upload broke: several did, and for the queue's patience.
        """
        payload, crc = task.payload, crc32(task.payload)
        pauses, deadline = delays(0.02, 0.5), time.monotonic() + self._link.patience_seconds
        bare = msgspec.structs.replace(task, payload=b"")
        avoid: dict[str, None] = {}
        sent_again = False

        def make(request: wire.Request) -> Callable[[int], wire.Request]:
            def made(again: int) -> wire.Request:
                nonlocal sent_again
                sent_again = sent_again or again > 0
                return request

            return made

        for attempt in itertools.count(1):
            request = wire.Reserve(producer, sequence, len(payload), crc, list(avoid))
            reserved = self._link.ask(make(request), wire.Reserved)
            try:
                self._upload(reserved, payload, crc)
                done = wire.PayloadStored(producer, sequence, reserved.blob, bare)
                added = self._link.ask(make(done), wire.TasksAdded, COPY_SECONDS)
                return wire.TasksAdded(added.known) if sent_again or attempt > 1 else added
            except (TemporaryError, TaskNotFound) as error:  # TaskNotFound: the reservation is gone with its master
                pause = next(pauses)
                if attempt >= UPLOADS_MIN and time.monotonic() + pause >= deadline:
                    if isinstance(error, TemporaryError):
                        raise
                    raise Unavailable(f"a payload was lost {attempt} times on its way; the last time: {error}") from error
                log.warning("upload retried", extra={"fields": {"host": reserved.store.host, "reason": str(error)}})
                if not isinstance(error, TaskNotFound):
                    avoid[reserved.store.host] = None
                self._link.pause(pause)
        raise AssertionError("the loop returns or raises")

    def _upload(self, reserved: wire.Reserved, payload: bytes, crc: int) -> None:
        connection = self._link.connections.take(reserved.store.endpoint)
        try:
            for offset in range(0, len(payload), store_wire.BLOB_PART_BYTES):
                part = payload[offset : offset + store_wire.BLOB_PART_BYTES]
                self._ask(connection, store_wire.PutBlob(reserved.blob, offset, len(payload), crc, part), store_wire.StoreDone)
        finally:
            self._link.connections.give(connection)

    def get(self, where: PayloadReference) -> bytes | None:
        """The payload; None if it can't be had from any store just now. Raises DataLost: every store that should have it says
        that it is damaged or gone."""
        damaged: list[str] = []
        for store in where.stores:
            try:
                return self._download(store, where)
            except RoqError as error:
                fields = {"blob": where.blob, "host": store.host, "reason": str(error)}
                log.warning("payload could not be fetched", extra={"fields": fields})
                if isinstance(error, DAMAGE):
                    damaged.append(f"{store.host} ({error})")
        if not where.stores or len(damaged) < len(where.stores):
            return None
        raise DataLost(f"payload {where.blob} of {where.size} bytes is damaged or missing on every host: {', '.join(damaged)}")

    def peek(self, where: PayloadReference) -> bytes:
        """The payload, empty if it can't be had: a view of a task is not to fail for that."""
        try:
            return self.get(where) or b""
        except DataLost as error:
            log.warning("payload could not be fetched for peek: %s", error)
            return b""

    def _download(self, store: StoreAddress, where: PayloadReference) -> bytes:
        connection, parts, size = self._link.connections.take(store.endpoint), list[bytes](), 0
        try:
            while size < where.size:
                request = store_wire.GetBlob(where.blob, size, min(store_wire.BLOB_PART_BYTES, where.size - size))
                part = self._ask(connection, request, store_wire.BlobPart)
                if not part.data or part.total != where.size:
                    raise DataLost(f"{part.total} bytes instead of {where.size}")
                parts.append(part.data)
                size += len(part.data)
        finally:
            self._link.connections.give(connection)
        payload = b"".join(parts)
        if crc32(payload) != where.crc:
            raise DataLost("its check sum is another one")
        return payload

    def _ask(self, connection: BlockingConnection, request: store_wire.Request, expect: type[T]) -> T:
        return connection.ask(request, expect, _decode_reply, PART_SECONDS, TURN_SECONDS)
