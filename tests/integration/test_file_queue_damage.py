"""The file queue whose files were damaged behind its back, or can't be read: what is damaged is named, the rest is served."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from roq.errors import UnknownFormat
from roq.wire.task import LeasedTask, NewTask, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.queue import FileQueue

RUNNABLE = json.dumps({"txt": "x" * 100, "class": "PrintTask"}).encode()
KINDS = {"json": (RUNNABLE, "queue"), "data": (b"\x00\x01payload" * 20, "data/queue")}
DAMAGED = 14


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def zero(path: Path, _: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def all_of(queue: FileQueue) -> list[LeasedTask[bytes]]:
    found: list[LeasedTask[bytes]] = []
    while leases := queue.lease(60, 100, 0)[1]:
        found += leases
        assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * len(leases)
    return found


@pytest.mark.parametrize("harm", [flip, cut, zero])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_payloads_are_named_and_the_others_served(
    folder: Path, kind: str, harm: Callable[[Path, random.Random], None], caplog: pytest.LogCaptureFixture
) -> None:
    payload, place = KINDS[kind]
    queue, chance = FileQueue(folder), random.Random(7)
    ids = queue.put([NewTask(payload) for _ in range(DAMAGED + 20)])
    harmed = sorted(chance.sample(ids, DAMAGED))
    for id in harmed:
        harm(folder / place / f"0--{id}.{kind}", chance)
    for view in queue.peek(TaskState.READY, 100):
        assert (view.payload, bool(view.error)) == ((b"", True) if view.id in harmed else (payload, False))
    with caplog.at_level(logging.ERROR):
        served = all_of(queue)
    assert sorted(lease.id for lease in served) == sorted(set(ids) - set(harmed))
    assert {lease.payload for lease in served} == {payload}
    letters = queue.peek(TaskState.DEAD, 100)
    assert sorted(letter.id for letter in letters) == harmed
    for letter in letters:
        assert letter.payload == b"", "nothing of it is shown as if it were a payload"
        assert letter.id in letter.error
        assert "damaged" in letter.error
        assert str(folder / "dead" / f"{letter.id}.{kind}") in letter.error
        assert any(letter.id in record.getMessage() for record in caplog.records)
    assert (queue.status().ready, queue.status().leased, queue.status().dead) == (0, 0, DAMAGED)


@pytest.mark.quick
def test_a_task_repaired_from_elsewhere_is_requeued_and_served(folder: Path) -> None:
    queue = FileQueue(folder)
    (id,) = queue.put([NewTask(b"precious")])
    path = folder / "data/queue" / f"0--{id}.data"
    good = path.read_bytes()
    zero(path, random.Random())
    assert all_of(queue) == []
    assert queue.requeue_dead([id]) == 1
    assert all_of(queue) == [], "it is damaged still"
    (folder / "dead" / f"{id}.data").write_bytes(good)
    assert queue.requeue_dead([id]) == 1
    assert [lease.payload for lease in all_of(queue)] == [b"precious"]


@contextmanager
def bad_sectors(*paths: Path) -> Iterator[None]:
    """Reading these files fails as it does on a disk that has lost them."""
    read, bad = os.read, {(found.st_dev, found.st_ino) for found in (path.stat() for path in paths)}

    def failing(fd: int, count: int) -> bytes:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, count)

    with mock.patch.object(os, "read", failing):
        yield


@pytest.mark.parametrize("part", ["queue", "movement"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_can_not_be_read_are_named_and_the_others_served(folder: Path, kind: str, part: str) -> None:
    payload, place = KINDS[kind]
    queue = FileQueue(folder, TaskSettings(max_attempts=3))
    ids = queue.put([NewTask(payload) for _ in range(6)])
    bad = {"queue": folder / place / f"0--{ids[0]}.{kind}", "movement": folder / place / f"../movement/{ids[0]}"}[part]
    with bad_sectors(bad):
        assert queue.status().ready == 6
        assert len(queue.peek(TaskState.READY, 10)) == 6
        served = all_of(queue)
        assert sorted(lease.id for lease in served) == sorted(ids[1:])
        (letter,) = queue.peek(TaskState.DEAD, 10)
        assert letter.id == ids[0]
        assert "can not be read" in letter.error
        assert letter.id in letter.error
    assert queue.requeue_dead(None) == 1
    assert [lease.payload for lease in all_of(queue)] == [payload], "the disk gives it back"


def test_release_all_passes_over_what_can_not_be_read(folder: Path) -> None:
    queue = FileQueue(folder)
    ids = queue.put([NewTask(b"x") for _ in range(3)])
    queue.lease(60, 3, 0)
    with bad_sectors(folder / "data/movement" / ids[1]):
        assert queue.release_all() == 2
    assert (queue.status().ready, queue.status().dead) == (2, 1)


# --- 0.1 ------------------------------------------------------------------------------------------------------------------

SETTINGS_0_1 = b'{"version":1,"settings":{"max_attempts":2,"dedup_seconds":300.0,"payload_bytes_max":1048576}}'


def folder_of_0_1(folder: Path) -> tuple[str, str]:
    """As 0.1 left it: a task of each kind, the first one leased once."""
    json_id, data_id = (names.unsealed(id) for id in names.IdMaker().make(1_700_000_000_000, [0, 0]))
    for part in ("queue", "movement", "data/queue", "data/movement", "dead", "meta", "dedup", "tmp"):
        (folder / part).mkdir(parents=True)
    (folder / "roq.json").write_bytes(SETTINGS_0_1)
    leased = f"1700000100--{json_id}.json"
    (folder / "queue" / leased).write_text(json.dumps({"payload": json.loads(RUNNABLE), "queueName": "q", "id": json_id}))
    (folder / "movement" / json_id).write_text(f"0--{json_id}.json\n{leased}\n")
    (folder / "data/queue" / f"0--{data_id}.data").write_bytes(b"of 0.1")
    (folder / "data/movement" / data_id).write_text(f"0--{data_id}.data\n")
    (folder / "insertions").write_text("2")
    return json_id, data_id


def test_a_folder_of_0_1_is_served_and_closed_to_0_1_by_the_first_put(folder: Path) -> None:
    json_id, data_id = folder_of_0_1(folder)
    queue = FileQueue(folder)
    assert queue.settings.max_attempts == 2
    assert (folder / "roq.json").read_bytes() == SETTINGS_0_1, "who only looks or works changes nothing"
    (new,) = queue.put([NewTask(b"new")])
    assert json.loads((folder / "roq.json").read_bytes())["version"] != 1, "0.1 would hand out the checksum with the payload"
    assert FileQueue(folder, queue.settings).settings == queue.settings
    found = {lease.id: (lease.payload, lease.attempt) for lease in all_of(queue)}
    assert {json_id, data_id, new} == set(found)
    assert found[data_id] == (b"of 0.1", 1)
    assert json.loads(found[json_id][0]) == json.loads(RUNNABLE)
    assert found[json_id][1] == 2
    assert (queue.status().inserted, queue.status().completed) == (3, 3)


def test_a_folder_of_a_later_version_is_refused(folder: Path) -> None:
    FileQueue(folder)
    (folder / "roq.json").write_text('{"version":4,"settings":{}}')
    with pytest.raises(UnknownFormat, match="version 4, this program knows 1 and 3"):
        FileQueue(folder)
