"""format("roq-shuffle"): a DataFrame in key order through a RoQ shuffle, the part that Spark's planner talks to.

    df.write.format("roq-shuffle").option("address", …).option("keys", "country,time").mode("append").save("visits")
    spark.read.format("roq-shuffle").option("address", …).load("visits")

Options: address ("file:///dir", "roq://zk1:2181,zk2:2181") or cluster ("zk1:2181,zk2:2181"); memoryMiB of each task; to write
also keys, ranges (0: as many as fit), replicas. Spark offers two modes to Python sources: "append" refuses a shuffle that is
sealed, "overwrite" removes what is there first. One save is one whole shuffle: its commit seals it. What tasks do:
shuffle_write.py, shuffle_read.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import GeographyType, GeometryType, StringType, StructType, VariantType

import roq.shuffle
from roq.errors import SchemaMismatch, ShuffleNotFound, ShuffleNotSealed, ShuffleSealed
from roq.ids import new_token
from roq.shuffle.blocks import load_schema, save_schema
from roq.shuffle.keys import KeyEncoder
from roq.shuffle.writer import MEMORY_BYTES, MEMORY_BYTES_MIN
from roq.spark.errors import option_error, spark_errors
from roq.spark.options import WHERE, address_of, name_of, refuse_unknown, whole_number
from roq.spark.schema import arrow_schema, same_types, spark_schema
from roq.spark.shuffle_read import ShuffleReader
from roq.spark.shuffle_write import ShuffleWriter
from roq.wire.shuffle import RANGES_MAX, REPLICAS_MAX, Description, ShuffleState

MIB = 1024 * 1024
MEMORY_MIB_MAX = 64 * 1024
NO_ORDER = (VariantType, GeometryType, GeographyType)  # in Arrow they are structs: told by their own names
EXAMPLE = "file:///data/shuffles or roq://zk1:2181,zk2:2181"


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
