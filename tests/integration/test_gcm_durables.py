"""Durable subscribers at the GCM: kept in ZooKeeper over changes of the leader, bounded, gone with their queue.

Hosts are played by a test double (gcm_bench.py); what is decided is in tests/unit/test_durable.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from gcm import held_names
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import (
    CallError,
    DurableTaken,
    InvalidName,
    InvalidPosition,
    NotRecorded,
    QueueNotFound,
    UnknownFormat,
)
from roq.wire import durables
from roq.wire import gcm as wire
from roq.wire.recording import Record, TapePosition, tapes_of
from tests.integration.gcm_bench import Bench, eventually

TAPES = tapes_of("q", "t")


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    """A leader with a recorded queue `q`."""
    async with AsyncExitStack() as stack:
        made = Bench(chroot, stack)
        await made.gcm()
        await made.host("a")
        await made.hosts_alive(1)
        await create(made)
        yield made


async def create(bench: Bench, transaction: str = "t") -> None:
    await bench.ask(wire.CreateQueue("q", transaction, record=Record()), wire.QueueInfo)


async def opened(bench: Bench, name: str = "d", holder: str = "one", queue: str = "q") -> str:
    return (await bench.ask(durables.OpenDurable(queue, name, holder, f"{holder} here"), durables.DurablePosition)).position


async def kept(bench: Bench, number: int, entry: int, holder: str = "one", name: str = "d", tapes: str = TAPES) -> str:
    position = str(TapePosition(tapes, {"A": entry}))
    await bench.ask(durables.KeepPosition("q", name, holder, number, position), wire.Done)
    return position


async def listed(bench: Bench) -> list[durables.DurableView]:
    views: list[durables.DurableView] = []
    while True:
        after = views[-1].name if views else ""
        answer = await bench.ask(durables.ListDurables("q", after), durables.Durables)
        views += answer.views
        if not answer.more:
            return views


async def folders(session: Session) -> list[str]:
    return await session.children(paths.DURABLES)


@pytest.mark.quick
async def test_a_position_is_kept_for_whoever_opens_it_next(bench: Bench) -> None:
    assert await opened(bench) == ""
    assert await opened(bench) == "", "the same request again"
    first = await kept(bench, 1, 5)
    assert await opened(bench, holder="two") == first
    with pytest.raises(DurableTaken, match="opened since by two here"):
        await kept(bench, 2, 9)
    second = await kept(bench, 2, 6, "two")
    await kept(bench, 1, 5, "two")  # a try that was overtaken
    (view,) = await listed(bench)
    assert (view.name, view.position, view.owner) == ("d", second, "two here")
    assert 0 < view.opened <= view.kept


async def test_only_recorded_queues_keep_positions_and_only_their_own(bench: Bench) -> None:
    await bench.create("plain")
    with pytest.raises(NotRecorded, match="`roq queue record`"):
        await opened(bench, queue="plain")
    with pytest.raises(QueueNotFound):
        await opened(bench, queue="other")
    with pytest.raises(InvalidName, match="durable subscriber"):
        await opened(bench, "a/b")
    await opened(bench)
    with pytest.raises(InvalidPosition, match="of another queue"):
        await kept(bench, 1, 1, tapes="others")
    with pytest.raises(DurableTaken, match="forgotten"):
        await kept(bench, 1, 1, name="never opened")


async def test_the_next_leader_has_them_and_refuses_whom_the_last_one_fenced(bench: Bench) -> None:
    await opened(bench)
    await opened(bench, holder="two")
    position = await kept(bench, 1, 7, "two")
    await bench.gcm()
    await bench.next_term()
    with pytest.raises(DurableTaken):
        await kept(bench, 2, 8, "one")
    assert await opened(bench, holder="three") == position


async def test_forgotten_is_forgotten_and_its_holder_is_fenced(bench: Bench) -> None:
    await opened(bench)
    await kept(bench, 1, 5)
    for _ in range(2):
        await bench.ask(durables.ForgetDurable("q", "d"), wire.Done)
    assert await listed(bench) == []
    with pytest.raises(DurableTaken, match="forgotten"):
        await kept(bench, 2, 6)
    assert await opened(bench, holder="two") == ""
    with pytest.raises(DurableTaken, match="two here"):
        await kept(bench, 3, 7)


async def test_many_at_once_are_counted_listed_in_parts_and_never_too_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_names, "NAMES_MAX", 12)
    monkeypatch.setattr(held_names, "LIST_AT_ONCE", 5)
    monkeypatch.setattr(held_names, "LIST_BYTES", 1)
    results = await asyncio.gather(*(opened(bench, f"d{number:02}") for number in range(20)), return_exceptions=True)
    refused = [one for one in results if one != ""]
    assert len(refused) == 8
    assert all(isinstance(one, CallError) and "`roq queue forget-durable`" in str(one) for one in refused)
    names = [view.name for view in await listed(bench)]
    assert names == sorted(names)
    assert len(names) == 12
    assert await opened(bench, names[0], "two") == "", "one that is there is opened all the same"
    await bench.ask(durables.ForgetDurable("q", names[0]), wire.Done)
    await opened(bench, "another")


async def test_holders_that_take_it_from_each_other_leave_one(bench: Bench) -> None:
    await asyncio.gather(*(opened(bench, holder=f"h{number}") for number in range(20)))
    results = await asyncio.gather(*(kept(bench, 1, number, f"h{number}") for number in range(20)), return_exceptions=True)
    (winner,) = [number for number, one in enumerate(results) if isinstance(one, str)]
    assert all(isinstance(one, DurableTaken) for number, one in enumerate(results) if number != winner)
    (view,) = await listed(bench)
    assert (view.position, view.owner) == (results[winner], f"h{winner} here")


async def test_they_go_with_their_queue_and_the_next_one_of_its_name_begins_anew(bench: Bench) -> None:
    session = await bench.session()
    for number in range(5):
        await opened(bench, f"d{number}")
    await kept(bench, 1, 5, name="d0")
    assert await folders(session) == [TAPES]
    await bench.ask(wire.RemoveQueue("q", "gone"), wire.Done)
    await eventually(lambda: _empty(session))
    await create(bench, "t2")
    with pytest.raises(InvalidPosition, match="removed and created anew"):
        await kept(bench, 2, 6, name="d0")
    assert await opened(bench, "d0", "two") == ""
    assert await folders(session) == [tapes_of("q", "t2")]


async def _empty(session: Session) -> bool:
    return await folders(session) == []


async def test_what_a_leader_that_died_has_left_the_next_one_removes(bench: Bench) -> None:
    session = await bench.session()
    await opened(bench)
    for name in ("durables/left", "durables/left/d1", "durables/left/d2"):
        await session.create(name)
    await bench.next_term()

    async def swept() -> bool:
        return await folders(session) == [TAPES]

    await eventually(swept)
    assert await opened(bench) == ""


async def test_a_queue_whose_record_can_not_be_read_keeps_its_positions(bench: Bench) -> None:
    session = await bench.session()
    await opened(bench)
    position = await kept(bench, 1, 5)
    record = await session.get(paths.queue("q"))
    assert record is not None
    await session.set(paths.queue("q"), b"of a newer version", -1)
    await bench.next_term()
    await bench.ask(wire.ListQueues(), wire.Queues)
    assert await folders(session) == [TAPES]
    await session.set(paths.queue("q"), record.data, -1)
    await bench.next_term()
    assert await opened(bench, holder="two") == position


async def test_one_that_can_not_be_read_says_so_and_can_be_forgotten(bench: Bench) -> None:
    session = await bench.session()
    await opened(bench)
    await session.set(paths.held_name(paths.DURABLES, TAPES, "d"), b"of a newer version", -1)
    with pytest.raises(UnknownFormat, match="forget-durable"):
        await opened(bench, holder="two")
    assert await listed(bench) == [durables.DurableView("d", "", "", 0.0, 0.0)]
    await bench.ask(durables.ForgetDurable("q", "d"), wire.Done)
    assert await opened(bench, holder="two") == ""
