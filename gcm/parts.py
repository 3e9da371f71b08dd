"""What is told in parts, each of which fits into a message. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

V = TypeVar("V")
PART_BYTES = 1024 * 1024  # 1,400 queues, 20 ms of the leader's loop; names, and addresses of all stores, fit beside them


def fitting(named: Iterable[tuple[str, V]], size: Callable[[V], int]) -> tuple[dict[str, V], bool]:
    """The first ones, as many as fit, at least one, and whether there are more. size: bytes of one."""
    found: dict[str, V] = {}
    total = 0
    for name, value in named:
        total += size(value)
        if found and total > PART_BYTES:
            return found, True
        found[name] = value
    return found, False


def part_of(logs: Mapping[str, bytes], after: str | None) -> tuple[dict[str, bytes], bool]:
    """Metadata by log of those that are named behind `after`, and whether there are more. None: all."""
    if after is None:
        return dict(logs), False
    return fitting(((log, logs[log]) for log in sorted(logs) if log > after), len)
