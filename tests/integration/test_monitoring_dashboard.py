"""The dashboard and the alerts of examples/monitoring on a real Prometheus that scrapes a real cluster under load: every
question has an answer, every rule can be evaluated.

`ROQ_SCREENSHOTS=1` lets it run for some minutes and takes the picture of docs/monitoring.md anew; else the picture goes to
pytest's folder. Not covered: Grafana itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import roq
from tests.harness.cards import as_holder
from tests.harness.dashboard import Asked, Prometheus, page
from tests.harness.ports import free_port, own_address
from tests.integration.console_scene import started_browser
from tests.integration.test_cli import environment

NO_QUICK_TEST = "a cluster, a Prometheus and a minute of load; its `roq up` takes 2181, so not beside test_doctor.py"
pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
PICTURE = ROOT / "docs" / "images" / "dashboard.png"
TAKE = bool(os.environ.get("ROQ_SCREENSHOTS"))  # read before the tests hide ROQ_*
SHOWN_SECONDS = 150.0  # on a picture that is kept
SCRAPE_SECONDS = 1
START_SECONDS, ANSWERED_SECONDS = 60.0, 90.0
WAVE_SECONDS = 60.0  # the load rises and falls
DEAD_EVERY = 23


class Watched(NamedTuple):
    """A cluster under load since `begun`, and the Prometheus that scrapes it."""

    prometheus: Prometheus
    begun: float


async def load(cluster: str, over: threading.Event) -> None:
    """A recorded queue with a group, one that is not recorded, and a work queue some of whose tasks are dead letters."""
    async with roq.connect(cluster) as client:
        await client.create_queue("orders", overflow="block", record=roq.Record(days=1, copies=2))
        await client.create_queue("prices", overflow="block")  # or a starved second drops messages, which is an alert
        await client.create_group("orders", "billing", order="none")
        async with (
            roq.open_queue(f"roq://{cluster}/invoices", max_attempts=1) as invoices,
            roq.open_queue(f"roq://{cluster}/orders@billing") as billing,
            client.subscriber("orders") as orders_read,
            client.subscriber("prices") as prices_read,
            client.publisher("orders", confirm="stored") as orders,
            client.publisher("prices") as prices,
        ):
            readers = [asyncio.create_task(_read(one)) for one in (orders_read, prices_read)]
            for turn in range(1_000_000):
                if over.is_set():
                    break
                share = 0.55 + 0.45 * math.sin(2 * math.pi * time.monotonic() / WAVE_SECONDS)
                await orders.publish_many("eu.paris", [b"order" * 20] * int(40 * share))
                await prices.publish_many("eu.paris", [b"price" * 5] * int(400 * share))
                await invoices.put(b"invoice %d" % turn)
                for task in await invoices.lease(seconds=30, count=2):
                    await (task.reject("no such customer") if turn % DEAD_EVERY == 7 else task.ack())
                for message in await billing.lease(seconds=30, count=40):
                    await message.ack()
                await asyncio.sleep(0.2)
            for reader in readers:
                reader.cancel()


async def _read(subscriber: roq.Subscriber) -> None:
    async for _ in subscriber:
        pass


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if (binary := shutil.which("prometheus")) is None:
        pytest.skip("prometheus is not installed (on Debian: apt-get install prometheus)")
    folder, address = tmp_path_factory.mktemp("dashboard"), own_address()
    metrics, served = free_port(address), free_port(address)
    cluster = ["up", "--hosts", "2", "--dir", str(folder / "cluster"), "--with-metrics", "--json"]
    with subprocess.Popen([sys.executable, "-m", "roq.cli", *cluster], stdout=subprocess.PIPE, env=environment()) as up:
        children = [up]
        over = threading.Event()
        try:
            assert up.stdout is not None
            ready = json.loads(up.stdout.readline())
            told = ["metrics", "-c", ready["cluster"], "--listen", f"{address}:{metrics}"]
            children.append(subprocess.Popen([sys.executable, "-m", "roq.cli", *told], env=environment()))
            configured = configuration([f"{address}:{metrics}"], list(ready["metrics"].values()))
            (folder / "prometheus.yml").write_text(json.dumps(configured))  # which is YAML, too
            children.append(subprocess.Popen(prometheus_command(binary, folder, f"{address}:{served}")))
            begun = time.time()
            url = f"http://{address}:{served}"
            wait_until(lambda: urllib.request.urlopen(f"{url}/-/ready").status == 200, START_SECONDS)
            owner = folder / "cluster" / "cards" / "owner.card"  # else this process would keep it for the tests that follow
            with as_holder(owner), ThreadPoolExecutor(1) as threads:
                loading = threads.submit(lambda: asyncio.run(load(ready["cluster"], over)))
                try:
                    yield Watched(Prometheus(url), begun)
                finally:
                    over.set()
                loading.result(START_SECONDS)  # what went wrong there
        finally:
            with ExitStack() as ending:  # the last one first, each whatever became of the others
                for child in children:
                    ending.callback(end, child, signal.SIGINT if child is up else signal.SIGTERM)


def end(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Killed if it takes too long."""
    child.send_signal(number)
    try:
        child.wait(START_SECONDS)
    finally:
        child.kill()


def configuration(clusters: list[str], hosts: list[str]) -> dict[str, object]:
    """As examples/monitoring/prometheus.yml has it, for these targets, more often."""
    ours = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    for job, targets in zip(ours["scrape_configs"], (clusters, hosts), strict=True):
        job |= {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
        job["static_configs"] = [{"targets": targets}]
    return {**ours, "global": {"evaluation_interval": "2s"}, "rule_files": [str(EXAMPLES / "alerts.yml")]}


def prometheus_command(binary: str, folder: Path, listen: str) -> list[str]:
    told = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data", "web.listen-address": listen}
    return [binary, "--log.level=warn", *(f"--{name}={value}" for name, value in told.items())]


def wait_until(check: object, seconds: float) -> None:
    """Ask again until it is true; what was raised last, or AssertionError."""
    assert callable(check)
    deadline = time.monotonic() + seconds
    while True:
        try:
            if check():
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.3)


def asked(watched: Watched) -> list[Asked]:
    return watched.prometheus.ask(EXAMPLES / "grafana.json", watched.begun, time.time(), SCRAPE_SECONDS)


def test_every_question_of_the_dashboard_has_an_answer(watched: Watched) -> None:
    empty = list[str]()

    def answered() -> bool:
        empty[:] = [f"{panel.title}: {question}" for panel in asked(watched) for question in panel.empty]
        return not empty

    try:
        wait_until(answered, ANSWERED_SECONDS)
    except AssertionError:
        assert empty == []
    shown = json.loads((EXAMPLES / "grafana.json").read_text())
    variables = {one["name"]: one["query"] for one in shown["templating"]["list"]}
    assert {"orders", "prices"} <= set(watched.prometheus.values(variables["queue"]))
    assert {"invoices", "orders@billing"} <= set(watched.prometheus.values(variables["work_queue"]))


def test_what_it_shows_is_what_was_done(watched: Watched) -> None:
    def last(title: str) -> dict[str, float]:
        [panel] = [one for one in asked(watched) if one.title == title]
        return {answer.legend: answer.points[-1][1] for answer in panel.answers}

    wait_until(lambda: last("Messages published").get("orders", 0) > 0, ANSWERED_SECONDS)
    assert {title: last(title) for title in ("Hosts away", "Sources that do not answer", "Processes given up")} == {
        "Hosts away": {"": 0},
        "Sources that do not answer": {"": 0},
        "Processes given up": {"": 0},
    }
    wait_until(lambda: last("Tasks").get("invoices dead", 0) > 0, ANSWERED_SECONDS)
    assert last("Publishers and subscribers") == {
        f"{who} {queue}": 1 for who in ("publishers", "subscribers") for queue in ("orders", "prices")
    }
    assert last("Exchanges") == {"orders": 1, "prices": 1}


def test_all_targets_are_up_and_all_rules_can_be_evaluated(watched: Watched) -> None:
    def targets() -> list[tuple[str, str]]:
        return [(one["health"], one["lastError"]) for one in watched.prometheus.get("targets")["activeTargets"]]

    wait_until(lambda: [health for health, _ in targets()] == ["up"] * 3, START_SECONDS)

    def rules() -> dict[str, tuple[str, str]]:
        groups = watched.prometheus.get("rules")["groups"]
        return {rule["name"]: (rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}

    wait_until(lambda: "unknown" not in {health for health, _ in rules().values()}, START_SECONDS)
    assert {name: told for name, told in rules().items() if told[0] != "ok"} == {}

    def firing() -> set[str]:
        return {one["labels"]["alertname"] for one in watched.prometheus.get("alerts")["alerts"] if one["state"] == "firing"}

    wait_until(lambda: "RoqDeadLetters" in firing(), ANSWERED_SECONDS)
    assert firing() <= {"RoqDeadLetters", "RoqStoreDiskFull"}, "dead letters, and perhaps this disk: nothing else is wrong"


def test_the_dashboard_is_drawn(watched: Watched, tmp_path: Path) -> None:
    if TAKE:
        wait_until(lambda: time.time() - watched.begun > SHOWN_SECONDS, 2 * SHOWN_SECONDS)
    wait_until(lambda: not any(panel.empty for panel in asked(watched)), ANSWERED_SECONDS)
    panels, end = asked(watched), time.time()
    file = tmp_path / "dashboard.html"
    file.write_text(page(panels, watched.begun, end))
    with started_browser() as browser:
        seen = browser.new_page(viewport={"width": 2406, "height": 900})
        seen.goto(file.as_uri())
        assert seen.locator("section").count() == len(panels)
        assert seen.locator("svg").count() == sum(panel.kind == "timeseries" for panel in panels)
        seen.locator("main").screenshot(path=PICTURE if TAKE else tmp_path / "dashboard.png")
