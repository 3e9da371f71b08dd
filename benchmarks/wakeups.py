"""How soon processes run that wait for a local log to grow, and what waiting costs: by the futex of its header, as RoQ does,
by a FIFO for each who waits, and by looking again. `python -m benchmarks.wakeups [readers]`; docs/decisions/0054 has a table.

Each way in turn, again and again: every reader sleeps, one writer wakes them all. Not covered: what is read then.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from roq.log.local import shared

READERS, ROUNDS, WAKES, PAUSE_SECONDS, IDLE_SECONDS = 16, 5, 30, 0.02, 1.0
STOP = 2**32 - 1
WAYS = ("futex", "FIFOs", "1 ms", "5 ms")


class Shared:
    """A word that the writer counts up, and one for each reader, who writes there when it saw the count: CLOCK_MONOTONIC."""

    def __init__(self, folder: Path, readers: int) -> None:
        mapped = shared.Mapped(folder / "words", 0o600, 4096)
        self.words, self.address = mapped.words, mapped.address(0)
        self.readers = range(1, readers + 1)


def wait_once(way: str, memory: Shared, fifo: int, seen: int) -> None:
    """Sleep until the count may have changed."""
    if way == "futex":
        shared.futex_wait(memory.address, seen, 1.0)
    elif way == "FIFOs":
        if select.select([fifo], [], [], 1.0)[0]:
            os.read(fifo, 16)
    else:
        time.sleep(int(way[0]) / 1000)


def read(way: str, memory: Shared, place: int, path: Path) -> None:
    """A reader's life."""
    fifo, seen = os.open(path, os.O_RDWR | os.O_NONBLOCK), 0
    while seen != STOP:
        while memory.words[0] == seen:
            wait_once(way, memory, fifo, seen)
        seen = memory.words[0]
        memory.words[place] = time.monotonic_ns()


def waker(way: str, memory: Shared, fifos: list[int]) -> Callable[[int], None]:
    """What a writer does to let everybody see this count."""

    def wake(count: int) -> None:
        memory.words[0] = count
        if way == "futex":
            shared.futex_wake(memory.address, shared.EVERYBODY)
        elif way == "FIFOs":
            for fifo in fifos:
                os.write(fifo, b"x")

    return wake


def measured(way: str, readers: int, folder: Path) -> tuple[list[float], list[float], float]:
    """us until the last reader ran; us that waking took the writer; ms of CPU a second that waiting took all readers."""
    memory, pids, fifos = Shared(folder, readers), list[int](), list[int]()
    for place in memory.readers:
        path = folder / f"{way}-{place}"
        os.mkfifo(path)
        fifos.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        if (pid := os.fork()) == 0:
            try:
                read(way, memory, place, path)
            finally:
                os._exit(0)
        pids.append(pid)
    wake, last, cost = waker(way, memory, fifos), list[float](), list[float]()
    for count in range(1, WAKES + 1):
        time.sleep(PAUSE_SECONDS)
        began = time.monotonic_ns()
        wake(count)
        cost.append((time.monotonic_ns() - began) / 1000)
        while min(memory.words[1 : readers + 1]) < began:
            time.sleep(0.0005)
        last.append((max(memory.words[1 : readers + 1]) - began) / 1000)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(IDLE_SECONDS)
    idle = sum(cpu_seconds(pid) - one for pid, one in zip(pids, before, strict=True)) / IDLE_SECONDS
    wake(STOP)
    for pid in pids:
        os.waitpid(pid, 0)
    for fifo in fifos:
        os.close(fifo)
    for path in folder.iterdir():
        path.unlink()
    return last, cost, idle * 1000


def cpu_seconds(pid: int) -> float:
    """Of a process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    """Prints the table."""
    readers = int(sys.argv[1]) if len(sys.argv) > 1 else READERS
    found: dict[str, list[tuple[list[float], list[float], float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(ROUNDS):
            for way in WAYS:
                found[way].append(measured(way, readers, Path(name)))
    print(f"{readers} readers: us until the last runs, us the writer is busy (medians); ms of CPU a second while all wait")
    for way, rounds in found.items():
        last = statistics.median(value for one in rounds for value in one[0])
        cost = statistics.median(value for one in rounds for value in one[1])
        print(f"{way:8} {last:8.0f} {cost:8.1f} {statistics.median(one[2] for one in rounds):8.2f}")


if __name__ == "__main__":
    main()
