"""One real Spark for all tests here: local[2,4] (two tasks at a time, four tries each), small, quiet, RoQ's formats registered.

Workers run this interpreter and import RoQ from this tree. Spark's settings that can't change later are those of `session`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import roq.spark

ROOT = Path(__file__).parents[2]
TEST_SECONDS = 240  # with the start of Spark, on a machine that has other things to do
QUIET = Path(__file__).with_name("log4j2.properties")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spark takes its time; a test that says how long keeps its own bound."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session; tests share it."""
    folder = tmp_path_factory.mktemp("spark")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=path, SPARK_LOCAL_IP="127.0.0.1")
    builder = SparkSession.builder.master("local[2,4]").appName("tests")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET} -Dderby.system.home={folder}",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "Europe/Brussels",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    roq.spark.register(session)
    yield session
    session.stop()
