"""Exchange process: reports to the queue's Monitor, heartbeats, a clean end. The forwarding is in forwarder.py."""

from __future__ import annotations

import asyncio
import os
import time

from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.exchange.tapes import TapeCare
from roq.runtime.liveness import beat_on_lease, open_board
from roq.runtime.observe import Counters
from roq.runtime.rpc import RpcClient
from roq.runtime.run import run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import monitor as wire
from roq.wire.assignment import ProcessSpec
from roq.wire.process import ChildSpec

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def count_traffic(counters: Counters, forwarder: Forwarder) -> None:
    """For whoever asks this process how it is. Of the tape while there is one."""
    for name, total in forwarder.traffic._asdict().items():
        counters[name] = total
    if forwarder.recorder is not None:
        counters["tape_waiting_bytes"] = forwarder.recorder.waiting_bytes
    else:
        counters.pop("tape_waiting_bytes", None)


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Forward until `stop`. Raises PortTaken."""
    process = spec.process
    counters = Counters()
    where = wire.ExchangeAddress(
        process.exchange, spec.address, spec.ports["front"], spec.ports["back"], time.time_ns() & 0xFFFF_FFFF_FFFF
    )
    forwarder = Forwarder(where.address, where.front, where.back, where.token, process.settings, counters, queue=process.queue)
    monitor = RpcClient(spec.monitor.clients_endpoint(), wire.Reply)

    def configure(changed: ProcessSpec) -> None:
        """The queue has another Monitor: report there from now on. Or it is recorded in another way."""
        nonlocal monitor
        if changed.monitor is not None and changed.monitor.clients_endpoint() != monitor.endpoint:
            monitor.close()
            monitor = RpcClient(changed.monitor.clients_endpoint(), wire.Reply)
        tapes.configure(changed.recording)
        report()

    failed: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failed.append(error)
        stop.set()

    tapes = TapeCare(process.queue, process.exchange, spec.zookeeper, forwarder, counters, fail)
    tapes.configure(process.recording)
    control = ShutdownMonitor(process.name, spec.address, spec.ports["control"], stop, counters, configure, process.term)
    board = open_board(spec)

    def report() -> None:
        count_traffic(counters, forwarder)
        load = board.host_load()
        cpu = time.process_time()
        monitor.notify(wire.ExchangeReport(where, spec.host, *forwarder.traffic, cpu, resident_bytes(), *load))

    report()
    try:
        await beat_on_lease(board, spec, stop, report)
    finally:
        forwarder.stop()
        control.close()
        monitor.close()
        await tapes.close()
        board.close()
    if failed:
        raise failed[0]


def main(spec: ChildSpec) -> int:
    """Entry point of the forked child; its exit code."""
    return run(lambda stop: serve(spec, stop))
