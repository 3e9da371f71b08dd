"""Spark's types as Arrow's and back, exactly: what was written with one schema is read with the same one.

Arrow does not know all that Spark's types say (variants, collations, char(n)), so the Arrow schema carries Spark's as metadata.
Time zones: Spark's timestamps are UTC microseconds; a writer's batches name the session's zone, a reader's must say UTC.
"""

from __future__ import annotations

import json

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from roq.errors import SchemaMismatch

SPARK_SCHEMA = b"roq.spark.schema"


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark's reader demands of batches, with Spark's own schema as metadata. Raises SchemaMismatch: a type Arrow has not,
    or two columns of one name."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SchemaMismatch(f"two columns are named {twice[0]!r}")
    for field in schema:
        try:
            to_arrow_schema(StructType([field]), timezone="UTC")
        except PySparkException as error:
            raise SchemaMismatch(f"column {field.name!r} can't be exchanged as Arrow: {error}") from error
    return to_arrow_schema(schema, timezone="UTC").with_metadata({SPARK_SCHEMA: schema.json().encode()})


def spark_schema(schema: pa.Schema) -> StructType:
    """Spark's types of an Arrow schema. Raises SchemaMismatch: a type Spark has not."""
    told = (schema.metadata or {}).get(SPARK_SCHEMA)
    if told is not None:
        return StructType.fromJson(json.loads(told))
    try:
        return from_arrow_schema(schema, prefer_timestamp_ntz=True)
    except PySparkException as error:
        raise SchemaMismatch(f"a column's type is none of Spark's: {error}") from error


def same_types(asked: pa.Schema, given: pa.Schema) -> None:
    """The same columns in the same order, of the same types, be they nullable or not. Raises SchemaMismatch."""
    if asked.names != given.names:
        raise SchemaMismatch(f"the columns are {', '.join(given.names)}, not {', '.join(asked.names)}")
    for ask, give in zip(asked, given, strict=True):
        if ask.type != give.type:
            raise SchemaMismatch(f"column {ask.name!r} is {give.type}, not {ask.type}")


def exact(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in precisely this schema; nothing is copied where only time zones differ. Raises SchemaMismatch."""
    if batch.schema.equals(schema):
        return batch
    if batch.schema.names != schema.names:
        raise SchemaMismatch(f"a batch has the columns {', '.join(batch.schema.names)}, not {', '.join(schema.names)}")
    try:
        columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise SchemaMismatch(f"a batch does not fit the schema: {error}") from error
