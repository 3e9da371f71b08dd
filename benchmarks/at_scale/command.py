"""`python -m benchmarks at-scale`: all of it, bounded, one size after the other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from benchmarks.at_scale.decisions import decisions
from benchmarks.at_scale.report import full, save
from benchmarks.at_scale.rig import Tell
from benchmarks.at_scale.run import ScaleFound, study
from benchmarks.at_scale.shuffles import shuffle_cost

SESSION_SECONDS = 6.0
STUDY_SECONDS, CROWD_SECONDS = 290.0, 600.0  # of one size, and more with a crowd: then it ends, with what was found so far
SIZES = ((10, 100), (10, 1_000), (100, 1_000), (100, 10_000), (1_000, 1_000), (1_000, 10_000))
DECIDED = (10, 100, 1_000), (100, 1_000, 2_500, 5_000, 10_000)  # hosts, queues
QUEUES_PER_HOST_MAX = 450  # three processes each: a host takes 1,500
SHUFFLES = ((10, 200), (100, 2_000), (1_000, 2_000), (1_000, 20_000))
QUICK_SIZES, QUICK_SHUFFLES = ((5, 50),), ((10, 200),)
QUICK_DECIDED = (10,), (100, 1_000)


async def at_scale(sizes: list[tuple[int, int]], parts: list[str], quick: bool, charts: Path | None, tell: Tell) -> ScaleFound:
    """The report goes to standard output, the chart to a file in `charts`. sizes: hosts and queues, empty: SIZES. parts: of
    "cluster", "faults", "crowd", "decisions" and "shuffle", empty: all; faults are injected into the last size, the crowd comes
    there, not with quick."""
    found = ScaleFound()
    sizes = sizes or [*(QUICK_SIZES if quick else SIZES)]
    if not parts or "decisions" in parts:
        hosts_wanted, queues_wanted = QUICK_DECIDED if quick else DECIDED
        for hosts, queues in ((hosts, queues) for hosts in hosts_wanted for queues in queues_wanted):
            if queues <= QUEUES_PER_HOST_MAX * hosts:
                found.decisions.append(decisions(hosts, queues))
                tell(f"decisions of {hosts} hosts, {queues} queues")
    if not parts or "shuffle" in parts:
        for followers, attempts in QUICK_SHUFFLES if quick else SHUFFLES:
            found.shuffles.append(shuffle_cost(followers, attempts))
            tell(f"shuffle of {followers} followers, {attempts} attempts")
    with _ended_by_terminate():
        for hosts, queues in sizes if not parts or {"cluster", "faults", "crowd"} & {*parts} else ():
            faults, crowd = ((hosts, queues) == sizes[-1] and (not parts or part in parts) for part in ("faults", "crowd"))
            bound = STUDY_SECONDS + crowd * CROWD_SECONDS
            try:
                async with asyncio.timeout(bound):
                    await study(hosts, queues, SESSION_SECONDS, faults, crowd and not quick, found, tell)
            except TimeoutError:
                tell(f"{hosts} hosts, {queues} queues: not done after {bound:g} s; what was found so far counts")
    print(full(found))
    if charts is not None and found.decisions:
        save(found, charts)
    return found


@contextlib.contextmanager
def _ended_by_terminate() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: nothing it started is left."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
