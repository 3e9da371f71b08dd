"""Followers of one test: each with a loop, socket and folder as in a store; and a leader that says what the test wants.

The clients are the real ones (ClusterSink, ClusterSource). Not covered: processes, the real leader (test_shuffle_cluster.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from roq.errors import RoqError, Unavailable
from roq.runtime.loop_thread import LoopThread
from roq.shuffle.cluster import ChosenBuffer, ClusterSink, ClusterSource, FollowerLink
from roq.shuffle.merge import merged
from roq.shuffle.node.server import Follower
from roq.shuffle.ranges import even_borders, holders, table_of
from roq.shuffle.sampling import Distribution
from roq.shuffle.writer import MEMORY_BYTES_MIN, Writer
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, ShuffleInfo, ShuffleList, TableInfo
from roq.wire.shuffle import Description, Range, Receipt, RunSample, ShuffleState
from tests.harness.shuffle_rows import ENCODER, SCHEMA, SPEC

SHUFFLE = "s1"
SECONDS = 20.0


class Leader:
    """Answers reports. ranges: to cut when a table is wanted; 0: it never is. silent: does not answer at all."""

    def __init__(self, ranges: int) -> None:
        self.ranges, self.silent, self.replicas = ranges, False, 2
        self.hosts: dict[str, str] = {}
        self.samples: dict[tuple[int, str, int], RunSample] = {}
        self.stored: dict[tuple[int, str], Receipt] = {}
        self.table: tuple[Range, ...] = ()
        self.winners: dict[int, str] = {}
        self.epoch = self.reports = 0
        self.refusal: RoqError | None = None

    async def report(self, told: ReportRuns) -> TableInfo:
        """See wire.gcm."""
        self.reports += 1
        if self.silent:
            raise Unavailable("this leader says nothing")
        if self.refusal is not None:
            raise self.refusal
        self.samples |= {(sample.partition, sample.attempt, sample.run): sample for sample in told.samples}
        self.stored |= {(receipt.partition, receipt.attempt): receipt for receipt in told.stored}
        if told.wanted and not self.epoch and self.ranges:
            self.cut(self.ranges)
        return TableInfo(self.epoch, self.table, dict(self.hosts), self.replicas, self.winners)

    async def list(self) -> ShuffleList:
        """See wire.gcm."""
        state = ShuffleState.SEALED if self.winners else ShuffleState.FILLING
        return ShuffleList((Description("visits", SHUFFLE, SPEC, state, 0.0, self.epoch, (), (), {}, 0, 0, 0, 0, 0),))

    def cut(self, ranges: int, hosts: Iterable[str] = ()) -> None:
        """A new table from the samples told so far, for these hosts (all)."""
        table = table_of(even_borders(Distribution.of(self.samples.values()), ranges))
        self.place(table, hosts)

    def place(self, table: tuple[Range, ...], hosts: Iterable[str] = ()) -> None:
        """A new table with these borders."""
        chosen = [*hosts] or [*self.hosts]
        self.table = tuple(
            msgspec.structs.replace(one, holders=holders(SHUFFLE, one.identity, chosen, self.replicas)) for one in table
        )
        self.epoch += 1


class Followers:
    """Named a, b, c, …"""

    def __init__(self, directory: Path, count: int = 3, ranges: int = 8, memory: int = 32 << 20) -> None:
        self.directory, self.memory = directory, memory
        self.leader = Leader(ranges)
        self.link = FollowerLink("127.0.0.1:1")
        self.running: dict[str, tuple[LoopThread, Follower]] = {}
        self._ports: dict[str, int] = {}
        for host in "abcdefgh"[:count]:
            self.start(host)

    def start(self, host: str) -> Follower:
        """At the port it had before, if it had one."""
        thread = LoopThread(f"follower {host}")
        work = Follower.open(
            host,
            self.directory / host,
            "127.0.0.1",
            self._ports.get(host, 0),
            self.leader.report,
            self.memory,
            self.leader.list,
        )
        follower = thread.call(work)
        self._ports[host] = follower.port
        self.running[host] = (thread, follower)
        self.leader.hosts[host] = f"tcp://127.0.0.1:{follower.port}"
        return follower

    def stop(self, host: str) -> None:
        """What it has in memory is gone."""
        thread, follower = self.running.pop(host)
        thread.call(follower.close())
        thread.stop()

    def follower(self, host: str) -> Follower:
        return self.running[host][1]

    def ask(self, host: str, request: msgspec.Struct, seconds: float = SECONDS) -> wire.Reply:
        return self.link.ask(self.leader.hosts[host], request, msgspec.Struct, seconds)  # type: ignore[return-value]

    # --- writing ------------------------------------------------------------------------------------------------------

    def open_attempt(self, host: str, partition: int, attempt: str = "a", writer: str = "w") -> ClusterSink:
        """At this buffer."""
        request = wire.OpenAttempt(SHUFFLE, "visits", SPEC, partition, attempt, writer)
        self.ask(host, request)
        return ClusterSink(self.link, ChosenBuffer(host, self.leader.hosts[host]), SHUFFLE, partition, attempt)

    def writer(self, host: str, partition: int, attempt: str = "a") -> Writer:
        sink = self.open_attempt(host, partition, attempt)
        return Writer(sink, ENCODER, partition, attempt, self.leader.ranges, MEMORY_BYTES_MIN)

    def write(self, host: str, partition: int, rows: int, attempt: str = "a", pad: int = 100) -> Receipt:
        """Ids partition * 1,000,000 + 0 …, keys at random but the same each time."""
        with self.writer(host, partition, attempt) as writer:
            for batch in batches(partition, rows, pad):
                writer.write(batch)
            return writer.finish()

    # --- reading ------------------------------------------------------------------------------------------------------

    def info(self, winners: dict[int, str], *, counted: bool = True) -> ShuffleInfo:
        """As a leader would describe the sealed shuffle. counted: the ranges' rows are asked of their first holders."""
        table = self.leader.table
        if counted:
            table = tuple(
                msgspec.structs.replace(one, rows=self.count(one.holders[0], one.interval, winners)[0]) for one in table
            )
        epoch = self.leader.epoch
        description = Description(
            "visits", SHUFFLE, SPEC, ShuffleState.SEALED, 0.0, epoch, table, (), winners, 0, 0, len(winners), 0, 0
        )
        return ShuffleInfo(description, dict(self.leader.hosts))

    def count(self, host: str, interval: wire.Interval, winners: dict[int, str]) -> tuple[int, int]:
        counts = self.ask(host, wire.CountRows(SHUFFLE, [interval], winners))
        assert isinstance(counts, wire.Counts)
        return counts.rows[0], counts.sizes[0]

    def source(self, info: ShuffleInfo, number: int) -> ClusterSource:
        return ClusterSource(self.link, lambda: info, number, info)

    def read(self, info: ShuffleInfo, each: Callable[[int], None] = lambda number: None) -> list[tuple[int, int]]:
        """(key, id) of all rows, range by range. each: called with the number of every range before it is read."""
        found: list[tuple[int, int]] = []
        for one in info.description.ranges:
            each(one.number)
            source = self.source(info, one.number)
            for batch in merged(source, ENCODER, 16 << 20):
                found += zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
            source.close()
        return found

    def judge(self, winners: dict[int, str], rows: dict[int, int]) -> None:
        """Complete, in order, nothing twice, and so at every holder."""
        info = self.info(winners)
        for one in info.description.ranges:
            held = {host: self.count(host, one.interval, winners)[0] for host in one.holders if host in self.running}
            assert set(held.values()) == {one.rows}, held
            assert len(one.holders) == min(self.leader.replicas, len(self.leader.hosts))
        found = self.read(info)
        assert [key for key, _ in found] == sorted(key for key, _ in found)
        expected = {partition * 1_000_000 + row for partition, count in rows.items() for row in range(count)}
        assert len(found) == len(expected)
        assert {id for _, id in found} == expected

    def close(self) -> None:
        self.link.close()
        for host in list(self.running):
            self.stop(host)


def batches(partition: int, rows: int, pad: int) -> Iterable[pa.RecordBatch]:
    """The rows of a partition, some thousand at a time."""
    source = random.Random(partition)
    for first in range(0, rows, 5000):
        count = min(5000, rows - first)
        keys = pa.array([source.randrange(1 << 40) if source.random() < 0.9 else 7 for _ in range(count)], pa.int64())
        ids = pa.array(range(partition * 1_000_000 + first, partition * 1_000_000 + first + count), pa.int64())
        yield pa.record_batch([keys, ids, pa.array([source.randbytes(pad)] * count, pa.binary())], schema=SCHEMA)


class InThread:
    """Runs `work` beside the test; `join` raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._future = self._thread.submit(work)

    @property
    def running(self) -> bool:
        return not self._future.done()

    def join(self, seconds: float = 60.0) -> object:
        self._thread.shutdown(wait=False)
        return self._future.result(seconds)


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for something that changes in another thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def made_in(directory: Path) -> Iterator[Callable[..., Followers]]:
    """A maker of followers, for a fixture; they are closed at the end."""
    made: list[Followers] = []

    def new(**options: int) -> Followers:
        made.append(Followers(directory, **options))
        return made[-1]

    yield new
    for one in made:
        one.close()


def write_all(followers: Followers, partitions: int, rows: int, hosts: str = "abc", pad: int = 100) -> list[InThread]:
    """All partitions at once, each at one of the hosts."""
    return [InThread(partial(followers.write, hosts[at % len(hosts)], at, rows, pad=pad)) for at in range(partitions)]
