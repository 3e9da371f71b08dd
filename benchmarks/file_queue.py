"""The file queue beside python-task-queue 2.14 on one disk, in turn; and alone with a million tasks.

Ours syncs every put and ack to the disk before it answers, or acks within LATE_SECONDS; theirs syncs nothing. Each round uses
new folders. Not covered: the
durable queues' servers (`workqueue`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from benchmarks.report import spread

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).with_name("peers")
TASK_QUEUE_PYTHON = Path(os.environ.get("TASK_QUEUE_PYTHON", ROOT / ".venv-interop/bin/python"))
ROQ, ROQ_LATE = "RoQ", "RoQ, acks synced late"
OURS = (ROQ, ROQ_LATE)
LATE_SECONDS = 0.05
RACE_TASKS, RACERS = 400, 4
SAMPLES = 1000
RATIO_MIN, PUT_RATIO_MIN, STALL_SECONDS_MAX = 8.0, 1.0, 0.05
STATUS_SECONDS_MAX, LEASE_SECONDS_MAX = 1.0, 0.002


class Round(msgspec.Struct, frozen=True):
    """One system once. Seconds, and tasks per second for the puts. stall: the longest lease + ack of all racers."""

    put_rate: float
    one: float  # median lease + ack
    mean: float  # of all leases + acks, with what the acks left to do
    race: float  # of RACERS processes on RACE_TASKS tasks, from the start to the last ack
    stall: float


class Fill(msgspec.Struct, frozen=True):
    """A big queue at one fill, seconds. lease: median; first: with the listing."""

    what: str
    status: float
    first: float
    lease: float
    lease_ack: float


class Big(msgspec.Struct, frozen=True):
    """A queue of so many tasks."""

    tasks: int
    put_rate: float
    fills: list[Fill]


class FileQueueFound(msgspec.Struct, frozen=True):
    """The findings. rounds: by system. batch_rate: of ours, leased and acked by the hundred."""

    rounds: dict[str, list[Round]]
    batch_rates: list[float]
    big: Big


class Program:
    """One of the programs on a folder."""

    def __init__(self, words: list[str | Path]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(words, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, env=environment)
        self._read()

    def tell(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._read())

    def __call__(self, *command: object) -> Any:
        self.tell(*command)
        return self.answer()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended")
        return line

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def programs(system: str, folder: Path, count: int) -> Iterator[list[Program]]:
    """So many processes of a system on a folder."""
    late = str(LATE_SECONDS if system == ROQ_LATE else 0.0)
    ours: list[str | Path] = [sys.executable, PEERS / "file_queue_program.py", folder, late]
    theirs: list[str | Path] = [TASK_QUEUE_PYTHON, PEERS / "task_queue_program.py", folder]
    with ExitStack() as stack:
        started = [Program(ours if system in OURS else theirs) for _ in range(count)]
        for one in started:
            stack.callback(one.close)
        yield started


def one_round(system: str, folder: Path, tasks: int) -> Round:
    """Put, lease and ack alone, then the race."""
    layer = () if system in OURS else (system.rsplit(" ", 1)[-1],)
    with programs(system, folder / "alone", 1) as (program,):
        rate = tasks / program("put", *layer, tasks)
        took = program("lease_ack", *layer, tasks // 2)
    with programs(system, folder / "race", RACERS) as racers:
        racers[0]("put", *layer, RACE_TASKS)
        for racer in racers:
            racer.tell("lease_ack", *layer, RACE_TASKS)
        lists = [racer.answer() for racer in racers]
    return Round(rate, median(took), mean(took), max(sum(one) for one in lists), max(max(one, default=0.0) for one in lists))


def fill(what: str, program: Program, samples: int) -> Fill:
    """One fill of the big queue."""
    seconds, *_ = program("status")
    (first,) = program("lease", 1)
    return Fill(what, seconds, first, median(program("lease", samples)), median(program("lease_ack", samples)))


def big(folder: Path, tasks: int, samples: int, tell: Callable[[str], None]) -> Big:
    """Fill a queue and take from it; another process, that knows nothing yet, at each fill."""
    with programs(ROQ, folder, 1) as (writer,):
        rate = tasks / writer("put", tasks)
        tell(f"{tasks} tasks put at {rate:.0f}/s")
    fills = []
    for what, more in (("all ready", 0), ("half leased", tasks // 2), ("nearly all leased", tasks // 2 - 6 * samples)):
        with programs(ROQ, folder, 1) as (program,):
            program("lease_many", more)
        with programs(ROQ, folder, 1) as (program,):
            fills.append(fill(what, program, samples))
            tell(f"{fills[-1]}")
    return Big(tasks, rate, fills)


def file_queue(rounds: int, tasks: int, big_tasks: int, tell: Callable[[str], None]) -> FileQueueFound:
    """Everything; folders are made below the working directory's file system and removed."""
    systems = [*OURS]
    if TASK_QUEUE_PYTHON.exists():
        systems += ["python-task-queue", "python-task-queue bare"]
    else:
        tell(f"not taking part: python-task-queue ({TASK_QUEUE_PYTHON} is missing: run tools/setup.sh interop)")
    found: dict[str, list[Round]] = {system: [] for system in systems}
    batches: list[float] = []
    where = Path(tempfile.mkdtemp(prefix="roq-file-queue-"))
    try:
        for number in range(rounds):
            for system in systems:
                found[system].append(one_round(system, where / f"{system}-{number}", tasks))
                tell(f"{system}: {found[system][-1]}")
            with programs(ROQ, where / f"batch-{number}", 1) as (program,):
                program("put", tasks)
                batches.append(tasks / program("lease_ack_batch", tasks))
        return FileQueueFound(found, batches, big(where / "big", big_tasks, min(SAMPLES, big_tasks // 50), tell))
    finally:
        shutil.rmtree(where, ignore_errors=True)


def compared_rows(found: FileQueueFound) -> list[list[str]]:
    """What, then a column per system, the ratio to the faster of theirs, the target."""
    rows = []
    lines: tuple[tuple[str, Callable[[Round], float], str], ...] = (
        ("put in batches, tasks/s", lambda one: one.put_rate, f"at least {PUT_RATIO_MIN:g}"),
        ("lease + ack one at a time, us", lambda one: one.one * 1e6, f"at least {RATIO_MIN:g}"),
        ("the same, mean with all that follows, us", lambda one: one.mean * 1e6, ""),
        (f"{RACERS} processes on {RACE_TASKS} tasks, ms", lambda one: one.race * 1e3, ""),
        ("longest lease + ack among them, ms", lambda one: one.stall * 1e3, f"RoQ at most {STALL_SECONDS_MAX * 1e3:g}"),
    )
    for what, read, target in lines:
        values = {system: [read(one) for one in rounds] for system, rounds in found.rounds.items()}
        middle = {system: median(some) for system, some in values.items()}
        theirs = [value for system, value in middle.items() if system not in OURS]
        ratios = []
        for system in OURS:
            if theirs:
                faster = what.endswith("/s")
                ratio = middle[system] / max(theirs) if faster else min(theirs) / middle[system]
                ratios.append(f"{ratio:.2f}")
        rows.append([what, *(spread(some) for some in values.values()), " / ".join(ratios) or "-", target])
    return rows


def big_rows(found: Big) -> list[list[str]]:
    """One row per fill."""
    return [
        [one.what, f"{one.status:.2f}", f"{one.first * 1e3:.0f}", f"{one.lease * 1e6:.0f}", f"{one.lease_ack * 1e6:.0f}",
         "met" if one.status <= STATUS_SECONDS_MAX and one.lease <= LEASE_SECONDS_MAX else "MISSED"]
        for one in found.fills
    ]  # fmt: skip


COMPARED_COLUMNS = ("what", *OURS, "python-task-queue", "its bare API", "times the faster of theirs", "target")
BIG_COLUMNS = ("fill", "status, s", "first lease (lists), ms", "lease, us", "lease + ack, us", "status at most 1 s, lease 2 ms")
