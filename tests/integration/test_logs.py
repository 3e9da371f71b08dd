"""What a cluster's processes log of a queue is found by the queue's name, and says which host it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.client.cluster import connect
from roq.tools.local.cluster import LocalCluster


def lines(folder: Path) -> list[dict[str, Any]]:
    """Every line that every process wrote; what is not one (a launcher's own announcement) has no time."""
    found = [json.loads(line) for path in folder.rglob("*.log") for line in path.read_text().splitlines()]
    return [line for line in found if "t" in line]


@pytest.mark.quick
async def test_lines_of_all_processes_are_found_by_host_and_queue(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, gcms=1, hosts=1) as cluster, connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders", record=roq.Record(days=1))
        async with connected.publisher("orders", confirm="stored") as publisher:
            await publisher.publish("eu", b"1")
        await connected.remove_queue("orders")
    written = lines(tmp_path)
    assert all(line["host"] and line["process"] and line["logger"] for line in written)
    kinds = {line["process"].partition("/")[0] for line in written}
    assert {"gcm", "hcm", "coordinator", "exchange", "monitor", "scaling", "store"} <= kinds
    served = {line["process"].partition("/")[0] for line in written if line.get("queue") == "orders"}
    assert {"gcm", "hcm", "exchange", "monitor", "scaling"} <= served
    theirs = [line for line in written if line["process"].partition("/")[0] in ("exchange", "monitor", "scaling")]
    assert {(line["host"], line["queue"]) for line in theirs} == {("host-1", "orders")}
