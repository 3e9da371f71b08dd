"""A shuffle's record in a real ZooKeeper: large parts in chunks, written before they are named, deleted when they are not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from gcm.shuffle_store import CHUNK_BYTES, ShuffleStore, read_all
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.election import take_epoch
from roq.coordination.link import Op
from roq.coordination.session import Session
from roq.errors import CallError, NotLeader
from roq.runtime.observe import Counters
from roq.shuffle.ranges import Placement, table_of
from roq.shuffle.record import ShuffleRecord, Stage, with_holders
from roq.wire.shuffle import RANGES_MAX, Position, Receipt, ShuffleState, Spec


@pytest.fixture
async def session(chroot: str) -> AsyncIterator[Session]:
    async with AsyncExitStack() as stack:
        session = await Session.connect(chroot, 6.0)
        stack.push_async_callback(session.close)
        for path in paths.SKELETON:
            await session.ensure_path(path)
        yield session


async def term_of(session: Session) -> LeaderTerm:
    return await LeaderTerm.begin(session, await take_epoch(session), Counters())


def large() -> ShuffleRecord:
    """10,000 ranges with long keys, 20,000 winners."""
    borders = [Position(number.to_bytes(100, "big"), number, 0, number) for number in range(1, RANGES_MAX)]
    receipts = tuple(Receipt(number, f"attempt-{number:020}", 1, 10, 1) for number in range(20_000))
    spec = Spec(("k",), b"schema" * 1000, 3, RANGES_MAX)
    of = ShuffleState.SEALING, Stage.CHECKING, 1
    record = ShuffleRecord("big", "id", spec, 1.5, "t", *of, (), (), receipts, RANGES_MAX + 1, placement=Placement.RING)
    table = with_holders(record, table_of(borders), [f"host{number}" for number in range(20)])
    return msgspec.structs.replace(record, table=table)


async def test_a_large_record_is_read_as_it_was_written(session: Session) -> None:
    term = await term_of(session)
    store, record = ShuffleStore(term, "id"), large()
    await store.create(record)
    names = await session.children(paths.shuffle("id"))
    assert {name.split("-")[0] for name in names} == {"schema", "table", "receipts"}
    for name in names:
        node = await session.get(paths.shuffle_part("id", name))
        assert node is not None
        assert 0 < len(node.data) <= CHUNK_BYTES
    node = await session.get(paths.shuffle("id"))
    assert node is not None
    assert len(node.data) < 2000
    moving = msgspec.structs.replace(record, stage=Stage.MOVING, epoch=2, former=record.table, table=record.table[:1])
    moving = msgspec.structs.replace(moving, table=table_of([], [7]))
    await store.write(moving)
    ((read, again),), unreadable = await read_all(session, term)
    assert not unreadable
    assert read == moving
    await again.write(record)
    left = await session.children(paths.shuffle("id"))
    assert sorted(left) == sorted(names), "what was the former table is the table again, and not written anew"
    await again.delete()
    assert await session.children(paths.SHUFFLES) == []
    await term.end(None)


async def test_what_nothing_names_is_deleted_and_what_is_damaged_is_left_alone(session: Session) -> None:
    first = await term_of(session)
    store, record = ShuffleStore(first, "id"), large()
    await store.create(record)
    await ShuffleStore(first, "damaged").create(msgspec.structs.replace(record, id="damaged"))
    await session.create(paths.shuffle("begun"))
    await session.create(paths.shuffle_part("begun", "schema-1-1.0"), b"x")
    await session.create(paths.shuffle_part("id", "table-0-9.0"), b"y")
    chunk = next(name for name in await session.children(paths.shuffle("damaged")) if name.startswith("table"))
    await session.set(paths.shuffle_part("damaged", chunk), b"z", -1)
    second = await term_of(session)
    ((read, _),), unreadable = await read_all(session, second)
    assert unreadable == {"damaged"}
    assert read == record
    assert sorted(await session.children(paths.SHUFFLES)) == ["damaged", "id"]
    assert "table-0-9.0" not in await session.children(paths.shuffle("id"))
    with pytest.raises(NotLeader):  # the former leader can't write any more
        await store.write(record)
    await first.end(None)
    await second.end(None)


@pytest.mark.quick
async def test_a_deletion_is_all_or_nothing(session: Session) -> None:
    """A leader that dies within it leaves nothing that names what is not there."""
    term = await term_of(session)
    store, record = ShuffleStore(term, "id"), large()
    await store.create(record)
    written: list[int] = []

    async def write(*operations: Op) -> None:
        written.append(len(operations))
        await LeaderTerm.write(term, *operations)

    term.write = write  # type: ignore[method-assign]
    await store.delete()
    assert len(written) == 1
    assert written[0] > 3, "the node and its parts"
    assert await session.children(paths.SHUFFLES) == []
    assert await read_all(session, term) == ([], frozenset())
    await term.end(None)


async def test_what_is_too_large_is_refused_and_the_term_goes_on(session: Session) -> None:
    term = await term_of(session)
    record = msgspec.structs.replace(large(), removal="x" * 2_000_000)
    store = ShuffleStore(term, "id")
    with pytest.raises(CallError):
        await store.create(record)
    assert not term.ended.done()
    await store.write(large())
    await term.end(None)
