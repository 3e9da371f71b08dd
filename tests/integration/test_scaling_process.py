"""The ScalingProcess's sockets: KPI records in, requests to the Monitor out, another policy while it runs. No GCM needed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from roq.errors import ProcessFailed
from roq.pubsub.scaling.process import serve
from roq.runtime.links import Broadcaster
from roq.runtime.liveness import HeartbeatBoard
from roq.runtime.rpc import RpcServer
from roq.runtime.shutdown import ask
from roq.wire import kpi as kpis
from roq.wire import monitor, process
from roq.wire.assignment import MonitorAddress, ProcessKind, ProcessSpec
from roq.wire.policy import Bounds, ExchangeRule, Policy
from roq.wire.process import ChildSpec
from tests.harness.ports import free_port

ADDRESS = "127.0.99.7"  # nobody connects from here, so a port found free stays free
RULES = Policy(exchange=ExchangeRule(max_messages_per_second=1000), bounds=Bounds(max_exchanges=2))


def record(second: int) -> bytes:
    """Two Exchanges, the first one overloaded."""
    publishers = tuple(kpis.PublisherKpi(number, "a", 400.0, 4000.0, 0.0, 0) for number in (1, 2, 3))
    exchanges = tuple(
        kpis.ExchangeKpi(id, "h", "active", count, count * 400.0, count * 4000.0, 0.0, 0.1, 0)
        for id, count in (("a", 3), ("b", 0))
    )
    return kpis.encode(kpis.QueueKpi("q", 1e9 + second, 1, 1200.0, 12000.0, 0.0, 0, exchanges, publishers, (), ()))


@pytest.mark.quick
async def test_records_make_decisions_and_a_policy_is_taken_at_once(tmp_path: Path) -> None:
    asked: asyncio.Queue[msgspec.Struct] = asyncio.Queue()

    async def handle(peer: bytes, request: msgspec.Struct) -> msgspec.Struct:
        asked.put_nowait(request)
        return monitor.Moved(1) if isinstance(request, monitor.Move) else monitor.Recorded()

    server = RpcServer(ADDRESS, 0, monitor.Request, handle)
    stream = Broadcaster(ADDRESS, 0)
    address = MonitorAddress("h", ADDRESS, server.port, stream.port)
    HeartbeatBoard(tmp_path / "board").close()
    spec = ChildSpec(
        process=ProcessSpec(ProcessKind.SCALING, "q"),
        host="h",
        address=ADDRESS,
        ports={"control": free_port(ADDRESS)},
        monitor=address,
        board=str(tmp_path / "board"),
        slot=3,
        ready_socket=str(tmp_path / "nobody"),
        zookeeper="127.0.0.1:1",
        log_path="",
    )
    stop = asyncio.Event()
    running = asyncio.create_task(serve(spec, stop))
    port = spec.ports["control"]
    try:
        async with asyncio.timeout(20):
            pong = process.Pong("", 0, {})
            second = 0
            while not pong.counters.get("records", 0) >= 3:  # the default policy decides nothing
                stream.send((b"q", b"random bytes"))
                stream.send((b"q2", record(second)))
                stream.send((b"q", record(second)))
                await asyncio.sleep(0.02)
                second += 1
                answer = await ask(ADDRESS, port, process.Ping())
                assert isinstance(answer, process.Pong)
                pong = answer
            assert pong.counters["refused_undecodable_kpi"] > 0
            assert asked.empty()
            await ask(ADDRESS, port, process.ConfigureProcess(ProcessSpec(ProcessKind.SCALING, "q", policy=RULES)))
            for more in range(2):
                stream.send((b"q", record(second + more)))
            begun, move, ended = [await asked.get() for _ in range(3)]
            assert isinstance(begun, monitor.RecordDecision)
            assert begun.decision.action == "rebalance"
            assert move == monitor.Move(((1, "b"),))
            assert isinstance(ended, monitor.RecordDecision)
            assert ended.decision.outcome == "1 of 1 publishers moved"
            await ask(ADDRESS, port, process.Shutdown("test"))
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        stream.close()
        server.close()
    board = HeartbeatBoard(tmp_path / "board")
    assert board.last(3) > 0
    board.close()


async def test_it_ends_with_its_hosts_lease(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board")
    board.renew_lease(time.monotonic() + 60)
    spec = ChildSpec(
        process=ProcessSpec(ProcessKind.SCALING, "q"),
        host="h",
        address=ADDRESS,
        ports={"control": free_port(ADDRESS)},
        monitor=MonitorAddress("h", ADDRESS, 1, 2),
        board=str(tmp_path / "board"),
        slot=3,
        ready_socket=str(tmp_path / "nobody"),
        zookeeper="127.0.0.1:1",
        log_path="",
    )
    running = asyncio.create_task(serve(spec, asyncio.Event()))
    try:
        async with asyncio.timeout(20):
            while not board.last(3):
                await asyncio.sleep(0.01)
            board.renew_lease(time.monotonic())
            with pytest.raises(ProcessFailed, match="lease"):
                await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        board.close()
