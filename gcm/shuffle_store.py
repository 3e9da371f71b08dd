"""A shuffle's record in ZooKeeper. The node `shuffles/<id>` is small; tables, committed attempts and the schema are *parts*
beside it, in chunks below the node, which are written before the node names them and never changed: whoever reads the node
finds what it names. A leader that dies in between leaves parts that nothing names; the next one deletes them.

    shuffles/<id>                      JSON: Node; empty while the shuffle is being created
    shuffles/<id>/<part>-<epoch>-<n>.0, .1, …    msgpack of the part; epoch: of the term that wrote it
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from typing import Any, NamedTuple

import msgspec

from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.link import Create, Delete, NoNode, SetData
from roq.coordination.session import Session
from roq.errors import DataLost, FrameError
from roq.runtime.observe import logger
from roq.shuffle.record import ShuffleRecord, Table
from roq.wire.assignment import from_json, to_json
from roq.wire.shuffle import Receipt, Spec

log = logger(__name__)
CHUNK_BYTES = 512 * 1024  # ZooKeeper takes 1 MB
READ_AT_ONCE = 32  # shuffles, when a term begins: their reads share the round trips
PARTS: dict[str, tuple[Any, Any]] = {  # type, and the value that is not written
    "schema": (bytes, b""),
    "table": (Table, ()),
    "former": (Table, ()),
    "receipts": (tuple[Receipt, ...], ()),
}


class RecordPart(msgspec.Struct, frozen=True):
    """Where a part is."""

    name: str
    chunks: int
    crc: int


class ShuffleNode(msgspec.Struct, frozen=True):
    """The node's value. record: without its parts."""

    record: ShuffleRecord
    parts: dict[str, RecordPart]


class _Written(NamedTuple):
    part: RecordPart
    value: object


class ShuffleStore:
    """Writes one shuffle's record in one term."""

    def __init__(self, term: LeaderTerm, id: str, parts: dict[str, _Written] | None = None) -> None:
        self._term, self._id = term, id
        self._parts = parts or {}
        self._serials = itertools.count(1)

    async def create(self, record: ShuffleRecord) -> None:
        """The first time. Raises NotLeader."""
        await self._term.write(Create(paths.shuffle(self._id)))
        await self.write(record)

    async def write(self, record: ShuffleRecord) -> None:
        """The parts that are new, then the node, then without the parts that are old. Raises NotLeader."""
        values = _split(record)
        parts: dict[str, _Written] = {}
        for name, value in values.items():
            if value != PARTS[name][1]:
                parts[name] = self._known(value) or await self._write_part(name, value)
        node = ShuffleNode(_joined(record, {}), {name: written.part for name, written in parts.items()})
        await self._term.write(SetData(paths.shuffle(self._id), to_json(node)))
        kept = {written.part.name for written in parts.values()}
        old = dict.fromkeys(written.part for written in self._parts.values() if written.part.name not in kept)
        self._parts = parts
        for part in old:
            await self._term.write(*(Delete(path) for path in _paths(self._id, part)))

    def _known(self, value: object) -> _Written | None:
        return next((each for each in self._parts.values() if each.value is value or each.value == value), None)

    async def _write_part(self, kind: str, value: object) -> _Written:
        data = msgspec.msgpack.encode(value)
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        part = RecordPart(f"{kind}-{self._term.fence.epoch}-{next(self._serials)}", len(chunks), zlib.crc32(data))
        for path, chunk in zip(_paths(self._id, part), chunks, strict=True):
            await self._term.write(Create(path, chunk))
        return _Written(part, value)

    async def delete(self) -> None:
        """Nothing of it is left; all or nothing, as a node without its parts is unreadable. Raises NotLeader."""
        written = dict.fromkeys(written.part for written in self._parts.values())
        old = [Delete(path) for part in written for path in _paths(self._id, part)]
        await self._term.write(*old, Delete(paths.shuffle(self._id)))


class ShufflesRead(NamedTuple):
    """What a term begins with. unreadable: ids of shuffles that are there, whose record a newer version wrote, or that are
    damaged. Nothing is known of them, so nothing of them may be forgotten."""

    shuffles: list[tuple[ShuffleRecord, ShuffleStore]]
    unreadable: frozenset[str]


async def read_all(session: Session, term: LeaderTerm) -> ShufflesRead:
    """Every shuffle, at the beginning of a term. One that can't be read is logged and left alone; what was not quite created
    is deleted. Raises NotLeader, ZooKeeperUnavailable."""
    room = asyncio.Semaphore(READ_AT_ONCE)
    unreadable = set[str]()

    async def one(id: str) -> tuple[ShuffleRecord, ShuffleStore] | None:
        async with room:
            try:
                return await _read_one(session, term, id)
            except (FrameError, DataLost, NoNode) as error:
                log.error("shuffle record is unreadable", extra={"fields": {"id": id, "reason": str(error)}})
                unreadable.add(id)
                return None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(id)) for id in sorted(await session.children(paths.SHUFFLES))]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    found = [each for task in tasks if (each := task.result()) is not None]
    return ShufflesRead(found, frozenset(unreadable))


async def _read_one(session: Session, term: LeaderTerm, id: str) -> tuple[ShuffleRecord, ShuffleStore] | None:
    """None: it is gone, or was not quite created. Raises FrameError, DataLost, NoNode if it can't be read."""
    node = await session.get(paths.shuffle(id))
    if node is None:
        return None
    read = from_json(node.data, ShuffleNode) if node.data else None
    parts = {kind: await _read(session, id, kind, part) for kind, part in read.parts.items()} if read else {}
    named = {path for written in parts.values() for path in _paths(id, written.part)}
    there = [paths.shuffle_part(id, name) for name in await session.children(paths.shuffle(id))]
    stray = [Delete(path) for path in there if path not in named]
    if read is None:
        stray.append(Delete(paths.shuffle(id)))
    if stray:
        await term.write(*stray)
    values = {kind: written.value for kind, written in parts.items()}
    return (_joined(read.record, values), ShuffleStore(term, id, parts)) if read else None


async def _read(session: Session, id: str, kind: str, part: RecordPart) -> _Written:
    data = b""
    for path in _paths(id, part):
        node = await session.get(path)
        data += node.data if node is not None else b""
    if zlib.crc32(data) != part.crc:
        raise DataLost(f"{part.name} of shuffle {id} is damaged")
    try:
        return _Written(part, msgspec.msgpack.decode(data, type=PARTS[kind][0]))
    except (msgspec.MsgspecError, KeyError) as error:
        raise DataLost(f"{part.name} of shuffle {id}: {error}") from error


def _paths(id: str, part: RecordPart) -> list[str]:
    return [paths.shuffle_part(id, f"{part.name}.{number}") for number in range(part.chunks)]


def _split(record: ShuffleRecord) -> dict[str, Any]:
    return {"schema": record.spec.schema, "table": record.table, "former": record.former, "receipts": record.receipts}


def _joined(record: ShuffleRecord, values: dict[str, Any]) -> ShuffleRecord:
    given = {name: values.get(name, absent) for name, (_, absent) in PARTS.items()}
    keys = record.spec
    spec = Spec(keys.keys, given.pop("schema"), keys.replicas, keys.ranges)
    return msgspec.structs.replace(record, spec=spec, **given)
