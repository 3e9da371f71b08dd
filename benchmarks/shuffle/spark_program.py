"""Spark's range sort in a process of its own, warm: a line with a folder in, a line with the seconds out."""

from __future__ import annotations

import sys
import time

from pyspark.sql import SparkSession


def main() -> None:
    """`python -m benchmarks.shuffle.spark_program RANGES LOCAL_FOLDER WARM_UP_FOLDER`."""
    ranges, local, warm_up = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "4g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": local,
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("range sort")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()

    def sort(folder: str) -> float:
        began = time.perf_counter()
        frame = spark.read.parquet(folder).repartitionByRange(ranges, "key").sortWithinPartitions("key")
        frame.write.format("noop").mode("overwrite").save()
        return time.perf_counter() - began

    for _ in range(3):
        sort(warm_up)
    print("ready", flush=True)
    for line in sys.stdin:
        print(sort(line.strip()), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
