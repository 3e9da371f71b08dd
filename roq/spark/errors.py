"""RoQ's errors in Spark's own style: a PySpark exception with a condition such as ROQ_SHUFFLE_SEALED and message parameters.

Spark shows what a data source raises as text: while planning as AnalysisException (PYTHON_DATA_SOURCE_ERROR), in a task and
after a commit as PythonException. Its last line is `PySparkValueError: [ROQ_…] what is wrong`. Not covered: errors of Spark.

Below: what the options of all our formats have in common: the address, whole numbers, names; nothing unknown passes silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from pyspark.errors import PySparkException, PySparkRuntimeError, PySparkTypeError, PySparkValueError

from roq.errors import CallError, InvalidConfiguration, RoqError, SchemaMismatch


def condition_of(error: type[RoqError]) -> str:
    """ShuffleSealed → ROQ_SHUFFLE_SEALED."""
    return "ROQ_" + re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).upper()


def in_spark_style(error: RoqError, **where: str) -> PySparkException:
    """The same as a PySpark exception: PySparkValueError when the call must be corrected (PySparkTypeError when it is about
    columns), PySparkRuntimeError else. where: more message parameters, such as shuffle="visits"."""
    style: type[PySparkException] = PySparkValueError if isinstance(error, CallError) else PySparkRuntimeError
    if isinstance(error, SchemaMismatch):
        style = PySparkTypeError
    place = ", ".join(f"{key} {value!r}" for key, value in where.items() if value not in str(error))
    message = f"{error} ({place})" if place else str(error)
    return style(message, errorClass=condition_of(type(error)), messageParameters={"reason": str(error), **where})


@contextmanager
def spark_errors(**where: str) -> Iterator[None]:
    """What RoQ raises in here leaves in Spark's style; a call that must be corrected without the story of where it was
    found."""
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


WHERE = ("address", "cluster")


def address_of(options: Mapping[str, str], example: str) -> str:
    """`address` as it is, or roq:// and `cluster` ("zk1:2181,zk2:2181"). example: of an address, for the message."""
    address, cluster = options.get("address", "").strip(), options.get("cluster", "").strip()
    if address and cluster:
        raise option_error("address", "give address or cluster, not both")
    if not address and not cluster:
        raise option_error("address", f'is missing; for instance {example}, or .option("cluster", "zk1:2181,zk2:2181")')
    return address or f"roq://{cluster.removeprefix('roq://')}"


def name_of(options: Mapping[str, str], what: str) -> str:
    """What .load("name") or .save("name") was given. what: a noun for the message."""
    if options.get("paths"):
        raise option_error("path", f"one {what} at a time")
    name = options.get("path", "").strip()
    if not name:
        raise option_error("path", f'is missing: name the {what} in .load("name") or .save("name")')
    return name


def whole_number(options: Mapping[str, str], option: str, default: int, least: int, most: int) -> int:
    """An option that is a number from `least` to `most`."""
    text = options.get(option, str(default)).strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise option_error(option, f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def refuse_unknown(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Each option must be one of these, in any case: a typing error is not a default."""
    names = {name.lower() for name in known} | {"path", "paths"}
    for option in options:
        if option.lower() not in names:
            raise option_error(option, f"is unknown; there are {', '.join(sorted(known))}")
