"""Backups: a cluster's metadata and what its recorded queues hold, in a folder; and back, into this cluster or another.

    backup.json         BackupManifest; written last, so a folder without it is no backup
    messages/<n>.part   of the n-th recorded queue, from the oldest message on

A part begins with PART_MAGIC. What follows are blocks: length u32, CRC-32 u32 (little endian), and as many bytes of msgpack: a
list of [topic, payload, headers or nil, publisher, sequence, timestamp in ns]. Each publisher's messages are in their order.
The digest is SHA-256 over topics, payloads and headers one after the other, and no number and no time, so that of a queue that
was restored is the same.

Restored messages are published anew, under one producer's name for each backup: numbers and times are new, the order is the
backup's. A restore that ended early goes on when it is asked again. Not restored: where groups and durable subscribers were,
for positions name entries of the old cluster. Not covered: tasks of work queues (`roq task move`), cards and rights (files of
whoever made them).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from roq.client.administration import create_queue_as
from roq.client.cluster import Cluster
from roq.errors import CallError, FrameError, MessagesLost, QueueConflict, QueueNotFound, UnknownFormat
from roq.ids import is_reserved, new_token
from roq.pubsub.start import EARLIEST
from roq.pubsub.subscription import Message
from roq.runtime.files import DISK, storage_errors
from roq.runtime.installation import installed_version
from roq.wire import gcm
from roq.wire.assignment import QueueSettings
from roq.wire.gcm import QueueInfo, WorkQueueInfo
from roq.wire.options import ClusterOptions
from roq.wire.policy import Policy
from roq.wire.recording import Record
from roq.wire.requests import PRIVATE_PREFIXES
from roq.wire.work_queue import GroupSource, TaskSettings

FORMAT = 1
MANIFEST, MESSAGES = "backup.json", "messages"
PART_MAGIC = b"RoQ backup 1\n"
BLOCK_BYTES_MAX = 64 * 1024 * 1024
_BLOCK = struct.Struct("<II")
StoredMessage = tuple[str, bytes, dict[str, str | bytes] | None, int, int, int]
Progress = Callable[[str, int, int], None]  # a queue, messages done with, and of how many (0: not known)


class QueueBackup(msgspec.Struct, frozen=True):
    """One queue. record: how it is kept, if it was ever recorded; recorded: whether it was when it was saved. part: its file
    below the folder, "" if there is none. messages, bytes, digest: of its messages and their payloads. missing: messages, at
    least, that had expired or were lost before they were read."""

    name: str
    settings: QueueSettings
    policy: Policy
    running: bool
    record: Record | None = None
    recorded: bool = False
    part: str = ""
    messages: int = 0
    bytes: int = 0
    digest: str = ""
    missing: int = 0


class WorkQueueBackup(msgspec.Struct, frozen=True):
    """One work queue, without its tasks; source: it is a group; shards: that take tasks."""

    name: str
    settings: TaskSettings
    write_quorum: int
    ack_quorum: int
    standbys: int
    inline_bytes: int
    source: GroupSource | None = None
    shards: int = 1


class BackupManifest(msgspec.Struct, frozen=True):
    """All of a backup. id: drawn anew for each. taken: seconds since 1970, when it was begun. version: of RoQ. options: what is
    settled for the whole cluster; None if only some queues were saved, or by or of an older version."""

    format: int
    id: str
    version: str
    taken: float
    queues: tuple[QueueBackup, ...]
    work_queues: tuple[WorkQueueBackup, ...]
    options: ClusterOptions | None = None

    def queue(self, name: str) -> QueueBackup:
        """Raises QueueNotFound."""
        for queue in self.queues:
            if queue.name == name:
                return queue
        raise QueueNotFound(f"this backup has no queue {name!r}, but {', '.join(one.name for one in self.queues) or 'none'}")


# --- the folder -------------------------------------------------------------------------------------------------------------


class _Digest:
    """Of messages one after the other."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.messages = self.bytes = 0

    def add(self, topic: str, payload: bytes, headers: dict[str, str | bytes] | None) -> None:
        self.messages += 1
        self.bytes += len(payload)
        self._sha.update(msgspec.msgpack.encode((topic, payload, headers or None)))

    @property
    def text(self) -> str:
        return self._sha.hexdigest()


class PartWriter:
    """Writes one queue's messages. Raises StorageFailed, StorageFull, StorageDenied."""

    def __init__(self, path: Path) -> None:
        self._path, self.digest = path, _Digest()
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
            self._file.write(PART_MAGIC)

    def write(self, messages: Sequence[Message]) -> None:
        """A block of them."""
        kept = [message for message in messages if not message.topic.startswith(PRIVATE_PREFIXES)]
        if not kept:
            return
        for message in kept:
            self.digest.add(message.topic, message.payload, message.headers)
        block = msgspec.msgpack.encode(
            [(one.topic, one.payload, one.headers or None, one.publisher, one.sequence, one.timestamp) for one in kept]
        )
        with storage_errors(self._path):
            self._file.write(_BLOCK.pack(len(block), zlib.crc32(block)))
            self._file.write(block)

    def close(self) -> None:
        """With everything on the disk."""
        with storage_errors(self._path):
            self._file.flush()
            DISK.sync(self._file.fileno())
            self._file.close()
            DISK.sync_folder(self._path.parent)


_blocks = msgspec.msgpack.Decoder(list[tuple[str, bytes, dict[str, Any] | None, int, int, int]])  # str | bytes can't be said


def read_part(path: Path) -> Iterator[list[StoredMessage]]:
    """The messages of a part, block by block. Raises UnknownFormat: it is none, or it is damaged, and where."""
    with storage_errors(path), path.open("rb") as file:
        if file.read(len(PART_MAGIC)) != PART_MAGIC:
            raise UnknownFormat(f"{path} is not a part of a backup, or of one that a newer program made")
        while head := file.read(_BLOCK.size):
            place = file.tell() - len(head)
            length, checksum = _BLOCK.unpack(head) if len(head) == _BLOCK.size else (0, 0)
            block = file.read(length) if 0 < length <= BLOCK_BYTES_MAX else b""
            if not block or len(block) != length or zlib.crc32(block) != checksum:
                raise UnknownFormat(f"{path} is damaged at byte {place}: take another copy of this backup")
            try:
                yield list(_blocks.decode(block))
            except msgspec.DecodeError as error:
                raise UnknownFormat(f"{path} is damaged at byte {place}: {error}") from None


def read_manifest(folder: Path) -> BackupManifest:
    """Raises UnknownFormat: there is no backup, or one of a newer format."""
    path = folder / MANIFEST
    if not path.exists():
        raise UnknownFormat(f"{folder} is no backup, or one that was not finished: it has no {MANIFEST}")
    with storage_errors(path):
        data = path.read_bytes()
    try:
        if (found := msgspec.json.decode(data, type=dict[str, Any]).get("format")) != FORMAT:
            raise UnknownFormat(f"{path} has format {found}, this version of RoQ reads {FORMAT}: use the version that made it")
        return msgspec.json.decode(data, type=BackupManifest)
    except msgspec.DecodeError as error:
        raise UnknownFormat(f"{path} is damaged: {error}") from None


def verify(folder: Path, queues: Sequence[str] = (), progress: Progress | None = None) -> BackupManifest:
    """Read a backup, or these queues of it, from the first byte to the last. Raises UnknownFormat: what is damaged or missing;
    QueueNotFound."""
    manifest = read_manifest(folder)
    for queue in _chosen(manifest, queues):
        if not queue.part:
            continue
        digest = _Digest()
        for block in read_part(folder / queue.part):
            for topic, payload, headers, *_ in block:
                digest.add(topic, payload, headers)
            if progress:
                progress(queue.name, digest.messages, queue.messages)
        if (digest.messages, digest.bytes, digest.text) != (queue.messages, queue.bytes, queue.digest):
            raise UnknownFormat(
                f"{folder / queue.part} does not match its manifest ({digest.messages} of {queue.messages} messages, or other "
                "contents): take another copy of this backup"
            )
    return manifest


def _chosen(manifest: BackupManifest, queues: Sequence[str]) -> list[QueueBackup]:
    return [manifest.queue(name) for name in queues] if queues else list(manifest.queues)


# --- save -------------------------------------------------------------------------------------------------------------------


async def save(
    cluster: Cluster, folder: Path, queues: Sequence[str] = (), *, messages: bool = True, progress: Progress | None = None
) -> BackupManifest:
    """Save the cluster's queues, or these, to a folder that is new or empty, while it goes on. messages: also what recorded
    queues hold when their turn comes. Queues of RoQ's own (`_roq.…`) only if they are named.

    Raises QueueNotFound, CallError: the folder is not empty; StorageFailed, StorageFull, StorageDenied, AccessDenied,
    Unavailable.
    """
    await asyncio.to_thread(_take_folder, folder)
    there = {info.record.name: info for info in await cluster.queues()}
    if unknown := [name for name in queues if name not in there]:
        there |= {name: await cluster.queue(name) for name in unknown}  # raises QueueNotFound, or finds what is not listed
    wanted = list(queues) or [name for name in there if not is_reserved(name)]
    began, saved = time.time(), list[QueueBackup]()
    for number, name in enumerate(sorted(wanted)):
        kept = _metadata(there[name])
        if messages and kept.record is not None:
            kept = await _save_messages(cluster, kept, folder, f"{MESSAGES}/{number}.part", progress)
        saved.append(kept)
    others = [_work_queue(info) for info in await cluster.work_queues() if not is_reserved(info.record.name)]
    groups = [_work_queue(info) for name in sorted(wanted) for info in await cluster.groups(name)]
    made = FORMAT, os.urandom(8).hex(), installed_version(), began
    kept_work = (*(() if queues else others), *groups)
    manifest = BackupManifest(*made, tuple(saved), kept_work, None if queues else await _options(cluster))
    await asyncio.to_thread(_write_manifest, folder, manifest)
    return manifest


async def _options(cluster: Cluster) -> ClusterOptions | None:
    """None if its leading GCM is of a version that has none."""
    try:
        return await cluster.options()
    except FrameError:
        return None


def _take_folder(folder: Path) -> None:
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CallError(f"{folder} is not empty: take a new folder for each backup")


def _metadata(info: QueueInfo) -> QueueBackup:
    record = info.record
    return QueueBackup(record.name, record.settings, info.policy, record.running, record.record, record.recorded)


def _work_queue(info: WorkQueueInfo) -> WorkQueueBackup:
    record, spec = info.record, info.record.spec
    quorums = (0, 0) if record.grows else (spec.write_quorum, spec.ack_quorum)
    shards = len(record.shards.open) if record.shards is not None else 1
    return WorkQueueBackup(record.name, spec.settings, *quorums, record.standbys, spec.inline_bytes, spec.source, shards)


async def _save_messages(
    cluster: Cluster, queue: QueueBackup, folder: Path, part: str, progress: Progress | None
) -> QueueBackup:
    missing = 0

    def lost(event: MessagesLost) -> None:
        nonlocal missing
        missing += max(1, event.count)

    writer = PartWriter(folder / part)
    try:
        async with cluster.subscriber(queue.name, start=EARLIEST, follow=False, on_lost=lost) as subscriber:
            async for batch in subscriber.batches():
                await asyncio.to_thread(writer.write, batch)
                if progress:
                    progress(queue.name, writer.digest.messages, 0)
    finally:
        await asyncio.to_thread(writer.close)
    digest = writer.digest
    return msgspec.structs.replace(
        queue, part=part, messages=digest.messages, bytes=digest.bytes, digest=digest.text, missing=missing
    )


def _write_manifest(folder: Path, manifest: BackupManifest) -> None:
    with storage_errors(folder):
        if (folder / MESSAGES).exists():
            DISK.sync_folder(folder / MESSAGES)
        DISK.write_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


# --- restore ----------------------------------------------------------------------------------------------------------------


async def restore(
    cluster: Cluster,
    folder: Path,
    queues: Sequence[str] = (),
    *,
    renamed: dict[str, str] = {},  # noqa: B006  never changed
    progress: Progress | None = None,
) -> BackupManifest:
    """Make the queues of a backup, or these, and publish their messages again; then work queues and groups, which begin at the
    earliest message; last, if all is restored, the cluster's options, unless some are set there. renamed: new names of queues,
    and so of their groups. Each queue is read again afterwards and compared with the backup. Interrupted, it goes on when it is
    called again; done, it changes nothing.

    Raises QueueConflict: there is a queue of this name that this restore did not make; UnknownFormat: the backup is damaged,
    nothing was restored, or what was restored is not what was saved; and what creating and publishing raise.
    """
    manifest = await asyncio.to_thread(verify, folder, queues)
    chosen = [_Restored(queue, renamed.get(queue.name, queue.name)) for queue in _chosen(manifest, queues)]
    for old in renamed:
        manifest.queue(old)
    for one in chosen:
        await one.look(cluster, manifest)
    for one in chosen:
        await one.make(cluster, manifest)
        if one.queue.messages and not one.done:
            await _publish(cluster, folder, manifest, one.queue, one.name, progress)
            await _compare(cluster, one.queue, one.name)
    names = {one.queue.name: one.name for one in chosen}
    for work_queue in manifest.work_queues:
        await _restore_work_queue(cluster, work_queue, names, everything=not queues)
    for one in chosen:
        await one.finish(cluster, manifest)
    if not queues and manifest.options is not None and await _options(cluster) == ClusterOptions():
        await cluster.set_template(manifest.options.template)
        await cluster.set_rebalance(manifest.options.rebalance)
    return manifest


class _Restored:
    """A queue on its way back. done: its messages are there. A queue is ours if the request that made it says so; what is ours
    and has no producer of this restore any more is either untouched or done."""

    def __init__(self, queue: QueueBackup, name: str) -> None:
        self.queue, self.name = queue, name
        self.done = False

    async def look(self, cluster: Cluster, manifest: BackupManifest) -> None:
        """What there is. Raises QueueConflict."""
        try:
            info = await cluster.queue(self.name)
        except QueueNotFound:
            return
        if not info.record.transaction.startswith(_producer(manifest)):
            other = f"remove it, or restore {self.queue.name!r} under another name"
            raise QueueConflict(f"queue {self.name!r} exists already, and this restore did not make it: {other}")
        self.done = not info.record.running or (self.queue.recorded and not info.record.recorded)
        if not self.done and self.queue.messages and not await self._begun(cluster, manifest):
            async with cluster.subscriber(self.name, start=EARLIEST, follow=False) as subscriber:
                self.done = await subscriber.next_batch() is not None

    async def _begun(self, cluster: Cluster, manifest: BackupManifest) -> bool:
        return any(view.name == _producer(manifest) for view in await cluster.producers(self.name))

    async def make(self, cluster: Cluster, manifest: BackupManifest) -> None:
        """The queue as it was, but for what would keep messages from it."""
        if await cluster.queue_exists(self.name):
            return
        transaction = f"{_producer(manifest)}-{new_token()}"
        request = gcm.CreateQueue(self.name, transaction, self.queue.settings, "", self.queue.policy, self.queue.record)
        await create_queue_as(cluster, request)

    async def finish(self, cluster: Cluster, manifest: BackupManifest) -> None:
        """Stopped, or recorded no longer, as it was."""
        record = (await cluster.queue(self.name)).record
        if self.queue.messages and record.running and await self._begun(cluster, manifest):
            await cluster.forget_producer(self.name, _producer(manifest))
        if self.queue.record is not None and not self.queue.recorded and record.recorded:
            await cluster.record_queue(self.name, None)
        if not self.queue.running and record.running:
            await cluster.stop_queue(self.name)


def _producer(manifest: BackupManifest) -> str:
    return f"restore-{manifest.id}"


async def _publish(
    cluster: Cluster, folder: Path, manifest: BackupManifest, queue: QueueBackup, name: str, progress: Progress | None
) -> None:
    async with cluster.publisher(name, producer=_producer(manifest)) as publisher:
        done = publisher.number
        skip = done
        async for block in _blocks_of(folder / queue.part):
            fresh, skip = block[skip:], max(0, skip - len(block))
            for topic, payload, headers, *_ in fresh:
                await publisher.publish(topic, payload, headers)
            done += len(fresh)
            if progress:
                progress(name, done, queue.messages)
        await publisher.flush(timeout_seconds=60.0)


async def _blocks_of(path: Path) -> AsyncGenerator[list[StoredMessage], None]:
    blocks = read_part(path)
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


async def _compare(cluster: Cluster, queue: QueueBackup, name: str) -> None:
    digest = _Digest()
    async with cluster.subscriber(name, start=EARLIEST, follow=False) as subscriber:
        async for batch in subscriber.batches():
            for message in batch:
                digest.add(message.topic, message.payload, message.headers)
    if (digest.messages, digest.text) != (queue.messages, queue.digest):
        raise UnknownFormat(
            f"queue {name!r} does not match its backup ({digest.messages} of {queue.messages} messages, or other contents): "
            "somebody publishes there, or some have expired meanwhile. Restore it under another name"
        )


async def _restore_work_queue(cluster: Cluster, one: WorkQueueBackup, names: dict[str, str], *, everything: bool) -> None:
    source = one.source
    if source is None and everything:
        await cluster.create_work_queue(
            one.name,
            settings=one.settings,
            write_quorum=one.write_quorum or None,
            ack_quorum=one.ack_quorum or None,
            standbys=one.standbys,
            inline_bytes=one.inline_bytes,
            shards=one.shards,
        )
    elif source is not None and source.queue in names:
        await cluster.create_group(
            names[source.queue],
            one.name.rpartition("@")[2],
            *source.topics,
            order=source.order,
            where=source.where,
            settings=one.settings,
            write_quorum=one.write_quorum or None,
            ack_quorum=one.ack_quorum or None,
            standbys=one.standbys,
        )
