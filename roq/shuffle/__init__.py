"""Shuffle: put a large data set in key order. Writers send what they have; readers get balanced ranges, each sorted.

    with roq.shuffle.open("file:///data/shuffles") as shuffles:  # or "roq://zk1:2181,zk2:2181"
        shuffles.create("visits", keys=["country", "time"], schema=schema)
        with shuffles.writer("visits", partition=0) as writer:
            writer.write(table)
            receipt = writer.finish()
        shuffles.commit("visits", [receipt])
        for range in shuffles.describe("visits").ranges:
            for batch in shuffles.read("visits", range.number):
                ...

Needs pyarrow: `pip install roq-messaging[shuffle]`. Plain blocking code; Spark's `format("roq-shuffle")` stands on it.
"""
