"""`GET /v1/follow` of a real cluster: what is told of resources as they change, and what can't be followed.

Not covered: rights and sessions that end (test_console_secured.py), a cluster that goes away (test_console_outage.py), how
often it looks (tests/unit/test_console_follow.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

import roq
from tests.integration.console_rig import WAIT_SECONDS, Program, RunningConsole, console, next_of, program, quoted
from tests.integration.running import RunningCluster

QUIET_SECONDS = 4.0  # in which a console that looks each second would have told
AT_ONCE_SECONDS = 20.0  # the next look by the clock is a minute away


@pytest.fixture(scope="module")
def served(cluster: RunningCluster) -> Iterator[RunningConsole]:
    with console(cluster.zookeeper, "--writable") as running:
        yield running


def followed(*resources: str, every: float) -> str:
    return f"/v1/follow?{urlencode([('of', one) for one in resources])}&every={every}"


class LatestAnswers:
    """Of a stream, which tells of its resources in no order."""

    def __init__(self, events: AsyncGenerator[tuple[str, Any], None]) -> None:
        self.events = events
        self._latest = dict[str, Any]()

    async def until(self, of: str, met: Callable[[Any], bool], status: int = 200) -> Any:
        """The resource once it is so."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                found = self._latest.get(of)
                if found is not None and found["status"] == status and met(found["body"]):
                    return found["body"]
                name, data = await anext(self.events)
                assert name == "answer", data
                self._latest[data["of"]] = data


@pytest.mark.quick
async def test_resources_are_told_at_once_and_when_they_change(asked: Program, client: roq.Cluster) -> None:
    name = f"odd #?&%41 {uuid.uuid4().hex[:8]}"
    rows, policy = f"/v1/queues?search={quoted(name)}", f"/v1/queues/{quoted(name)}/policy"
    async with asked.events(followed(rows, policy, every=60)) as events:
        told = LatestAnswers(events)
        await told.until(rows, lambda found: found["total"] == 0)
        await told.until(policy, lambda found: found["title"] == "QueueNotFound", 404)
        begun = time.monotonic()
        await client.create_queue(name)
        try:
            await told.until(rows, lambda found: [row["queue"] for row in found["rows"]] == [name])
            await told.until(policy, lambda found: found["policy"]["bounds"]["max_exchanges"] != 3)
            await client.set_policy(name, roq.Policy(bounds=roq.Bounds(max_exchanges=3)))
            changed = await told.until(policy, lambda found: found["policy"]["bounds"]["max_exchanges"] == 3)
            assert changed == await asked.get(policy)
        finally:
            await client.remove_queue(name)
        gone = await told.until(policy, lambda found: found["status"] == 404, 404)
        assert gone == await asked.get(policy, 404)
        assert time.monotonic() - begun < AT_ONCE_SECONDS


async def test_what_no_event_reports_is_told_and_nothing_while_nothing_changes(
    asked: Program, client: roq.Cluster, cluster: RunningCluster
) -> None:
    name = f"jobs-{uuid.uuid4().hex[:8]}"
    row, tasks = f"/v1/work-queues/{name}", f"/v1/work-queues/{name}/tasks?state=ready"
    async with roq.open_queue(f"roq://{cluster.zookeeper}/{name}") as work:
        try:
            await work.put(b"first")
            async with asked.events(followed(row, tasks, every=1)) as events:
                told = LatestAnswers(events)
                await told.until(tasks, lambda found: len(found) == 1)
                await work.put(b"second")
                found = await told.until(tasks, lambda found: len(found) == 2)
                assert [one["payload"]["text"] for one in found] == ["first", "second"]
                await told.until(row, lambda found: found["waiting"] == 2)
            async with asked.events(followed(tasks, "/v1/access", every=1)) as events:
                assert {(await anext(events))[1]["of"] for _ in range(2)} == {tasks, "/v1/access"}
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(events), QUIET_SECONDS)
        finally:
            await client.remove_work_queue(name)


@pytest.mark.parametrize(
    "of",
    [
        "/v1/events",
        "/v1/follow?of=/v1/queues",
        "/v1/queues/x/kpis",
        "/v1/queues/x/messages",
        "/v1/queues/x/start",
        "/v1/session",
        "/v1/openapi.json",
        "/v1/nothing",
        "/static/app.js",
        "http://elsewhere.test/v1/queues",
        "/v1/queues/é",
        "",
    ],
)
async def test_what_is_no_resource_with_an_answer_is_refused(asked: Program, of: str) -> None:
    refused = await asked.get(followed("/v1/queues", of, every=2), 400)
    assert (refused["title"], repr(of) in refused["detail"]) == ("NotFollowed", True)


async def test_a_stream_follows_few_resources_and_not_too_often(asked: Program) -> None:
    for wrong in (
        followed(*["/v1/queues"] * 5, every=2),
        "/v1/follow",
        followed("/v1/queues", every=0.1),
        "/v1/follow?of=&every=x",
    ):
        assert (await asked.get(wrong, 400))["title"] in ("InvalidConfiguration", "NotFollowed")
    bad = "/v1/queues?limit=100000"
    async with asked.events(followed(bad, every=2)) as events:
        assert (await next_of(events, "answer"))["body"]["title"] == "InvalidConfiguration"


async def test_it_ends_with_the_console(cluster: RunningCluster) -> None:
    with console(cluster.zookeeper) as running:
        async with program(running) as made, made.events(followed("/v1/hosts", every=2)) as events:
            assert len((await next_of(events, "answer"))["body"]) == 2
            stopping = asyncio.create_task(asyncio.to_thread(running.stop))
            assert (await next_of(events, "cut"))["reason"] == "the console ends"
            assert await asyncio.wait_for(stopping, WAIT_SECONDS) == 0
