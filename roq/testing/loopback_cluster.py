"""LoopbackCluster: the container-less twin of DockerCluster, on loopback addresses: kills and pauses, no network faults.

It lives in a thread with an event loop of its own, so that tests of any loop, and fixtures of any scope, can use it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from roq.errors import CallError, ProcessFailed
from roq.testing.cluster import CLIENT, GCM, HCM, HostProcess, NotPossible, TestedCluster
from roq.testing.freezing import freeze
from roq.tools.local import leftovers
from roq.tools.local.cluster import HCM_PORT, JAVA, LocalCluster

T = TypeVar("T")
PROGRAMS = ("roq-gcm", "roq-hcm", "roq-fork-server", "roq-monitor", "roq-exchange", "roq-scaling", "roq-store", "roq-master")
DAEMONS, CHILDREN = PROGRAMS[:3], PROGRAMS[3:]


class LoopbackCluster(TestedCluster):
    """`async with LoopbackCluster(gcms=2, hcms=2) as cluster`. logs: directory for logs and state; else a temporary one.

    zookeeper: None: on RoQ's coordinator; "java": on a real ZooKeeper of its own (`pip install "roq-messaging[local]"`). Either
    is the machine "zookeeper-1".
    """

    def __init__(
        self,
        *,
        zookeepers: int = 1,
        zookeeper: str | None = None,
        gcms: int = 2,
        hcms: int = 2,
        session_seconds: float = 4.0,
        exchanges_max: int = 8,
        logs: Path | None = None,
        start_seconds: float = 30.0,
    ) -> None:
        if zookeepers != 1:
            raise NotPossible("a LoopbackCluster has one ZooKeeper")
        if zookeeper not in (None, JAVA):
            raise NotPossible(f'a LoopbackCluster starts its own ZooKeeper: zookeeper is None or "{JAVA}"')
        self._directory, self._temporary = logs, logs is None
        self._options: dict[str, Any] = {"gcms": gcms, "hosts": hcms, "zookeeper": zookeeper}
        self._options["session_seconds"] = session_seconds
        self._options |= {"exchanges_max": exchanges_max, "start_seconds": start_seconds}
        self._local: LocalCluster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._paused: dict[str, list[int]] = {}

    @property
    def zookeeper(self) -> str:
        """Address and chroot."""
        return self._cluster.zookeeper

    def address(self, name: str) -> str:
        """Loopback address of a GCM or host."""
        self._check_names(name)
        daemon = (self._cluster.gcms | self._cluster.hosts).get(name)
        return daemon.option("--address") if daemon is not None else "127.0.0.1"

    def hcm_port(self, host: str) -> int:
        """Port of a host's own interface."""
        return HCM_PORT

    async def open(self) -> None:
        """Raises RoqError with the reason if it does not come up."""
        directory = self._directory or Path(tempfile.mkdtemp(prefix="roq-test-"))
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loopback-cluster", daemon=True)
        self._thread.start()
        self._local = LocalCluster(directory, **self._options)
        try:
            await self._there(self._local.start())
        except BaseException:
            await self.close()
            raise
        self.zookeepers, self.gcms, self.hosts = ("zookeeper-1",), tuple(self._local.gcms), tuple(self._local.hosts)

    async def close(self) -> None:
        """Stop everything. Raises ProcessFailed if something had to be killed that should have stopped by itself."""
        local, loop, thread = self._local, self._loop, self._thread
        if local is None or loop is None or thread is None:
            return
        for name in list(self._paused):
            await self.unpause(name)
        self._local = None
        try:
            left = await asyncio.shield(self._there(local.stop()))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)
            loop.close()
            if self._temporary and self._directory is not None:
                await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        if left:
            raise ProcessFailed(f"had to be killed at the end: {', '.join(process.command for process in left)}")

    @property
    def _cluster(self) -> LocalCluster:
        if self._local is None:
            raise CallError("this cluster is not open")
        return self._local

    def _there(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` in the cluster's own loop."""
        assert self._loop is not None
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # --- faults -------------------------------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """SIGKILL of every process of a GCM or host."""
        self._daemon(name)
        self._paused.pop(name, None)
        if name in self.gcms:
            await self._there(self._cluster.kill_gcm(name))
        else:
            await self._there(self._cluster.lose_host(name))

    async def stop(self, name: str) -> None:
        """Clean stop of a host; a GCM is killed."""
        self._daemon(name)
        await (self._there(self._cluster.stop_host(name)) if name in self.hosts else self.kill(name))

    async def start(self, name: str) -> None:
        """Start a GCM or host again at its address."""
        self._daemon(name)
        await self._there(self._cluster.start_gcm(name) if name in self.gcms else self._cluster.start_hcm(name))

    async def pause(self, name: str) -> None:
        """SIGSTOP of every process of a machine, ZooKeeper included."""
        pids = [self._cluster.zookeeper_pid] if name in self.zookeepers else [found.pid for found in self._owned(name)]
        self._paused[name] = pids
        await asyncio.to_thread(freeze, *pids)

    async def unpause(self, name: str) -> None:
        """SIGCONT."""
        for pid in self._paused.pop(name, []):
            if leftovers.alive(pid):
                os.kill(pid, signal.SIGCONT)

    async def kill_process(self, name: str, process: str) -> int:
        """SIGKILL one process by its name. A daemon is started again, as its unit would."""
        pid = await self._pid(name, process)
        match process:
            case _ if process == HCM:
                await self._there(self._cluster.kill_hcm(name))
                await self.start(name)
            case _ if process == GCM:
                await self._there(self._cluster.kill_gcm(name))
                await self.start(name)
            case _:
                os.kill(pid, signal.SIGKILL)
        return pid

    async def pause_process(self, name: str, process: str) -> int:
        """SIGSTOP."""
        pid = await self._pid(name, process)
        await asyncio.to_thread(freeze, pid)
        return pid

    async def unpause_process(self, name: str, pid: int) -> None:
        """SIGCONT."""
        if any(process.pid == pid for process in self._owned(name)):
            os.kill(pid, signal.SIGCONT)

    async def _pid(self, name: str, process: str) -> int:
        if process in DAEMONS:  # an HCM that hangs need not be asked
            programs = {found.command.partition(" ")[0]: found.pid for found in self._owned(name)}
            if process in programs:
                return programs[process]
        for found in await self.processes(name):
            if found.name == process:
                return found.pid
        raise ProcessFailed(f"no process {process} on {name}")

    async def heal(self) -> None:
        """Nothing to heal: there are no network faults here."""

    async def processes(self, name: str) -> list[HostProcess]:
        """See TestedCluster."""
        found = ((leftover.pid, leftover.command.partition(" ")[0]) for leftover in self._owned(name))
        return await self._named_processes(name, {pid: program for pid, program in found if program in PROGRAMS})

    async def system_processes(self, name: str) -> list[HostProcess]:
        """The same: there is one machine."""
        return await self.processes(name)

    def _owned(self, name: str) -> list[leftovers.Leftover]:
        self._daemon(name)
        return [process for process in self._cluster.processes() if process.owner == name]

    def _daemon(self, name: str) -> None:
        self._check_names(name)
        if name in (CLIENT, *self.zookeepers):
            raise NotPossible(f"a LoopbackCluster can't do that to {name}")
