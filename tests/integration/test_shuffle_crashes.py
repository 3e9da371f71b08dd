"""A folder's shuffles whose processes are killed: at every change they make, and at any time with many at work. What a loss of
power would undo."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

import roq.shuffle
from roq.errors import ShuffleNotFound
from roq.shuffle.writer import MEMORY_BYTES_MIN
from roq.wire.shuffle import Description, Receipt, ShuffleState
from tests.harness import shuffle_writer
from tests.harness.crash_points import crash_points, trace, unsynced
from tests.harness.shuffle_writer import SCHEMA, batches

ROWS = 25_000  # of a partition: about three runs with the least memory
ROOT = Path(__file__).parents[2]
Act = Callable[[roq.shuffle.Shuffles], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shuffles"


@pytest.fixture
def parts() -> list[list[pa.RecordBatch]]:
    return [batches(partition, ROWS) for partition in range(2)]


def opened(folder: Path) -> roq.shuffle.Shuffles:
    return roq.shuffle.open(f"file://{folder}")


def write(shuffles: roq.shuffle.Shuffles, partition: int, data: list[pa.RecordBatch]) -> Receipt:
    with shuffles.writer("s", partition, memory_bytes=MEMORY_BYTES_MIN) as writer:
        for batch in data:
            writer.write(batch)
        return writer.finish()


def check(shuffles: roq.shuffle.Shuffles, partitions: int, rows: int = ROWS) -> None:
    """Everything is there, once, in order."""
    keys: list[bytes] = []
    ids: list[int] = []
    for batch in shuffles.read_all("s", memory_bytes=MEMORY_BYTES_MIN):
        keys += batch["k"].to_pylist()
        ids += batch["id"].to_pylist()
    assert keys == sorted(keys)
    assert sorted(ids) == list(range(partitions * rows))


def grown_old(folder: Path) -> None:
    """What was left is old now, and its writers are dead."""
    long_ago = time.time() - 3600
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (long_ago, long_ago))


def test_creating_killed_anywhere_can_be_repeated(folder: Path) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        return lambda: opened(folder).create("s", ["k"], SCHEMA, ranges=4)

    points = 0
    for point, _ in crash_points(prepare):
        points += 1
        with opened(folder) as shuffles:
            assert len(shuffles.list()) <= 1, point
            grown_old(folder)
            assert shuffles.create("s", ["k"], SCHEMA, ranges=4).state is ShuffleState.FILLING, point
            assert [path.name for path in folder.iterdir()] == ["s.shuffle"], point
    assert points > 5


def test_writing_killed_anywhere_leaves_an_attempt_that_does_not_count(folder: Path, parts: list[list[pa.RecordBatch]]) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        opened(folder).create("s", ["k"], SCHEMA, ranges=4)
        return lambda: write(opened(folder), 0, parts[0])

    points = 0
    for point, finished in crash_points(prepare):
        points += 1
        with opened(folder) as shuffles:
            grown_old(folder)
            receipt = write(shuffles, 0, parts[0])
            stored = [path.name for path in (folder / "s.shuffle/attempts").iterdir()]
            assert all(name.endswith(".run") for name in stored), "what the dead one was writing is gone"
            assert len(stored) <= 1 + (finished or "fsync" in point), point
            shuffles.commit("s", [receipt])
            if points % 8 == 0 or finished:
                check(shuffles, 1)
    assert points > 20


@pytest.mark.parametrize("what", ["commit", "rebalance"])
def test_sealing_killed_anywhere_is_done_or_not(folder: Path, parts: list[list[pa.RecordBatch]], what: str) -> None:
    ready = folder.with_name("ready")
    with opened(ready) as shuffles:
        shuffles.create("s", ["k"], SCHEMA, ranges=4)
        receipts = [write(shuffles, partition, data) for partition, data in enumerate(parts)]
        write(shuffles, 1, parts[1])  # a loser
        if what == "rebalance":
            shuffles.commit("s", receipts)

    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ready, folder)
        shuffles = opened(folder)
        return (lambda: shuffles.commit("s", receipts)) if what == "commit" else lambda: shuffles.rebalance("s", 7)

    points = 0
    for point, finished in crash_points(prepare):
        points += 1
        with opened(folder) as shuffles:
            found = shuffles.describe("s")
            if what == "commit":
                assert (
                    found.state is ShuffleState.SEALED
                    if finished
                    else found.state in (ShuffleState.FILLING, ShuffleState.SEALED)
                ), point
                assert shuffles.commit("s", receipts).winners == {each.partition: each.attempt for each in receipts}
            else:
                assert len(found.ranges) in ((7,) if finished else (4, 7)), point
                assert len(shuffles.rebalance("s", 7).ranges) == 7
            check(shuffles, 2)
        assert len(list((folder / "s.shuffle/attempts").iterdir())) == 2, "the loser is gone"
    assert points > 5


def test_removing_killed_anywhere_can_be_repeated(folder: Path) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        shuffles = opened(folder)
        shuffles.create("s", ["k"], SCHEMA)
        shuffles.commit("s", [write(shuffles, 0, batches(0, 100))])
        return lambda: shuffles.remove("s")

    for point, finished in crash_points(prepare):
        with opened(folder) as shuffles:
            there = [each.state for each in shuffles.list()]
            assert there == [] if finished else there in ([], [ShuffleState.SEALED]), point
            with suppress(ShuffleNotFound):
                shuffles.remove("s")
            with pytest.raises(ShuffleNotFound):
                shuffles.remove("s")
            assert not any(folder.iterdir()), point


def test_nothing_that_was_answered_can_be_undone_by_a_loss_of_power(folder: Path) -> None:
    shuffles = opened(folder)
    done: list[Receipt | Description] = []
    steps: list[Callable[[], object]] = [
        lambda: shuffles.create("s", ["k"], SCHEMA),
        lambda: done.append(write(shuffles, 0, batches(0, ROWS))),
        lambda: shuffles.commit("s", [each for each in done if isinstance(each, Receipt)]),
        lambda: shuffles.rebalance("s", 3),
        lambda: shuffles.remove("s"),
    ]
    for step in steps:
        changes = trace(step)
        assert any(change.call == "rename" for change in changes)
        left = [change for change in unsynced(changes) if change.call != "unlink" and not change.path.endswith("lock")]
        gone = {change.path for change in changes if change.call == "rename"}  # made under names they have no more
        assert [change for change in left if change.call == "rename" or change.path not in gone] == []


# --- many processes -------------------------------------------------------------------------------------------------------


def killed_or_finished(folder: Path, partition: int, seconds: float | None) -> Receipt | None:
    """Run a writer, killed so long after it began to write."""
    words = [sys.executable, "-m", shuffle_writer.__name__, f"file://{folder}", "s", str(partition), str(ROWS)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    if seconds is not None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.send_signal(signal.SIGKILL)
    output, _ = child.communicate(timeout=50)
    return msgspec.json.decode(output, type=Receipt) if output.endswith("}\n") else None


def attempts(folder: Path, partition: int) -> Iterator[Receipt]:
    """Attempts until one is through; most are killed."""
    draw = random.Random(partition)
    for number in range(4):
        receipt = killed_or_finished(folder, partition, None if number == 3 else draw.random() * 0.15)
        if receipt is not None:
            yield receipt
    assert receipt is not None


@pytest.mark.timeout(120)
def test_many_writers_killed_and_committers_at_the_same_time(folder: Path) -> None:
    with opened(folder) as shuffles:
        shuffles.create("s", ["k"], SCHEMA, ranges=9)
        with ThreadPoolExecutor(4) as pool:
            receipts = [found[-1] for found in pool.map(lambda partition: list(attempts(folder, partition)), range(4))]
            found = list(pool.map(lambda _: opened(folder).commit("s", receipts), range(4)))
            assert all(each == found[0] for each in found)
        assert {path.name for path in (folder / "s.shuffle/attempts").iterdir()} == {
            f"{each.partition}-{each.attempt}.run" for each in receipts
        }
        check(shuffles, 4)
