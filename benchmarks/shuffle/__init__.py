"""The shuffle beside Spark's own range sort, on one machine, in one run: the same rows in, every row in key order out.

run.py: plain Python. Two processes write and two read, over a folder, and every byte is on stable storage before a writer is
done; Spark sorts the same Parquet files by `repartitionByRange(64, key).sortWithinPartitions(key)` into the noop sink with
local[2], warmed up, and syncs nothing. Then memory: what our processes have resident at most on data ten times their budget.
spark.py: the same through Spark's format("roq-shuffle"). Not covered: the cluster.
"""
