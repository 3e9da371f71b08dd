"""Many runs, and of one that broke a promise the shortest story that still does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from roq.tools.simulation.run import FAULT_SECONDS, Run, What, simulate

TRIES_MAX = 80  # runs to shorten one story


def runs(seeds: Iterable[int], seconds: float = FAULT_SECONDS, jobs: int = 1, what: What = What.MESSAGES) -> Iterator[Run]:
    """The runs of these seeds, in their order. jobs: processes that share them."""
    one = partial(simulate, seconds=seconds, what=what)
    if jobs <= 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(one, seeds)


def shortest(run: Run, seconds: float = FAULT_SECONDS) -> Run:
    """The same seed with as few of its faults as still break a promise. Takes up to TRIES_MAX runs."""
    best, tries = run, 0
    size = max(1, len(run.faults) // 2)
    while tries < TRIES_MAX:
        for start in range(0, len(best.faults), size):
            fewer = best.faults[:start] + best.faults[start + size :]
            tries += 1
            shorter = simulate(run.seed, seconds, faults=fewer, what=run.what)
            if shorter.wrong:
                best = shorter
                break
            if tries >= TRIES_MAX:
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
            continue
        size = min(size, max(1, len(best.faults) // 2))
    return best


def story(run: Run) -> str:
    """What happened and what went wrong, as text."""
    return "\n".join((f"seed {run.seed}:", *run.trace, *(f"   WRONG  {wrong}" for wrong in run.wrong)))


class Stopwatch:
    """How fast it goes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.count = 0

    def per_minute(self) -> float:
        """Runs so far."""
        return self.count / max(1e-9, time.monotonic() - self._began) * 60
