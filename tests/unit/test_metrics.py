"""Metrics: which samples a cluster and work queues give, and that what examples/monitoring asks for is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from prometheus_client.core import Metric
from typer.testing import CliRunner

from hcm.machine import ProcessUsage
from hcm.metrics import HostLook, HostMetrics, ProcessAnswer
from roq.cli import metrics_server as metrics
from roq.cli.main import app
from roq.cli.metrics import LISTEN, sources
from roq.cli.metrics_server import Sources, answer
from roq.client.metrics import ScrapedSources, families
from roq.client.overview import ExchangeRow, HostRow, Overview, QueueRow
from roq.config import listen_place
from roq.errors import InvalidAddress, InvalidConfiguration
from roq.runtime.scraping import metrics_answer
from roq.wire.assignment import ProcessKind, ProcessState, RunningProcess
from roq.wire.process import Pong
from roq.wire.store import StoreView, SyncTimes
from roq.wire.task import Status
from roq.workqueue.queue import open_queue

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
HOST = HostRow("h1", "10.0.0.1", True, False, 1, 8, 1, 5, 1, 3, 0.5, 0.25, 1e9)
EXCHANGE = ExchangeRow("orders", "e1", "h1", "10.0.0.1", "active", 2, 3, 0.0, 0.0, 0.0, 0.75, 4096)
QUEUE = QueueRow("orders", True, True, 1, "drop", "h1", 1, 2, 3, 10.0, 100.0, 30.0, 0.5, 99, "", 0.02, 1000, 10_000, 3000, 4, 7)
AWAY = QueueRow("away", True, True, 1, "drop", "h1", 1, problem="its Monitor does not answer")  # as it is read
OVERVIEW = Overview(1e9, "10.0.0.1:5500", 4, (HOST,), (QUEUE, AWAY), (EXCHANGE,), ())
FOUND = ScrapedSources(
    {"zk1:2181": True, "file:///data/tasks": True, "gone": False},
    OVERVIEW,
    {
        "file:///data/tasks": Status(3, 2, 1, 4, 100, 110, 5500),
        "jobs": Status(0, 0, 0, 0, 0, 0),
        "orders@billing": Status(5, 0, 1, 0, 7, 17, 100, 2500, expired=4, lag=30),
    },
)


def samples(found: ScrapedSources) -> dict[tuple[str, ...], float]:
    """Value by name and labels."""
    return samples_of(families(found))


def samples_of(all_families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sample.labels.items())): sample.value
        for family in all_families
        for sample in family.samples
    }


def host_families() -> list[Metric]:
    """All that a host can tell."""
    process = RunningProcess("exchange/q/e", ProcessKind.EXCHANGE, "q", "e", ProcessState.RUNNING, 1, {})
    usage = ProcessUsage(1.0, 1, 1.0)
    store = StoreView("h1", "d", 1, 1, 1, 1, {}, "l", 1, 1, SyncTimes((0.1,), (1, 1), 0.5))
    look = HostLook(
        (ProcessAnswer(process, usage, Pong(process.name, 1, {"tape_waiting_bytes": 1})),), usage, 0, store, "connected", True
    )
    return list(HostMetrics("h1", 0.0).families(look))


def test_what_is_found_is_what_is_served() -> None:
    got = samples(FOUND)
    for wanted, value in {
        ("roq_up", "source=zk1:2181"): 1,
        ("roq_up", "source=gone"): 0,
        ("roq_gcm_leader_info", "leader=10.0.0.1:5500"): 1,
        ("roq_gcm_epoch",): 4,
        ("roq_host_up", "host=h1"): 1,
        ("roq_host_processes_failed", "host=h1"): 1,
        ("roq_host_process_restarts", "host=h1"): 3,
        ("roq_host_card_expiry_timestamp_seconds", "host=h1"): 1e9,
        ("roq_queue_ready", "queue=orders"): 1,
        ("roq_queue_ready", "queue=away"): 0,
        ("roq_messages_published_total", "queue=orders"): 1000,
        ("roq_messages_published_bytes_total", "queue=orders"): 10_000,
        ("roq_messages_delivered_total", "queue=orders"): 3000,
        ("roq_messages_dropped_total", "queue=orders"): 4,
        ("roq_messages_lost_total", "queue=orders"): 7,
        ("roq_subscriber_lag_seconds", "queue=orders"): 0.5,
        ("roq_delivery_latency_p99_seconds", "queue=orders"): 0.02,
        ("roq_exchange_busy_ratio", "queue=orders", "exchange=e1", "host=h1"): 0.75,
        ("roq_tasks", "queue=file:///data/tasks", "state=dead"): 4,
        ("roq_oldest_ready_seconds", "queue=file:///data/tasks"): 5.5,
        ("roq_oldest_ready_seconds", "queue=jobs"): 0,
        ("roq_tasks", "queue=orders@billing", "state=ready"): 5,
        ("roq_group_behind_seconds", "queue=orders@billing"): 2.5,
        ("roq_group_lag_messages", "queue=orders@billing"): 30,
        ("roq_tasks_expired_total", "queue=orders@billing"): 4,
        ("roq_tasks_expired_total", "queue=jobs"): 0,
        ("roq_group_missed_total", "queue=orders@billing"): 0,
        ("roq_tasks_completed_total", "queue=file:///data/tasks"): 100,
        ("roq_tasks_inserted_total", "queue=file:///data/tasks"): 110,
    }.items():
        assert got[wanted] == value, wanted


def test_of_a_monitor_that_does_not_answer_no_totals_are_told() -> None:
    """Zeros would be totals that start over: all that was ever published would come again."""
    asked = {name for name, *labels in samples(FOUND) if "queue=away" in labels}
    assert asked == {"roq_queue_running", "roq_queue_ready", "roq_queue_exchanges"}
    stopped = msgspec.structs.replace(OVERVIEW, queues=(msgspec.structs.replace(AWAY, problem="", running=False),))
    assert {name for name, *labels in samples(ScrapedSources({}, stopped, {})) if "queue=away" in labels} == asked


def test_their_number_does_not_depend_on_publishers_subscribers_or_tasks() -> None:
    crowded = msgspec.structs.replace(QUEUE, publishers=10_000, subscribers=10_000)
    overview = msgspec.structs.replace(OVERVIEW, queues=(crowded, AWAY))
    tasks = {**FOUND.tasks, "jobs": Status(10_000, 0, 0, 0, 0, 10_000)}
    assert samples(ScrapedSources(FOUND.up, overview, tasks)).keys() == samples(FOUND).keys()


def test_without_a_cluster_there_is_nothing_of_one() -> None:
    names = {name for name, *_ in samples(ScrapedSources({"jobs": True}, None, {"jobs": Status(1, 0, 0, 0, 0, 1)}))}
    totals = {f"roq_tasks_{what}_total" for what in ("completed", "inserted", "expired")}
    assert names == {"roq_up", "roq_tasks", "roq_oldest_ready_seconds", *totals}


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_examples_ask_for_what_there_is(file: str) -> None:
    text = (EXAMPLES / file).read_text()
    asked = set(re.findall(r"roq_\w+", text))
    assert len(asked) > 10
    assert asked <= {name for name, *_ in (*samples(FOUND), *samples_of(host_families()))}
    for found in re.findall(r"{{queue}}|{{(\w+)}}|\$labels\.(\w+)", text):
        assert {*found} <= {"", "host", "queue", "exchange", "source", "state", "kind", "leader"}


def test_the_page_tells_what_there_is_and_nothing_else() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "monitoring.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `roq_")]
    told = {name for row in rows for name in re.findall(r"roq_\w+", row.split("|")[1])}
    there = [*families(FOUND), *host_families()]
    assert told == {metric.name + "_total" * (metric.type == "counter") for metric in there}
    labels = {label for metric in there for sample in metric.samples for label in sample.labels}
    assert {*re.findall(r"`(\w+)`", "".join(row.split("|")[2] for row in rows)), "host"} == labels


def test_of_a_work_queue_that_is_no_group_it_is_not_told_how_far_it_is_behind() -> None:
    for metric in ("roq_group_behind_seconds", "roq_group_lag_messages"):
        assert [labels for name, *labels in samples(FOUND) if name == metric] == [["queue=orders@billing"]]


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["expr"] for panel in panels for target in panel["targets"])


def test_prometheus_own_tool_finds_nothing_wrong() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (on Debian: apt-get install prometheus)")
    checks = [(("metrics",), metrics_answer(one)[2]) for one in (families(FOUND), host_families())]
    for arguments, given in (
        *checks,
        (("rules", str(EXAMPLES / "alerts.yml")), b""),
        (("config", str(EXAMPLES / "prometheus.yml")), b""),
    ):
        done = subprocess.run([promtool, "check", *arguments], input=given, capture_output=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/metrics", "200 OK", 'roq_tasks{queue="ADDRESS",state="ready"} 2.0'),
        ("/v1/work-queues/QUOTED/status", "200 OK", '"ready":2,'),
        ("/v1/work-queues/gone/status", "404 Not Found", "error"),
        ("/v1/queues/nobody/status", "404 Not Found", "error"),
        ("/v1/queues", "404 Not Found", "error"),
        ("/health", "200 OK", "ok"),
        ("/", "404 Not Found", "error"),
    ],
)
async def test_answers(tmp_path: Path, path: str, status: str, text: str) -> None:
    address = f"file://{tmp_path}/tasks"
    async with open_queue(address) as queue:
        await queue.put_many([b"1", b"2"])
    sources = Sources(None, [address])
    got, _, body = await answer(sources, path.replace("QUOTED", quote(address, safe="")), "")
    await sources.close()
    assert (got, text.replace("ADDRESS", address) in body.decode()) == (status, True), body


async def test_a_folder_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, asked, goes_on = f"file://{tmp_path}/tasks", [], threading.Event()

    def hangs(address: str) -> Status:
        asked.append(address)
        goes_on.wait(30)
        return Status(1, 0, 0, 0, 0, 1)

    monkeypatch.setattr(metrics, "_look", hangs)
    monkeypatch.setattr(metrics, "SOURCE_SECONDS", 0.05)
    sources = Sources(None, [address])
    try:
        assert [await sources.status(address) for _ in range(3)] == [None] * 3
        assert asked == [address], "no thread for each who asks"
    finally:
        goes_on.set()
    monkeypatch.setattr(metrics, "SOURCE_SECONDS", 10.0)
    assert await sources.status(address) == Status(1, 0, 0, 0, 0, 1)
    goes_on.clear()
    monkeypatch.setattr(metrics, "SOURCE_SECONDS", 0.05)
    try:
        assert await sources.status(address) == Status(1, 0, 0, 0, 0, 1), "what was counted last"
        monkeypatch.setattr(metrics, "COUNTED_SECONDS", 0.0)
        assert await sources.status(address) is None, "but not for long"
    finally:
        goes_on.set()
    await sources.close()


async def test_one_that_may_not_be_read_says_nothing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = f"file://{tmp_path}/good", f"log://{tmp_path}/bad"
    async with open_queue(good) as queue:
        await queue.put(b"1")
    (tmp_path / "bad").mkdir()
    listed = os.listdir

    def denied(path: str) -> list[str]:
        if path == f"{tmp_path}/bad":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", denied)
    sources = Sources(None, [good, bad])
    found = await sources.read()
    await sources.close()
    assert (found.up, found.tasks[good].ready) == ({good: True, bad: False}, 1)


def test_prometheus_gets_openmetrics_if_it_asks_for_it() -> None:
    _, kind, body = metrics_answer(families(FOUND), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_autoscalers_get_numbers_alone() -> None:
    got = metrics.numbers(Status(0, 0, 0, 0, 0, 0))
    assert set(got) == {"ready", "delayed", "leased", "dead", "completed", "inserted", "oldest_seconds"}
    group = metrics.numbers(FOUND.tasks["orders@billing"])
    assert (group["behind_seconds"], group["lag"], group["expired"]) == (2.5, 30, 4)
    assert "lag" not in metrics.numbers(Status(0, 0, 0, 0, 0, 0, behind_ms=0)), "it is not known"


def test_where_to_listen() -> None:
    assert listen_place(LISTEN, "--listen") == ("127.0.0.1", 9464)
    assert listen_place(":80", "--listen") == ("0.0.0.0", 80)
    assert listen_place("[::1]:80", "--listen") == ("::1", 80)
    for wrong in ("9464", "host", "host:", "host:x", "host:70000", "host:²", ""):
        with pytest.raises(InvalidConfiguration, match=re.escape(f"--listen is [HOST]:PORT, got {wrong!r}")):
            listen_place(wrong, "--listen")


@pytest.mark.parametrize(
    ("given", "clusters", "queues"),
    [
        ("zk1:2181", ["zk1:2181"], []),
        ("zk1:2181,zk2:2181/RoQ", ["zk1:2181,zk2:2181/RoQ"], []),
        ("[::1]:2181", ["[::1]:2181"], []),
        ("roq://zk1:2181,zk2", ["zk1:2181,zk2:2181/RoQ"], []),
        ("/data/tasks", [], ["file:///data/tasks"]),
        ("./so:1", [], [f"file://{os.getcwd()}/so%3A1"]),
        ("log:///data/fast", [], ["log:///data/fast"]),
    ],
)
def test_what_an_address_of_the_command_is(given: str, clusters: list[str], queues: list[str]) -> None:
    assert sources([given]) == (clusters, queues)


def test_a_work_queue_of_a_cluster_is_served_with_it() -> None:
    with pytest.raises(InvalidAddress, match="'orders' is served with its cluster, all of it: `roq metrics zk1:2181`"):
        sources(["roq://zk1:2181/orders"])


def test_what_another_program_can_not_see_is_no_cluster() -> None:
    with pytest.raises(InvalidAddress, match="memory: is a queue within one program"):
        sources(["memory:7"])


def test_two_clusters_take_two_commands() -> None:
    for words in (["zk1:2181", "zk2:2181"], ["zk1:2181", "-c", "zk2:2181"]):
        done = CliRunner().invoke(app, ["metrics", *words])
        assert done.exit_code == 1
        assert "one cluster for each" in done.output


def test_the_scaler_asks_for_what_is_answered() -> None:
    text = (EXAMPLES / "keda.yml").read_text()
    [(url, value)] = re.findall(r'url: "(.*)"\n *valueLocation: "(.*)"', text)
    assert re.fullmatch(r"http://[a-z-]+:9464/v1/work-queues/jobs/status", url)
    assert value in metrics.numbers(Status(0, 0, 0, 0, 0, 0))
