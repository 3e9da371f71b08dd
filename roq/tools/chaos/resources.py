"""Resources over time: what a leak looks like, and what it does not. Pure.

Memory is *anonymous* memory (heap and stacks, as /proc/<pid>/smaps_rollup tells it): every leak of a program shows there, and
unlike private memory or PSS it does not jump when a sibling of the same fork server ends and shared pages become
somebody's own.

A process is judged from `warm_up` seconds after it was first seen, and only if it was then watched for as long again. That time
is cut into WINDOWS equal pieces; the median of each stands for it, so that what a fault heaps up for some seconds is no leak.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

WINDOWS = 8
WARM_UP_SECONDS = 600.0
WARM_UP_SHARE = 1 / 3  # of a run that is too short for WARM_UP_SECONDS
MEMORY_SHARE = 0.05  # no window is further from the first one
MEMORY_MAX = 512 << 20  # bytes; no process ever has more, whatever is stuck (the client is several publishers with their rings)
MEMORY_FLOOR = 1 << 20  # bytes that are allowed where MEMORY_SHARE is less
# The client is all publishers and subscribers: each fault fills rings and held messages differently, and malloc keeps most of
# what the fullest moment took: 45 MiB after some minutes of faults, however many follow, 40 before the first long one. At 2,000
# messages a second this is little more than a byte for every message of an hour. So much for each load: all
# of them keep accounts of what they put and got.
CLIENT_FLOOR = 8 << 20
# A store knows where each entry is, 8 bytes each: some 3 MiB for what the loads keep in an hour. And its pools of threads fill
# late, each thread with memory of its own.
STORE_FLOOR = 12 << 20
# No window has so many more than the first one. An HCM has descriptors for each process of its host, and they move; a GCM
# that begins to lead has connections to hosts, stores and clients, 18 more in a cluster of three hosts.
# A pool takes a thread more when all it has are busy, however late; a store has six pools, two of them pyarrow's: 25 threads.
DESCRIPTORS_MORE, THREADS_MORE, ZNODES_MORE = 24, 12, 8


class ZnodeCount(NamedTuple):
    """How many there are, seconds after the start of the load; tapes: of tapes, which stay until they expire; shuffles: of
    shuffles, which stay for a minute after they were removed: as many as are made in a minute."""

    at: float
    nodes: int
    tapes: int = 0
    shuffles: int = 0


class ResourceSample(NamedTuple):
    """One process at one moment. memory: anonymous, private: only its own; bytes."""

    memory: int
    private: int
    descriptors: int
    threads: int


class Series:
    """One life of a process: its readings, seconds after the start of the load. floor: bytes its memory may grow by."""

    def __init__(self, machine: str, name: str, pid: int, floor: int = MEMORY_FLOOR) -> None:
        self.machine, self.name, self.pid, self.floor = machine, name, pid, floor
        self.at = array("d")
        self.columns = tuple(array("Q") for _ in ResourceSample._fields)

    def add(self, at: float, reading: ResourceSample) -> None:
        """One more."""
        self.at.append(at)
        for column, value in zip(self.columns, reading, strict=True):
            column.append(value)

    def column(self, name: str) -> Sequence[int]:
        """All values of one field of Reading."""
        return self.columns[ResourceSample._fields.index(name)]


class Trend(msgspec.Struct, frozen=True):
    """One number over time. windows: medians after the warm-up, empty if it was not watched for long enough."""

    first: int
    last: int
    most: int
    windows: tuple[float, ...] = ()


class Life(msgspec.Struct, frozen=True):
    """One process from first to last reading (seconds). problems: why it is not steady."""

    machine: str
    name: str
    pid: int
    since: float
    until: float
    readings: int
    judged: bool
    memory: Trend
    private: Trend
    descriptors: Trend
    threads: Trend
    problems: tuple[str, ...] = ()


class Resources(msgspec.Struct, frozen=True):
    """What all processes took. znodes: of the whole ensemble, which serves this cluster alone, but for those of tapes and of
    shuffles. problems: what is not steady; beyond: who had more memory than a process may ever have."""

    warm_up_seconds: float
    memory_share: float
    memory_floor: int
    client_floor: int
    store_floor: int
    descriptors_more: int
    threads_more: int
    znodes_more: int
    lives: tuple[Life, ...]
    znodes: Trend
    tapes: Trend
    shuffles: Trend
    problems: tuple[str, ...]
    beyond: tuple[str, ...]


def warm_up(seconds: float) -> float:
    """How long a run of `seconds` lets a process grow."""
    return min(WARM_UP_SECONDS, seconds * WARM_UP_SHARE)


def judge(series: Sequence[Series], znodes: Sequence[ZnodeCount], seconds: float) -> Resources:
    """The verdict on a run with `seconds` of load."""
    warm = warm_up(seconds)
    lives = tuple(_life(one, warm) for one in series if one.at)
    at = [one.at for one in znodes]
    nodes = _trend(at, [one.nodes - one.tapes - one.shuffles for one in znodes], warm)
    tapes, shuffles = (_trend(at, [getattr(one, kind) for one in znodes], warm) for kind in ("tapes", "shuffles"))
    problems = [f"{life.machine} {life.name} (pid {life.pid}): {text}" for life in lives for text in life.problems]
    problems += _more("znodes", nodes, ZNODES_MORE)
    if shuffles.windows:
        problems += _more("znodes of shuffles", shuffles, round(shuffles.windows[0]) + ZNODES_MORE)
    if not any(life.judged for life in lives):
        problems.append("no process lived long enough to be judged")
    if not nodes.windows:
        problems.append("znodes were not counted for long enough to be judged")
    return Resources(
        warm_up_seconds=warm,
        memory_share=MEMORY_SHARE,
        memory_floor=MEMORY_FLOOR,
        client_floor=CLIENT_FLOOR,
        store_floor=STORE_FLOOR,
        descriptors_more=DESCRIPTORS_MORE,
        threads_more=THREADS_MORE,
        znodes_more=ZNODES_MORE,
        lives=lives,
        znodes=nodes,
        tapes=tapes,
        shuffles=shuffles,
        problems=tuple(problems),
        beyond=tuple(
            f"D6: {life.machine} {life.name} (pid {life.pid}) had {life.memory.most / 2**20:.0f} MiB"
            for life in lives
            if life.memory.most > MEMORY_MAX
        ),
    )


def _life(series: Series, warm: float) -> Life:
    memory, private, descriptors, threads = (_trend(series.at, column, warm) for column in series.columns)
    problems = [
        *_flat("memory", memory, series.floor),
        *_more("descriptors", descriptors, DESCRIPTORS_MORE),
        *_more("threads", threads, THREADS_MORE),
    ]
    return Life(
        machine=series.machine,
        name=series.name,
        pid=series.pid,
        since=round(series.at[0], 1),
        until=round(series.at[-1], 1),
        readings=len(series.at),
        judged=bool(memory.windows),
        memory=memory,
        private=private,
        descriptors=descriptors,
        threads=threads,
        problems=tuple(problems),
    )


def _trend(at: Sequence[float], values: Sequence[int], warm: float) -> Trend:
    if not at:
        return Trend(0, 0, 0)
    return Trend(values[0], values[-1], max(values), _windows(at, values, warm))


def _windows(at: Sequence[float], values: Sequence[int], warm: float) -> tuple[float, ...]:
    """Median of each window; none if it was not watched long enough, or a window is empty."""
    begin, length = at[0] + warm, at[-1] - at[0] - warm
    if length <= 0 or length < warm * 0.9:  # a run of twice the warm-up has processes that are seen a little shorter
        return ()
    pieces: list[list[int]] = [[] for _ in range(WINDOWS)]
    for moment, value in zip(at, values, strict=True):
        if moment >= begin:
            pieces[min(WINDOWS - 1, int((moment - begin) / length * WINDOWS))].append(value)
    return tuple(float(median(piece)) for piece in pieces) if all(pieces) else ()


def _flat(what: str, trend: Trend, floor: int) -> list[str]:
    if not trend.windows:
        return []
    first, allowed = trend.windows[0], max(MEMORY_SHARE * trend.windows[0], floor)
    worst = max(trend.windows, key=lambda value: abs(value - first))
    if abs(worst - first) <= allowed:
        return []
    return [f"{what} is not flat: {first / 2**20:.1f} MiB after the warm-up, later {worst / 2**20:.1f} MiB"]


def _more(what: str, trend: Trend, allowed: int) -> list[str]:
    if not trend.windows or max(trend.windows) - trend.windows[0] <= allowed:
        return []
    return [f"{what} grow: {trend.windows[0]:g} after the warm-up, later {max(trend.windows):g}"]
