"""A driver of its own: a publication of rows on a recorded queue, in three files of which each has a third of them.

    python tests/spark/publication_driver.py ZOOKEEPER QUEUE STAGING ROWS

Row n has the payload n, on one of seven topics.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import roq.spark
from tests.spark.queue_driver import SETTINGS


def main(zookeeper: str, queue: str, staging: str, rows: str) -> None:
    builder = SparkSession.builder.master("local[2]")
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    roq.spark.register(spark)
    frame = spark.range(0, int(rows), 1, 3).selectExpr("concat('t.', id % 7) as topic", "cast(id as string) as payload")
    writer = frame.write.format("roq").option("cluster", zookeeper).option("queue", queue).option("confirm", "stored")
    writer.option("staging", staging).option("publication", "daily").mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
