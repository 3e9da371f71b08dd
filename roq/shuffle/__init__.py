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

Needs pyarrow: `pip install "roq-messaging[shuffle]"`. Plain blocking code; Spark's `format("roq-shuffle")` stands on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from roq.runtime.installation import brought_by

# Loaded when asked for: the leader in gcm plans shuffles without pyarrow. The types are in __init__.pyi.
_HOMES = {"open": "service", "Shuffles": "service", "Writer": "writer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with brought_by("shuffle", __name__):
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
