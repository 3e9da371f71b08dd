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
_HOMES = {
    "shuffle.service": ("open", "Shuffles"),
    "shuffle.writer": ("Writer",),
    "wire.shuffle": ("Description", "Interval", "Position", "Range", "Receipt", "ShuffleState", "Spec"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # noqa: PLE0605 - as in __init__.pyi


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with brought_by("shuffle", __name__):
        found = globals()[name] = getattr(import_module(f"roq.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
