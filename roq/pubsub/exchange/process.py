"""Exchange process: the forwarding itself, reports to the queue's Monitor, heartbeats, a clean end."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from typing import NamedTuple

import zmq

from roq.errors import ProcessFailed
from roq.runtime import sockets
from roq.runtime.liveness import beat_on_lease, open_board
from roq.runtime.observe import Counters, logger
from roq.runtime.rpc import RpcClient
from roq.runtime.run import run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import monitor as wire
from roq.wire.assignment import ProcessSpec, QueueSettings
from roq.wire.frame import welcome
from roq.wire.limits import FRAME_OVERHEAD_BYTES
from roq.wire.process import ChildSpec

log = logger(__name__)
CONTROL = "inproc://proxy-control"
SUBSCRIBE_ALL = b"\x01"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ForwardedTotals(NamedTuple):
    """Totals since the start: frames and bytes in from publishers, out to subscribers."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0


class Forwarder:
    """ZeroMQ's steerable proxy between the front (XSUB) and the back (XPUB), in a thread of its own. Bind both sides (raises
    PortTaken), then `start`.

    The front subscribes to everything, so a publisher's welcome is one byte and no topic is filtered before us. While a queue
    with overflow "block" waits for a subscriber, the proxy does not answer its control socket; statistics then come late and
    the proxy is stopped through its context.
    """

    def __init__(self, address: str, front_port: int, back_port: int, settings: QueueSettings) -> None:
        # one frame is at most the queue's limit; what is larger ends the sender's connection
        self._front = sockets.exchange_front(settings.max_frame_bytes + FRAME_OVERHEAD_BYTES, settings.overflow)
        self._back = sockets.exchange_back(settings.max_frame_bytes, settings.overflow)
        try:
            self.front_port = sockets.bind(self._front, address, front_port)
            self.back_port = sockets.bind(self._back, address, back_port)
        except BaseException:
            self._front.close(0)
            self._back.close(0)
            raise
        self.control, self._far = sockets.inproc_pair(CONTROL)
        self._thread = threading.Thread(target=self._forward, name="forwarder", daemon=True)
        self._asked = False
        self.traffic = ForwardedTotals()

    def start(self, token: str) -> None:
        """Forward from now on. Publishers are welcomed with the Exchange's token."""
        self._token = token
        self._thread.start()

    def _forward(self) -> None:
        self._front.send(SUBSCRIBE_ALL)
        self._front.send(welcome(self._token))
        try:
            zmq.proxy_steerable(self._front, self._back, None, self._far)
        except zmq.ContextTerminated:
            log.info("forwarding stopped through its context")
        finally:
            self._front.close(0)
            self._back.close(0)
            self._far.close(0)

    @property
    def alive(self) -> bool:
        """Whether the forwarding thread runs."""
        return self._thread.is_alive()

    def refresh(self) -> None:
        """Take in the statistics asked for last time and ask for new ones; never blocks."""
        try:
            while True:
                parts = self.control.recv_multipart(zmq.NOBLOCK)
                if len(parts) == 8:
                    self._asked = False
                    values = [struct.unpack("=Q", part)[0] for part in parts]
                    self.traffic = ForwardedTotals(values[0], values[1], values[6], values[7])
        except zmq.Again:
            pass
        if not self._asked:
            self._asked = True
            self.control.send(b"STATISTICS", zmq.NOBLOCK)

    def stop(self) -> None:
        """End the thread. Frames inside ZeroMQ that subscribers did not take are gone: drain an Exchange first."""
        if self._thread.is_alive():
            try:
                self.control.send(b"TERMINATE", zmq.NOBLOCK)
                self._thread.join(0.2)
            except zmq.ZMQError as error:
                log.info("proxy does not answer commands", extra={"fields": {"reason": str(error)}})
        self.control.close(0)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Forward until `stop`. Raises PortTaken."""
    process = spec.process
    counters = Counters()
    forwarder = Forwarder(spec.address, spec.ports["front"], spec.ports["back"], process.settings)
    monitor = RpcClient(spec.monitor.clients_endpoint(), wire.Reply)

    def configure(changed: ProcessSpec) -> None:
        """The queue has another Monitor: report there from now on."""
        nonlocal monitor
        if changed.monitor is not None and changed.monitor.clients_endpoint() != monitor.endpoint:
            monitor.close()
            monitor = RpcClient(changed.monitor.clients_endpoint(), wire.Reply)
        report()

    control = ShutdownMonitor(process.name, spec.address, spec.ports["control"], stop, counters, configure, process.term)
    board = open_board(spec)
    where = wire.ExchangeAddress(
        process.exchange, spec.address, forwarder.front_port, forwarder.back_port, time.time_ns() & 0xFFFF_FFFF_FFFF
    )

    def on_beat() -> None:
        if not forwarder.alive:
            raise ProcessFailed("the forwarding thread ended by itself")
        forwarder.refresh()
        report()

    def report() -> None:
        load = board.host_load()
        cpu = time.process_time()
        monitor.notify(wire.ExchangeReport(where, spec.host, *forwarder.traffic, cpu, resident_bytes(), *load))

    forwarder.start(where.token)
    report()
    try:
        await beat_on_lease(board, spec, stop, on_beat)
    finally:
        forwarder.stop()
        control.close()
        monitor.close()
        board.close()


def main(spec: ChildSpec) -> int:
    """Entry point of the forked child; its exit code."""
    return run(lambda stop: serve(spec, stop))
