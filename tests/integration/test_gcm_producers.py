"""Producers at the GCM: kept in ZooKeeper over changes of the leader, listed, forgotten, gone with their queue.

Hosts are played by a test double (gcm_bench.py); what is decided is in tests/unit/test_producers.py, what producers share with
durable subscribers in test_gcm_durables.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from gcm import held_names
from roq.coordination import paths
from roq.errors import CallError, NotRecorded, ProducerFenced, UnknownFormat
from roq.wire import gcm as wire
from roq.wire import producers
from roq.wire.master import OUTBOX_PREFIX
from roq.wire.producers import LIFE_BITS
from roq.wire.recording import Record
from tests.integration.gcm_bench import Bench, eventually


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    """A leader with a recorded queue `q`."""
    async with AsyncExitStack() as stack:
        made = Bench(chroot, stack)
        await made.gcm()
        await made.host("a")
        await made.hosts_alive(1)
        await made.ask(wire.CreateQueue("q", "t", record=Record()), wire.QueueInfo)
        yield made


async def opened(bench: Bench, holder: str = "one", name: str = "p", queue: str = "q") -> producers.ProducerGrant:
    return await bench.ask(producers.OpenProducer(queue, name, holder, f"{holder} here"), producers.ProducerGrant)


async def kept(bench: Bench, turn: int, number: int, holder: str = "one", *, closed: bool = False) -> None:
    await bench.ask(producers.KeepProducer("q", "p", holder, turn, number, True, 1, "A", closed), wire.Done)


async def listed(bench: Bench) -> list[producers.ProducerView]:
    return list((await bench.ask(producers.ListProducers("q"), producers.Producers)).views)


@pytest.mark.quick
async def test_a_number_is_kept_for_whoever_opens_it_next(bench: Bench) -> None:
    first = await opened(bench)
    assert await opened(bench) == first, "the same request again"
    await kept(bench, 1, 10)
    second = await opened(bench, "two")
    assert (second.publisher, second.number, second.path) == (first.publisher, 10, 1 << LIFE_BITS)
    assert not second.settled
    with pytest.raises(ProducerFenced, match="opened since by two here"):
        await kept(bench, 2, 11)
    await kept(bench, 1, 12, "two", closed=True)
    third = await opened(bench, "three")
    assert (third.number, third.path, third.settled) == (12, 1 << LIFE_BITS, True)
    (view,) = await listed(bench)
    assert (view.name, view.number, view.closed, view.owner) == ("p", 12, False, "three here")


async def test_the_next_leader_knows_it_and_a_removed_queue_takes_it_along(bench: Bench) -> None:
    session = await bench.session()
    first = await opened(bench)
    await kept(bench, 1, 10)
    await bench.next_term()
    assert (await opened(bench, "two")).number == 10
    await bench.ask(producers.ForgetProducer("q", "p"), wire.Done)
    await bench.ask(producers.ForgetProducer("q", "p"), wire.Done)
    with pytest.raises(ProducerFenced, match="forgotten"):
        await kept(bench, 1, 11, "two")
    anew = await opened(bench, "two")
    assert (anew.number, anew.path) == (0, 0)
    assert anew.publisher != first.publisher, "readers know the numbers of the other one"
    await bench.ask(wire.RemoveQueue("q", "u"), wire.Done)

    async def gone() -> bool:
        return await session.children(paths.PRODUCERS) == []

    await eventually(gone)


async def test_the_clusters_own_take_no_room_and_go_with_their_work_queue(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_names, "NAMES_MAX", 1)
    made = await bench.ask(wire.CreateWorkQueue("w", "t"), wire.WorkQueueInfo)
    serving = OUTBOX_PREFIX + made.record.spec.log
    for name in (f"{OUTBOX_PREFIX}gone1", serving, "mine"):
        await opened(bench, name=name)
    with pytest.raises(CallError, match="has 1 producers"):
        await opened(bench, name="yours")
    assert [view.name for view in await listed(bench)] == [serving, "mine"], "the first one's work queue is not there"
    await opened(bench, name=f"{OUTBOX_PREFIX}gone2")
    assert [view.name for view in await listed(bench)] == sorted((f"{OUTBOX_PREFIX}gone2", serving, "mine"))


async def test_only_recorded_queues_have_producers(bench: Bench) -> None:
    await bench.create("plain")
    with pytest.raises(NotRecorded, match="`roq queue record`"):
        await opened(bench, queue="plain")


async def test_a_queue_whose_record_can_not_be_read_is_not_taken_for_removed(bench: Bench) -> None:
    session = await bench.session()
    node = await session.get(paths.queue("q"))
    assert node is not None
    await session.set(paths.queue("q"), b"{", node.version)
    await bench.next_term()
    with pytest.raises(UnknownFormat, match="record of queue 'q' is damaged"):
        await opened(bench)
    with pytest.raises(UnknownFormat):
        await bench.ask(wire.DescribeQueue("q"), wire.QueueInfo)
    await session.set(paths.queue("q"), node.data, node.version + 1)
    await bench.next_term()
    await opened(bench)
