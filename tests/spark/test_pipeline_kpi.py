"""The job kpi: the history is complete, nothing is in it twice, the report's numbers are those of the records."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from roq.errors import CallError, InvalidPolicy
from roq.pubsub.scaling.what_if import what_if
from roq.spark.pipeline import kpi
from roq.spark.pipeline.capacity import QueueReport
from roq.spark.pipeline.job import read_kept
from roq.spark.pipeline.kpi_records import HISTORY, READ_ARROW, read_lines, record_of, row_of
from roq.wire.kpi import ExchangeKpi, HostKpi, PublisherKpi, QueueKpi, QueueTotals, SubscriberKpi
from roq.wire.policy import ExchangeRule, Policy

BEGIN = 1_790_000_000.25  # 2026-09-21T14:13:20Z
STRICT = "[exchange]\nmax_messages_per_second = 500\n"
RULES = Policy(exchange=ExchangeRule(max_messages_per_second=500))
BIG = 1 << 63  # ids are unsigned


def record(second: float, *, queue: str = "orders", load: float = 300.0, term: int = 1, lost: int = 0) -> QueueKpi:
    """Three publishers on one Exchange, two subscribers."""
    publishers = tuple(PublisherKpi(BIG + number, "a", load / 3, load, 0.0, 0) for number in range(3))
    exchange = ExchangeKpi("a", "h", "active", 3, load, 3 * load, 6 * load, load / 2000, 2**25)
    subscribers = tuple(
        SubscriberKpi(BIG + 9 + number, True, load, load, 0.002, 0.001 * number, 0.004 * number, lost, 0) for number in range(2)
    )
    host = HostKpi("h", load / 2000 + 0.1, 0.5, 1, 8)
    return QueueKpi(queue, BEGIN + second, term, load, 3 * load, 2 * load, lost, (exchange,), publishers, subscribers, (host,))


def lines(*records: QueueKpi) -> str:
    return "".join(msgspec.json.encode(each).decode() + "\n" for each in records)


def history(spark: SparkSession, folder: Path) -> list[QueueKpi]:
    rows = read_kept(spark, str(folder), HISTORY).orderBy("queue", "time", "term").collect()
    return [record_of(row.asDict(recursive=True)) for row in rows]


def run(spark: SparkSession, *given: str) -> kpi.KpiResult:
    return kpi.work(spark, kpi.parser().parse_args(given))


def reports(result: kpi.KpiResult) -> list[QueueReport]:
    return msgspec.json.decode(Path(result.report).read_bytes(), type=list[QueueReport])


def test_a_history_from_before_there_were_totals_is_read(spark: SparkSession, tmp_path: Path) -> None:
    counted = msgspec.structs.replace(record(1), totals=QueueTotals(300, 900, 600, 1, 2))
    assert record_of(row_of(counted)) == counted
    older = StructType([field for field in HISTORY.fields if field.name != "totals"])
    spark.createDataFrame([{name: row_of(counted)[name] for name in older.names}], older).write.parquet(str(tmp_path / "old"))
    assert history(spark, tmp_path / "old") == [record(1)]


def test_lines_become_rows_and_rows_records() -> None:
    records = [record(second) for second in range(3)]
    given = [*lines(*records).splitlines(), "", '{"queue": "or', lines(record(1e13)).strip(), "[]"]
    batch = pa.RecordBatch.from_pydict({"value": given})
    rows = [row for found in read_lines(iter([batch])) for row in found.to_pylist()]
    assert [record_of(row) for row in rows if row["unreadable"] is None] == records
    told = [row["unreadable"] for row in rows if row["unreadable"] is not None]
    assert len(told) == 3
    assert "truncated" in told[0]
    assert "not a time" in told[1]
    assert next(iter(read_lines(iter([batch])))).schema.names == READ_ARROW.names


def test_every_record_is_in_the_history_once(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(second, queue=queue) for queue in ("orders", "visits") for second in (0, 1, 2, 40_000, 40_001)]
    (tmp_path / "one.jsonl").write_text(lines(*records[:6]) + '{"queue": "ord')
    (tmp_path / "two.jsonl").write_text(lines(*records[4:]))
    folder = tmp_path / "history"
    first = run(spark, "--history", str(folder), "--records", f"{tmp_path}/one.jsonl")
    assert (first.added, first.known, first.unreadable) == (6, 0, 1)
    assert "left out, not a KPI record" in capsys.readouterr().err
    second = run(spark, "--history", str(folder), "--records", f"{tmp_path}/*.jsonl")
    assert (second.added, second.known) == (4, 6)
    assert history(spark, folder) == sorted(records, key=lambda each: (each.queue, each.time))
    assert sorted(path.name for path in folder.glob("day=*")) == ["day=2026-09-21", "day=2026-09-22"]


def test_what_a_killed_job_had_collected_is_added_by_the_next(spark: SparkSession, tmp_path: Path) -> None:
    left = tmp_path / "history" / kpi.COLLECTED / "records.jsonl"
    left.parent.mkdir(parents=True)
    left.write_text(lines(record(0), record(1), record(1, term=2), record(0)))
    (tmp_path / "one.jsonl").write_text(lines(record(2)))
    assert run(spark, "--history", f"file://{tmp_path}/history", "--records", f"{tmp_path}/one.jsonl").added == 4
    assert not left.exists()
    assert len(history(spark, tmp_path / "history")) == 4


@pytest.fixture
def loaded(spark: SparkSession, tmp_path: Path) -> Path:
    """A history: a rise from 300 to 1,200 messages/s and a gap; a queue of its own beside it."""
    records = [record(second, load=300.0 if second < 60 else 1200.0, lost=4 if second >= 30 else 0) for second in range(90)]
    records += [record(second, load=1200.0, term=2, lost=2) for second in range(100, 120)]
    records += [record(second, queue="calm", load=30.0) for second in range(10)]
    (tmp_path / "all.jsonl").write_text(lines(*records))
    (tmp_path / "strict.toml").write_text(STRICT)
    run(spark, "--history", f"{tmp_path}/history", "--records", f"{tmp_path}/all.jsonl")
    return tmp_path


def test_the_report_and_its_pictures_tell_what_was_and_what_would_have_been(spark: SparkSession, loaded: Path) -> None:
    given = ("--history", f"{loaded}/history", "--report", f"{loaded}/report", "--policy", f"{loaded}/strict.toml")
    result = run(spark, *given)
    calm, orders = reports(result)
    assert (calm.queue, calm.records, orders.queue, orders.records) == ("calm", 10, "orders", 110)
    assert (orders.missing_seconds, orders.sparse_records, calm.missing_seconds) == (10, 1, 0)
    assert "10 s have no record" in orders.in_words()
    assert "have no record" not in calm.in_words()
    assert "warning" not in orders.in_words()
    assert orders.lost == 6  # 4, and 2 of the next term
    assert orders.messages_per_second.highest == 1200
    assert orders.messages_per_second.highest_at == "2026-09-21T14:14:20Z"
    assert orders.messages_per_second.mean == pytest.approx((60 * 300 + 50 * 1200) / 110)
    assert orders.latency_p99_seconds is not None
    assert orders.latency_p99_seconds.median == 0.004
    assert (orders.exchanges_least, orders.exchanges_most, orders.exchange_hours) == (1, 1, round(110 / 3600, 4))
    steps = list(what_if([each for each in history(spark, loaded / "history") if each.queue == "orders"], RULES))
    trial = orders.trials[0]
    assert trial.policy == "strict"
    assert trial.exchanges_most == max(len(step.kpi.exchanges) for step in steps) == 3
    assert (trial.over_seconds, trial.recorded_over_seconds) == (sum(step.over for step in steps), 50)
    assert trial.over_seconds < 10
    assert [each.cause for each in trial.decisions] == [each.cause for step in steps for each in step.decisions]
    assert trial.actions["scale-out"] == 2
    assert calm.trials[0].actions == {}
    assert [Path(path).name for path in result.pictures] == ["capacity-calm.svg", "capacity-orders.svg"]
    root = ElementTree.parse(result.pictures[1]).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Load (messages/s)", "Exchanges", "policy strict", "as it was", "p99, highest", "published", "delivered"} <= set(
        texts
    )
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 14  # seven lines, each divided by the gap


def test_records_too_far_apart_for_a_policy_are_told(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "thin.jsonl").write_text(lines(*(record(4 * number, load=1200.0) for number in range(20))))
    (tmp_path / "strict.toml").write_text(STRICT)
    given = ("--history", f"{tmp_path}/history", "--records", f"{tmp_path}/thin.jsonl", "--report", f"file://{tmp_path}/report")
    (thin,) = reports(run(spark, *given, "--policy", f"{tmp_path}/strict.toml"))
    assert (thin.records, thin.missing_seconds, thin.sparse_records) == (20, 57, 19)
    assert "57 s have no record" in thin.in_words()
    assert "warning: 19 records came more than 3 s after the one before" in thin.in_words()


def test_wrong_calls(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(CallError, match="is empty"):
        run(spark, "--history", f"{tmp_path}/history", "--report", f"{tmp_path}/report")
    with pytest.raises(CallError, match="give --report"):
        run(spark, "--history", f"{tmp_path}/history", "--policy", __file__)
    with pytest.raises(InvalidPolicy):
        run(spark, "--history", f"{tmp_path}/history", "--report", f"{tmp_path}/report", "--policy", f"{tmp_path}/none.toml")
    with pytest.raises(CallError, match="--report has to be a folder of this machine"):
        run(spark, "--history", f"{tmp_path}/history", "--report", "s3a://bucket/report")
    with pytest.raises(CallError, match="first kept on this machine"):
        run(spark, "--history", "s3a://bucket/history", "--cluster", "127.0.0.1:1")
    with pytest.raises(PySparkException, match=r"none\.jsonl"):
        run(spark, "--history", f"{tmp_path}/history", "--records", f"{tmp_path}/none.jsonl")
