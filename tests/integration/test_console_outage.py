"""`roq console` while its cluster goes away and comes back, loses a host, and keeps a history."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest

import roq
from tests.integration.console_rig import WAIT_SECONDS, Program, RunningConsole, console, next_of, program
from tests.integration.running import RunningCluster

pytestmark = pytest.mark.timeout(150)  # sessions have to end, and records to come


@pytest.fixture(scope="module")
def served(mortal: RunningCluster) -> Iterator[RunningConsole]:
    with console(mortal.zookeeper, "--writable") as running:
        yield running


async def test_another_policy_is_replayed_over_what_was_kept(asked: Program, mortal: RunningCluster) -> None:
    name = f"kept-{uuid.uuid4().hex[:8]}"
    strict = {"exchange": {"max_messages_per_second": 70}, "bounds": {"cooldown_seconds": 0}}
    async with roq.connect(mortal.zookeeper) as client:
        await client.create_queue(name)
        await client.record_history(roq.Record())
        publishing = asyncio.create_task(publish(client, name))
        try:
            await asked.until(
                f"/v1/queues/{name}/history?since=1h", lambda found: sum(one["records"] for one in found["periods"]) > 3
            )
            proposed = {"policy": strict, "since": "1h"}
            async with asyncio.timeout(WAIT_SECONDS):
                place = f"/v1/queues/{name}/policy/what-if"
                while (found := await asked.post(place, proposed))["exchanges_most"] < 2:
                    await asyncio.sleep(0.5)
            assert (found["taken"], found["same"], found["recorded_exchanges_most"]) == (0, 0, 1)
            assert found["recorded_over_seconds"] > 0
            assert {row["action"] for row in found["decisions"]} >= {"scale-out"}
            assert all(row["would"] and not row["taken"] and row["cause"] for row in found["decisions"])
            assert found["begin"] < found["end"]
            none = await asked.post(f"/v1/queues/{name}/policy/what-if", {"policy": {}, "since": "1h"})
            assert (none["would"], none["decisions"], none["over_seconds"]) == (0, [], 0)
            assert (await client.get_policy(name)) == roq.Policy()
            rows = (await asked.get("/v1/queues"))["rows"]
            own = (await asked.get("/v1/queues?state=own"))["rows"]
            assert [row["queue"] for row in rows] == [name]
            assert [row["queue"] for row in own] == ["_roq.decisions", "_roq.kpi"]
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await client.record_history(None)
            await client.remove_queue(name)


async def publish(client: roq.Cluster, name: str) -> None:
    async with client.publisher(name) as one, client.publisher(name) as other:
        while True:
            for publisher in (one, other):
                await publisher.publish_many("t", [b"x"] * 10)
            await asyncio.sleep(0.2)


async def test_a_cluster_goes_away_and_comes_back(asked: Program, mortal: RunningCluster, served: RunningConsole) -> None:
    async with asked.events("/v1/events") as events, asked.events("/v1/follow?of=/v1/hosts&every=60") as followed:
        await next_of(events, "overview")
        hosts = await next_of(followed, "answer", lambda data: data["status"] == 200)
        await asyncio.to_thread(mortal.call, mortal.local.kill_gcm("gcm-1"))
        lost = await next_of(events, "unreachable")
        assert (await next_of(followed, "answer", lambda data: data["status"] == 503))["body"]["advice"]
        assert lost["advice"]
        async with asked.events("/v1/events") as late:
            assert (await next_of(late, "unreachable"))["since"] == lost["since"]
        for path in ("/v1/overview", "/v1/queues", "/v1/hosts"):
            refused = await asked.get(path, 503)
            assert refused["detail"]
        assert (await asked.get("/v1/session"))["signed_in"] is True
        assert not (await asked.get("/v1/doctor"))["healthy"]
        assert (await asked.client.get("/")).status_code == 200
        await asyncio.to_thread(mortal.call, mortal.local.start_gcm("gcm-1"))
        back = await next_of(events, "reachable")
        assert back["since"] == lost["since"] < back["until"]
        again = await next_of(followed, "answer", lambda data: data["status"] == 200)
        assert [row["host"] for row in again["body"]] == [row["host"] for row in hosts["body"]]
        assert (await next_of(events, "overview"))["hosts"]["total"] == 3
    assert (await asked.get("/v1/overview"))["hosts"]["alive"] == 3
    assert sum("can't be reached" in line for line in served.lines) == 1


async def test_a_host_that_is_lost_is_told_and_still_shown(asked: Program, mortal: RunningCluster) -> None:
    async with asked.events("/v1/events") as events:
        await next_of(events, "overview", lambda data: data["hosts"]["alive"] == 3)
        await asyncio.to_thread(mortal.call, mortal.local.lose_host("host-3"))
        left = await next_of(events, "cluster", lambda data: data["kind"] == "host-left")
        assert left["host"] == "host-3"
        found = await next_of(events, "overview", lambda data: data["hosts"]["alive"] == 2)
        assert [problem["host"] for problem in found["problems"]] in ([], ["host-3"])
    hosts = {row["host"]: row["alive"] for row in await asked.get("/v1/hosts")}
    assert not hosts.get("host-3", False)
    if "host-3" in hosts:
        shown = await asked.get("/v1/hosts/host-3")
        assert (shown["capacity"], shown["problem"] != "") == (None, True)
        assert (await asked.get("/v1/hosts/host-3/logs?process=store", 503))["title"] == "Unavailable"


async def test_it_starts_while_the_cluster_is_away() -> None:
    with console("127.0.0.1:1") as running:
        async with program(running) as made:
            refused = await made.get("/v1/overview", 503)
            assert (refused["title"], refused["advice"] != "") == ("ZooKeeperUnavailable", True)
            assert (await made.get("/v1/session"))["signed_in"] is True
