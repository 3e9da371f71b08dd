"""Runs both, in turn, and our processes alone for their memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import psutil

import roq.shuffle
from benchmarks.report import spread
from benchmarks.shuffle.data import KEY_BYTES, SCHEMA, VALUE_BYTES, make_files
from roq.shuffle.ranges import imbalance
from roq.wire.shuffle import Receipt

ROOT = Path(__file__).parents[2]
PROCESSES, RANGES, FILES = 2, 64, 8
ROWS, QUICK_ROWS, WARM_UP_ROWS = 10_000_000, 1_000_000, 400_000
FAST_MEMORY_BYTES = 256 * 1024 * 1024  # of each of our processes, in the race with Spark, which has 4 GiB
MEMORY_BYTES = 64 * 1024 * 1024
DATA_PER_BUDGET = 10
RATIO_MIN, IMBALANCE_MAX = 1.0, 1.15
KINDS = ("uniform", "zipf")


class Round(msgspec.Struct, frozen=True):
    """One sort of ours. write, commit, read: seconds. cpu: of all processes. peaks: bytes resident at most, of each process;
    before: what it had with a small shuffle behind it, 0 if not measured."""

    write: float
    commit: float
    read: float
    imbalance: float
    cpu: float
    before: list[int]
    write_peaks: list[int]
    read_peaks: list[int]

    @property
    def seconds(self) -> float:
        """From the start of the writers' processes to the end of the readers'."""
        return self.write + self.commit + self.read


class Speed(msgspec.Struct, frozen=True):
    """Ours and Spark's, in turn. spark: seconds and CPU seconds."""

    rows: int
    ours: list[Round]
    spark: list[tuple[float, float]]


def run_children(commands: Sequence[Sequence[object]]) -> list[dict[str, object]]:
    """Run programs side by side; what they answered."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [[sys.executable, "-m", "benchmarks.shuffle.program", *map(str, each)] for each in commands]
    started = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=environment) for each in words]
    answers = []
    for child in started:
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
        answers.append(json.loads(output))
    return answers


def sort(folder: Path, inputs: Sequence[str], memory_bytes: int, rows: int, how: str = "", ranges: int = RANGES) -> Round:
    """One sort of ours. inputs: one per partition, dealt out to the writers. how: "-measured" to measure memory before."""
    address, name = f"file://{folder}", "bench"
    with roq.shuffle.open(address) as shuffles:
        shuffles.create(name, ["key"], SCHEMA, ranges=ranges)
        began = time.perf_counter()
        named = [f"{partition}={what}" for partition, what in enumerate(inputs)]
        written = run_children([(f"write{how}", address, name, memory_bytes, *named[at::PROCESSES]) for at in range(PROCESSES)])
        wrote = time.perf_counter()
        receipts = [
            Receipt(*each)
            for answer in written
            for each in msgspec.convert(answer["receipts"], list[tuple[int, str, int, int, int]])
        ]
        description = shuffles.commit(name, receipts)
        committed = time.perf_counter()
        found = run_children([(f"read{how}", address, name, memory_bytes, at, PROCESSES) for at in range(PROCESSES)])
        ended = time.perf_counter()
        shuffles.remove(name)
    if sum(msgspec.convert(answer["rows"], int) for answer in found) != rows:
        raise RuntimeError("rows are missing")
    before, write_peaks, read_peaks = (
        [msgspec.convert(answer.get(what, 0), int) for answer in answers]
        for what, answers in (("before", written + found), ("peak", written), ("peak", found))
    )
    cpu = sum(msgspec.convert(answer["cpu"], float) for answer in written + found)
    uneven = imbalance([each.size for each in description.ranges])
    return Round(wrote - began, committed - wrote, ended - committed, uneven, cpu, before, write_peaks, read_peaks)


@contextmanager
def spark_sorter(folder: Path, warm_up: Path) -> Iterator[Callable[[Path], tuple[float, float]]]:
    """Spark's sort of a folder of Parquet files: seconds and CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    words = [sys.executable, "-m", "benchmarks.shuffle.spark_program", str(RANGES), str(folder), str(warm_up)]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError("Spark did not start: is Java 17 on the path?")

        processes = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]

        def cpu() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        def sorted_in(inputs: Path) -> tuple[float, float]:
            assert child.stdin is not None
            assert child.stdout is not None
            before = cpu()
            child.stdin.write(f"{inputs}\n")
            child.stdin.flush()
            return float(child.stdout.readline()), cpu() - before

        yield sorted_in
    finally:
        child.communicate()


def speed(where: Path, rows: int, rounds: int, tell: Callable[[str], None]) -> Speed:
    """Both sort the same files, in turn."""
    found = Speed(rows, [], [])
    make_files(where / "warm-up", "uniform", WARM_UP_ROWS, FILES)
    files = [str(path) for path in make_files(where / "input", "uniform", rows, FILES)]
    with spark_sorter(where / "spark", where / "warm-up") as spark:
        for _ in range(rounds):
            found.spark.append(spark(where / "input"))
            tell("Spark: {:.2f} s, CPU {:.2f} s".format(*found.spark[-1]))
            found.ours.append(sort(where / "shuffles", files, FAST_MEMORY_BYTES, rows))
            tell(f"RoQ: {found.ours[-1].seconds:.2f} s, {found.ours[-1]}")
    shutil.rmtree(where / "input")
    return found


def memory(where: Path, tell: Callable[[str], None]) -> dict[str, Round]:
    """Our processes with little memory and much data, by kind of keys."""
    found = {}
    rows = MEMORY_BYTES * DATA_PER_BUDGET // (KEY_BYTES + VALUE_BYTES)
    for kind in KINDS:
        found[kind] = sort(where / "shuffles", [f"{kind}:{rows}"] * PROCESSES, MEMORY_BYTES, rows * PROCESSES, "-measured")
        tell(f"memory, {kind}: {found[kind]}")
    return found


SPEED_COLUMNS = ("rows", "RoQ, s", "write", "commit", "read", "CPU s", "Spark, s", "CPU s", "times Spark's speed", "target")
MEMORY_COLUMNS = (
    "keys",
    "budget",
    "data per writer",
    "before",
    "writers, above it",
    "readers, above it",
    "largest / mean",
    "met",
)


def speed_rows(found: Speed) -> list[list[str]]:
    """One row."""
    parts = [[getattr(each, part) for each in found.ours] for part in ("seconds", "write", "commit", "read", "cpu")]
    theirs = [[each[part] for each in found.spark] for part in (0, 1)]
    ratio = median(theirs[0]) / median(parts[0])
    verdict = f"at least {RATIO_MIN:g}: {'met' if ratio >= RATIO_MIN else 'MISSED'}"
    return [[f"{found.rows:,}", *map(spread, [*parts, *theirs]), f"{ratio:.2f}", verdict]]


def memory_rows(found: dict[str, Round]) -> list[list[str]]:
    """One row per kind of keys; MiB."""
    rows = []
    for kind, each in found.items():
        peaks = [*each.write_peaks, *each.read_peaks]
        above = [(peak - before) / 2**20 for peak, before in zip(peaks, each.before, strict=True)]
        budget = MEMORY_BYTES / 2**20
        met = max(above) <= budget and each.imbalance <= IMBALANCE_MAX
        before = spread([one / 2**20 for one in each.before])
        shown = [
            f"{budget:.0f}",
            f"{budget * DATA_PER_BUDGET:.0f}",
            before,
            spread(above[:PROCESSES]),
            spread(above[PROCESSES:]),
        ]
        rows.append([kind, *shown, f"{each.imbalance:.3f}", "met" if met else "MISSED"])
    return rows
