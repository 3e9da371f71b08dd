"""Crash points, for tests: steps of source and sink at which the world can be made to end.

ROQ_SPARK_CRASH names a file. While there is one, it says at which point, "point", or at which passing of it in one process,
"point:2", that process stands still for ever and writes "point pid" into the file beside it, {file}.reached; killing it, or the
whole driver, is the test's. A Spark driver is a JVM with several Python processes, and a process can't well kill them all.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

VARIABLE = "ROQ_SPARK_CRASH"
SOURCE_POINTS = (
    "source.leased",  # tasks are leased, no manifest names them
    "source.manifest",  # the manifest is durable, Spark was not told
    "source.planned",  # the offset is on its way to Spark's log
    "source.parts",  # Spark logged the offset, no task ran
    "source.committed",  # Spark committed the batch, nothing is acked
    "source.acked",  # acked, the manifest still lies there
    "source.forgotten",  # the manifest is gone
)
SINK_POINTS = (
    "sink.staged",  # a task's rows are staged
    "sink.planned",  # it is decided which stages count
    "sink.half",  # some rows are published
    "sink.published",  # all are, and nobody has noted it
    "sink.noted",  # noted; Spark was not told
)
POINTS = (*SOURCE_POINTS, *SINK_POINTS)

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Stand still for ever, if this is the point."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        wanted = Path(path).read_text()
    except FileNotFoundError:
        return
    point, _, time = wanted.partition(":")
    if point == name:
        _passed[wanted] += 1
        if _passed[wanted] == int(time or 1):
            Path(f"{path}.tmp").write_text(f"{name} {os.getpid()}")
            Path(f"{path}.tmp").rename(f"{path}.reached")
            threading.Event().wait()
