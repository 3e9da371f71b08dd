"""The worker processes of the load: started, killed and frozen by the nemesis, and started anew under another name.

All write to one pipe (worker.py says why); what comes out is handed to the load that a worker belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO

import msgspec
from msgspec import structs

from roq.runtime.liveness import start_time
from roq.tools.chaos.worker import WorkerEvent, WorkerEventKind, WorkerPlan

READ_BYTES = 1 << 16
STOP_SECONDS = 20.0  # a worker that holds tasks gives them back; longer than it has patience
Listener = Callable[[WorkerEvent], None]
_EVENT = msgspec.json.Decoder(WorkerEvent)


class WorkerProcesses:
    """`async with WorkerProcesses() as pool: pool.add(plan, listener)` for each worker. The nemesis's Workers."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        self._rest = b""
        self._listeners: dict[str, Listener] = {}  # by worker
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._frozen: dict[int, int | None] = {}  # pid -> when it began, in the kernel's ticks
        self._told: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  what they write to people; open until `stop`
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.killed = 0
        self.failures: list[str] = []

    async def __aenter__(self) -> WorkerProcesses:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def add(self, plan: WorkerPlan, listener: Listener) -> None:
        """Have such a worker from now on. Its processes are named `worker.1`, `worker.2`, …; each draws its own numbers."""
        self._keepers.append(asyncio.create_task(self._keep(plan, listener)))

    # --- the nemesis's --------------------------------------------------------------------------------------------------

    def names(self) -> Sequence[str]:
        """Those that run."""
        return list(self._running)

    def kill(self, name: str) -> None:
        """SIGKILL; another one is started in its place. Raises ProcessLookupError if it has just ended."""
        self._running[name].kill()
        self.killed += 1

    def pause(self, name: str) -> int:
        """SIGSTOP; its pid. Raises ProcessLookupError if it has just ended."""
        process = self._running[name]
        began = start_time(process.pid)
        process.send_signal(signal.SIGSTOP)
        self._frozen[process.pid] = began
        return process.pid

    def resume(self, pid: int) -> None:
        """SIGCONT, if it still lives."""
        began = self._frozen.pop(pid, None)
        if began is not None and began == start_time(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- processes ------------------------------------------------------------------------------------------------------

    async def _keep(self, plan: WorkerPlan, listener: Listener) -> None:
        life = 0
        while not self._stopping:
            life += 1
            mine = structs.replace(plan, worker=f"{plan.worker}.{life}", seed=plan.seed + life)
            self._listeners[mine.worker] = listener
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "roq.tools.chaos.worker", msgspec.json.encode(mine).decode(), str(self._writing)),
                pass_fds=(self._writing,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._told,
                stderr=self._told,
            )
            self._running[mine.worker] = process
            if self._stopping:
                _signal(process, signal.SIGTERM)
            code = await process.wait()
            del self._running[mine.worker]
            await self._say(mine.worker)
            if code != -signal.SIGKILL and not self._stopping:  # another one would fail as well
                if code:  # else it said why
                    self.failures.append(f"worker {mine.worker} ended with {code}: {self._last_words()}")
                return

    async def _say(self, worker: str) -> None:
        """Behind everything that it wrote itself. In a thread, for a full pipe waits until we read."""
        line = msgspec.json.encode(WorkerEvent(WorkerEventKind.ENDED, worker, time.monotonic())) + b"\n"
        await asyncio.to_thread(os.write, self._writing, line)

    def _last_words(self) -> str:
        self._told.seek(max(0, self._told.seek(0, os.SEEK_END) - READ_BYTES))
        return (self._told.read().decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]

    def _read(self) -> bool:
        """Whether there was anything."""
        try:
            lines = (self._rest + os.read(self._reading, READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return False
        self._rest = lines.pop()
        for line in lines:
            event = _EVENT.decode(line)
            listener = self._listeners[event.worker]
            if event.kind is WorkerEventKind.ENDED:
                del self._listeners[event.worker]
            elif event.kind is WorkerEventKind.FAILED:
                self.failures.append(f"worker {event.worker}: {event.what}")
            listener(event)
        return True

    async def stop(self) -> None:
        """End them, each in its time; what they had is settled or given back. Everything that they wrote is handed out."""
        self._stopping = True
        for pid in list(self._frozen):
            self.resume(pid)
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        done, late = await asyncio.wait(self._keepers, timeout=STOP_SECONDS) if self._keepers else (set(), set())
        if late:
            self.failures.append(f"{len(self._running)} workers did not end within {STOP_SECONDS:g} s")
            for process in self._running.values():
                _signal(process, signal.SIGKILL)
            await asyncio.wait(late)
        while self._read():
            pass
        for task in done:
            task.result()

    async def close(self) -> None:
        """`stop`, and let go."""
        await self.stop()
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        os.close(self._writing)
        self._told.close()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Unless it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
