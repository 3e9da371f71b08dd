"""Hosts that are lost while a request needs them: the request is answered all the same. Hosts are played by a test double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from gcm.transactions import exchange_id
from roq.coordination import paths
from roq.wire import gcm as wire
from roq.wire.assignment import ProcessKind, ProcessState, QueueRecord, QueueSettings, from_json
from tests.integration.gcm_bench import Bench, FakeHost, eventually


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(chroot, stack)


@pytest.fixture
async def hosts(bench: Bench) -> dict[str, FakeHost]:
    """A leader and three hosts; `slow` does nothing it is told."""
    await bench.gcm()
    made = {name: await bench.host(name) for name in ("left", "right", "slow")}
    made["slow"].obeys.clear()
    await bench.hosts_alive(3)
    return made


async def recorded(bench: Bench, queue: str) -> Callable[[Callable[[QueueRecord], bool]], Awaitable[None]]:
    session = await bench.session()

    async def until(good: Callable[[QueueRecord], bool]) -> None:
        async def check() -> bool:
            node = await session.get(paths.queue(queue))
            return node is not None and good(from_json(node.data, QueueRecord))

        await eventually(check)

    return until


@pytest.mark.quick
async def test_host_of_a_queue_that_is_being_created(bench: Bench, hosts: dict[str, FakeHost]) -> None:
    asked = asyncio.ensure_future(bench.ask(wire.CreateQueue("q", "t", QueueSettings(2), "slow"), wire.QueueInfo))
    await (await recorded(bench, "q"))(lambda record: record.monitor_host == "slow")
    await hosts["slow"].stop()
    info = await asked
    assert info.ready
    assert {*info.record.monitor_hosts, *info.record.exchanges.values()} == {"left", "right"}
    assert info.record.term == 2
    assert [monitor.host for monitor in info.monitors][:1] == [info.record.monitor_host]


async def test_host_of_a_backup_that_is_being_created(bench: Bench, hosts: dict[str, FakeHost]) -> None:
    asked = asyncio.ensure_future(bench.ask(wire.CreateQueue("q", "t", QueueSettings(3), "left"), wire.QueueInfo))
    until = await recorded(bench, "q")
    await until(lambda record: "slow" in record.backups)
    await asyncio.sleep(0.1)
    assert not asked.done()
    await hosts["slow"].stop()
    assert (await asked).record.monitor_host == "left"
    await until(lambda record: record.backups == ("right",))


async def test_host_of_an_exchange_that_is_being_created(bench: Bench, hosts: dict[str, FakeHost]) -> None:
    await bench.ask(wire.CreateQueue("q", "t", host="left"), wire.QueueInfo)
    request = wire.CreateExchange("q", "x", "slow")
    asked = asyncio.ensure_future(bench.ask(request, wire.ExchangeCreated))
    id = exchange_id("q", "x")
    await (await recorded(bench, "q"))(lambda record: record.exchanges.get(id) == "slow")
    await hosts["slow"].stop()
    made = await asked
    assert made.exchange == id
    assert made.host in ("left", "right")
    info = await bench.ask(wire.DescribeQueue("q"), wire.QueueInfo)
    assert info.record.exchanges[id] == made.host
    assert len(info.record.exchanges) == 2
    assert await bench.ask(request, wire.ExchangeCreated) == made


async def test_backup_that_its_host_gives_up_is_made_elsewhere(bench: Bench, hosts: dict[str, FakeHost]) -> None:
    """Thesis §10.5.3: the creation request of a backup failed."""
    hosts["right"].states[ProcessKind.MONITOR] = ProcessState.FAILED
    hosts["slow"].obeys.set()
    info = await bench.ask(wire.CreateQueue("q", "t", QueueSettings(2), "left"), wire.QueueInfo)
    assert info.ready
    await (await recorded(bench, "q"))(lambda record: record.backups == ("slow",))
