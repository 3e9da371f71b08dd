"""What a program finds around it, and what it finds in a simulation instead: every replacement there is, in one table."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import hcm.host
import hcm.machine
import hcm.process
import roq.coordination.session
import roq.log.store.blobs
import roq.log.store.identity
import roq.log.store.process
import roq.log.store.server
import roq.pubsub.exchange.forwarder
import roq.pubsub.exchange.process
import roq.runtime.blocking_connection
import roq.runtime.connections
import roq.runtime.files
import roq.runtime.links
import roq.runtime.liveness
import roq.shuffle.node.attempt
import roq.shuffle.node.committer
import roq.shuffle.node.datafile
import roq.shuffle.node.memory
import roq.shuffle.node.server
import roq.shuffle.node.storage
import roq.workqueue.lease_keeper
import roq.workqueue.master_link
from roq.tools.simulation import machines
from roq.tools.simulation.blocking import SELECT, LoopBeside, SimulatedStopEvent, Sockets
from roq.tools.simulation.clocks import Wall
from roq.tools.simulation.coordination import SimulatedCoordinator, TreeLink
from roq.tools.simulation.disks import Files
from roq.tools.simulation.dumps import Forks
from roq.tools.simulation.loop import PROCESS, SimulatedLoop
from roq.tools.simulation.network import Network, unread
from roq.tools.simulation.threads import Pool, SimpleQueue, SimulatedThreads
from roq.wire.assignment import ProcessKind

JOURNAL_BYTES = 256 * 1024  # of a store's journal file: few enough to come to its end
QUEUE_BYTES = 32 * 1024  # of one subscriber in an Exchange
DATA_BYTES = 8 * 1024  # of a follower's file


THREADED = (
    roq.runtime.blocking_connection,
    roq.log.store.blobs,
    roq.shuffle.node.datafile,
    roq.shuffle.node.attempt,
    roq.shuffle.node.server,
    roq.log.store.process,
    roq.log.store.server,
    roq.workqueue.lease_keeper,
    roq.workqueue.master_link,
)


class _HostStats:
    def sample(self) -> tuple[float, float]:
        return 0.1, 0.3


class _Random(Random):
    """Without a seed: one drawn from the run's."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(random.getrandbits(64) if seed is None else seed)


def _table(
    loop: SimulatedLoop, network: Network, coordinator: SimulatedCoordinator, wall: Wall, seed: Random
) -> list[tuple[Any, str, Any]]:
    now = loop.time

    def wall_time() -> float:
        process = PROCESS.get()
        return wall.seconds(process.address if process is not None else coordinator.address)

    def clock(which: int) -> float:
        return wall_time() if which == time.CLOCK_REALTIME else now()

    def pid() -> int:
        process = PROCESS.get()
        return process.pid if process is not None else real_pid

    real_pid = os.getpid()

    def link(address: Any, session_seconds: float, connect_seconds: float, on_state: Callable[..., None]) -> TreeLink:
        return TreeLink(coordinator, address, session_seconds, on_state)

    return [
        (time, "monotonic", now),
        (time, "monotonic_ns", lambda: int(now() * 1e9)),
        (time, "time", wall_time),
        (time, "time_ns", lambda: int(wall_time() * 1e9)),
        (time, "clock_gettime", clock),
        (time, "process_time", lambda: 0.0),
        (os, "urandom", seed.randbytes),
        (os, "getpid", pid),
        (random, "Random", _Random),
        (random, "SystemRandom", lambda: seed),
        (secrets, "randbits", seed.getrandbits),
        (secrets, "token_hex", lambda count: seed.randbytes(count).hex()),
        (roq.coordination.session, "open_link", link),
        (roq.runtime.connections, "listen", network.listen),
        (roq.runtime.links, "unread", unread),
        (roq.runtime.liveness, "send_datagram", machines.send_datagram),
        (roq.pubsub.exchange.forwarder, "queue_bytes", lambda settings: QUEUE_BYTES),
        (roq.pubsub.exchange.process, "resident_bytes", lambda: 1 << 25),
        (hcm.host, "Children", machines.SimulatedChildren),
        (hcm.host, "start_time", machines.start_time),
        (hcm.machine, "is_free", network.is_free),
        (hcm.process, "HostStats", _HostStats),
        (hcm.process, "disk_free_bytes", lambda path: 1 << 40),
        (hcm.process.HostManager, "_say_ready", lambda manager: None),
        (hcm.process, "_raise_descriptor_limit", lambda: None),
        *_below_work_queues(loop, network, seed, wall_time),
    ]


def _below_work_queues(
    loop: SimulatedLoop, network: Network, seed: Random, wall_time: Callable[[], float]
) -> list[tuple[Any, str, Any]]:
    """Threads, disks, and what blocking clients stand on."""
    files = Files(lambda: machines.SimulatedChildren.machines, wall_time)
    threading, system = SimulatedThreads(loop).module(), files.module()
    sizes = {**(roq.log.store.server.StoreServer.__init__.__kwdefaults__ or {}), "file_bytes": JOURNAL_BYTES}
    return [
        *((module, "threading", threading) for module in THREADED),
        (roq.log.store.server, "SimpleQueue", SimpleQueue),
        (roq.log.store.server, "Disk", files.disk),
        (roq.log.store.server.StoreServer.__init__, "__kwdefaults__", sizes),
        *((module, "os", system) for module in (roq.runtime.files, roq.log.store.blobs)),
        (roq.log.store.blobs, "opened", files.read),
        *_below_followers(loop),
        (roq.log.store.identity, "BOOT_ID", files),
        *Forks(loop, seed, lambda: machines.SimulatedChildren.machines).replacements(),
        (hcm.machine, "ROLES", {**hcm.machine.ROLES, ProcessKind.STORE: ("clients", "control")}),  # no part in shuffles
        (roq.runtime.blocking_connection, "socket", Sockets(network).module()),
        (roq.runtime.blocking_connection, "select", SELECT),
        (roq.runtime.blocking_connection, "StopEvent", SimulatedStopEvent),
        (roq.workqueue.master_link, "StopEvent", SimulatedStopEvent),
        (roq.workqueue.master_link, "LoopThread", lambda name: LoopBeside(loop, name)),
    ]


def _below_followers(loop: SimulatedLoop) -> list[tuple[Any, str, Any]]:
    """Threads of followers. What is below writers and readers: shuffle_cluster.py."""
    below = roq.shuffle.node
    return [
        *((module, "ThreadPoolExecutor", Pool) for module in (below.memory, below.committer, below.storage)),
        (below.committer, "FILE_BYTES", DATA_BYTES),
        (below.server, "raise_limit", lambda: None),
        (below.server, "LoopThread", lambda name: LoopBeside(loop, name)),
    ]


@contextlib.contextmanager
def replaced(
    loop: SimulatedLoop,
    network: Network,
    coordinator: SimulatedCoordinator,
    wall: Wall,
    seed: Random,
    more: Sequence[tuple[Any, str, Any]] = (),
) -> Iterator[None]:
    """While a simulation runs, in this process and thread. more: (owner, name, what stands in its place)."""
    table = [*_table(loop, network, coordinator, wall, seed), *more]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in table]
    state = random.getstate()
    random.seed(seed.getrandbits(64))
    collecting = gc.isenabled()
    gc.disable()  # when what a killed process left is taken apart must not depend on the heap
    for owner, name, value in table:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        random.setstate(state)
        if collecting:
            gc.enable()
