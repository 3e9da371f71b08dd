"""What recording costs those who publish and subscribe and don't ask for it: the loads of `python -m benchmarks pubsub`, one
publisher and one subscriber, through a queue that is recorded and through one that is not, on one cluster."""

from __future__ import annotations

import roq
from benchmarks.machine import quiet
from benchmarks.recorded.workload import SIZE, Found, Size, Wrong
from roq.ids import new_token
from roq.tools.bench.cpu import Pids, queue_pids
from roq.tools.bench.harness import CLIENT_MODULE, IDLE_SECONDS, drive
from roq.tools.bench.load import Load

FLAT_OUT, LATENCY_RATE = 2_500_000, 10_000  # messages/s
RECORD = {"not recorded": None, "recorded": roq.Record()}


async def on_and_off(address: str, size: Size) -> list[Found]:
    """Throughput one by one, and latency at 10,000/s; of either kind. Raises Wrong if a message is lost, repeated or out of
    order."""
    loads = {
        "one by one": Load(size=SIZE, messages=int(FLAT_OUT * size.live_seconds)),
        "10,000/s": Load(size=SIZE, messages=int(LATENCY_RATE * size.latency_seconds), rate=LATENCY_RATE),
    }
    found = []
    async with roq.connect(address) as cluster:
        for what, load in loads.items():
            for kind, record in RECORD.items():
                await quiet(patience_seconds=size.quiet_seconds)
                found.append(await _through(cluster, address, f"{what}, {kind}", load, record))
    return found


async def _through(cluster: roq.Cluster, address: str, way: str, load: Load, record: roq.Record | None) -> Found:
    queue = f"live-{new_token()}"
    await cluster.create_queue(queue, overflow=roq.Overflow.BLOCK, record=record)

    async def pids() -> Pids:
        return queue_pids(await cluster.view(), queue)

    try:
        result = await drive(load, "roq", address, queue, CLIENT_MODULE, pids, IDLE_SECONDS)
    finally:
        await cluster.remove_queue(queue)
    if result.lost or result.duplicated or result.reordered or result.delivered != load.messages:
        raise Wrong(f"{way}: lost {result.lost}, duplicated {result.duplicated}, reordered {result.reordered}")
    p50, p99 = (result.latency_us[name] if load.rate else None for name in ("p50", "p99"))
    clients = sum(result.cpu_seconds[name] for name in ("publisher", "subscriber")) / result.seconds
    servers = sum(result.cpu_seconds.values()) / result.seconds - clients
    return Found(way, result.delivered, result.seconds, p50, p99, None, clients, servers + result.foreign_cores)
