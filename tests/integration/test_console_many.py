"""The console where there are very many queues: their records are in a real ZooKeeper as a leading GCM leaves them, stopped but
for one that runs. How long the list takes, and how large it is, for programs and in Chromium.

With `-o log_cli=true -o log_cli_level=INFO` it says the figures.

Not covered: a cluster of many hosts (benchmarks/at_scale), thousands of queues that run (their Monitors are processes).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

import roq
from roq.coordination import paths
from roq.coordination.link import Create
from roq.coordination.session import Session
from roq.ids import new_token
from roq.wire.assignment import QueueRecord, QueueSettings, to_json
from tests.integration.console_rig import RunningConsole, console, program
from tests.integration.console_scene import Watched, started_browser
from tests.integration.running import RunningCluster

pytestmark = pytest.mark.timeout(240)
SOME, MANY = 500, 10_000
RUNNING = "orders"
NODES_AT_ONCE, PLANTING_SECONDS = 200, 30.0
LOOKS, PAUSE_SECONDS = {SOME: 1, MANY: 8}, 1.1  # what was read is kept for a second: each look has the leader asked
ROW_BYTES_MAX, OVERVIEW_BYTES_MAX = 500, 16_000
ANSWER_SECONDS, BROWSER_SECONDS = 1.0, 3.0
SLACK = 3.0  # other tests run beside this one
SHOWN = 50  # rows of a page
log = logging.getLogger(__name__)


async def plant(address: str, count: int) -> None:
    """Stopped queues `orders-00000` and on; the leader does not know of them."""
    settings = QueueSettings()
    records = [
        QueueRecord(f"orders-{number:05}", settings, False, "host-1", 1, {new_token(): "host-1"}, 1e9, new_token())
        for number in range(count)
    ]
    nodes = [Create(paths.queue(record.name), to_json(record)) for record in records]
    session = await Session.connect(address, PLANTING_SECONDS)
    try:
        for first in range(0, len(nodes), NODES_AT_ONCE):
            await session.multi(nodes[first : first + NODES_AT_ONCE])
    finally:
        await session.close()


class Crowded:
    """A cluster with so many queues, and a console of it."""

    def __init__(self, directory: Path, count: int) -> None:
        self.count = count
        self.running = RunningCluster(directory, gcms=1, hosts=1, session_seconds=2.0)
        self.running.call(self._fill())

    async def _fill(self) -> None:
        local = self.running.local
        async with roq.connect(local.zookeeper) as cluster:
            await cluster.create_queue(RUNNING)
            await local.kill_gcm("gcm-1")
            await plant(local.zookeeper, self.count)
            await local.start_gcm("gcm-1")
            async with asyncio.timeout(PLANTING_SECONDS):
                while len(await cluster.queues()) != self.count + 1:
                    await asyncio.sleep(0.1)


@pytest.fixture(scope="module", params=[pytest.param(SOME, marks=pytest.mark.quick), MANY], ids=str)
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    made = Crowded(tmp_path_factory.mktemp("crowd"), request.param)
    yield made
    assert made.running.stop() == []


@pytest.fixture(scope="module")
def served(crowded: Crowded) -> Iterator[RunningConsole]:
    with console(crowded.running.zookeeper) as running:
        yield running


async def looked(client: httpx.AsyncClient, query: dict[str, Any], times: int) -> tuple[dict[str, Any], list[float], int]:
    """The last answer, seconds of each, bytes as they were sent."""
    taken, answer = list[float](), None
    for _ in range(times):
        await asyncio.sleep(PAUSE_SECONDS)
        began = time.perf_counter()
        answer = await client.get("/v1/queues", params=query)
        taken.append(time.perf_counter() - began)
        assert answer.status_code == 200, answer.text
    assert answer is not None
    return answer.json(), taken, len(answer.content)


@pytest.mark.parametrize(
    ("query", "total", "first"),
    [
        pytest.param({}, 1, RUNNING, id="first page"),
        pytest.param({"offset": 450}, 1, "orders-00449", id="a later page"),
        pytest.param({"search": "0049"}, 0, "orders-00049", id="searched"),
        pytest.param({"sort": "-messages_per_second"}, 1, RUNNING, id="the busiest"),
        pytest.param({"state": "stopped", "limit": 200}, 0, "orders-00000", id="the largest page"),
    ],
)
async def test_a_page_of_queues_is_small_and_soon_there(
    crowded: Crowded, served: RunningConsole, query: dict[str, Any], total: int, first: str
) -> None:
    async with program(served) as asked:
        await asked.sign_in()
        found, taken, size = await looked(asked.client, query, LOOKS[crowded.count])
    names = [f"orders-{number:05}" for number in range(crowded.count)]
    assert found["total"] == total + sum(query.get("search", "") in name for name in names)
    assert found["rows"][0]["queue"] == first
    assert len(found["rows"]) <= query.get("limit", SHOWN)
    assert size <= ROW_BYTES_MAX * len(found["rows"]) + 100
    log.info(
        "%d queues, %s: %.0f ms, at most %.0f, %d bytes", crowded.count, query, median(taken) * 1e3, max(taken) * 1e3, size
    )
    assert median(taken) < ANSWER_SECONDS * SLACK


async def test_the_overview_counts_them_all(crowded: Crowded, served: RunningConsole) -> None:
    async with program(served) as asked:
        await asked.sign_in()
        began = time.perf_counter()
        found = await asked.until("/v1/overview", lambda found: found["rates"] is not None)
        taken = time.perf_counter() - began
        assert found["queues"]["total"] == crowded.count + 1
        assert (found["queues"]["running"], found["rates"]["queues_asked"]) == (1, 1)
        size = len((await asked.client.get("/v1/overview")).content)
    log.info("%d queues: the overview after %.2f s, %d bytes", crowded.count, taken, size)
    assert size < OVERVIEW_BYTES_MAX


def test_the_list_can_be_used_in_a_browser(crowded: Crowded, served: RunningConsole) -> None:
    with started_browser() as browser:
        watched = Watched(browser, served.url)
        try:
            began, taken = time.perf_counter(), list[float]()
            page = watched.visit("queues", "Queues")  # scripts are there from now on
            expect(page.locator("tbody tr")).to_have_count(SHOWN)
            first = time.perf_counter() - began
            for name in ("orders-00499", "orders-00049"):
                watched.page.goto("about:blank")
                began = time.perf_counter()
                page = watched.visit("queues", "Queues")
                expect(page.locator("tbody tr")).to_have_count(SHOWN)
                taken.append(time.perf_counter() - began)
                page.get_by_label("Name").fill(name)
                began = time.perf_counter()
                expect(page.locator("tbody tr")).to_have_count(1)
                expect(page.locator("tbody")).to_contain_text(name)
                taken.append(time.perf_counter() - began)
            opened, searched = taken[::2], taken[1::2]
            log.info("%d queues in Chromium: %s s to open, at first %s, %s to search", crowded.count, opened, first, searched)
            assert watched.wrong == []
            assert min(opened) < BROWSER_SECONDS * SLACK
            assert min(searched) < BROWSER_SECONDS * SLACK
        finally:
            watched.context.close()
