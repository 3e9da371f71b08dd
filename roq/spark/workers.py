"""Spark's Python workers run one task after the other, and look through all their objects for garbage after each."""

from __future__ import annotations

import gc
from functools import cache


@cache
def settle() -> None:
    """Once in each process: spare what is there by now (60,000 objects of modules) from the collections after every task, which
    take 40 ms of a short task. Only cycles among what is there now would never be collected."""
    gc.collect()
    gc.freeze()
