"""Child processes that do what every child does and nothing else; the queue's name says how they misbehave.

For the HCM's tests: `--process-module trivial_programs`. Queues named `crash…` end at once, `stubborn…` can't be asked to
stop. The counters a Ping tells hold what the newest specification says.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from roq.errors import ProcessFailed
from roq.runtime.liveness import announce_ready, beat, open_board
from roq.runtime.observe import Counters
from roq.runtime.run import run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire.assignment import MonitorRole, ProcessKind, ProcessSpec
from roq.wire.process import ChildSpec

log = logging.getLogger(__name__)


def main(spec: ChildSpec) -> int:
    if spec.process.queue.startswith("defect"):
        raise ValueError("a defect of this program")
    return run(lambda stop: serve(spec, stop))


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    if spec.process.queue.startswith("crash"):
        raise ProcessFailed("this program always gives up")
    counters = Counters()

    def configure(process: ProcessSpec) -> None:
        assert process.monitor is not None
        counters["monitor_clients"], counters["term"] = process.monitor.clients, process.term
        counters["active"] = int(process.role is MonitorRole.ACTIVE)
        counters["monitors"] = len(process.monitors)
        if process.policy is not None:
            counters["max_exchanges"] = process.policy.bounds.max_exchanges

    configure(spec.process)
    heard = stop
    if spec.process.queue.startswith("stubborn"):
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
    monitor = ShutdownMonitor(spec.process.name, spec.address, spec.ports["control"], heard, counters, configure)
    beating = asyncio.create_task(beat(open_board(spec), spec.slot))
    announce_ready(spec)
    await stop.wait()
    beating.cancel()
    monitor.close()


PROGRAMS = dict.fromkeys(ProcessKind, main)
