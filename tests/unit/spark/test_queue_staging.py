"""What writers stage, and what becomes of it: batches that lose their rows, litter, the folder of a queue.

Not covered: publications cut short (test_queue_protocol.py).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, StructType

import roq.blocking
from roq.spark.queue_files import ArrowFile
from roq.spark.queue_options import QueueOptions, queue_options
from roq.spark.queue_outlets import SAVE, opened, staged_schema
from roq.spark.queue_write import (
    DONE_KEEP_SECONDS,
    LITTER_SECONDS,
    Publication,
    QueueBatchWriter,
    QueueStreamWriter,
    Staged,
    stage,
    writer_of,
)

SCHEMA = StructType().add("payload", BinaryType())


@pytest.fixture(params=["log", "file"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> QueueOptions:
    address = f"{request.param}://{tmp_path}/out"
    with roq.blocking.open_queue(address):
        return queue_options({"address": address})


def staged(options: QueueOptions, job: str, batch: int, numbers: range) -> list[ArrowFile]:
    schema = staged_schema(["payload"])
    rows = pa.RecordBatch.from_arrays([pa.array([b"%d" % number for number in numbers])], schema=schema)
    return stage(Publication(options.staging_folder(), job, batch).folder, f"0-{numbers.start}", [rows], schema)


def told(job: str, files: list[ArrowFile]) -> list[Staged]:
    """What the tasks of a batch tell the driver."""
    return [Staged(job, 0, tuple(file.values() for file in files), 10), Staged(job, 1, (), 0)]


def numbers_in(options: QueueOptions) -> list[int]:
    with roq.blocking.open_queue(options.address) as queue:
        return sorted(int(task.payload) for task in queue.lease(60, 1000))


def files_in(options: QueueOptions) -> list[str]:
    folder = options.staging_folder()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def age(folder: Path, seconds: float) -> None:
    at = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (at, at))


# --- a batch that has no rows when it is run again ----------------------------------------------------------------------


def test_a_batch_half_published_is_finished_though_its_next_run_has_no_rows(options: QueueOptions) -> None:
    publication = Publication(options.staging_folder(), "query", 5)
    plan, _ = publication.decide([*staged(options, "query", 5, range(10)), *staged(options, "query", 5, range(10, 20))])
    with opened(options, "query", plan.decided, 10, publication.folder) as outlet:
        publication.publish(type(plan)(plan.files[:1], plan.decided), outlet)  # and the driver dies
    with roq.blocking.open_queue(options.address) as queue:
        assert queue.status().ready == 10
    writer = writer_of(QueueStreamWriter, options, SCHEMA, False)
    writer.commit(told("query", []), 5)
    assert publication.done
    assert numbers_in(options) == list(range(20))


def test_a_batch_with_a_row_that_is_too_large_can_come_again_without_it(tmp_path: Path) -> None:
    address = f"log://{tmp_path}/small"
    with roq.blocking.open_queue(address, payload_bytes_max=100):
        options = queue_options({"address": address})
    writer = writer_of(QueueStreamWriter, options, SCHEMA, False)
    files = staged(options, "query", 3, range(10))
    large = Staged("query", 0, tuple(file.values() for file in files), 101)
    with pytest.raises(PySparkException, match=r"\[ROQ_PAYLOAD_TOO_LARGE\]"):
        writer.commit([large], 3)
    writer.abort([large], 3)
    writer.commit(told("query", staged(options, "query", 3, range(10, 15))), 3)
    assert numbers_in(options) == list(range(10, 15))


def test_a_batch_without_rows_leaves_nothing_behind(options: QueueOptions) -> None:
    writer = writer_of(QueueStreamWriter, options, SCHEMA, False)
    writer.commit(told("query", staged(options, "query", 1, range(10))), 1)
    Publication(options.staging_folder(), "query", 2).folder.mkdir()  # as a task does that has no rows
    writer.commit(told("query", []), 2)
    assert not Publication(options.staging_folder(), "query", 2).done
    assert files_in(options) == ["query", "query/done.json"]
    writer.commit([], 3)
    assert numbers_in(options) == list(range(10))


# --- litter --------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_no_folders(options: QueueOptions) -> None:
    job = f"{SAVE}1"
    files = staged(options, job, 0, range(10))
    QueueBatchWriter(options, ("payload",), job).abort([*told(job, files), None])
    assert files_in(options) == []


def test_what_killed_saves_left_goes_after_a_day_planned_or_not(options: QueueOptions) -> None:
    staging = options.staging_folder()
    killed, unplanned, empty, going = (f"{SAVE}{name}" for name in ("killed", "unplanned", "empty", "going"))
    Publication(staging, killed, 0).decide(staged(options, killed, 0, range(10)))
    staged(options, unplanned, 0, range(10))
    (staging / empty).mkdir()
    age(staging, LITTER_SECONDS + 60)
    Publication(staging, going, 0).decide(staged(options, going, 0, range(10)))
    Publication(staging, "other", 0).sweep()
    assert {path.split("/")[0] for path in files_in(options)} == {going}


def test_plans_of_streams_are_kept_for_the_next_run(options: QueueOptions) -> None:
    staging = options.staging_folder()
    Publication(staging, "query", 7).decide(staged(options, "query", 7, range(10)))
    staged(options, "query", 8, range(10))
    age(staging, LITTER_SECONDS + 60)
    Publication(staging, "other", 0).sweep()
    assert Publication(staging, "query", 7).planned
    assert not (staging / "query/8").exists()


def test_a_stream_that_goes_on_after_a_long_rest_keeps_what_it_stages_today(options: QueueOptions) -> None:
    staging = options.staging_folder()
    for job in ("resting", "gone"):
        Publication(staging, job, 6).decide(staged(options, job, 6, range(10)))
        Publication(staging, job, 6).note()
    age(staging, DONE_KEEP_SECONDS + 60)
    files = staged(options, "resting", 7, range(10, 20))
    Publication(staging, "other", 0).sweep()
    assert not (staging / "gone").exists()
    writer_of(QueueStreamWriter, options, SCHEMA, False).commit(told("resting", files), 7)
    assert numbers_in(options) == list(range(10, 20))


# --- whose folder it is --------------------------------------------------------------------------------------------------


def test_the_folder_of_a_queue_does_not_depend_on_how_its_address_is_written() -> None:
    def folder(address: str, **more: str) -> str:
        return queue_options({"address": address, "staging": "/staging", **more}).staging_folder().name

    mine = folder("roq://zk1:2181,zk2:2181/prod/tasks")
    assert mine == folder("roq://ZK2,zk1/prod/tasks") == folder("roq://zk2:2181,zk3:2181,zk4:2181/prod/tasks")
    assert folder("log:///data/x%20y") == folder("log:///data//x y/")
    others = (
        "roq://zk1:2181,zk2:2181/test/tasks",
        "roq://zk1:2181,zk2:2181/prod/others",
        "log:///prod/tasks",
        "file:///prod/tasks",
    )
    assert len({mine, *map(folder, others), folder("roq://zk1:2181,zk2:2181/prod/tasks", kind="queue")}) == 6


def test_a_publication_has_the_same_folder_in_any_order_of_zookeepers_but_not_in_another_cluster() -> None:
    def folder(address: str) -> str:
        return queue_options({"address": address, "staging": "/staging", "publication": "2026-11"}).staging_folder().name

    assert folder("roq://zk1:2181,zk2:2181/tasks") == folder("roq://zk2,zk1/tasks")
    assert folder("roq://zk1:2181/tasks") != folder("roq://zk9:2181/tasks"), "what that one published says nothing here"
