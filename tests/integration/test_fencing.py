"""What lives on at a lost host is ended: by the higher term if it can be reached, else by its lease."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import roq
from roq.errors import CallError, MessagesLost, NotReady, ProcessFailed
from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.exchange.process import serve
from roq.pubsub.monitor.process import fence
from roq.pubsub.monitor.process import serve as serve_monitor
from roq.runtime.liveness import HeartbeatBoard
from roq.runtime.observe import Counters
from roq.runtime.rpc import RpcClient
from roq.runtime.shutdown import ShutdownMonitor, ask
from roq.wire import monitor, zmtp
from roq.wire import process as wire
from roq.wire.assignment import FormerProcess, MonitorAddress, ProcessKind, ProcessSpec, QueueSettings
from roq.wire.envelope import EnvelopeKind, open_envelope, seal
from roq.wire.process import ChildSpec
from tests.harness.ports import free_port
from tests.integration.follower_rig import until
from tests.integration.running import RunningCluster

ADDRESS = "127.0.0.1"
NAME = "exchange/q/e1"
BOUND_SECONDS = 20.0
NAMED = wire.Named({21: 0.5}, True)


def child(process: ProcessSpec, ports: dict[str, int], directory: Path) -> ChildSpec:
    return ChildSpec(
        process=process,
        host="h",
        address=ADDRESS,
        ports=ports,
        monitor=MonitorAddress("h", ADDRESS, 9, 9),
        board=str(directory / "board"),
        slot=3,
        ready_socket=str(directory / "nobody"),
        zookeeper="127.0.0.1:1",
        log_path="",
    )


@pytest.mark.quick
async def test_a_process_stops_for_a_higher_term_only_and_only_if_it_is_meant() -> None:
    stop = asyncio.Event()
    told: list[int] = []

    def obey(term: int) -> wire.Named:
        told.append(term)
        return NAMED

    control = ShutdownMonitor(NAME, ADDRESS, 0, stop, Counters(), lambda spec: None, 2, obey)
    try:
        for name, term in ((NAME, 2), (NAME, 1), ("exchange/q/e2", 3)):
            with pytest.raises(CallError, match="is not replaced"):
                await ask(ADDRESS, control.port, wire.FenceProcess(name, term))
        await ask(ADDRESS, control.port, wire.ConfigureProcess(ProcessSpec(ProcessKind.EXCHANGE, "q", "e1", term=3)))
        with pytest.raises(CallError):
            await ask(ADDRESS, control.port, wire.FenceProcess(NAME, 3))
        assert not stop.is_set()
        assert await ask(ADDRESS, control.port, wire.FenceProcess(NAME, 4)) == wire.ProcessDone(NAMED)
        async with asyncio.timeout(BOUND_SECONDS):
            await stop.wait()
        assert told == [4]
    finally:
        control.close()


async def test_what_is_replaced_names_its_subscribers_once_and_has_ended_when_nothing_listens() -> None:
    stop = asyncio.Event()
    named: list[wire.Named] = []
    control = ShutdownMonitor(NAME, ADDRESS, 0, stop, Counters(), lambda spec: None, 1, lambda term: NAMED)
    fencing = asyncio.create_task(fence(FormerProcess(NAME, "h", "e1", ADDRESS, control.port, BOUND_SECONDS), 2, named.append))
    async with asyncio.timeout(BOUND_SECONDS):
        await stop.wait()
        assert not fencing.done(), "it has obeyed, and has not ended yet"
        while not named:
            await asyncio.sleep(0.01)
        control.close()
        await fencing
    assert named == [NAMED]


async def test_what_cannot_be_reached_is_waited_for_until_its_lease_is_over() -> None:
    started = time.monotonic()
    await fence(FormerProcess(NAME, "h", "e1", lease_seconds=0.2), 2, lambda silent: None)
    assert time.monotonic() - started >= 0.2


@pytest.mark.quick
async def test_an_exchange_ends_with_its_hosts_lease(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board")
    board.renew_lease(time.monotonic() + 60)
    spec = child(ProcessSpec(ProcessKind.EXCHANGE, "q", "e1"), {"front": 0, "back": 0, "control": 0}, tmp_path)
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


class Played:
    """The clients of one Monitor, played by the test."""

    def __init__(self, port: int) -> None:
        self.notices: asyncio.Queue[msgspec.Struct] = asyncio.Queue()
        self.rpc = RpcClient(f"tcp://{ADDRESS}:{port}", monitor.Reply, monitor.NoticeToMember, self.notices.put_nowait)

    async def join_publisher(self) -> monitor.PublisherWelcome:
        return await self.rpc.request(monitor.JoinPublisher(11), monitor.PublisherWelcome, BOUND_SECONDS)

    async def get_ready(self, subscriber: int, exchange: monitor.ExchangeAddress) -> None:
        """It joins, and says that it is attached to the one Exchange, which has reported; again when that has become active."""
        self.rpc.notify(monitor.ExchangeReport(exchange, "h", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0))
        await self.rpc.request(monitor.JoinSubscriber(subscriber, (">",)), monitor.SubscriberWelcome, BOUND_SECONDS)
        proof = monitor.SubscriberReport(subscriber, 9, (exchange.token,), 0, 0, 0, 0, 0.0, 0.0, 0.0)
        self.rpc.notify(proof)
        await self.rpc.request(monitor.AwaitExchange(exchange.id), monitor.Recorded, BOUND_SECONDS)
        self.rpc.notify(proof)
        await self.heard(monitor.Heard)

    async def heard(self, kind: type[msgspec.Struct]) -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            while not isinstance(await self.notices.get(), kind):
                pass


@contextlib.contextmanager
def forwarding() -> Iterator[monitor.ExchangeAddress]:
    """An Exchange's forwarder; the test reports for it."""
    forwarder = Forwarder(ADDRESS, 0, 0, "e1/1", QueueSettings(), Counters())
    exchange = monitor.ExchangeAddress("e1", ADDRESS, forwarder.front_port, forwarder.back_port, 1)
    try:
        yield exchange
    finally:
        forwarder.stop()


async def test_a_fenced_monitor_names_its_subscribers_to_the_one_that_follows(tmp_path: Path) -> None:
    """Nobody else is waited for then: with all of them back, a new publisher need not wait its 5 s."""
    old, new = ({name: free_port(ADDRESS) for name in ("clients", "kpis", "control")} for _ in range(2))
    former = FormerProcess("monitor/q", "h", "", ADDRESS, old["control"], BOUND_SECONDS)
    stop, stops = asyncio.Event(), asyncio.Event()
    first = child(ProcessSpec(ProcessKind.MONITOR, "q"), old, tmp_path)
    replaced = asyncio.create_task(serve_monitor(first, stop))
    spec = ProcessSpec(ProcessKind.MONITOR, "q", term=2, former=(former,))
    before, after = Played(old["clients"]), Played(new["clients"])
    running = [replaced]
    bound = contextlib.ExitStack()
    try:
        exchange = bound.enter_context(forwarding())
        await before.get_ready(21, exchange)
        running.append(asyncio.create_task(serve_monitor(child(spec, new, tmp_path), stops)))
        await before.heard(monitor.Standby)
        await asyncio.wait_for(replaced, BOUND_SECONDS)
        with pytest.raises(NotReady, match="taken over"):
            await after.join_publisher()
        await after.get_ready(21, exchange)
        assert (await after.join_publisher()).exchange == exchange
    finally:
        bound.close()
        stop.set()
        stops.set()
        await asyncio.gather(*running)
        before.rpc.close()
        after.rpc.close()


MEMBERS = 300
AS_A_FORK_SERVER_ENDS_IT = """
import os, sys
import msgspec
from roq.pubsub.monitor.process import main
from roq.wire.process import ChildSpec
os._exit(main(msgspec.json.decode(sys.argv[1], type=ChildSpec)))
"""


async def test_what_a_fenced_monitor_says_last_leaves_before_its_process_ends(tmp_path: Path) -> None:
    ports = {name: free_port(ADDRESS) for name in ("clients", "kpis", "control")}
    spec = msgspec.json.encode(child(ProcessSpec(ProcessKind.MONITOR, "q"), ports, tmp_path)).decode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", AS_A_FORK_SERVER_ENDS_IT, spec)
    played = Played(ports["clients"])
    try:
        for subscriber in range(MEMBERS):
            await played.rpc.request(monitor.JoinSubscriber(subscriber, (">",)), monitor.SubscriberWelcome, BOUND_SECONDS)
        done = await ask(ADDRESS, ports["control"], wire.FenceProcess("monitor/q", 2), BOUND_SECONDS)
        assert done == wire.ProcessDone(wire.Named({}, True))
        await asyncio.wait_for(process.wait(), BOUND_SECONDS)
        for _ in range(MEMBERS):
            await played.heard(monitor.Standby)
    finally:
        played.rpc.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


NAMED_MANY = 380_000  # 7 MB: more than the kernel takes before anything is read
NAMES_MANY = """
import os, sys
from roq.runtime.observe import Counters
from roq.runtime.run import run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire.process import Named

async def serve(stop):
    named = Named(dict.fromkeys(range(1 << 40, (1 << 40) + int(sys.argv[2])), 1.0), True)
    control = ShutdownMonitor("monitor/q", "127.0.0.1", int(sys.argv[1]), stop, Counters(), None, 1, lambda term: named)
    await stop.wait()
    control.close()

os._exit(run(serve))
"""


def test_a_long_answer_leaves_before_its_process_ends() -> None:
    """As to a Monitor that is fenced with very many subscribers, from a reader that is not quick."""
    port = free_port(ADDRESS)
    with subprocess.Popen([sys.executable, "-c", NAMES_MANY, str(port), str(NAMED_MANY)]) as process, socket.socket() as peer:
        try:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            peer.settimeout(BOUND_SECONDS)
            until(lambda: peer.connect_ex((ADDRESS, port)) == 0)
            fence = seal(EnvelopeKind.REQUEST, 1, wire.FenceProcess("monitor/q", 2))
            peer.sendall(zmtp.hello(b"DEALER") + zmtp.frame(fence))
            parser, answers = zmtp.Parser(), list[list[bytes]]()
            while not answers:
                data = peer.recv(1 << 16)
                assert data, "it ended before its answer had left"
                answers += parser.feed(data)
            envelope = open_envelope(answers[0][-1])
            assert (envelope.kind, envelope.id) == (EnvelopeKind.REPLY, 1)
            assert process.wait(BOUND_SECONDS) == 0
        finally:
            process.kill()


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
