"""Options of a cluster's work queue, on three hosts: that the numbers asked for are the ones used, whoever asks.

Not covered: what can be asked for (tests/unit/test_workqueue_options.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import Unavailable, WorkQueueConflict
from roq.log.replicated.metadata import LogMeta
from roq.testing.freezing import freeze
from roq.tools.local.cluster import LocalCluster
from roq.wire.assignment import from_json
from roq.workqueue.contract import ClusterSettings
from tests.integration.held import blobs_of
from tests.integration.test_cli_task import task, told
from tests.integration.test_master_faults import local_cluster, process_on

pytestmark = pytest.mark.timeout(120)
INLINE = 1_000
PATIENCE_SECONDS = 1.0


async def log_of(cluster: LocalCluster, name: str) -> LogMeta:
    async with roq.connect(cluster.zookeeper) as connected:
        log = (await connected.work_queue(name)).record.spec.log
    session = await Session.connect(cluster.zookeeper)
    try:
        node = await session.get(paths.log(log))
    finally:
        await session.close()
    assert node is not None
    return from_json(node.data, LogMeta)


async def test_a_cluster_s_queue_has_the_options_that_were_asked_for(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        address = f"roq://{cluster.zookeeper}/all"
        async with roq.open_queue(address, write_quorum=3, ack_quorum=3, standbys=2, inline_bytes=INLINE) as queue:
            assert queue.settings == ClusterSettings(0, 300.0, 1024 * 1024, 3, 3, 2, INLINE)
            await queue.put_many([b"x" * (INLINE - 1), b"y" * INLINE])
            assert {host: len(blobs) for host, blobs in (await blobs_of(cluster, "all")).items()} == {
                "host-1": 1,
                "host-2": 1,
                "host-3": 1,
            }, "the larger one is in the stores, three times"
        meta = await log_of(cluster, "all")
        assert (meta.write_quorum, meta.ack_quorum) == (3, 3)
        assert [len(fragment.nodes) for segment in meta.segments for fragment in segment.fragments] == [3]
        async with roq.connect(cluster.zookeeper) as connected:
            record = (await connected.work_queue("all")).record
            assert len({record.master_host, *record.standby_hosts}) == 3
        await asyncio.to_thread(other_faces, address)
        await asyncio.to_thread(from_the_shell, address)
        await three_must_have_it(cluster, address)


def other_faces(address: str) -> None:
    """They see them, may ask for the same again, and are told what differs."""
    with blocking.open_queue(f"{address}?write_quorum=3&ack_quorum=3&standbys=2&inline_bytes={INLINE}") as same:
        assert sorted(len(one.payload) for one in same.lease(60, 2)) == [INLINE - 1, INLINE]
        assert same.release_all() == 2
    for asked, told_why in (
        ("write_quorum=2", "write_quorum 3, not 2"),
        ("ack_quorum=1", "ack_quorum 3, not 1"),
        ("standbys=1", "standbys 2, not 1"),
        ("inline_bytes=65536&max_attempts=7", f"max_attempts 0, not 7, inline_bytes {INLINE}, not 65536"),
    ):
        with pytest.raises(WorkQueueConflict, match=f"'all' exists with {told_why}$"):
            blocking.open_queue(f"{address}?{asked}").open()


def from_the_shell(address: str) -> None:
    """`create` chooses them, `status` and `ls` show them."""
    shown = told("status", address)["settings"]
    assert [shown[name] for name in ("write_quorum", "ack_quorum", "standbys", "inline_bytes")] == [3, 3, 2, INLINE]
    small, more = address.replace("/all", "/small"), ("--standbys", "0", "--inline-bytes", "5000")
    made = task("create", small, "--write-quorum", "2", "--ack-quorum", "1", *more).stderr
    assert b"write quorum 2, ack quorum 1, 0 standbys, payloads from 5000 bytes on go straight to a store" in made
    assert b"write quorum 2, ack quorum 1, 0 standbys" in b" ".join(task("status", small).stdout.split())
    [row] = [row for row in told("ls", address.removeprefix("roq://").removesuffix("/all")) if row["name"] == "small"]
    assert (row["copies"], row["needed"], row["standbys_wanted"], row["inline_bytes"]) == (2, 1, 0, 5000)
    assert b"write_quorum 2, not 3" in task("create", f"{small}?write_quorum=3", code=1).stderr
    assert b"at most write_quorum" in task("create", small, "--write-quorum", "2", "--ack-quorum", "3", code=1).stderr


async def three_must_have_it(cluster: LocalCluster, address: str) -> None:
    """With one of three stores frozen, nothing is acknowledged, and a call says so when its patience is over."""
    async with roq.open_queue(f"{address}?patience_seconds={PATIENCE_SECONDS}") as queue:
        frozen = (await process_on(cluster, "host-2", "store")).pid
        freeze(frozen)
        try:
            begun = time.monotonic()
            with pytest.raises(Unavailable):
                await queue.put(b"x")
            assert PATIENCE_SECONDS / 2 < time.monotonic() - begun < 10, "not the 30 s of a call without this option"
        finally:
            os.kill(frozen, signal.SIGCONT)
