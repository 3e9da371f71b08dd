"""Who looks into blocks and splits them for a follower: roq.shuffle.blocks, loaded when the first block has to be looked into,
as it needs pyarrow. Most stores of most clusters never see a shuffle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

from roq.errors import InvalidConfiguration
from roq.runtime.installation import install
from roq.shuffle.ranges import KeyList
from roq.wire.shuffle import Block, Position, Spec


class BlockSplitter(Protocol):
    """Blocking; any thread. Raises DataLost if the block's data is no such rows."""

    def keys_of(self, spec: Spec, block: Block, /) -> KeyList:
        """See roq.shuffle.blocks."""

    def part(self, spec: Spec, block: Block, first: int, end: int, /) -> Block:
        """See roq.shuffle.blocks."""

    def divide(
        self, spec: Spec, block: Block, place: tuple[int, int], borders: Sequence[Position], /
    ) -> list[tuple[int, Block]]:
        """See roq.shuffle.blocks."""


@cache
def splitter() -> BlockSplitter:
    """Raises InvalidConfiguration where pyarrow is not installed."""
    try:
        return cast(BlockSplitter, importlib.import_module("roq.shuffle.blocks"))
    except ImportError as error:
        raise InvalidConfiguration(f"this host's store can't take part in shuffles: {install('shuffle')} ({error})") from error
