"""Forks of masters that dump their state: in place of `Dump._fork`, and of `os` as far as their parent uses it.

A process cannot be forked here. What its fork would dump is dumped at the fork's moment, and a process of its own on the same
machine hands it over after a while. Like any other it is killed, stands still or loses power; some die alone, of memory, and
some with their master.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import roq.workqueue.master.dump
from roq.tools.simulation.loop import PROCESS, Process, SimulatedLoop
from roq.tools.simulation.machines import Machine
from roq.workqueue.fold import Fold
from roq.workqueue.master.dump import Dump
from roq.workqueue.state import State

DUMP_SECONDS = 0.02, 0.2, 4.0  # about so long
DIRECT_MAX = 0, 0, 1 << 60  # in place of Dump's: how large a state is dumped without a fork
REFUSED_SHARE, KILLED_SHARE, TOGETHER_SHARE = 0.1, 0.15, 0.5  # no memory; killed alone; killed with its master


class Forks:
    """Of all masters of a run. machines: by address."""

    def __init__(self, loop: SimulatedLoop, random: Random, machines: Callable[[], Mapping[str, Machine]]) -> None:
        self._loop, self._random, self._machines = loop, random, machines
        self._running: dict[int, tuple[Machine, Process]] = {}  # by pid
        self._ended: dict[int, int] = {}  # pid -> status, as waitpid tells it
        self._waiting: dict[int, int] = {}  # a pidfd -> pid
        self._numbers = itertools.count(1 << 20)  # of pidfds, which no other descriptor has
        self._files: set[int] = set()  # in memory, open

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of replacements."""

        def fork(dump: Dump, fold: Fold) -> None:
            dump._child, dump._file = self._fork(fold)

        return [(roq.workqueue.master.dump, "os", self._module()), (Dump, "_fork", fork)]

    def _fork(self, fold: Fold) -> tuple[int, int]:
        master = PROCESS.get()
        assert master is not None, "only simulated processes have masters"
        if self._random.random() < REFUSED_SHARE:
            raise OSError(errno.ENOMEM, "no memory for another process")
        data, file, machine = State(fold).dump(), os.memfd_create("roq-dump", os.MFD_CLOEXEC), self._machines()[master.address]
        its, seconds = os.dup(file), self._random.choice(DUMP_SECONDS) * (0.5 + self._random.random())
        self._files |= {file, its}
        done: list[bool] = []

        async def program(stop: asyncio.Event) -> None:
            await asyncio.sleep(seconds)
            os.write(its, data)
            done.append(True)

        child = machine.run("dump", program)
        self._running[child.pid] = machine, child
        child.on_end.append(lambda: self._gone(child.pid, its, 0 if done else signal.SIGKILL))
        master.on_end.append(lambda: self._close(file))
        if self._random.random() < KILLED_SHARE:
            self._loop.call_later(seconds * self._random.random(), self._kill, child.pid)
        if self._random.random() < TOGETHER_SHARE:
            master.on_end.append(lambda: self._kill(child.pid))
        return child.pid, file

    def _gone(self, pid: int, file: int, status: int) -> None:
        del self._running[pid]
        self._ended[pid] = status
        self._close(file)
        for descriptor, awaited in self._waiting.items():
            if awaited == pid:
                self._loop.readable(descriptor)

    def _module(self) -> SimpleNamespace:
        return SimpleNamespace(
            pidfd_open=self._pidfd_open,
            waitpid=lambda pid, options: (pid, self._ended.pop(pid, 0)),
            waitstatus_to_exitcode=os.waitstatus_to_exitcode,
            kill=self._kill,
            close=self._close,
        )

    def _pidfd_open(self, pid: int) -> int:
        descriptor = next(self._numbers)
        self._waiting[descriptor] = pid
        if pid in self._ended:
            self._loop.call_soon(self._loop.readable, descriptor)
        return descriptor

    def _kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        if pid in self._running:
            machine, child = self._running[pid]
            machine.kill(child)

    def _close(self, descriptor: int) -> None:
        """Also what is closed already."""
        self._waiting.pop(descriptor, None)
        if descriptor in self._files:
            self._files.discard(descriptor)
            os.close(descriptor)
