"""Metrics of one host: totals over lives that end, what is told of processes, Exchanges and the store, and how many series."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from hcm.machine import ProcessUsage
from hcm.metrics import SESSION_STATES, GrowingTotals, HostLook, HostMetrics, ProcessAnswer
from roq.config import HcmConfig, load
from roq.errors import InvalidConfiguration
from roq.runtime.observe import Histogram
from roq.wire.assignment import ProcessKind, ProcessState, RunningProcess
from roq.wire.process import Pong
from roq.wire.store import StoreView, SyncTimes

BEGAN = 1000.0  # when the HCM did
ORDERS = ("exchange", "orders")
OWN = ProcessUsage(3.0, 30, BEGAN)
STORE = StoreView(
    *("h1", "disk", 700, 64, 32, 5, {"entries_stored": 9, "written_bytes": 900, "syncs": 4, "damages": 1}),
    *("life", 2, 2000, SyncTimes((0.001, 0.5), (1, 2, 1), 1.75)),
)
Samples = dict[tuple[str, ...], float]


def exchange(queue: str = "orders", name: str = "e1", pid: int = 7, restarts: int = 0) -> RunningProcess:
    state = ProcessState.RUNNING if pid else ProcessState.STARTING
    return RunningProcess(f"exchange/{queue}/{name}", ProcessKind.EXCHANGE, queue, name, state, pid, {"control": 1}, restarts)


def look(*answers: ProcessAnswer, silent: int = 0, session: str = "connected", leads: bool | None = True) -> HostLook:
    return HostLook(answers, OWN, silent, STORE, session, leads)


def told(process: RunningProcess, frames: int, cpu: float = 1.0, began: float = BEGAN + 1, **more: int) -> ProcessAnswer:
    counters = {"frames_in": frames, "bytes_in": 10 * frames, "frames_out": 2 * frames, "bytes_out": 20 * frames, **more}
    return ProcessAnswer(process, ProcessUsage(cpu, 100, began), Pong(process.name, process.pid, counters))


def samples(families: list[Metric]) -> Samples:
    """Value by name and the labels behind the host."""
    found = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["host"] == "h1", "every series of a host says whose it is"
            found[sample.name, *(f"{name}={value}" for name, value in sample.labels.items() if name != "host")] = sample.value
    return found


def metrics() -> HostMetrics:
    return HostMetrics("h1", BEGAN)


def of(made: HostMetrics, seen: HostLook) -> Samples:
    return samples(list(made.families(seen)))


# --- totals over lives ------------------------------------------------------------------------------------------------


def test_a_total_grows_over_the_lives_of_a_process() -> None:
    totals = GrowingTotals()
    seen = []
    for life, value in [(1, 10), (1, 15), (2, 4), (2, 4), (3, 40)]:
        totals.take("e1", ORDERS, life, {"frames": value}, from_birth=True)
        totals.keep({"e1": ORDERS})
        seen.append(totals.totals[ORDERS]["frames"])
    assert seen == [10, 15, 19, 19, 59], "what a new life counted comes on top, also if it has counted more already"


def test_what_was_counted_before_anybody_looked_does_not_come_at_once() -> None:
    totals = GrowingTotals()
    totals.take("adopted", ORDERS, 1, {"frames": 1_000_000}, from_birth=False)
    assert totals.totals[ORDERS]["frames"] == 0
    totals.take("adopted", ORDERS, 1, {"frames": 1_000_007}, from_birth=False)
    assert totals.totals[ORDERS]["frames"] == 7
    totals.take("adopted", ORDERS, 2, {"frames": 3}, from_birth=True)
    assert totals.totals[ORDERS]["frames"] == 10


def test_one_that_is_silent_loses_nothing_and_one_that_is_gone_leaves_its_total() -> None:
    totals = GrowingTotals()
    for name in ("e1", "e2"):
        totals.take(name, ORDERS, 1, {"frames": 5}, from_birth=True)
    totals.keep({"e1": ORDERS, "e2": ORDERS})
    totals.take("e1", ORDERS, 1, {"frames": 6}, from_birth=True)  # e2 hangs
    totals.keep({"e1": ORDERS, "e2": ORDERS})
    totals.take("e2", ORDERS, 1, {"frames": 9}, from_birth=True)
    totals.keep({"e2": ORDERS})  # e1 was removed
    assert totals.totals[ORDERS]["frames"] == 15
    totals.keep({})
    assert totals.totals == {}, "of a queue that is not here any more nothing is told"
    totals.take("e2", ORDERS, 1, {"frames": 9}, from_birth=True)
    assert totals.totals[ORDERS]["frames"] == 9, "it is another one of that name"


def test_a_life_is_of_who_answered() -> None:
    """Its HCM may have listed the one before: what the next one counted by then is not what that one counted."""
    made = metrics()
    of(made, look(told(exchange(pid=7), 10)))
    late = told(exchange(pid=7), 0)._replace(told=Pong("exchange/orders/e1", 8, {"frames_in": 30}))
    assert of(made, look(late))["roq_exchange_received_frames_total", "queue=orders"] == 40
    assert of(made, look(told(exchange(pid=8), 31)))["roq_exchange_received_frames_total", "queue=orders"] == 41


# --- what is told -----------------------------------------------------------------------------------------------------


def test_what_is_found_is_what_is_served() -> None:
    made = metrics()
    tape = {"tape_entries": 3, "tape_bytes": 300, "tape_waiting_bytes": 44, "tape_full": 1, "frames_dropped": 5}
    first = told(exchange(), 100, cpu=2.0, **tape)
    of(made, look(first, told(exchange(name="e2", pid=8), 10), told(exchange("other", pid=9), 1)))
    failed = RunningProcess("monitor/orders", ProcessKind.MONITOR, "orders", "", ProcessState.FAILED, 0, {}, 4)
    again = told(exchange(pid=70, restarts=1), 7, cpu=0.5, **tape)
    got = of(made, look(again, told(exchange(name="e2", pid=8), 20), ProcessAnswer(failed), silent=2))
    for wanted, value in {
        ("roq_processes", "kind=exchange", "state=running"): 2,
        ("roq_processes", "kind=monitor", "state=failed"): 1,
        ("roq_processes", "kind=monitor", "state=running"): 0,
        ("roq_process_restarts_total", "kind=exchange", "queue=orders"): 1,
        ("roq_process_restarts_total", "kind=monitor", "queue=orders"): 4,
        ("roq_process_cpu_seconds_total", "kind=exchange", "queue=orders"): 3.5,
        ("roq_process_cpu_seconds_total", "kind=hcm", "queue="): 3.0,
        ("roq_process_resident_memory_bytes", "kind=exchange", "queue=orders"): 200,
        ("roq_process_resident_memory_bytes", "kind=hcm", "queue="): 30,
        ("roq_processes_silent",): 2,
        ("roq_exchange_received_frames_total", "queue=orders"): 127,
        ("roq_exchange_received_bytes_total", "queue=orders"): 1270,
        ("roq_exchange_sent_frames_total", "queue=orders"): 254,
        ("roq_exchange_sent_bytes_total", "queue=orders"): 2540,
        ("roq_exchange_dropped_frames_total", "queue=orders"): 10,
        ("roq_tape_entries_total", "queue=orders"): 6,
        ("roq_tape_bytes_total", "queue=orders"): 600,
        ("roq_tape_full_total", "queue=orders"): 2,
        ("roq_tape_waiting_bytes", "queue=orders"): 44,
        ("roq_zookeeper_session", "state=connected"): 1,
        ("roq_zookeeper_session", "state=lost"): 0,
        ("roq_gcm_leads",): 1,
        ("roq_store_written_bytes_total",): 900,
        ("roq_store_entries_total",): 9,
        ("roq_store_free_bytes",): 700,
        ("roq_store_journal_bytes",): 64,
        ("roq_store_live_bytes",): 32,
        ("roq_store_blob_bytes",): 2000,
        ("roq_store_blobs",): 2,
        ("roq_store_segments",): 5,
        ("roq_store_damages",): 1,
        ("roq_store_sync_seconds_bucket", "le=0.001"): 1,
        ("roq_store_sync_seconds_bucket", "le=0.5"): 3,
        ("roq_store_sync_seconds_bucket", "le=+Inf"): 4,
        ("roq_store_sync_seconds_count",): 4,
        ("roq_store_sync_seconds_sum",): 1.75,
    }.items():
        assert got[wanted] == value, wanted
    assert not [name for name in got if "queue=other" in name], "it is not here any more"


def test_their_number_depends_on_queues_alone() -> None:
    one = of(metrics(), look(told(exchange(), 1)))
    many = of(metrics(), look(*(told(exchange(name=f"e{n}", pid=n), 1) for n in range(1, 50))))
    assert one.keys() == many.keys()


def test_what_is_not_known_is_not_told() -> None:
    starting = ProcessAnswer(exchange(pid=0))
    blind = HostLook((starting,), OWN, 0, None, "connecting", None)
    got = of(metrics(), blind)
    assert {name for name, *_ in got if name.startswith(("roq_store", "roq_tape", "roq_gcm", "roq_exchange"))} == set()
    assert got["roq_processes", "kind=exchange", "state=starting"] == 1
    assert [got["roq_zookeeper_session", f"state={state}"] for state in SESSION_STATES] == [1, 0, 0, 0, 0]


def test_an_adopted_exchange_counts_from_now_on() -> None:
    made = metrics()
    before = told(exchange(), 1_000, cpu=50.0, began=BEGAN - 1)
    assert of(made, look(before))["roq_exchange_received_frames_total", "queue=orders"] == 0
    got = of(made, look(told(exchange(), 1_001, cpu=50.5, began=BEGAN - 1)))
    assert got["roq_exchange_received_frames_total", "queue=orders"] == 1
    assert got["roq_process_cpu_seconds_total", "kind=exchange", "queue=orders"] == 0.5


# --- where it comes from ----------------------------------------------------------------------------------------------


def test_a_histogram_counts_by_upper_ends() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.0, 0.1, 0.11, 1.0, 1.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == pytest.approx(2.71)


def hcm(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, "--security", "none", "--zookeeper", "127.0.0.1:1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=Path(__file__).parents[2])


def test_what_metrics_need_is_loaded_for_them_alone_and_told_if_it_is_missing(tmp_path: Path) -> None:
    unasked = hcm("import sys, hcm.__main__; print('prometheus_client' in sys.modules, 'wsgiref' in sys.modules)")
    assert unasked.stdout == "False False\n", unasked.stderr
    absent = "import sys; sys.modules['prometheus_client'] = None; from hcm.__main__ import main; main()"
    done = hcm(absent, "--state-dir", str(tmp_path), "--metrics", "127.0.0.1:0")
    assert (done.returncode, done.stderr) == (
        2,
        'roq-hcm: serving metrics needs prometheus_client: pip install "roq-messaging[metrics]"\n',
    )


def test_where_metrics_are_served_is_checked_at_the_start(tmp_path: Path) -> None:
    assert HcmConfig().metrics is None, "nowhere unless it is asked for"
    file = tmp_path / "hcm.toml"
    file.write_text('metrics = "0.0.0.0:9464"\n')
    assert load(HcmConfig, file, {}, {}).metrics == "0.0.0.0:9464"
    assert load(HcmConfig, file, {"ROQ_METRICS": ":1"}, {}).metrics == ":1"
    for wrong in ("9464", "host:", ":99999", ""):
        with pytest.raises(InvalidConfiguration, match=r"metrics is \[HOST\]:PORT"):
            load(HcmConfig, None, {}, {"metrics": wrong})
