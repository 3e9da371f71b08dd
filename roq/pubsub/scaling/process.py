"""The ScalingProcess: KPI stream in, decisions performed. Sockets and tasks only; see decide.py and performer.py."""

from __future__ import annotations

import asyncio
import contextlib

import zmq

from roq.coordination.locate import GcmClient
from roq.errors import CallError, FrameError
from roq.pubsub.scaling.decide import Memory, decide
from roq.pubsub.scaling.performer import Performer
from roq.runtime import sockets
from roq.runtime.liveness import BEAT_SECONDS, HostLease, announce_ready, open_board
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.rpc import RpcClient
from roq.runtime.run import Tasks, run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import kpi as wire
from roq.wire import monitor
from roq.wire.assignment import MonitorAddress, ProcessSpec
from roq.wire.child import ChildSpec
from roq.wire.policy import Policy

log = logger(__name__)


class Scaling:
    """One queue's scaling: its policy, its memory, and its two connections to the Monitor."""

    def __init__(self, spec: ChildSpec, counters: Counters) -> None:
        self.queue = spec.process.queue
        self._name = self.queue.encode()
        self._counters = counters
        self._refusals = Refusals(log, counters)
        self._policy = (spec.process.policy or Policy()).check()
        self._memory = Memory()
        self._address = spec.monitor
        self.performer = Performer(self.queue, self._ask(), lambda: GcmClient(spec.zookeeper), counters)
        self._stream = self._listen()

    def _ask(self) -> RpcClient:
        return RpcClient(self._address.clients_endpoint(), monitor.Reply, counters=self._counters)

    def _listen(self) -> sockets.Link:
        socket = sockets.control_socket(zmq.SUB)
        socket.subscribe(self._name)
        socket.connect(self._address.kpis_endpoint())
        return sockets.Link(socket, self._record)

    def _record(self, parts: list[bytes]) -> None:
        """One message of the KPI stream."""
        try:
            if len(parts) != 2:
                raise FrameError(f"{len(parts)} parts instead of 2")
            record = wire.decode(parts[1])
        except FrameError as error:
            self._refusals.note("undecodable_kpi", error)
            return
        if record.queue != self.queue:
            return  # the subscription matches by prefix
        self._counters["records"] += 1
        decisions, self._memory = decide(record, self._policy, self._memory)
        for decision in decisions:
            self.performer.offer(decision)

    def configure(self, spec: ProcessSpec) -> None:
        """Go on with another policy, at once, and with another Monitor if it has moved."""
        if spec.queue != self.queue:
            raise CallError(f"this process scales queue {self.queue!r}, not {spec.queue!r}")
        self._policy = (spec.policy or Policy()).check()
        log.info("policy replaced", extra={"fields": {"queue": self.queue}})
        if spec.monitor is not None and spec.monitor != self._address:
            self._follow(spec.monitor)

    def _follow(self, address: MonitorAddress) -> None:
        """Listen to and ask another Monitor; what is being asked of the former one fails with Closed. One that only has
        another term is the same process."""
        former, self._address = self._address, address
        if (former.clients_endpoint(), former.kpis_endpoint()) == (address.clients_endpoint(), address.kpis_endpoint()):
            return
        self.performer.monitor.close()
        self.performer.monitor = self._ask()
        self._stream.close()
        self._stream = self._listen()

    def close(self) -> None:
        """Close both connections."""
        self._stream.close()
        self.performer.monitor.close()


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Scale until `stop`. Raises PortTaken, InvalidPolicy, ProcessFailed: the host's lease is over."""
    counters = Counters()
    scaling = Scaling(spec, counters)
    tasks = Tasks(lambda error: stop.set())
    try:
        control = ShutdownMonitor(
            spec.process.name, spec.address, spec.ports["control"], stop, counters, configure=scaling.configure
        )
        board = open_board(spec)
        try:
            lease = HostLease(board)
            tasks.start(scaling.performer.run(), "performer")
            board.beat(spec.slot)
            announce_ready(spec)
            while not stop.is_set():
                lease.check()
                board.beat(spec.slot)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await stop.wait()
        finally:
            await tasks.stop()
            control.close()
            board.close()
    finally:
        scaling.close()


def main(spec: ChildSpec) -> int:
    """Run the ScalingProcess of `spec`; its exit code."""
    return run(lambda stop: serve(spec, stop))
