"""format("roq-shuffle"): a DataFrame in key order through a RoQ shuffle.

    df.write.format("roq-shuffle").option("address", …).option("keys", "country,time").mode("append").save("visits")
    spark.read.format("roq-shuffle").option("address", …).load("visits")

Options: address ("file:///dir", "roq://zk1:2181,zk2:2181") or cluster ("zk1:2181,zk2:2181"); memoryMiB of each task; to write
also keys, ranges (0: as many as fit), replicas. Spark offers two modes to Python sources: "append" refuses a shuffle that is
sealed, "overwrite" removes what is there first. One save is one complete shuffle: its commit seals it.

Reading: one Spark partition per range of a sealed shuffle, in key order; its rows merged, in Arrow batches. Which replica is
asked, and what happens when it does not answer, is roq.shuffle's. Spark learns nothing of the order (a Python source can't
tell), so ORDER BY sorts again: use mapInArrow, mapInPandas or foreachPartition, which see each range in order.

Writing: each task is one attempt at one partition; the driver's commit names those that count. Attempts are named after the
save and Spark's task attempt: no two runs of tasks ever share one, whether they were retried, speculated, or of a driver that
came before. What is pickled is plain values; connections are made where they are used. A task that is killed leaves an
attempt that nobody names: it is not read, and goes when the shuffle is sealed or removed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, InputPartition, WriterCommitMessage
from pyspark.sql.types import GeographyType, GeometryType, StringType, StructType, VariantType

import roq.shuffle
from roq.errors import RoqError, SchemaMismatch, ShuffleConflict, ShuffleNotFound, ShuffleNotSealed, ShuffleSealed
from roq.ids import new_token
from roq.shuffle.blocks import load_schema, save_schema
from roq.shuffle.keys import KeyEncoder
from roq.shuffle.writer import MEMORY_BYTES, MEMORY_BYTES_MIN
from roq.spark.errors import WHERE, address_of, name_of, option_error, refuse_unknown, spark_errors, whole_number
from roq.spark.schema import arrow_schema, exact, same_types, spark_schema
from roq.wire.shuffle import RANGES_MAX, REPLICAS_MAX, Description, Range, Receipt, ShuffleState

MIB = 1024 * 1024
MEMORY_MIB_MAX = 64 * 1024
NO_ORDER = (VariantType, GeometryType, GeographyType)  # in Arrow they are structs: told by their own names
EXAMPLE = "file:///data/shuffles or roq://zk1:2181,zk2:2181"
CHANGED = (
    "the shuffle was made or cut anew since this was planned: load it again. A query that overwrites the shuffle it reads"
    " destroys it: save under another name, then remove this one"
)
log = logging.getLogger(__name__)


@cache
def settle() -> None:
    """Once in each process: Spark's Python workers run one task after the other, and look for garbage after each. Spare what
    is there by now (60,000 objects of modules) from the collections after every task, which take 40 ms of a short task. Only
    cycles among what is there now would never be collected."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """A range of the table the job was planned with. interval: encoded."""

    number: int
    interval: bytes


@dataclass(frozen=True)
class ShuffleReader(DataSourceReader):
    """Of one load. shuffle: id of the shuffle when it was planned. schema: serialized."""

    address: str
    name: str
    shuffle: str
    schema: bytes
    memory_bytes: int

    def partitions(self) -> list[InputPartition]:
        """One per range, in key order."""
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            return [RangePartition(one.number, _encoded(one)) for one in self._same(shuffles.describe(self.name)).ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of one range in order."""
        if not isinstance(partition, RangePartition):  # what Spark makes of no partitions at all
            return
        settle()
        schema = load_schema(self.schema)
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            self._check(shuffles.describe(self.name), partition)
            batches = iter(shuffles.read(self.name, partition.number, self.memory_bytes))
            first = next(batches, None)
            self._check(shuffles.describe(self.name), partition)  # the range is open: what is so now was so when it was opened
            if first is not None:
                yield exact(first, schema)
                for batch in batches:
                    yield exact(batch, schema)

    def _check(self, now: Description, partition: RangePartition) -> None:
        """Is this number still the range the job was planned with?"""
        if [_encoded(one) for one in self._same(now).ranges if one.number == partition.number] != [partition.interval]:
            raise ShuffleConflict(CHANGED)

    def _same(self, now: Description) -> Description:
        if now.id != self.shuffle:
            raise ShuffleConflict(CHANGED)
        return now


def _encoded(one: Range) -> bytes:
    """What the range is made of, wherever it lies."""
    return msgspec.msgpack.encode(one.interval)


@dataclass(frozen=True)
class PartitionWritten(WriterCommitMessage):
    """What a task tells the driver: a Receipt in plain values."""

    partition: int
    attempt: str
    rows: int
    size: int
    runs: int


@dataclass(frozen=True)
class ShuffleWriter(DataSourceArrowWriter):
    """Of one save. shuffle: id of the shuffle called `name`; created: by this save. schema: serialized. save: unique."""

    address: str
    name: str
    shuffle: str
    created: bool
    schema: bytes
    save: str
    memory_bytes: int

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """In a task: returns when the rows are stored, as often as replicas say."""
        task = TaskContext.get()
        if task is None:
            raise RuntimeError("this runs in a Spark task")
        settle()
        schema, attempt = load_schema(self.schema), f"{self.save}-{task.taskAttemptId()}"
        with (
            spark_errors(shuffle=self.name),
            roq.shuffle.open(self.address) as shuffles,
            shuffles.writer(self.name, task.partitionId(), attempt, self.memory_bytes) as writer,
        ):
            for batch in iterator:
                writer.write(exact(batch, schema))
            receipt = writer.finish()
        return PartitionWritten(receipt.partition, receipt.attempt, receipt.rows, receipt.size, receipt.runs)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: name the committed attempts and seal. Returns when readers may read."""
        receipts = [
            Receipt(m.partition, m.attempt, m.rows, m.size, m.runs) for m in messages if isinstance(m, PartitionWritten)
        ]
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            if shuffles.describe(self.name).id != self.shuffle:
                raise ShuffleConflict(f"shuffle {self.name!r} was removed and made anew while this was written")
            shuffles.commit(self.name, receipts)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, also after a commit that failed: a shuffle this save has made goes, unless its committed attempts
        are named."""
        try:
            with roq.shuffle.open(self.address) as shuffles:
                now = shuffles.describe(self.name)
                if self.created and now.id == self.shuffle and now.state is ShuffleState.FILLING:
                    shuffles.remove(self.name)
        except ShuffleNotFound:
            pass
        except RoqError as error:  # Spark shows why the save failed, not what its abort says
            log.warning("shuffle %s: what the failed save wrote could not be removed: %s", self.name, error)


class RoqShuffleDataSource(DataSource):
    """The data source "roq-shuffle"."""

    @classmethod
    def name(cls) -> str:
        """What follows .format."""
        return "roq-shuffle"

    def schema(self) -> StructType:
        """Columns of the sealed shuffle."""
        description = self._sealed()
        with spark_errors(shuffle=description.name):
            return spark_schema(load_schema(description.spec.schema))

    def reader(self, schema: StructType) -> ShuffleReader:
        """One partition per range. schema: the shuffle's; another one, given with .schema(…), must have the same types."""
        refuse_unknown(self.options, (*WHERE, "memoryMiB"))
        description = self._sealed()
        with spark_errors(shuffle=description.name):
            same_types(arrow_schema(schema), arrow_schema(spark_schema(load_schema(description.spec.schema))))
            wanted = arrow_schema(schema).remove_metadata()
        return ShuffleReader(
            self._address(),
            description.name,
            description.id,
            save_schema(wanted),
            self._memory_bytes(),
        )

    def writer(self, schema: StructType, overwrite: bool) -> ShuffleWriter:
        """Creates the shuffle, and with mode("overwrite") removes the former one."""
        refuse_unknown(self.options, (*WHERE, "keys", "ranges", "replicas", "memoryMiB"))
        address, name = self._address(), name_of(self.options, "shuffle")
        keys = self._keys(schema, name)
        ranges = whole_number(self.options, "ranges", 0, 0, RANGES_MAX)
        replicas = whole_number(self.options, "replicas", 2, 1, REPLICAS_MAX)
        memory_bytes = self._memory_bytes()
        with spark_errors(shuffle=name), roq.shuffle.open(address) as shuffles:
            arrow = arrow_schema(schema)
            KeyEncoder(arrow, keys)  # before anything is removed: can these columns be keys?
            if overwrite:
                with suppress(ShuffleNotFound):
                    shuffles.remove(name)
            before: Description | None = None
            with suppress(ShuffleNotFound):
                before = shuffles.describe(name)
            if before is not None and before.state is not ShuffleState.FILLING:
                raise ShuffleSealed(f'shuffle {name!r} is sealed already: save another one, or with mode("overwrite")')
            made = shuffles.create(name, keys=keys, schema=arrow, ranges=ranges, replicas=replicas)
        return ShuffleWriter(address, name, made.id, before is None, save_schema(arrow), new_token(), memory_bytes)

    def _address(self) -> str:
        return address_of(self.options, EXAMPLE)

    def _sealed(self) -> Description:
        name = name_of(self.options, "shuffle")
        with spark_errors(shuffle=name), roq.shuffle.open(self._address()) as shuffles:
            description = shuffles.describe(name)
            if description.state is not ShuffleState.SEALED:
                raise ShuffleNotSealed(
                    f"shuffle {name!r} is {description.state} yet: it can be read when its writers committed"
                )
            return description

    def _memory_bytes(self) -> int:
        return MIB * whole_number(self.options, "memoryMiB", MEMORY_BYTES // MIB, MEMORY_BYTES_MIN // MIB, MEMORY_MIB_MAX)

    def _keys(self, schema: StructType, name: str) -> list[str]:
        """The names as the schema writes them; Spark's columns know no case."""
        asked = [key.strip() for key in self.options.get("keys", "").split(",")]
        if asked == [""]:
            raise option_error("keys", 'is missing: name the columns to sort by, for instance "country,time"')
        found: list[str] = []
        with spark_errors(shuffle=name):
            for key in asked:
                field = schema[_column(schema.names, key)]
                if isinstance(field.dataType, StringType) and not field.dataType.isUTF8BinaryCollation():
                    raise SchemaMismatch(f"key column {field.name!r} has a collation: keys are compared byte by byte")
                if isinstance(field.dataType, NO_ORDER):
                    kind = field.dataType.simpleString()
                    raise SchemaMismatch(f"key column {field.name!r} is of type {kind}, which has no order here")
                found.append(field.name)
        return found


def _column(names: Sequence[str], key: str) -> str:
    if key in names:
        return key
    alike = [name for name in names if name.lower() == key.lower()]
    if len(alike) != 1:
        raise SchemaMismatch(f"no column {key!r} to sort by; there are {', '.join(names)}")
    return alike[0]
