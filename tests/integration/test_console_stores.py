"""`GET /v1/stores` of a real cluster: what each store says of itself, one that hangs, one whose host is stopped.

Not covered: who may ask (test_console_secured.py), the page (test_console_browser.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import roq
from roq.console.stores import LOOK_SECONDS
from roq.testing.freezing import freeze
from tests.integration.console_rig import Program, RunningConsole, console, next_of
from tests.integration.running import RunningCluster

pytestmark = pytest.mark.timeout(150)  # a session has to end
HOSTS = ["host-1", "host-2", "host-3"]


@pytest.fixture(scope="module")
def served(mortal: RunningCluster) -> Iterator[RunningConsole]:
    with console(mortal.zookeeper) as running:
        yield running


async def recorded(asked: Program, mortal: RunningCluster) -> tuple[str, list[Any]]:
    """A recorded queue, and what the stores say once all of them run: the first that needs them begins them."""
    name = f"kept-{uuid.uuid4().hex[:8]}"
    async with roq.connect(mortal.zookeeper) as client:
        await client.create_queue(name, record=roq.Record(), replication=2)
    return name, await asked.until("/v1/stores", lambda rows: [row["answers"] for row in rows] == [True] * 3)


async def test_every_store_says_how_much_it_keeps(asked: Program, mortal: RunningCluster) -> None:
    assert await asked.get("/v1/stores") == []
    name, before = await recorded(asked, mortal)
    blob = 1_000_000
    async with roq.open_queue(f"roq://{mortal.zookeeper}/{name}", write_quorum=3, ack_quorum=3) as tasks:
        await tasks.put(b"x")
        await tasks.put(b"y" * blob)
    after = await asked.until("/v1/stores", lambda rows: all(row["blob_bytes"] >= blob for row in rows))
    for row, earlier in zip(after, before, strict=True):
        assert (row["logs"] > earlier["logs"], row["problem"], row["damages"]) == (True, "", 0)
        assert row["segments"] > earlier["segments"]
        assert row["blobs"] > earlier["blobs"]
        assert 0 < row["live_bytes"] <= row["journal_bytes"]
        assert row["disk_free_bytes"] > 0
    assert [row["host"] for row in after] == HOSTS


async def test_a_store_that_hangs_is_a_row_that_says_so_in_time(asked: Program, mortal: RunningCluster) -> None:
    await recorded(asked, mortal)
    processes = (await asked.get("/v1/hosts/host-2"))["processes"]
    [pid] = [one["pid"] for one in processes if one["kind"] == "store"]
    await asyncio.sleep(1.1)  # nothing that was read before is given any more
    freeze(pid)
    try:
        begun = time.monotonic()
        rows = await asked.get("/v1/stores")
        assert time.monotonic() - begun < LOOK_SECONDS
        assert [row["answers"] for row in rows] == [True, False, True]
        # its HCM ends what hangs for three seconds: on a busy machine that may be before the answer is missed
        assert rows[1]["problem"].startswith(("no answer to DescribeStore", "no connection to"))
        assert (rows[1]["disk_free_bytes"], rows[1]["logs"]) == (None, None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await asked.until("/v1/stores", lambda rows: all(row["answers"] for row in rows))


async def test_the_store_of_a_stopped_host_does_not_answer(asked: Program, mortal: RunningCluster) -> None:
    await recorded(asked, mortal)
    async with asked.events("/v1/follow?of=/v1/stores&every=60") as followed:
        await next_of(followed, "answer", lambda data: data["status"] == 200)
        await asyncio.to_thread(mortal.call, mortal.local.stop_host("host-3"))
        told = await next_of(followed, "answer", lambda data: not all(row["answers"] for row in data["body"]))
    assert [(row["host"], row["answers"]) for row in told["body"]] == [("host-1", True), ("host-2", True), ("host-3", False)]
    rows = await asked.until("/v1/stores", lambda rows: rows[-1]["problem"] == "its host is away")
    assert [row["host"] for row in rows] == HOSTS
