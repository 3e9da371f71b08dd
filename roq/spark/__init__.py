"""RoQ's sources and sinks for PySpark. The only room that imports it.

    roq.spark.register(spark)
    spark.read.format("roq-shuffle").option("address", "file:///data/shuffles").load("visits")

Needs PySpark 4.3 and Java 17: `pip install "roq-messaging[spark]"`. Formats: "roq-shuffle", "roq". docs/spark.md tells them.
"""

from roq.runtime.installation import brought_by

with brought_by("spark", __name__):
    from roq.spark.register import register

__all__ = ["register"]
