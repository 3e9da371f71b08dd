"""Jobs over a stream: run it until there is nothing left, or until a signal; and where a recorded queue is begun with."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from roq.errors import InvalidPosition
from roq.spark.pipeline.job import reason, say, seconds
from roq.spark.tape_options import EARLIEST
from roq.wire.recording import TapePosition, is_position
from roq.workqueue.stop_signals import stopped_by_signals

LOOK_SECONDS = 1.0  # between looks whether a signal has come
CHECKPOINT = "_checkpoint"  # in the job's folder; readers of Parquet pass over names that begin so
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
AGO = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])", re.ASCII)


def add_arguments(found: argparse.ArgumentParser, folder: str) -> None:
    """--every and --checkpoint. folder: what the job writes, for the help."""
    found.add_argument("--every", type=seconds, help="go on for ever, a batch every so many seconds; default: end when done")
    found.add_argument("--checkpoint", help=f"folder for Spark's checkpoint; default: {CHECKPOINT} in the {folder}")


def since(text: str) -> str:
    """Type of an argument: 7d (so long ago), a time, earliest or a position, as `startingPosition` has it."""
    if text == EARLIEST:
        return text
    try:
        if is_position(text):
            return str(TapePosition.parse(text))
        if ago := AGO.fullmatch(text):
            return (datetime.now().astimezone() - timedelta(**{UNITS[ago[2]]: float(ago[1])})).isoformat()
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (InvalidPosition, ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"so long ago such as 7d or 12h, a time such as 2026-11-26T10:00, {EARLIEST}, or a position, got {text!r}: {error}"
        ) from None


def run_stream(
    name: str, source: DataFrame, each: Callable[[DataFrame, int], None], checkpoint: str, every: float | None
) -> bool:
    """Give each batch and its number to `each`, for ever or (every: None) until there is nothing left; False: a signal came
    before. Raises what the stream met with."""
    writer = source.writeStream.foreachBatch(each).queryName(name).option("checkpointLocation", checkpoint)
    trigger = {"availableNow": True} if every is None else {"processingTime": f"{round(every * 1000)} milliseconds"}
    stopped = threading.Event()
    with stopped_by_signals(stopped.set):
        query = writer.trigger(**trigger).start()
        try:
            while not stopped.is_set() and not query.awaitTermination(LOOK_SECONDS):
                pass
            query.stop()
        except (PySparkException, Py4JError, ConnectionError) as error:
            if not stopped.is_set():
                raise
            say(f"Spark got the signal too and ended first: {reason(error)}")
    return not stopped.is_set()
