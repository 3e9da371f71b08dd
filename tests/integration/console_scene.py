"""What the browser tests of the console have: a cluster with something of everything, and Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import axe_playwright_python
import pyarrow as pa
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

import roq
import roq.shuffle
from roq.client.history import past_kpis
from roq.workqueue.address import queue_address
from tests.integration.running import RunningCluster

ROOT = Path(__file__).parents[2]
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
SIZE: ViewportSize = {"width": 1200, "height": 800}
START_SECONDS = 30.0
PATIENCE_SECONDS = 15.0
INSTALL_SECONDS = 300.0
NASTY = '<img src=x onerror="window.hit=1">\'%2e&#?'  # a queue may be named so, and a work queue
ORDERS, INVOICES, PARCELS, GROUP, TRIPS = "orders", "invoices", "parcels", "billing", "trips"
PARCELS_DEAD = (
    ("windows", b"a\r\nb"),
    ("windows", b"c\r\nd"),
    ("mixed", b"a\rb\n"),
    ("large", b"x" * 70_000),
)  # error, payload
SLOW, WRONG = "no answer from the provider within {} s", 'order {} has </script><script>window.hit=1</script> as "amount"'
SLOW_LETTERS, WRONG_LETTERS = 4, 2
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"  # the machine's, as when a container starts: the pages try again
PACE_SECONDS = 0.05
PER_TURN = 25  # messages

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


class Scene:
    """The cluster, filled, with traffic on its queue ORDERS until it is left."""

    def __init__(self, directory: Path) -> None:
        self.running = RunningCluster(directory, zookeeper=None, gcms=1, hosts=3, exchanges_max=20, session_seconds=2.0)
        self.address = self.running.zookeeper

    def __enter__(self) -> Scene:
        try:
            self.running.call(fill(self.address))
            write_shuffle(f"roq://{self.address}")
            self._traffic = self.running.call(begin_traffic(self.address))
            self.running.call(until_history(self.address))
        except BaseException:
            self.running.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.running.call(end(self._traffic))
        self.running.stop()

    def policy(self) -> roq.Policy:
        """Of ORDERS."""
        return self.running.call(read_policy(self.address))

    def letters(self, name: str = INVOICES) -> dict[str, bytes]:
        """Dead letters of a work queue: payload by id."""
        return self.running.call(tasks(self.address, name, "dead"))

    def waiting(self, name: str = INVOICES) -> dict[str, bytes]:
        """Its tasks that wait."""
        return self.running.call(tasks(self.address, name, "ready"))

    def put(self, name: str, payload: bytes) -> None:
        """Another task."""
        self.running.call(put_task(self.address, name, payload))

    def runs(self, queue: str) -> bool:
        """Whether it is not stopped."""
        return self.running.call(is_running(self.address, queue))


async def fill(address: str) -> None:
    """Queues, a group, a work queue with dead letters of two kinds, the history."""
    async with roq.connect(address) as cluster:
        await cluster.record_history(roq.Record(days=1))
        await cluster.create_queue(ORDERS, replication=2, overflow="block", record=roq.Record(days=1))
        await cluster.create_queue(NASTY)
        await cluster.create_queue("telemetry")
        await cluster.create_group(ORDERS, GROUP, "eu.rome", order="topic")
    async with roq.open_queue(f"roq://{address}/{INVOICES}", max_attempts=5) as work:
        await work.put_many([b'{"order": %d, "amount": "12,50"}' % number for number in range(SLOW_LETTERS + WRONG_LETTERS)])
        for number, task in enumerate(await work.lease(seconds=60, count=SLOW_LETTERS + WRONG_LETTERS, wait_seconds=10)):
            await task.reject((SLOW if number < SLOW_LETTERS else WRONG).format(30 + number))
        await work.put(b"a task that waits")
    async with roq.open_queue(queue_address(address, NASTY)) as work:
        await work.put(NASTY.encode())
        (task,) = await work.lease(seconds=60, wait_seconds=10)
        await task.reject(NASTY)
    async with roq.open_queue(f"roq://{address}/{PARCELS}") as work:
        for error, payload in PARCELS_DEAD:
            await work.put(payload)
            (task,) = await work.lease(seconds=60, wait_seconds=10)
            await task.reject(error)


def write_shuffle(address: str) -> None:
    """A sealed shuffle."""
    trips = pa.table({"country": ["fr", "be", "fr"], "time": [3, 1, 2]})
    with roq.shuffle.open(address) as shuffles:
        shuffles.create(TRIPS, keys=["country", "time"], schema=trips.schema, ranges=4)
        with shuffles.writer(TRIPS, partition=0) as writer:
            writer.write(trips)
            shuffles.commit(TRIPS, [writer.finish()])


async def begin_traffic(address: str) -> asyncio.Task[None]:
    """Two publishers and a subscriber of ORDERS; returns when messages flow."""
    flows = asyncio.Event()
    running = asyncio.create_task(traffic(address, flows))
    await asyncio.wait_for(flows.wait(), PATIENCE_SECONDS)
    return running


async def traffic(address: str, flows: asyncio.Event) -> None:
    async with (
        roq.connect(address) as cluster,
        cluster.subscriber(ORDERS) as reads,
        cluster.publisher(ORDERS) as one,
        cluster.publisher(ORDERS) as other,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(publish(one, "eu.paris"))
        group.create_task(publish(other, "us.boston"))
        async for _ in reads:
            flows.set()


async def publish(publisher: roq.Publisher, topic: str) -> None:
    while True:
        await publisher.publish_many(topic, [b"x" * 100] * PER_TURN)
        await asyncio.sleep(PACE_SECONDS)  # the load is meant to be steady


async def end(running: asyncio.Task[None]) -> None:
    """Cancel it, and see it end."""
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def until_history(address: str) -> None:
    """Until ORDERS with both publishers is in the history."""
    async with asyncio.timeout(START_SECONDS), roq.connect(address) as cluster:
        while not any([len(kpi.publishers) == 2 async for kpi in past_kpis(cluster, ORDERS, "earliest")]):
            await asyncio.sleep(0.25)  # nobody tells when it is stored


async def read_policy(address: str) -> roq.Policy:
    async with roq.connect(address) as cluster:
        return await cluster.get_policy(ORDERS)


async def is_running(address: str, queue: str) -> bool:
    async with roq.connect(address) as cluster:
        return (await cluster.queue(queue)).record.running


async def put_task(address: str, name: str, payload: bytes) -> None:
    async with roq.open_queue(f"roq://{address}/{name}") as work:
        await work.put(payload)


async def tasks(address: str, name: str, state: str) -> dict[str, bytes]:
    async with roq.open_queue(f"roq://{address}/{name}") as work:
        return {one.id: one.payload for one in await work.peek(state, 100)}


def chromium() -> str:
    """Where it is; installed by apt if that is possible. Fails with what to do where it is not."""
    found = subprocess.run(
        [ROOT / "tools" / "chromium.sh"], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """Chromium without a window."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root otherwise
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=sandbox)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and whatever went wrong in it."""

    def __init__(self, browser: Browser, address: str, *, scheme: Literal["light", "dark"] = "light") -> None:
        self.context = browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
        self.page: Page = self.context.new_page()
        self.address = address
        self.wrong: list[str] = []
        self.page.on("console", self._told)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))

    def _told(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and NETWORK_CHANGED not in message.text:
            self.wrong.append(f"{message.text} {message.location}")

    def visit(self, path: str, title: str) -> Page:
        """The page behind the "#/", once it is there."""
        self.page.goto(f"{self.address}/#/{path}")
        expect(self.page.get_by_role("heading", level=1)).to_have_text(title)
        return self.page

    def violations(self, *rules: str) -> list[str]:
        """What axe-core finds, by these of its rules or all."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        found = self.page.evaluate("rules => axe.run(rules)", {"runOnly": list(rules)} if rules else {})["violations"]
        return [f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found for node in one["nodes"]]

    def tab_to(self, role: str, name: str, *, steps: int = 80) -> None:
        """Press Tab until that has the focus, which must be seen."""
        wanted = self.page.get_by_role(role, name=name, exact=True)  # type: ignore[arg-type]
        for _ in range(steps):
            self.page.keyboard.press("Tab")
            if wanted.count() == 1 and wanted.evaluate("one => one === document.activeElement"):
                assert wanted.evaluate("one => getComputedStyle(one).outlineStyle") != "none", (
                    f"nobody sees that {name} has the focus"
                )
                return
        raise AssertionError(f"{steps} Tabs do not reach {role} {name}")
