"""RoQ's errors in Spark's own style: a PySpark exception with a condition such as ROQ_SHUFFLE_SEALED and message parameters.

Spark shows what a data source raises as text: while planning as AnalysisException (PYTHON_DATA_SOURCE_ERROR), in a task and
after a commit as PythonException. Its last line is `PySparkValueError: [ROQ_…] what is wrong`. Not covered: errors of Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException, PySparkRuntimeError, PySparkTypeError, PySparkValueError

from roq.errors import CallError, InvalidConfiguration, RoqError, SchemaMismatch


def condition_of(error: type[RoqError]) -> str:
    """ShuffleSealed → ROQ_SHUFFLE_SEALED."""
    return "ROQ_" + re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).upper()


def in_spark_style(error: RoqError, **where: str) -> PySparkException:
    """The same as a PySpark exception: PySparkValueError when the call must be mended (PySparkTypeError when it is about
    columns), PySparkRuntimeError else. where: more message parameters, such as shuffle="visits"."""
    style: type[PySparkException] = PySparkValueError if isinstance(error, CallError) else PySparkRuntimeError
    if isinstance(error, SchemaMismatch):
        style = PySparkTypeError
    place = ", ".join(f"{key} {value!r}" for key, value in where.items() if value not in str(error))
    message = f"{error} ({place})" if place else str(error)
    return style(message, errorClass=condition_of(type(error)), messageParameters={"reason": str(error), **where})


@contextmanager
def spark_errors(**where: str) -> Iterator[None]:
    """What RoQ raises in here leaves in Spark's style; a call that must be mended without the story of where it was found."""
    try:
        yield
    except CallError as error:
        raise in_spark_style(error, **where) from None
    except RoqError as error:
        raise in_spark_style(error, **where) from error


def option_error(option: str, problem: str) -> PySparkException:
    """An option of a format is missing, unknown or out of range. problem: a sentence that says what is wanted."""
    parameters = {"option": option, "reason": problem}
    message = f'.option("{option}", …): {problem}'
    return PySparkValueError(message, errorClass=condition_of(InvalidConfiguration), messageParameters=parameters)
