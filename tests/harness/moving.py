"""Programs that move a group's messages by transactions and are killed at every step; what they said, what is read, and what is
wrong with it: see `judge`.

Not covered: what a program does (mover.py).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

from tests.harness import mover
from tests.harness.mover import AGAIN, MoverStep

ROOT = Path(__file__).parents[2]
PROGRAMS = 2  # at a time
LIVES_MAX = 200
TURNS = range(4, 64, 2)  # of a life, before it dies: a turn with messages, if there are some
TOLD_MAX = 5  # of what is wrong
DEATHS = tuple(str(step) for step in MoverStep if step is not MoverStep.NEVER)


class HeardLease(NamedTuple):
    """began: its request, monotonic seconds."""

    began: float
    key: str


@dataclass
class MovedLedger:
    """What programs said. asked: the keys of each transaction that was to be committed; committed: when that was answered."""

    asked: dict[str, list[str]] = field(default_factory=dict)
    committed: dict[str, float] = field(default_factory=dict)
    undone: set[str] = field(default_factory=set)
    leases: list[HeardLease] = field(default_factory=list)

    def heard(self, line: str) -> None:
        """One line of a program (mover.py)."""
        match line.split():
            case ["leased", began, *keys]:
                self.leases += [HeardLease(float(began), key) for key in keys]
            case ["asked", name, *keys]:
                self.asked[name] = keys
            case ["committed", when, name]:
                self.committed[name] = float(when)
            case ["undone", name]:
                self.undone.add(name)
            case _:
                raise AssertionError(f"a program said {line!r}")

    def is_alone(self, name: str) -> bool:
        """Whether the transaction acked nothing."""
        return self.asked[name] == [name]


def judge(ledger: MovedLedger, found: Mapping[str, Sequence[str]], done: set[str]) -> list[str]:
    """What is wrong, in words; empty if nothing is. found: payloads by queue, as they were read; done: keys of messages that
    the group has done.

    Of every transaction all is in every queue, once and in its order, or nothing in any; what was committed is there, what was
    undone is not; each of the group's messages was moved once; what one program has committed comes in that order, with acks
    and without; and nothing is leased by a request that began after its commit was answered.
    """
    shown = {queue: _by_transaction(payloads) for queue, payloads in found.items()}
    wrong = [f"{queue}: {one}" for queue, names in shown.items() for one in _judge_queue(ledger, names, done)]
    everywhere = set.intersection(*map(set, shown.values()))
    if half := sorted(set().union(*shown.values()) - everywhere):
        wrong.append(f"{len(half)} transactions show in some queues only: {half[:TOLD_MAX]}")
    ends = {key: when for name, when in ledger.committed.items() for key in ledger.asked[name]}
    if returned := sorted({lease.key for lease in ledger.leases if lease.began > ends.get(lease.key, lease.began)}):
        wrong.append(f"{len(returned)} messages came again after their ack was committed: {returned[:TOLD_MAX]}")
    return wrong


def _by_transaction(payloads: Iterable[str]) -> dict[str, list[str]]:
    names = defaultdict[str, list[str]](list)
    for name, key in map(str.split, payloads):
        names[name].append(key)
    return names


def _judge_queue(ledger: MovedLedger, names: Mapping[str, list[str]], done: set[str]) -> list[str]:
    may_show = ledger.asked.keys() - ledger.undone
    moved = Counter(key for name, keys in names.items() for key in keys if key != name)
    doubtful = {
        "transactions were committed and don't show": ledger.committed.keys() - names.keys(),
        "transactions show that nobody committed": names.keys() - may_show,
        "transactions are not as they were": {one for one in names.keys() & may_show if names[one] != ledger.asked[one]},
        "messages were moved twice": {key for key, times in moved.items() if times > 1},
        "messages are done and were not moved": done - moved.keys(),
        "messages were moved and are not done": moved.keys() - done,
    }
    wrong = [f"{len(some)} {what}: {sorted(some)[:TOLD_MAX]}" for what, some in doubtful.items() if some]
    for alone in (True, False):
        mine = [name for name in names if name in ledger.committed and ledger.is_alone(name) is alone]
        if late := [after for before, after in _of_each_life(mine) if before > after]:
            wrong.append(f"{len(late)} transactions come behind later ones of their program: {late[:TOLD_MAX]}")
    return wrong


def _of_each_life(names: Iterable[str]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Each two that follow each other, as (life, turn)."""
    lives = defaultdict[str, list[tuple[str, int]]](list)
    for name in names:
        life, _, turn = name.rpartition(".")
        lives[life].append((life, int(turn)))
    return [pair for turns in lives.values() for pair in itertools.pairwise(turns)]


class MovingPrograms:
    """As many as PROGRAMS at a time; each that dies is followed by another. deaths: of programs, by step."""

    def __init__(self, zookeeper: str, group: str, queues: Sequence[str]) -> None:
        self._zookeeper, self._group, self._queues = zookeeper, group, queues
        self.ledger = MovedLedger()
        self.deaths = Counter[str]()  # of programs, by MoverStep
        self._steps = itertools.cycle(DEATHS)
        self._numbers = itertools.count()
        self._calm = self._stop = False
        self._heard = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __str__(self) -> str:
        ledger = self.ledger
        unknown = len(ledger.asked.keys() - ledger.committed.keys() - ledger.undone)
        figures = f"{len(ledger.committed)} committed, {len(ledger.undone)} undone, {unknown} not known"
        return f"transactions: {figures}; deaths: {dict(sorted(self.deaths.items()))}"

    def start(self) -> None:
        """Beside the test."""
        self._tasks = [asyncio.get_running_loop().create_task(self._lives()) for _ in range(PROGRAMS)]

    async def _lives(self) -> None:
        while not self._stop:
            number = next(self._numbers)
            assert number < LIVES_MAX, str(self)
            step = str(MoverStep.NEVER) if self._calm else next(self._steps)
            code = await self._life(number, step)
            if code == -SIGKILL and step != MoverStep.NEVER:
                self.deaths[step] += 1
                self._heard.set()
            else:
                assert code == AGAIN or (code == 0 and self._stop), f"program {number} ended with {code}"

    async def _life(self, number: int, step: str) -> int:
        words = [self._zookeeper, self._group, f"life-{number}", step, str(random.choice(TURNS)), *self._queues]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", mover.__name__, *words, stdin=pipe, stdout=pipe, cwd=ROOT
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._running[number] = process
        if self._stop:  # meanwhile
            process.stdin.close()
        try:
            async for line in process.stdout:
                self.ledger.heard(line.decode())
                self._heard.set()
            return await process.wait()
        finally:
            del self._running[number]
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def until(self, seconds: float, *, deaths: int = 0, commits: int = 0) -> None:
        """Until programs have died so often at each step from now on, and so many of their transactions of both kinds, with
        acks and without, were committed."""
        died, before = Counter(self.deaths), len(self.ledger.committed)
        async with asyncio.timeout(seconds):
            while True:
                for task in self._tasks:
                    if task.done():
                        task.result()
                since = [self.ledger.is_alone(name) for name in list(self.ledger.committed)[before:]]
                if min(since.count(True), since.count(False)) >= commits and all(
                    self.deaths[step] - died[step] >= deaths for step in DEATHS
                ):
                    return
                self._heard.clear()
                await self._heard.wait()

    def calm(self) -> None:
        """Those that start now live on."""
        self._calm = True

    async def finish(self, seconds: float) -> None:
        """Let each end its turn. Those that are to die before may do so."""
        self._stop = True
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()
        async with asyncio.timeout(seconds):
            await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Kill what runs."""
        self._stop = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
