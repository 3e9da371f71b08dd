"""Simulated hosts: `python -m benchmarks.at_scale.hosts --zookeeper ZK --first 1 --count 500`.

To ZooKeeper and the GCM each is what a real HCM is: a session through kazoo, a Curator registration, a watch on its assignment,
and a report of the whole host after each one, held back as an HCM does while processes start. Not there: the processes; their
ports are numbers at which nobody listens. A line of JSON on standard output says that all are registered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time

from hcm.assignment import admit
from hcm.machine import ROLES
from roq.coordination import paths
from roq.coordination.link import ANY_VERSION, Node, NodeExists, NoNode
from roq.coordination.registration import SERVICE_NAME, Registration, ServiceInstance
from roq.coordination.session import Session, SessionState
from roq.errors import ZooKeeperUnavailable
from roq.ids import new_token
from roq.wire.assignment import (
    Assignment,
    HostReport,
    ProcessSpec,
    ProcessState,
    RunningProcess,
    from_json,
    to_json,
)
from roq.wire.hcm import HostPayload

START_SECONDS = 0.03  # of a process; a real one is forked in about so long
CONNECTS_AT_ONCE = 32
CONNECT_SECONDS = 30.0
FIRST_PORT = 7000


class SimulatedHost:
    """One host. start(), then until cancelled."""

    def __init__(self, zookeeper: str, name: str, exchanges_max: int, session_seconds: float) -> None:
        self.name = name
        self._zookeeper, self._exchanges_max, self._session_seconds = zookeeper, exchanges_max, session_seconds
        self._incarnation = new_token()
        self._processes: dict[str, RunningProcess] = {}
        self._ports = FIRST_PORT
        self._epoch = self._revision = 0
        self._due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when it is registered. Raises ZooKeeperUnavailable, HostConflict."""
        session = await Session.connect(self._zookeeper, self._session_seconds, CONNECT_SECONDS)
        session.on_state(self._connected)
        payload = HostPayload(self._incarnation, self._exchanges_max)
        when = time.time_ns() // 1_000_000
        instance = ServiceInstance(SERVICE_NAME, self.name, "127.0.0.1", FIRST_PORT - 1, payload=payload, registered=when)
        registered = Registration(session, paths.host(self.name), instance, on_registered=lambda _: self._due.set())
        await registered.start()
        session.watch_data(paths.assignment(self.name), self._assigned)
        self._tasks.append(asyncio.get_running_loop().create_task(self._write_reports(session)))

    def _connected(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._due.set()

    def _assigned(self, node: Node | None) -> None:
        if node is None:
            return
        assignment = from_json(node.data, Assignment)
        if (assignment.epoch, assignment.revision) == (self._epoch, self._revision):
            return
        admit(assignment, self.name, self._epoch)
        self._epoch, self._revision = assignment.epoch, assignment.revision
        known = self._processes
        self._processes = {spec.name: known.get(spec.name) or self._started(spec) for spec in assignment.processes}
        self._due.set()

    def _started(self, spec: ProcessSpec) -> RunningProcess:
        roles = ROLES[spec.kind]
        ports = {role: self._ports + number for number, role in enumerate(roles)}
        self._ports += len(roles)
        return RunningProcess(spec.name, spec.kind, spec.queue, spec.exchange, ProcessState.RUNNING, os.getpid(), ports)

    async def _write_reports(self, session: Session) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(START_SECONDS)
            self._due.clear()
            here = self.name, "127.0.0.1", self._incarnation, self._epoch, self._revision
            data = to_json(HostReport(*here, tuple(self._processes.values()), self._session_seconds))
            try:
                await self._write(session, data)
            except ZooKeeperUnavailable:
                await session.wait_connected()
                self._due.set()

    async def _write(self, session: Session, data: bytes) -> None:
        path = paths.running(self.name)
        try:
            await session.set(path, data, ANY_VERSION)
        except NoNode:
            await session.ensure_path(paths.host_state(self.name))
            with contextlib.suppress(NodeExists):
                await session.create(path, data)


async def _run(arguments: argparse.Namespace) -> None:
    gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

    async def begin(host: SimulatedHost) -> None:
        async with gate:
            await host.start()

    numbers = range(arguments.first, arguments.first + arguments.count)
    hosts = [
        SimulatedHost(arguments.zookeeper, f"host-{number}", arguments.exchanges_max, arguments.session_seconds)
        for number in numbers
    ]
    await asyncio.gather(*map(begin, hosts))
    sys.stdout.write(json.dumps({"ready": True, "hosts": len(hosts), "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


def main() -> None:
    """Runs until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.at_scale.hosts", description=__doc__)
    parser.add_argument("--zookeeper", required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first host")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--exchanges-max", type=int, required=True)
    parser.add_argument("--session-seconds", type=float, required=True)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
