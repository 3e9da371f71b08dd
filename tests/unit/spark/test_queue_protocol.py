"""Leases, manifests and publications step by step, without Spark running: what a driver that died leaves to the next one.

Not covered: Spark's own order of these steps (tests/spark/test_queue_stream.py, test_queue_crashes.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import roq.blocking
from roq.errors import DataLost, ManifestGone, ManifestsTaken
from roq.spark import queue_ledger
from roq.spark.queue_feed import LeaseFeed
from roq.spark.queue_files import ArrowFile
from roq.spark.queue_options import queue_options
from roq.spark.queue_outlets import opened, staged_schema
from roq.spark.queue_write import BatchPlan, Publication, stage
from roq.workqueue.address import open_backend
from tests.unit.spark.queue_feeding import LIMIT, address_in, die, drain, feed, payloads, renewed, status

LEASE_SECONDS = 9.0  # renewed twice in six; two thirds of it are for a machine that is busy


@pytest.mark.parametrize("scheme", ["log", "file"])
def test_a_stream_takes_everything_once_and_acks_it(scheme: str, tmp_path: Path) -> None:
    address = address_in(scheme, tmp_path, 450)
    read = feed(address)
    assert sorted(drain(read, read.first())) == list(range(450))
    read.close()
    assert status(address) == (0, 0, 450)
    assert not list((tmp_path / "queue/spark/manifests").glob("*.arrow")), "acked manifests go"


@pytest.mark.parametrize("leases", ["hold", "over"])
@pytest.mark.parametrize("scheme", ["log", "file"])
def test_what_was_leased_and_never_told_to_spark_comes_first(scheme: str, leases: str, tmp_path: Path) -> None:
    address = address_in(scheme, tmp_path, 250)
    first = feed(address)
    told = first.plan(first.first(), LIMIT)
    assert told["n"] == 1
    die(first, address, leases)
    second = feed(address)
    start = second.first()
    assert payloads(second, start, second.plan(start, LIMIT)) == list(range(100))
    assert sorted(drain(second, start)) == list(range(250)), "each once, though the first stream's leases are over"
    second.close()
    assert status(address) == (0, 0, 250)


@pytest.mark.parametrize("leases", ["hold", "over"])
def test_a_batch_that_is_run_again_has_the_same_rows_and_its_tasks_do_not_come_twice(leases: str, tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 250)
    first = feed(address)
    start = first.first()
    end = first.plan(start, LIMIT)
    before = payloads(first, start, end)
    die(first, address, leases)  # Spark had written the offset down
    second = feed(address)
    assert payloads(second, start, end) == before
    assert sorted(drain(second, end)) == list(range(100, 250)), "the second lease of these tasks is none of a new row"
    second.close()
    assert status(address) == (0, 0, 250)


def test_a_batch_committed_after_its_leases_were_over_is_still_done(tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 100)
    first = feed(address)
    end = first.plan(first.first(), LIMIT)
    die(first, address, "over")  # after Spark's commit: nothing is acked
    assert status(address) == (100, 0, 0)
    second = LeaseFeed(queue_options({"address": address, "maxRowsPerBatch": "100"}))
    second.done(end)
    assert second._ledger.wait_acked(10)
    second.freeze()
    assert drain(second, end) == []
    second.close()
    assert status(address) == (0, 0, 100)


def test_what_was_leased_ahead_goes_back_when_a_stream_stops(tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 250)
    read = feed(address)
    read.plan(read.first(), LIMIT)
    read.close()
    assert status(address) == (150, 100, 0)


def test_one_stream_per_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address_in("log", tmp_path, 1)
    monkeypatch.setattr(queue_ledger, "LOCK_SECONDS", 0.1)
    read = feed(address)
    with pytest.raises(ManifestsTaken, match='option\\("manifests"'):
        feed(address)
    other = feed(address, manifests=str(tmp_path / "others"))
    other.close()
    read.close()


def test_a_manifest_that_is_gone_or_damaged_is_told(tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 200)
    read = feed(address)
    start = read.first()
    end = read.plan(start, LIMIT)
    part = read.parts(start, end)[0]
    path = Path(ArrowFile(*part.files[0]).path)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"x" + data[101:])
    with pytest.raises(ManifestGone, match="damaged"):
        list(part.rows())
    path.unlink()
    with pytest.raises(ManifestGone, match="can't be read"):
        list(part.rows())
    with pytest.raises(ManifestGone, match="belongs to manifests of stream"):
        read.plan({"stream": "another", "n": 1}, LIMIT)
    read._ledger._open.clear()
    with pytest.raises(ManifestGone, match="begin with a new checkpoint"):
        read.parts(start, end)
    read.close()


@pytest.mark.parametrize("scheme", ["log", "file"])
def test_leases_of_open_manifests_are_renewed(scheme: str, tmp_path: Path) -> None:
    address = address_in(scheme, tmp_path, 20)
    backend = open_backend(address, None)
    ledger = queue_ledger.Ledger(tmp_path / "manifests", address, backend, LEASE_SECONDS, lambda error: None)
    began = time.monotonic()
    ledger.add(backend.lease(LEASE_SECONDS, 20, 0.0)[1], began)
    renewed(backend, 20)
    assert backend.status().leased == 20
    ledger.commit(1)
    assert ledger.wait_acked(10)
    assert backend.status().completed == 20, "the tokens of today"
    ledger.close()
    backend.close()


# --- publications -----------------------------------------------------------------------------------------------------


class Torn(Exception):
    """The process died here."""


def staged_files(publication: Publication, attempt: int, numbers: range) -> list[ArrowFile]:
    schema = staged_schema(["payload", "dedup_key"])
    rows = [b"%d" % number for number in numbers]
    batches = [pa.RecordBatch.from_arrays([pa.array(rows), pa.array([f"k{row!r}" for row in rows])], schema=schema)]
    return stage(publication.folder, f"0-{attempt}", batches, schema)


def publish(address: str, publication: Publication, files: list[ArrowFile], rows_until_death: int = 1_000_000) -> BatchPlan:
    """A commit that dies after some rows."""
    plan, _ = publication.decide(files)
    with opened(queue_options({"address": address}), publication.job, plan.decided, 10, publication.folder) as outlet:
        published = 0

        class Dying:
            def publish(self, number: int, batch: pa.RecordBatch) -> None:
                nonlocal published
                for row in range(0, batch.num_rows, 10):
                    if published >= rows_until_death:
                        raise Torn
                    outlet.publish(number + row, batch.slice(row, 10))
                    published += 10

            def flush(self) -> None:
                outlet.flush()

            def end(self) -> None:
                outlet.end()

            def close(self) -> None:
                """The test's own."""

        publication.publish(plan, Dying())
    return plan


def numbers_in(address: str) -> list[int]:
    with roq.blocking.open_queue(address) as queue:
        return sorted(int(task.payload) for task in queue.lease(60, 1000))


@pytest.fixture(params=["log", "file"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    address = f"{request.param}://{tmp_path}/out"
    with roq.blocking.open_queue(address):
        yield address


def test_a_publication_cut_short_goes_on_with_the_rows_that_were_chosen(target: str, tmp_path: Path) -> None:
    publication = Publication(tmp_path / "staging", "query", 7)
    with pytest.raises(Torn):
        publish(target, publication, staged_files(publication, 1, range(100)), rows_until_death=40)
    with roq.blocking.open_queue(target) as queue:
        done = queue.lease(60, 15)
        queue.ack_many(done)
    again = Publication(tmp_path / "staging", "query", 7)
    assert not again.done
    publish(target, again, staged_files(again, 2, range(99, -1, -1)))  # Spark ran the tasks again, in another order
    again.note()
    assert again.done
    assert sorted([*numbers_in(target), *(int(task.payload) for task in done)]) == list(range(100))


def test_an_abort_keeps_what_is_or_may_be_published(tmp_path: Path, target: str) -> None:
    publication = Publication(tmp_path / "staging", "query", 1)
    files = staged_files(publication, 1, range(10))
    plan = publish(target, publication, files)
    publication.abandon(files)
    assert all(Path(ArrowFile(*values).path).exists() for values in plan.files)
    other = Publication(tmp_path / "staging", "query", 2)
    files = staged_files(other, 1, range(10))
    other.abandon(files)
    assert not any(Path(file.path).exists() for file in files)


def test_staged_rows_that_are_gone_are_told(tmp_path: Path, target: str) -> None:
    publication = Publication(tmp_path / "staging", "query", 1)
    files = staged_files(publication, 1, range(10))
    Path(files[0].path).unlink()
    with pytest.raises(DataLost, match="staged rows"):
        publish(target, publication, files)
    assert numbers_in(target) == []


def test_numbers_count_after_the_tasks_are_done(tmp_path: Path, target: str) -> None:
    publication = Publication(tmp_path / "staging", "query", 1)
    files = staged_files(publication, 1, range(20))
    publish(target, publication, files)
    with roq.blocking.open_queue(target) as queue:
        queue.ack_many(queue.lease(60, 1000))
    publish(target, publication, files)
    assert numbers_in(target) == []


def test_delay_and_priority_arrive(tmp_path: Path, target: str) -> None:
    schema = staged_schema(["payload", "priority", "delay_seconds"])
    rows = pa.RecordBatch.from_arrays(
        [pa.array([b"a", b"b", b"c"]), pa.array([0, 5, None]), pa.array([None, 0.0, 60.0])], schema=schema
    )
    publication = Publication(tmp_path / "staging", "query", 1)
    publish(target, publication, stage(publication.folder, "0-0", [rows], schema))
    with roq.blocking.open_queue(target) as queue:
        assert [(task.payload, task.priority) for task in queue.peek()] == [(b"b", 5), (b"a", 0)]
        assert [task.payload for task in queue.peek("delayed")] == [b"c"]
        assert queue.status().inserted == 3
