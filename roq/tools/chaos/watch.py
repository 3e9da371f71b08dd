"""The resource watch: reads every few seconds what each process of a cluster under test takes, this one included.

Linux only (/proc). A process that can't be read (it ends just now) has no reading; a ZooKeeper that is frozen tells no count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from roq.errors import RoqError
from roq.testing import TestedCluster
from roq.testing.cluster import CLIENT, HostProcess
from roq.tools.chaos.resources import CLIENT_FLOOR, MEMORY_FLOOR, ResourceSample, Series

EVERY_SECONDS = 5.0
ZOOKEEPER_SECONDS = 2.0
ZOOKEEPER_COUNTS = b"Node count:"


class ResourceWatch:
    """`await watch.run(started)` until it is cancelled; then `series` and `znodes` tell it all."""

    def __init__(self, cluster: TestedCluster, every_seconds: float = EVERY_SECONDS) -> None:
        self._cluster, self._every = cluster, every_seconds
        self._lives: dict[tuple[int, str], Series] = {}
        self.znodes: list[tuple[float, int]] = []

    @property
    def series(self) -> list[Series]:
        """All lives so far, in the order they were first seen."""
        return list(self._lives.values())

    async def run(self, started: float) -> None:
        """started: monotonic seconds."""
        while True:
            begun = time.monotonic()
            machines = (*self._cluster.gcms, *self._cluster.hosts)
            await asyncio.gather(self._count_znodes(started), *(self._look(name, started) for name in machines))
            self._read(CLIENT, HostProcess(CLIENT, os.getpid()), started, CLIENT_FLOOR)
            await asyncio.sleep(begun + self._every - time.monotonic())

    async def _look(self, machine: str, started: float) -> None:
        try:
            processes = await self._cluster.system_processes(machine)
        except RoqError:
            return  # down
        for process in processes:
            self._read(machine, process, started)

    def _read(self, machine: str, process: HostProcess, started: float, floor: int = MEMORY_FLOOR) -> None:
        begun, reading = read(process.pid)
        if reading is None:
            return
        series = self._lives.setdefault((process.pid, begun), Series(machine, process.name, process.pid, floor))
        if "/" in process.name:  # as its HCM names it; the HCM may have been mute before
            series.name = process.name
        series.add(round(time.monotonic() - started, 1), reading)

    async def _count_znodes(self, started: float) -> None:
        count = await znodes(self._cluster.zookeeper)
        if count is not None:
            self.znodes.append((round(time.monotonic() - started, 1), count))


def read(pid: int) -> tuple[str, ResourceSample | None]:
    """When a process began (in the kernel's ticks), and what it takes; None if it is gone."""
    process = Path(f"/proc/{pid}")
    try:
        stat = (process / "stat").read_text().rpartition(")")[2].split()
        rollup = (process / "smaps_rollup").read_text()
        descriptors = len(os.listdir(process / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return "", None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in rollup.splitlines()[1:]}
    if not sizes:  # a zombie
        return "", None
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return stat[19], ResourceSample(sizes["Anonymous"], private, descriptors, int(stat[17]))


async def znodes(zookeeper: str) -> int | None:
    """How many znodes the first server of this address that answers has; None if none does."""
    for server in zookeeper.partition("/")[0].split(","):
        host, _, port = server.rpartition(":")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ZOOKEEPER_SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(b"srvr")
                    answer = await reader.read()
                finally:
                    writer.close()
            for line in answer.splitlines():
                if line.startswith(ZOOKEEPER_COUNTS):
                    return int(line[len(ZOOKEEPER_COUNTS) :])
    return None
