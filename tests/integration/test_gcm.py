"""The GCM against a real ZooKeeper: every request. Hosts are played by a test double."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
import zmq

from gcm.transactions import exchange_id
from roq.coordination import paths
from roq.coordination.locate import read_leader
from roq.errors import (
    FrameError,
    HostFull,
    HostNotFound,
    InvalidName,
    LastExchange,
    NoHosts,
    NotReady,
    ProcessFailed,
    QueueConflict,
    QueueNotFound,
    QueueStopped,
)
from roq.runtime.links import SubscriberLink
from roq.wire import gcm as wire
from roq.wire import process as process_wire
from roq.wire.assignment import (
    Assignment,
    Overflow,
    ProcessKind,
    ProcessState,
    from_json,
)
from roq.wire.policy import Policy, QueueRule
from tests.harness import libzmq
from tests.integration.gcm_bench import PATIENCE_SECONDS, Bench, eventually


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(chroot, stack)


@pytest.fixture
async def served(bench: Bench) -> Bench:
    """A leader and two hosts."""
    await bench.gcm()
    await bench.host("left")
    await bench.host("right")
    await bench.hosts_alive(2)
    return bench


# --- queues ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_created_queue_serves_and_its_transaction_is_gone(served: Bench) -> None:
    info = await served.create("orders, all: ünïcode", replication=3)
    assert info.ready
    assert info.record.settings.replication == 3
    assert info.monitors[0].host == info.record.monitor_host
    assert await served.ask(wire.DescribeQueue("orders, all: ünïcode"), wire.QueueInfo) == info
    session = await served.session()

    async def forgotten() -> bool:
        return not await session.children(paths.transactions(paths.TransactionKind.QUEUE))

    await eventually(forgotten)


async def test_creation_is_idempotent_by_transaction_and_by_name(served: Bench) -> None:
    first = await served.create("q", "t1")
    assert await served.create("q", "t1") == first
    assert await served.create("q", "t2") == first
    with pytest.raises(QueueConflict):
        await served.create("q", "t1", overflow=Overflow.BLOCK)
    assert (await served.ask(wire.QueueExists("q"), wire.Exists)).exists
    assert not (await served.ask(wire.QueueExists("other"), wire.Exists)).exists


async def test_many_queues_at_once(served: Bench) -> None:
    """Over 50, where the original's fixed arrays ended; twice the same requests, all at the same time."""
    names = [f"queue {number}, of many" for number in range(60)]
    infos = await asyncio.gather(*(served.create(name) for name in names * 2))
    assert all(info.ready for info in infos)
    queues = (await served.ask(wire.ListQueues(), wire.Queues)).queues
    assert sorted(names) == [info.record.name for info in queues]
    hosts = (await served.ask(wire.ListHosts(), wire.Hosts)).hosts
    assert [host.monitors for host in hosts] == [30, 30]


async def test_failed_process_rolls_the_queue_back(served: Bench, bench: Bench) -> None:
    third = await bench.host("third")
    await bench.hosts_alive(3)
    third.states[ProcessKind.SCALING] = ProcessState.FAILED
    request = wire.CreateQueue("q", "t", host="third")
    with pytest.raises(ProcessFailed, match="scaling/q on host third: no reason"):
        await served.ask(request, wire.QueueInfo)
    assert not (await served.ask(wire.QueueExists("q"), wire.Exists)).exists
    third.states.clear()
    assert (await served.ask(request, wire.QueueInfo)).record.monitor_host == "third"


async def test_removal_waits_for_the_processes_and_can_be_repeated(served: Bench, bench: Bench) -> None:
    third = await bench.host("third")
    await bench.hosts_alive(3)
    await served.ask(wire.CreateQueue("q", "t", host="third"), wire.QueueInfo)
    third.obeys.clear()
    leader = await read_leader(served.zookeeper)
    removal = wire.RemoveQueue("q", "r")
    waiting = asyncio.ensure_future(served.ask_at(leader.port, removal, wire.Done))

    async def removed() -> bool:
        return not (await served.ask(wire.QueueExists("q"), wire.Exists)).exists

    await eventually(removed)
    assert not waiting.done()
    third.obeys.set()
    await waiting
    await served.ask(removal, wire.Done)
    with pytest.raises(QueueNotFound):
        await served.ask(wire.RemoveQueue("q", "another"), wire.Done)
    again = await served.ask(wire.CreateQueue("q", "t3", host="third"), wire.QueueInfo)
    assert again.ready
    await served.ask(removal, wire.Done)  # the old request, late: the new queue stays
    assert (await served.ask(wire.QueueExists("q"), wire.Exists)).exists


async def test_stop_and_start(served: Bench) -> None:
    first = await served.create("q")
    for _ in range(2):
        await served.ask(wire.StopQueue("q", "s"), wire.Done)
    stopped = await served.ask(wire.DescribeQueue("q"), wire.QueueInfo)
    assert (stopped.ready, stopped.monitors, stopped.record.running) == (False, (), False)
    assert not (await served.create("q")).ready  # it exists, stopped, and stays so
    with pytest.raises(QueueStopped):
        await served.ask(wire.CreateExchange("q", "e"), wire.ExchangeCreated)
    for _ in range(2):
        await served.ask(wire.StartQueue("q", "s"), wire.Done)
    started = await served.ask(wire.DescribeQueue("q"), wire.QueueInfo)
    assert started.ready
    assert started.monitors[0].term == first.record.term + 1
    for request in (wire.StartQueue("x", "t"), wire.StopQueue("x", "t"), wire.DescribeQueue("x"), wire.GetPolicy("x")):
        with pytest.raises(QueueNotFound):
            await served.ask(request, wire.Done)


async def test_policy_changes_reach_the_host(served: Bench) -> None:
    policy = Policy(queue=QueueRule(max_publishers_per_exchange=3))
    host = (await served.create("q")).record.monitor_host
    session = await served.session()

    async def assigned() -> Policy | None:
        node = await session.get(paths.assignment(host))
        assert node is not None
        (spec,) = [spec for spec in from_json(node.data, Assignment).processes if spec.kind is ProcessKind.SCALING]
        return spec.policy

    for wanted in (policy, None):
        await served.ask(wire.SetPolicy("q", wanted, "t"), wire.Done)
        assert await assigned() == wanted
        assert (await served.ask(wire.GetPolicy("q"), wire.PolicyInfo)).policy == (wanted or Policy())
        assert (await session.get(paths.policy("q")) is None) == (wanted is None)


@pytest.mark.quick
async def test_refusals(bench: Bench) -> None:
    await bench.gcm(wait_seconds=1.0)
    with pytest.raises(NoHosts):
        await bench.create("q")
    host = await bench.host("only", exchanges_max=2)
    await bench.hosts_alive(1)
    for request in (wire.CreateQueue("a/b", "t"), wire.CreateQueue("q", "a/b"), wire.DescribeQueue(""), wire.QueueExists("..")):
        with pytest.raises(InvalidName):
            await bench.ask(request, wire.QueueInfo)
    with pytest.raises(HostNotFound):
        await bench.ask(wire.CreateQueue("q", "t", host="nowhere"), wire.QueueInfo)
    await bench.create("one")
    await bench.create("two")
    with pytest.raises(HostFull):
        await bench.create("three")
    with pytest.raises(HostFull):
        await bench.ask(wire.CreateExchange("one", "t", "only"), wire.ExchangeCreated)
    await bench.ask(wire.RemoveQueue("two", "r"), wire.Done)
    host.obeys.clear()
    with pytest.raises(NotReady):
        await bench.create("slow")
    host.obeys.set()
    assert (await bench.create("slow")).ready  # the same transaction, once the host has caught up


# --- Exchanges and hosts -----------------------------------------------------------------------------------------------


async def test_exchange_on_another_host_follows_the_monitor(served: Bench, bench: Bench) -> None:
    third = await bench.host("third")
    await bench.hosts_alive(3)
    info = await served.ask(wire.CreateQueue("q", "t", host="third"), wire.QueueInfo)
    request = wire.CreateExchange("q", "e1", "left")
    made = await served.ask(request, wire.ExchangeCreated)
    assert made == wire.ExchangeCreated(exchange_id("q", "e1"), "left")
    assert await served.ask(request, wire.ExchangeCreated) == made
    session = await served.session()

    async def ports_known_on_left() -> int:
        node = await session.get(paths.assignment("left"))
        assert node is not None
        (spec,) = from_json(node.data, Assignment).processes
        assert spec.monitor is not None
        return spec.monitor.clients

    assert await ports_known_on_left() == info.monitors[0].clients
    third.port_base = 9000
    third.report()

    async def followed() -> bool:
        return await ports_known_on_left() == 9000

    await eventually(followed)
    await served.ask(wire.RemoveExchange("q", made.exchange, "r1"), wire.Done)
    await served.ask(wire.RemoveExchange("q", made.exchange, "r1"), wire.Done)
    (last,) = (await served.ask(wire.DescribeQueue("q"), wire.QueueInfo)).record.exchanges
    with pytest.raises(LastExchange):
        await served.ask(wire.RemoveExchange("q", last, "r2"), wire.Done)


async def test_draining_host_takes_nothing_new(served: Bench) -> None:
    await served.ask(wire.DrainHost("left", True, "d"), wire.Done)
    assert {(await served.create(f"q{number}")).record.monitor_host for number in range(4)} == {"right"}
    with pytest.raises(HostFull, match="cordoned"):
        await served.ask(wire.CreateQueue("q", "t", host="left"), wire.QueueInfo)
    await served.ask(wire.DrainHost("left", False, "d"), wire.Done)
    assert (await served.create("another")).record.monitor_host == "left"


async def test_broadcast_tells_changes(served: Bench) -> None:
    leader = await read_leader(served.zookeeper)
    seen: asyncio.Queue[wire.ClusterView] = asyncio.Queue()

    def told(messages: list[list[bytes]]) -> None:
        for topic, body in messages:
            assert topic == wire.BROADCAST_TOPIC
            seen.put_nowait(msgspec.msgpack.decode(body, type=wire.ClusterView))

    link = SubscriberLink(f"tcp://127.0.0.1:{leader.broadcast}", [wire.BROADCAST_TOPIC], told)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            view = await seen.get()
            assert [host.host for host in view.hosts] == ["left", "right"]
            await served.create("q")
            while not (view.queues and view.queues[0].ready):
                view = await seen.get()
            assert view.leader == f"127.0.0.1:{leader.port}"
    finally:
        link.close()


async def test_random_bytes_do_no_harm(served: Bench) -> None:
    leader = await read_leader(served.zookeeper)
    socket = libzmq.socket(zmq.DEALER, 100)
    socket.connect(f"tcp://127.0.0.1:{leader.port}")
    for size in range(64):
        socket.send(os.urandom(size))
    socket.close()
    assert not (await served.ask(wire.ListQueues(), wire.Queues)).queues
    with pytest.raises(FrameError):
        await served.ask(process_wire.Ping(), wire.Done)  # type: ignore[arg-type]
