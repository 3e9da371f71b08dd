"""Store process: one per host. Keeps segments of replicated logs and blobs in `spec.data_dir`.

It serves at `spec.ports["clients"]` (roq.wire.store) and `spec.ports["control"]`; what shares its process (the shuffle node)
has ports of its own. ZooKeeper is needed only to make sure that the disk is this host's, and not an old image of it
(identity.py): an empty disk waits for it; one with a cookie serves at once, takes entries as soon as ZooKeeper answers or if it
did in this boot of the machine, and is sure of nothing's absence before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from roq.coordination.session import Session
from roq.errors import InvalidConfiguration, RoqError, StorageFailed, ZooKeeperUnavailable
from roq.log.store.identity import Cookie, prove, proved_in_this_boot, read_cookie, register
from roq.log.store.server import StoreServer
from roq.runtime.liveness import BEAT_SECONDS, HeartbeatBoard, announce_ready, beat, open_board
from roq.runtime.run import Tasks, run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire.process import ChildSpec

log = logging.getLogger(__name__)
ZOOKEEPER_RETRY_SECONDS = 1.0


class Neighbour(Protocol):
    """What shares the process, in threads of its own, from when it is made."""

    def close(self) -> None:
        """Blocking: stop it."""


BesideStore = Callable[[ChildSpec, Callable[[RoqError], object]], Neighbour | None]  # failed(error): it can't serve


async def accept_disk(spec: ChildSpec, directory: Path) -> Cookie:
    """Wait for ZooKeeper and register an empty disk. Raises InvalidConfiguration if the host has another one."""
    while True:
        try:
            session = await Session.connect(spec.zookeeper)
            try:
                return (await register(session, directory, spec.host, None))[0]
            finally:
                await session.close()
        except ZooKeeperUnavailable:
            await asyncio.sleep(ZOOKEEPER_RETRY_SECONDS)


def _beat_for(server: StoreServer, board: HeartbeatBoard, slot: int, ended: threading.Event) -> None:
    """A thread. A disk that hangs in the middle of a sync must not look like a process that hangs."""
    while not ended.wait(BEAT_SECONDS):
        if server.syncing:
            board.beat(slot)


async def serve(spec: ChildSpec, stop: asyncio.Event, beside: BesideStore) -> None:
    """Serve until `stop`. Raises PortTaken, InvalidConfiguration, StorageFailed."""
    directory = Path(spec.data_dir)
    failure: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failure.append(error)
        stop.set()

    tasks = Tasks(fail)
    board = open_board(spec)
    tasks.start(beat(board, spec.slot), "heartbeat")
    try:
        cookie = read_cookie(directory, spec.host)
        fresh = cookie is None
        if cookie is None:
            cookie = await accept_disk(spec, directory)
    except OSError as error:
        raise StorageFailed(f"the cookie of {directory}, which names its disk, can't be read or written: {error}") from error
    server = StoreServer(directory, spec.host, spec.address, spec.ports["clients"], fail, disk_name=cookie.uuid)
    if not fresh:
        server.storage.doubt(takes_entries=proved_in_this_boot(directory))  # before the first request is read
    tasks.start(prove(spec.zookeeper, directory, cookie, server.storage, server.kick), "disk proof")
    ended = threading.Event()
    threading.Thread(target=_beat_for, args=(server, board, spec.slot, ended), name="heartbeat", daemon=True).start()
    control = ShutdownMonitor(spec.process.name, spec.address, spec.ports["control"], stop, server.counters)
    loop = asyncio.get_running_loop()
    neighbour = beside(spec, lambda error: loop.call_soon_threadsafe(fail, error))
    announce_ready(spec)
    try:
        await stop.wait()
    finally:
        ended.set()
        control.close()
        if neighbour is not None:
            await asyncio.to_thread(neighbour.close)
        await server.close()
        await tasks.stop()
        board.close()
    if failure:
        raise failure[0] if isinstance(failure[0], RoqError) else InvalidConfiguration(str(failure[0]))


def main(spec: ChildSpec, beside: BesideStore) -> int:
    """Entry point of the forked child; its exit code."""
    Path(spec.data_dir).mkdir(parents=True, exist_ok=True)
    return run(lambda stop: serve(spec, stop, beside))
