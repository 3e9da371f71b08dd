"""The file queue on full and forbidden disks, with clocks that disagree, and with the habits of network file systems."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from roq.errors import StorageDenied, StorageFull
from roq.wire.task import NewTask, Settlement
from roq.workqueue.file_queue import aftermath
from roq.workqueue.file_queue.queue import FileQueue
from tests.harness.other_users import let_others_in

NOBODY = 65_534
RUNNABLE = json.dumps({"txt": "x", "class": "PrintTask"}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def payloads(queue: FileQueue, count: int = 100) -> list[bytes]:
    """Lease and ack up to `count`."""
    _, leases, _ = queue.lease(60, count, 0)
    assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * len(leases)
    return [lease.payload for lease in leases]


# --- disks --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=False, capture_output=True
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("mounting a small disk takes root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_takes_all_of_a_put_or_nothing_and_gives_back_what_it_holds(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aftermath, "GATHER_SECONDS", 3.0)  # what was acked is held so long, unless its room is needed
    queue = FileQueue(small_disk / "queue")
    kept: set[bytes] = set()

    def fill() -> None:
        for number in range(100):
            batch = [b"%d-%d " % (number, k) + b"x" * 3000 for k in range(6)]
            queue.put([NewTask(payload) for payload in batch])
            kept.update(batch)

    with pytest.raises(StorageFull):
        fill()
    assert kept
    assert queue.status().ready == len(kept)
    assert not any((small_disk / "queue/tmp").iterdir())
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        deque((os.write(filler, b"x" * 4096) for _ in range(100)), maxlen=0)
    os.close(filler)
    found = payloads(queue)
    assert set(found) == kept
    os.unlink(small_disk / "filler")
    assert queue.put([NewTask(b"room again")])
    assert payloads(queue) == [b"room again"]
    queue.close()


def as_nobody(act: Callable[[], object]) -> str:
    """Run in a child of another user; the name of the error's class, or "done"."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        said = "done"
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except BaseException as error:  # noqa: BLE001  told to the parent
            said = type(error).__name__
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_a_folder_without_permission(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(RUNNABLE)])
    let_others_in(folder)
    assert as_nobody(lambda: FileQueue(folder / "new")) == StorageDenied.__name__
    assert as_nobody(lambda: queue.put([NewTask(b"x")])) == StorageDenied.__name__
    assert as_nobody(lambda: queue.lease(60, 1, 0)) == StorageDenied.__name__
    assert as_nobody(lambda: FileQueue(folder).status()) == "done", "who may read may look"
    folder.chmod(0o700)
    assert as_nobody(lambda: FileQueue(folder)) == StorageDenied.__name__
    assert payloads(queue) == [RUNNABLE]


# --- clocks and network file systems ------------------------------------------------------------------------------------


def test_clocks_that_disagree_end_leases_early_but_never_two_valid_ones(folder: Path) -> None:
    slow, fast = FileQueue(folder), FileQueue(folder, clock=lambda: time.time() + 3600)
    slow.put([NewTask(b"x")])
    _, (first,), _ = slow.lease(60, 1, 0)
    _, (second,), _ = fast.lease(60, 1, 0)
    assert second.attempt == 2
    assert slow.settle([Settlement.ack(first.token)]) == [None]
    assert fast.settle([Settlement.release(second.token)]) == [""]
    assert slow.lease(60, 1, 0)[:2] == ([], []), "it is delayed by the other's clock"
    assert slow.status().delayed == 1
    assert slow.release_all() == 1
    assert payloads(slow) == [b"x"]


def done_but_lost(call: Callable[..., None]) -> Callable[..., None]:
    """A call whose answer got lost: it is sent again, and the second one finds nothing."""

    def wrapped(*arguments: str) -> None:
        call(*arguments)
        raise FileNotFoundError(errno.ENOENT, "sent again")

    return wrapped


def test_renames_and_removals_sent_twice_by_a_network_file_system(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(RUNNABLE)])
    with mock.patch.object(os, "rename", done_but_lost(os.rename)):
        _, (lease,), _ = queue.lease(60, 1, 0)
        (token,) = queue.settle([Settlement.extend(lease.token, 60)])
    assert token
    with mock.patch.object(os, "unlink", done_but_lost(os.unlink)):
        assert queue.settle([Settlement.ack(token)]) == [""]
    assert queue.settle([Settlement.ack(token)]) == [None]
    assert queue.status().completed == 1


@pytest.mark.quick
def test_a_lost_race_is_no_attempt(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(RUNNABLE)])
    with mock.patch.object(os, "rename", side_effect=FileNotFoundError(errno.ENOENT, "another was faster")):
        assert queue.lease(60, 1, 0)[:2] == ([], [])
    _, (lease,), _ = queue.lease(60, 1, 10)
    assert lease.attempt == 1


def test_a_stale_listing_costs_no_time(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(b"%d" % number) for number in range(300)])
    listed = {path: os.listdir(path) for path in (f"{folder}/queue", f"{folder}/data/queue")}
    assert len(payloads(FileQueue(folder), 200)) == 200
    late = FileQueue(folder)
    begun = time.monotonic()
    with mock.patch.object(os, "listdir", lambda path: listed[path]):
        assert len(payloads(late, 300)) == 100
        assert late.lease(60, 1, 0)[:2] == ([], [])
    assert time.monotonic() - begun < 5, "a lost race costs a failed open, not a pause"
    assert late.status().completed == 300
    assert not any((folder / "data/movement").iterdir())


def test_a_movement_file_locked_by_another_host_delays_a_settlement(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(b"x")])
    _, (lease,), _ = queue.lease(60, 1, 0)
    with mock.patch("roq.workqueue.file_queue.directory.try_lock", side_effect=[False] * 20 + [True]):
        (token,) = queue.settle([Settlement.extend(lease.token, 60)])
    assert token


# --- acks synced late ---------------------------------------------------------------------------------------------------


def test_acks_synced_late_are_done_for_everybody_at_once_and_counted_soon(folder: Path) -> None:
    queue, other = FileQueue(folder, ack_sync_seconds=0.05), FileQueue(folder)
    queue.put([NewTask(RUNNABLE) for _ in range(600)])
    assert payloads(queue, 500) == [RUNNABLE] * 500
    assert other.status().ready == 100
    deadline = time.monotonic() + 5
    while other.status().completed < 500:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert payloads(queue, 100) == [RUNNABLE] * 100
    queue.close()
    assert other.status().completed == 600


def test_acks_synced_late_are_counted_when_a_program_ends_without_close(folder: Path) -> None:
    FileQueue(folder).put([NewTask(b"x")])
    words = (
        "import sys\nfrom roq.wire.task import Settlement\nfrom roq.workqueue.file_queue.queue import FileQueue\n"
        "queue = FileQueue(sys.argv[1], ack_sync_seconds=30)\n_, (one,) = queue.lease(9, 1, 0)[:2]\n"
        "queue.settle([Settlement.ack(one.token)])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", words, folder], check=True, timeout=20, env=environment)
    assert FileQueue(folder).status().completed == 1
