"""Strangers that begin large messages at every server of a cluster and never end them: its memory stays bounded, and whoever
means well is served meanwhile.

Why: docs/decisions/0042-every-server-bounds-what-is-unfinished.md. Not covered: who waits for whom then
(tests/unit/test_read_budget.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import pytest

import roq
from roq import blocking
from roq.coordination.locate import read_leader
from roq.runtime.shutdown import ask
from roq.tools.chaos.watch import read
from roq.wire import process as process_wire
from roq.wire import zmtp
from roq.wire.limits import CONTROL_BYTES_MAX
from tests.integration.running import RunningCluster
from tests.integration.workqueue_rig import new_address, removed_at_the_end

GROWTH_MAX = 64  # MiB, however many connections
STILL_SECONDS = 0.5  # nobody reads on
FLOOD_SECONDS = 20.0
SERVED_SECONDS = 15.0
BLOCK = bytes(256 * 1024)


class Target(NamedTuple):
    """A server. socket_type: of a peer it would welcome. served: what a good client asks of it. size: of a stranger's message,
    as large as it may be. strangers: so many that their messages would be far more than is allowed."""

    name: str
    pid: int
    address: str
    port: int
    socket_type: bytes
    served: Callable[[], Awaitable[object]]
    size: int = CONTROL_BYTES_MAX
    strangers: int = 60


@contextlib.contextmanager
def unfinished(target: Target) -> Iterator[None]:
    """Strangers, each with all but the last byte of its message sent, as far as it is read."""
    begin = zmtp.hello(target.socket_type) + b"\x02" + (target.size - 1).to_bytes(8, "big")
    left = dict[socket.socket, int]()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(target.strangers):
            one = stack.enter_context(socket.create_connection((target.address, target.port), 5))
            one.sendall(begin)
            one.setblocking(False)
            selector.register(one, selectors.EVENT_WRITE)
            left[one] = target.size - 2
        until = time.monotonic() + FLOOD_SECONDS
        while left and time.monotonic() < until and (ready := selector.select(STILL_SECONDS)):
            for key, _ in ready:
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    try:
                        left[peer] -= peer.send(BLOCK[: left[peer]])
                    except (BrokenPipeError, ConnectionResetError):  # refused
                        left[peer] = 0
                if not left[peer]:
                    selector.unregister(peer)
                    del left[peer]
        yield


def memory(pid: int) -> int:
    reading = read(pid)[1]
    assert reading is not None
    return reading.memory


async def targets(cluster: RunningCluster, client: roq.Cluster, queue: str, work_queue: str) -> list[Target]:
    info, work = await client.queue(queue), await client.work_queue(work_queue)
    hosts = await client.hosts()
    monitor_host = next(one for one in hosts if one.host == info.record.monitor_host)
    master_host = next(one for one in hosts if one.host == work.record.master_host)
    assert monitor_host.report is not None
    assert master_host.report is not None
    monitor = next(one for one in monitor_host.report.processes if one.queue == queue and str(one.kind) == "monitor")
    store = next(one for one in master_host.report.processes if str(one.kind) == "store")
    master = next(one for one in master_host.report.processes if one.name == f"master/{work_queue}")
    exchange = next(one for one in monitor_host.report.processes if one.queue == queue and str(one.kind) == "exchange")
    leader = await read_leader(cluster.zookeeper)
    gcm, hcm = cluster.local.gcms["gcm-1"].pid, cluster.local.hosts[monitor_host.host].pid

    async def put() -> None:
        async with roq.open_queue(f"roq://{cluster.zookeeper}/{work_queue}") as tasks:
            await tasks.put(b"x" * 60_000)

    async def join() -> None:
        async with client.publisher(queue) as publisher:
            await publisher.publish("good", b"x")
            await publisher.flush()

    def control(address: str, port: int) -> Callable[[], Awaitable[object]]:
        return lambda: ask(address, port, process_wire.Ping(), SERVED_SECONDS)

    there, here = monitor_host.address, master_host.address
    return [
        Target("gcm", gcm, leader.host, leader.port, b"DEALER", client.view),
        Target("gcm's broadcast", gcm, leader.host, leader.broadcast, b"SUB", client.view),
        Target("hcm", hcm, there, monitor_host.port, b"DEALER", client.hosts),
        Target("monitor", monitor.pid, there, monitor.ports["clients"], b"DEALER", join),
        Target("monitor's kpis", monitor.pid, there, monitor.ports["kpis"], b"SUB", join),
        Target("exchange's back", exchange.pid, there, exchange.ports["back"], b"SUB", join),
        Target("exchange's front", exchange.pid, there, exchange.ports["front"], b"PUB", join, 1 << 20, 1000),
        Target("control", monitor.pid, there, monitor.ports["control"], b"DEALER", control(there, monitor.ports["control"])),
        Target("store", store.pid, here, store.ports["clients"], b"DEALER", put),
        Target("follower", store.pid, here, store.ports["shuffle"], b"DEALER", put),
        Target("master", master.pid, here, master.ports["clients"], b"DEALER", put),
    ]


@pytest.mark.quick
@pytest.mark.timeout(240)
async def test_unfinished_messages_are_bounded_at_every_server(
    cluster: RunningCluster, client: roq.Cluster, queue: str
) -> None:
    with removed_at_the_end(cluster, new_address("roq", cluster.zookeeper)) as address:
        await asyncio.to_thread(lambda: blocking.open_queue(address).__enter__().close())
        grown = dict[str, int]()  # MiB
        for target in await targets(cluster, client, queue, address.rpartition("/")[2]):
            before = memory(target.pid)
            with unfinished(target):
                async with asyncio.timeout(SERVED_SECONDS):
                    await target.served()
                grown[target.name] = (memory(target.pid) - before) >> 20
        assert max(grown.values()) <= GROWTH_MAX, grown
