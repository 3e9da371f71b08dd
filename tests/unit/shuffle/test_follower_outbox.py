"""What is to be sent to one holder: batched, tried again, and nothing is forgotten in the queue (peers.py)."""

from __future__ import annotations

import asyncio

import pytest

from roq.errors import RoqError, Unavailable
from roq.shuffle.node.attempt import BufferedBlock, Part
from roq.shuffle.node.peers import REQUESTS_AT_ONCE, Outbox
from roq.wire.shuffle import BLOCKS_BYTES_MAX, Block, Piece, Spec, StorePieces
from tests.harness.shuffle_rows import SPEC


class Sender:
    """A shuffle, and the holder it sends to. fails: how many requests the holder refuses."""

    id, name = "s", "visits"
    spec: Spec = SPEC

    def __init__(self, fails: int = 0) -> None:
        self.left: set[Part] = set()
        self.requests: list[int] = []
        self.fails, self.under_way, self.most = fails, 0, 0

    def wants(self, part: Part, host: str) -> bool:
        return part in self.left

    def leaving(self, parts: list[Part]) -> None:
        assert parts

    async def pieces(self, parts: list[Part], host: str) -> list[Piece]:
        return [part.piece() for part in parts]

    def sent(self, parts: list[Part], host: str, error: RoqError | None) -> None:
        if error is None:
            self.left -= set(parts)

    async def store(self, host: str, request: StorePieces) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        self.requests.append(sum(len(block.data) for piece in request.pieces for block in piece.blocks))
        if self.fails:
            self.fails -= 1
            raise Unavailable

    def part(self, size: int) -> Part:
        made = Part((0, "a"), 0, 0, [BufferedBlock(0, Block(0, 1, b"", b"", 0, bytes(size)))])
        self.left.add(made)
        return made


async def emptied(sender: Sender) -> None:
    async with asyncio.timeout(2):
        while sender.left:
            await asyncio.sleep(0.001)


async def test_what_fits_travels_together() -> None:
    sender = Sender()
    box = Outbox("h", sender.store)
    for _ in range(20):
        box.put(sender, sender.part(BLOCKS_BYTES_MAX // 4))
    await emptied(sender)
    assert len(sender.requests) == 5
    assert max(sender.requests) <= BLOCKS_BYTES_MAX
    assert sender.most == REQUESTS_AT_ONCE


async def test_what_failed_is_tried_again() -> None:
    sender = Sender(fails=3)
    box = Outbox("h", sender.store)
    for _ in range(4):
        box.put(sender, sender.part(BLOCKS_BYTES_MAX // 2))
    await emptied(sender)
    await box.close()


@pytest.mark.parametrize("turns", range(12))
async def test_nothing_stays_in_the_queue(turns: int) -> None:
    """Also what comes in the very turn of the loop in which all workers end."""
    sender = Sender()
    box = Outbox("h", sender.store)
    for _ in range(REQUESTS_AT_ONCE):
        box.put(sender, sender.part(BLOCKS_BYTES_MAX))
    for _ in range(turns):
        await asyncio.sleep(0)
    box.put(sender, sender.part(1))
    await emptied(sender)
