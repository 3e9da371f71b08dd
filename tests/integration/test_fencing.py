"""What lives on at a lost host is ended: by the higher term if it can be reached, else by its lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import roq
from roq.errors import CallError, MessagesLost, ProcessFailed
from roq.exchange.process import serve
from roq.monitor.fencing import fence
from roq.runtime.liveness import HeartbeatBoard
from roq.runtime.observe import Counters
from roq.runtime.shutdown import ShutdownMonitor, ask
from roq.wire import process as wire
from roq.wire.assignment import FormerProcess, MonitorAddress, ProcessKind, ProcessSpec
from roq.wire.child import ChildSpec
from tests.integration.running import RunningCluster

ADDRESS = "127.0.0.1"
NAME = "exchange/q/e1"
BOUND_SECONDS = 20.0


async def test_a_process_stops_for_a_higher_term_only_and_only_if_it_is_meant() -> None:
    stop = asyncio.Event()
    told: list[int] = []
    monitor = ShutdownMonitor(NAME, ADDRESS, 0, stop, Counters(), lambda spec: None, 2, told.append)
    try:
        for name, term in ((NAME, 2), (NAME, 1), ("exchange/q/e2", 3)):
            with pytest.raises(CallError, match="is not replaced"):
                await ask(ADDRESS, monitor.port, wire.Fence(name, term))
        await ask(ADDRESS, monitor.port, wire.Configure(ProcessSpec(ProcessKind.EXCHANGE, "q", "e1", term=3)))
        with pytest.raises(CallError):
            await ask(ADDRESS, monitor.port, wire.Fence(NAME, 3))
        assert not stop.is_set()
        await ask(ADDRESS, monitor.port, wire.Fence(NAME, 4))
        async with asyncio.timeout(BOUND_SECONDS):
            await stop.wait()
        assert told == [4]
    finally:
        monitor.close()


async def test_what_is_replaced_is_known_to_have_ended_when_nothing_listens() -> None:
    stop = asyncio.Event()
    monitor = ShutdownMonitor(NAME, ADDRESS, 0, stop, Counters(), lambda spec: None, 1)
    fencing = asyncio.create_task(fence(FormerProcess(NAME, "h", "e1", ADDRESS, monitor.port, BOUND_SECONDS), 2))
    async with asyncio.timeout(BOUND_SECONDS):
        await stop.wait()
        assert not fencing.done(), "it has obeyed, and has not ended yet"
        monitor.close()
        await fencing


async def test_what_cannot_be_reached_is_waited_for_until_its_lease_is_over() -> None:
    started = time.monotonic()
    await fence(FormerProcess(NAME, "h", "e1", lease_seconds=0.2), 2)
    assert time.monotonic() - started >= 0.2


async def test_an_exchange_ends_with_its_hosts_lease(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board")
    board.renew_lease(time.monotonic() + 60)
    spec = ChildSpec(
        process=ProcessSpec(ProcessKind.EXCHANGE, "q", "e1"),
        host="h",
        address=ADDRESS,
        ports={"front": 0, "back": 0, "control": 0},
        monitor=MonitorAddress("h", ADDRESS, 9, 9),
        board=str(tmp_path / "board"),
        slot=3,
        ready_socket=str(tmp_path / "nobody"),
        zookeeper="127.0.0.1:1",
        log_path="",
    )
    stop = asyncio.Event()
    running = asyncio.create_task(serve(spec, stop))
    try:
        async with asyncio.timeout(BOUND_SECONDS):
            while not board.last(3):
                await asyncio.sleep(0.01)
            board.renew_lease(time.monotonic())
            with pytest.raises(ProcessFailed, match="lease"):
                await running
    finally:
        stop.set()
        await asyncio.gather(running, return_exceptions=True)
        board.close()


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path, gcms=1, hosts=2, session_seconds=4.0)
    yield running
    running.stop()


async def publish(publisher: roq.Publisher, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await publisher.publish("t", b"%d" % time.monotonic_ns())
        await asyncio.sleep(0.01)


async def test_who_is_ready_after_the_monitors_hcm_is_lost_gets_everything(two_hosts: RunningCluster) -> None:
    """Its processes live on with the publisher; the queue is led elsewhere. A new subscriber is ready only when they ended."""
    lost: list[MessagesLost] = []
    stop = asyncio.Event()
    async with roq.connect(two_hosts.zookeeper) as client:
        await client.create_queue("q", overflow="block")
        info = await client.queue("q")
        publisher = await client.publisher("q").open()
        publishing = asyncio.create_task(publish(publisher, stop))
        two_hosts.call(two_hosts.local.kill_hcm(info.record.monitor_host))
        async with asyncio.timeout(BOUND_SECONDS):
            while (now := await client.queue("q")).record.term == info.record.term or not now.monitors:
                await asyncio.sleep(0.05)
        async with client.subscriber("q", on_lost=lost.append) as subscriber:
            ready = publisher.messages + 1
            received: list[int] = []
            async with asyncio.timeout(BOUND_SECONDS):
                async for message in subscriber:
                    received.append(message.sequence)
                    if message.sequence >= ready + 100:
                        break
            stop.set()
            await publishing
        with contextlib.suppress(roq.RoqError):
            await publisher.close()
    assert {*range(ready, received[-1] + 1)} <= {*received}, "nothing after it was ready is missing"
    assert lost == []
