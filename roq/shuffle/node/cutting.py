"""Blocks looked into and cut, with pyarrow: the only module of a store that needs it (cutter.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import overload
from zlib import crc32

from roq.shuffle.blocks import decode_foreign, load_schema, split
from roq.shuffle.keys import KeyEncoder, Keys
from roq.shuffle.node.stored import split_keys
from roq.wire.shuffle import Block, Position, Spec

ENCODERS_MAX = 256  # one per spec in use


class _KeyList(Sequence[bytes]):
    """Keys, turned into bytes one by one where they are asked for: a binary search needs few of them."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self._keys.at(row) for row in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._keys.at(index)


@lru_cache(ENCODERS_MAX)
def _encoder(schema: bytes, keys: tuple[str, ...]) -> KeyEncoder:
    return KeyEncoder(load_schema(schema), keys)


class ArrowCutter:
    """A Cutter."""

    def keys(self, spec: Spec, block: Block) -> Sequence[bytes]:
        """See Cutter."""
        encoder = _encoder(spec.schema, spec.keys)
        return _KeyList(encoder.encode(decode_foreign(encoder.schema, block)))

    def part(self, spec: Spec, block: Block, first: int, end: int) -> Block:
        """See Cutter."""
        encoder = _encoder(spec.schema, spec.keys)
        if first > block.first:
            block = split(block, first - block.first, encoder)[1]
        if end < block.first + block.rows:
            block = split(block, end - block.first, encoder)[0]
        return block

    def divide(self, spec: Spec, block: Block, place: tuple[int, int], borders: Sequence[Position]) -> list[tuple[int, Block]]:
        """See Cutter."""
        encoder = _encoder(spec.schema, spec.keys)
        batch = decode_foreign(encoder.schema, block)
        keys = encoder.encode(batch)
        listed = _KeyList(keys)
        ends = [0, *(split_keys(listed, block.first, place, border) for border in borders), block.rows]
        found = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            if begin < end:
                data: bytes = batch.slice(begin, end - begin).serialize().to_pybytes()
                made = Block(block.first + begin, end - begin, keys.at(begin), keys.at(end - 1), crc32(data), data)
                found.append((number, made))
        return found

    def check(self) -> None:
        """It can."""
