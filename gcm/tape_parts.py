"""The tapes of a queue, in parts that fit into a message. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from roq.wire.limits import CONTROL_BYTES_MAX

PART_BYTES = CONTROL_BYTES_MAX // 2  # of metadata; names, and the addresses of all stores, fit into the other half


def part_of(logs: Mapping[str, bytes], after: str | None) -> tuple[dict[str, bytes], bool]:
    """Metadata by log of those that are named behind `after`, at least of one, and whether there are more. None: all."""
    if after is None:
        return dict(logs), False
    found: dict[str, bytes] = {}
    size = 0
    for log in sorted(name for name in logs if name > after):
        size += len(logs[log])
        if found and size > PART_BYTES:
            return found, True
        found[log] = logs[log]
    return found, False
