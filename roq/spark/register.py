"""One call that makes RoQ's formats known to a Spark session, if the Python that its workers run has RoQ.

That is looked up on the driver's machine: Spark plans with a worker there. Not covered: the executors' own machines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from roq.errors import InvalidConfiguration
from roq.runtime.installation import install
from roq.spark.errors import in_spark_style
from roq.spark.queue_source import RoqDataSource
from roq.spark.shuffle_source import RoqShuffleDataSource

# Its version, before anything that may fail; then what RoQ lacks there. PySpark itself comes with Spark.
PROBE = """import sys
print("roq", "%d.%d" % sys.version_info[:2], flush=True)
import roq.blocking
from roq.runtime.installation import missing
print("roq", *set(missing("spark")) - {"pyspark", "py4j"})"""
PROBE_SECONDS = 60.0  # a second, if the machine has nothing else to do
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


def check_worker_python(spark: SparkSession) -> None:
    """Raises PySparkValueError, which says what to set. Spark Connect's workers are the server's: nothing is known of them."""
    context = getattr(spark, "sparkContext", None)
    if context is None:
        return
    program = str(context.pythonExec)  # PYSPARK_PYTHON, also if spark-submit was given spark.pyspark.python; else python3
    found = shutil.which(program)
    shipped = SparkFiles.getRootDirectory()  # of addPyFile and --py-files
    search = os.pathsep.join([shipped, *(os.path.join(shipped, name) for name in context._python_includes)])
    problem = "is not there" if found is None else _problem(found, search)
    if problem:
        place = "" if found in (None, program) else f" ({found})"
        raise in_spark_style(
            InvalidConfiguration(
                f"Spark's Python workers run {program}{place}, which {problem}. Before the session is made, set"
                f" PYSPARK_PYTHON={sys.executable}, or to another Python {OURS} that has done {install('spark')}"
            )
        )


@cache
def _problem(found: str, search: str) -> str:
    """Why RoQ can't run in this Python; "" if it can. search: beside the PYTHONPATH."""
    if _place(found) == _place(sys.executable):
        return ""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [search, os.environ.get("PYTHONPATH")]))}
    try:
        asked = subprocess.run(
            [found, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run: {error}"
    said = [line.split()[1:] for line in asked.stdout.splitlines() if line.startswith("roq")]
    why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    if not said:
        return f"is no Python: {why}"
    [version], lacking = said[0], said[-1] if len(said) > 1 else []
    if version != OURS:
        return f"is Python {version}, and this program's is {OURS}"
    if asked.returncode:
        return f"can't import roq: {why}"
    return f"lacks {', '.join(sorted(lacking))}" if lacking else ""


def _place(program: str) -> tuple[str, str]:
    """The folder too: the programs of all virtual environments are links to one."""
    return os.path.realpath(os.path.dirname(program)), os.path.realpath(program)


def register(spark: SparkSession) -> None:
    """Make format("roq") and format("roq-shuffle") known. Again: no harm. Raises PySparkValueError
    (ROQ_INVALID_CONFIGURATION): the Python that Spark's workers run lacks RoQ, or is of another version than this one."""
    check_worker_python(spark)
    for source in (RoqDataSource, RoqShuffleDataSource):
        spark.dataSource.register(source)
