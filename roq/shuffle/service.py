"""What programs use: the shuffles of one address. Plain blocking code; any thread, except that a writer belongs to one.

    file:///data/shuffles                  a folder, for the processes of one machine; no server (folder.py)
    roq://zk1:2181,zk2:2181/RoQ            a cluster; the chroot may be left out (cluster.py)

A path is percent-decoded; relative ones and host parts are refused: two programs would mean different folders by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

import pyarrow as pa

from roq.errors import CallError, DataLost, InvalidAddress, ShuffleNotSealed
from roq.ids import check_name, new_token
from roq.shuffle.blocks import load_schema, save_schema
from roq.shuffle.contract import Opened, ShuffleService
from roq.shuffle.folder import FolderService
from roq.shuffle.keys import KeyEncoder
from roq.shuffle.merge import merged
from roq.shuffle.writer import MEMORY_BYTES, Writer, check_memory
from roq.wire.shuffle import PARTITIONS_MAX, RANGES_MAX, REPLICAS_MAX, Description, Range, Receipt, ShuffleState, Spec

EXAMPLES = "file:///data/shuffles · roq://zk1:2181,zk2:2181"
PORT_MAX = 65535


class Shuffles:
    """The shuffles of one address; `roq.shuffle.open` makes it. A context manager."""

    def __init__(self, service: ShuffleService) -> None:
        self._service = service

    def create(self, name: str, keys: Sequence[str], schema: pa.Schema, replicas: int = 2, ranges: int = 0) -> Description:
        """A new shuffle, or the one there is if it was created the same. ranges: 0 for as many as fit the data.

        Raises ShuffleConflict, SchemaMismatch (missing keys, types that can't be keys), InvalidName, CallError.
        """
        check_name(name, "shuffle")
        if not 0 <= ranges <= RANGES_MAX:
            raise CallError(f"ranges is {ranges}: 0 to {RANGES_MAX} are possible")
        if not 1 <= replicas <= REPLICAS_MAX:
            raise CallError(f"replicas is {replicas}: 1 to {REPLICAS_MAX} are possible")
        saved = save_schema(schema)
        KeyEncoder(schema, keys)
        return self._service.create(name, Spec(tuple(keys), saved, replicas, ranges))

    def writer(self, name: str, partition: int, attempt: str | None = None, memory_bytes: int = MEMORY_BYTES) -> Writer:
        """Begin an attempt of a partition. attempt: an id that is used once, random if None. memory_bytes: what the writer may
        use beside what it is given.

        Raises ShuffleNotFound, ShuffleSealed, AttemptConflict, CallError.
        """
        if not 0 <= partition < PARTITIONS_MAX:
            raise CallError(f"partition is {partition}: 0 to {PARTITIONS_MAX - 1} are possible")
        attempt = new_token() if attempt is None else check_name(attempt, "attempt")
        check_memory(memory_bytes)
        spec = self._service.describe(name).spec
        encoder = KeyEncoder(load_schema(spec.schema), spec.keys)
        sink = self._service.open_attempt(name, partition, attempt)
        return Writer(sink, encoder, partition, attempt, spec.ranges, memory_bytes)

    def commit(self, name: str, receipts: Sequence[Receipt]) -> Description:
        """Name the attempts that count, one per partition, and seal. Returns when readers may read. The same again: the same.

        Raises ShuffleNotFound, ShuffleSealed (with other committed attempts), AttemptConflict (two of one partition),
        AttemptNotFound.
        """
        return self._service.commit(name, receipts)

    def describe(self, name: str) -> Description:
        """State, ranges, committed attempts, sizes. Raises ShuffleNotFound."""
        return self._service.describe(name)

    def list(self) -> list[Description]:
        """All shuffles, by name."""
        return self._service.list()

    def remove(self, name: str) -> None:
        """Forget a shuffle and its data. Raises ShuffleNotFound."""
        self._service.remove(name)

    def rebalance(self, name: str, ranges: int = 0) -> Description:
        """Cut a sealed shuffle anew. ranges: 0 for as many as it has. Raises ShuffleNotFound, ShuffleNotSealed, CallError."""
        if not 0 <= ranges <= RANGES_MAX:
            raise CallError(f"ranges is {ranges}: 0 to {RANGES_MAX} are possible")
        return self._service.rebalance(name, ranges)

    def read(
        self, name: str, number: int, memory_bytes: int = MEMORY_BYTES, planned: Description | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one range in key order, in batches of at most 65,536 rows, with this much memory. planned: what
        describe() told when the ranges were given out to several readers: one that comes after another cut is told so
        (CallError), since its number stands for other rows then.

        Raises ShuffleNotFound, ShuffleNotSealed, CallError (no such range) at once; Unavailable, DataLost, CallError (split
        anew) while it is read.
        """
        check_memory(memory_bytes)
        if planned is not None and planned.name != name:
            raise CallError(f"planned is a description of shuffle {planned.name!r}, not of {name!r}")
        description = self._sealed(planned or self._service.describe(name))
        self._range(description, number)
        return self._rows(description, number, memory_bytes)

    def read_all(self, name: str, memory_bytes: int = MEMORY_BYTES) -> Iterator[pa.RecordBatch]:
        """All rows in key order, one range after the other. Raises as `read`."""
        check_memory(memory_bytes)
        description = self._sealed(self._service.describe(name))
        return (batch for each in description.ranges for batch in self._rows(description, each.number, memory_bytes))

    def close(self) -> None:
        """Let go of the address."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _sealed(self, description: Description) -> Description:
        if description.state is not ShuffleState.SEALED:
            raise ShuffleNotSealed(f"shuffle {description.name!r} is {description.state}: commit it before it is read")
        return description

    def _range(self, description: Description, number: int) -> Range:
        if not 0 <= number < len(description.ranges):
            last = len(description.ranges) - 1
            raise CallError(f"shuffle {description.name!r} has the ranges 0 to {last}, not {number}")
        return description.ranges[number]

    def _rows(self, description: Description, number: int, memory_bytes: int) -> Iterator[pa.RecordBatch]:
        """The rows of a range, and not one fewer or more."""
        expected = self._range(description, number).rows
        encoder = KeyEncoder(load_schema(description.spec.schema), description.spec.keys)
        source = self._service.open_range(description.name, number)
        try:
            if source.opened != Opened(description.id, self._range(description, number).interval):
                raise CallError(f"shuffle {description.name!r} was made or cut anew: its ranges are other ones now")
            there = sum(piece.rows for piece in source.slices)
            if expected >= 0 and there != expected:
                raise DataLost(f"range {number} should have {expected} rows, and {there} were found")
            rows = 0
            for batch in merged(source, encoder, memory_bytes):
                rows += batch.num_rows
                yield batch
            if rows != there:
                raise DataLost(f"range {number} should have {there} rows, and {rows} came")
        finally:
            source.close()


class ShuffleAddress(NamedTuple):
    """An address in parts. where: the folder, or ZooKeeper's addresses as `roq.connect` takes them."""

    scheme: str
    where: str


def parse(address: str) -> ShuffleAddress:
    """The parts of an address. Raises InvalidAddress."""
    if not isinstance(address, str):
        raise InvalidAddress(f"an address is a string, got {type(address).__name__}")
    scheme, slashes, rest = address.partition("://")
    if not slashes or scheme not in ("file", "roq"):
        guess = f" Is file://{quote(address)} meant?" if address.startswith("/") else ""
        raise InvalidAddress(f"{address!r} is not the address of shuffles.{guess} Addresses look like {EXAMPLES}")
    return ShuffleAddress(scheme, _folder(address, rest) if scheme == "file" else _zookeeper(address, rest))


def open(address: str) -> Shuffles:
    """The shuffles of an address. Raises InvalidAddress; a cluster: Unavailable."""
    scheme, where = parse(address)
    if scheme == "file":
        return Shuffles(FolderService(Path(where)))
    cluster = import_module("roq.shuffle.cluster")  # with its network code, which a folder does not need
    return Shuffles(cluster.ClusterService(where))


def _folder(address: str, path: str) -> str:
    if not path.startswith("/"):
        raise InvalidAddress(f"{address!r}: the folder is written from the root, with three slashes: file:///data/shuffles")
    if "?" in path or "#" in path:
        raise InvalidAddress(f"{address!r}: '?' and '#' in a folder's name are written %3F and %23")
    folder = unquote(path)
    if "\0" in folder or not folder.strip("/"):
        raise InvalidAddress(f"{address!r} names no folder of its own")
    return folder


def _zookeeper(address: str, rest: str) -> str:
    for host in rest.partition("/")[0].split(","):
        name, colon, port = host.rpartition(":")
        name, port = (name, port) if colon else (host, "2181")
        if not name or not (port.isdigit() and 0 < int(port) <= PORT_MAX):
            raise InvalidAddress(f"{address!r}: {host!r} is not the host:port of a ZooKeeper")
    return rest
