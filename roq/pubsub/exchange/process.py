"""Exchange process: reports to the queue's Monitor, heartbeats, a clean end. The forwarding is in forwarder.py."""

from __future__ import annotations

import asyncio
import os
import time

from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.exchange.recorder import Recorder
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


class MonitorConnection:
    """To whoever is the queue's Monitor; it may have producers fenced, whoever is the Monitor when that is done. token: of this
    life of the Exchange."""

    def __init__(self, endpoint: str, token: str, forwarder: Forwarder) -> None:
        self._token, self._forwarder = token, forwarder
        self._fencing = set[tuple[int, int]]()  # publishers and paths of which what was taken is not stored yet
        self._recorder: Recorder | None = None  # that stores it
        self._client = self._connected(endpoint)

    def _connected(self, endpoint: str) -> RpcClient:
        return RpcClient(endpoint, wire.Reply, wire.FencePublisher, self._fence)

    def follow(self, endpoint: str) -> None:
        """The Monitor is there from now on."""
        if endpoint != self._client.endpoint:
            self._client.close()
            self._client = self._connected(endpoint)

    def notify(self, notice: wire.ExchangeReport | wire.PathsFenced) -> None:
        """Tell it, unless the backlog is full."""
        self._client.notify(notice)

    def _fence(self, notice: wire.FencePublisher) -> None:
        if self._recorder is not self._forwarder.recorder:  # one that writes no more may never say so
            self._recorder = self._forwarder.recorder
            self._fencing.clear()
        fenced = notice.publisher, notice.path
        if fenced in self._fencing:
            return  # the Monitor repeats it whenever the publisher tries to join

        def done() -> None:
            self._fencing.discard(fenced)
            self.notify(wire.PathsFenced(self._token, *fenced))

        self._fencing.add(fenced)
        self._forwarder.fence(*fenced, done)

    def close(self) -> None:
        """Let go."""
        self._client.close()


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Forward until `stop`. Raises PortTaken."""
    process = spec.process
    counters = Counters()
    where = wire.ExchangeAddress(
        process.exchange, spec.address, spec.ports["front"], spec.ports["back"], time.time_ns() & 0xFFFF_FFFF_FFFF
    )
    forwarder = Forwarder(where.address, where.front, where.back, where.token, process.settings, counters, queue=process.queue)
    monitor = MonitorConnection(spec.monitor.clients_endpoint(), where.token, forwarder)

    def configure(changed: ProcessSpec) -> None:
        """The queue has another Monitor: report there from now on. Or it is recorded in another way."""
        if changed.monitor is not None:
            monitor.follow(changed.monitor.clients_endpoint())
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
        totals = (*forwarder.traffic, cpu, resident_bytes(), *load)
        monitor.notify(wire.ExchangeReport(where, spec.host, *totals, wire.SERVER_PROTOCOL))

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
