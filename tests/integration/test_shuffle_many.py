"""A shuffle of more partitions than one message has room for: committed by the real leader, counted at followers, opened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from roq.shuffle.keys import KeyEncoder
from roq.shuffle.ranges import holders
from roq.wire.gcm import CommitShuffle
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.shuffle import Piece, Receipt, ShuffleState
from tests.harness.shuffle_rows import encode_block
from tests.integration.test_shuffle_leader import HOSTS, SCHEMA, ShuffleScene, blocking

PARTITIONS = 130_000
STORED_AT_ONCE = 10_000
FIRST_IDENTITY = 1  # of the range of a shuffle that nobody wanted a table of


@pytest.fixture
async def scene(chroot: str, tmp_path: Path) -> AsyncIterator[ShuffleScene]:
    async with AsyncExitStack() as stack:
        yield ShuffleScene(chroot, stack, tmp_path)


async def test_more_winners_than_fit_a_message(scene: ShuffleScene) -> None:
    """Their rows are put where their writers' buffers would have put them."""
    await scene.begin()
    created = await blocking(lambda: scene.shuffles.create("s", ["k"], SCHEMA, 1, 1))
    (holder,) = holders(created.id, FIRST_IDENTITY, set(HOSTS), 1)
    batch = pa.record_batch([pa.array([7], pa.int64()), pa.array(["v"])], schema=SCHEMA)
    block = encode_block(batch, KeyEncoder(SCHEMA, ["k"]).encode(batch), 0)
    storage = scene.followers[holder].storage
    for first in range(0, PARTITIONS, STORED_AT_ONCE):
        pieces = [Piece(number, f"app-20261122-{number:014x}", 0, [block]) for number in range(first, first + STORED_AT_ONCE)]
        await storage.store(created.id, "s", created.spec, pieces)
    receipts = [Receipt(number, f"app-20261122-{number:014x}", 1, len(block.data), 1) for number in range(PARTITIONS)]
    assert len(msgspec.msgpack.encode(CommitShuffle("s", "t", receipts))) > CONTROL_BYTES_MAX
    sealed = await blocking(lambda: scene.shuffles.commit("s", receipts))
    assert (sealed.state, sealed.rows, len(sealed.winners)) == (ShuffleState.SEALED, PARTITIONS, PARTITIONS)
    again = await blocking(lambda: scene.shuffles.commit("s", receipts))
    assert again.id == sealed.id
    source = await blocking(lambda: scene.shuffles._service.open_range("s", 0))
    assert [piece.partition for piece in source.slices] == [*range(PARTITIONS)]
    assert list((scene.directory / holder).glob(f"shuffles/{created.id}/winners-*")), "told once, and kept"
