"""The number of the format that ZooKeeper's tree has: the JSON of `format`, which each leader looks at before it writes.

A leader reads records of older formats, and writes its own. From a record that it rewrites it drops the fields that it does not
know. So a version whose records older leaders must not rewrite raises `reads`, and a GCM that knows less stands for no
election. Version 0.1 (format 1, no node) does not look.
"""

from __future__ import annotations

import msgspec

from roq.errors import FrameError, UnknownFormat
from roq.wire.assignment import from_json

FORMAT = 2  # what this version writes; 1: version 0.1
READS = 1  # 0.1 may lead again, without what it does not know (docs/compatibility.md)


class TreeFormat(msgspec.Struct, frozen=True):
    """format: of what is written. reads: a GCM must know this format, at least, to lead. version: of the RoQ that raised it."""

    format: int
    reads: int
    version: str

    def __str__(self) -> str:
        return f"format {self.format}, of version {self.version}"


FIRST = TreeFormat(1, 1, "0.1")


def read_format(data: bytes | None) -> TreeFormat:
    """What the node says; None or empty: it is not there. Raises UnknownFormat if it can't be read."""
    if not data:
        return FIRST
    try:
        return from_json(data, TreeFormat)
    except FrameError as error:
        raise UnknownFormat(
            f"the node `format` of ZooKeeper's tree is damaged ({error}): remove it, and the next leader writes it anew"
        ) from error


def check_format(tree: TreeFormat) -> None:
    """Raises UnknownFormat if a GCM of this version must not lead."""
    if tree.reads > FORMAT:
        raise UnknownFormat(
            f"ZooKeeper's tree has {tree}, and GCMs that know format {tree.reads} may lead; this one knows format {FORMAT}: "
            f"install version {tree.version} or newer here"
        )


def raised(tree: TreeFormat, version: str) -> TreeFormat:
    """What a leader of this version, which may lead, writes: the same if the format is as new as ours, or newer."""
    return tree if tree.format >= FORMAT else TreeFormat(FORMAT, max(tree.reads, READS), version)
