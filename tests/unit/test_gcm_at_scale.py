"""What the leader does for one change does not grow with what has not changed.

Not covered: how long it takes (`python -m benchmarks at-scale`, docs/scale.md).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from benchmarks.at_scale.decisions import cluster_of, reported
from gcm import placement
from gcm.cluster import ClusterState, Host, differing
from gcm.reconcile import assign, assign_all, changes, stamp
from gcm.transactions import create_queue
from gcm.watcher import WAKE_SECONDS, ClusterWatcher, HostReading, read_host, read_snapshot
from roq.coordination import paths
from roq.coordination.link import Create, Node, SetData
from roq.errors import HostFull, NoHosts
from roq.runtime.run import Tasks
from roq.shuffle.ranges import Placement, holders, table_of
from roq.shuffle.record import ShuffleRecord, refilled, with_holders
from roq.wire.assignment import STORES, to_json
from roq.wire.gcm import CreateQueue
from roq.wire.shuffle import Position, Spec

CHANCE = random.Random(5)


@pytest.mark.parametrize("seed", range(50))
def test_what_differs_of_tables_that_share_the_rest(seed: int) -> None:
    chance = random.Random(seed)
    before = {number: [number] for number in range(chance.randrange(8))}
    after = {key: value for key, value in before.items() if chance.random() < 0.7}
    after |= {number: [number] for number in range(10) if chance.random() < 0.2}
    wanted = {key for key in {*before, *after} if before.get(key) is not after.get(key)}
    named_before, named_after = ({str(key): value for key, value in table.items()} for table in (before, after))
    assert sorted(differing(named_before, named_after)) == sorted(map(str, wanted))
    assert differing(named_before, named_before) == []


def test_a_creation_touches_one_host_and_leaves_the_others_as_they_are() -> None:
    before = cluster_of(20, 100)
    after = stamp(before, assign(create_queue(before, CreateQueue("new", "t"), 0.0, CHANCE), ["new"], before))
    (name,) = differing(before.hosts, after.hosts)
    assert after.hosts[name].revision == 2
    written = changes(before, after)
    assert [type(one) for one in written] == [Create, Create, SetData]
    assert written[2].path == paths.assignment(name)


def test_every_assignment_that_is_right_is_left_as_it_is() -> None:
    """Or a term that begins would write them all."""
    cluster = cluster_of(5, 50)
    assert assign_all(cluster).hosts == cluster.hosts
    assert differing(cluster.hosts, assign_all(cluster).hosts) == []
    emptied = replace(cluster, hosts={name: replace(host, assigned={}) for name, host in cluster.hosts.items()})
    found = assign_all(emptied)
    assert {name: dict(host.assigned) for name, host in found.hosts.items()} == {
        name: dict(host.assigned) for name, host in cluster.hosts.items()
    }


def test_stores_come_beside_what_a_host_has() -> None:
    cluster = replace(cluster_of(3, 6), shuffles=frozenset({"s"}))
    found = assign(cluster, [STORES], cluster)
    for name, host in found.hosts.items():
        assert {*host.assigned} == {*cluster.hosts[name].assigned, "store"}


def test_places_are_the_least_loaded_by_chance_among_equals() -> None:
    cluster = cluster_of(4, 6)  # two hosts have two queues, two have one
    assert {placement.place(cluster, "", CHANCE).name for _ in range(60)} == {"host-3", "host-4"}
    full = {name: replace(host, draining_wanted=True) for name, host in cluster.hosts.items()}
    with pytest.raises(HostFull, match="all 4 hosts are full or cordoned"):
        placement.place(replace(cluster, hosts=full), "", CHANCE)
    with pytest.raises(NoHosts):
        placement.place(ClusterState(1, {"a": Host("a")}), "", CHANCE)


# --- watching --------------------------------------------------------------------------------------------------------------


class CountingTree:
    """What a term reads, counted. made: folders that were asked to be there."""

    def __init__(self, cluster: ClusterState) -> None:
        self.nodes: dict[str, bytes] = {}
        self.reads, self.made = list[str](), list[str]()
        for host in cluster.hosts.values():
            assert host.report is not None
            self.nodes[paths.assignment(host.name)] = to_json(host.assignment(1))
            self.nodes[paths.running(host.name)] = to_json(host.report)
        self.nodes |= {paths.queue(name): to_json(record) for name, record in cluster.queues.items()}
        self.watch_data = self.watch_children = Mock()

    async def children(self, path: str) -> list[str]:
        inside = (name.removeprefix(f"{path}/") for name in self.nodes if name.startswith(f"{path}/"))
        return sorted({name.partition("/")[0] for name in inside})

    async def get(self, path: str) -> Node | None:
        self.reads.append(path)
        data = self.nodes.get(path)
        return Node(data, 0, 1, 7, 0) if data is not None else None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [await self.get(path) for path in paths]

    async def ensure_path(self, path: str) -> None:
        self.made.append(path)


async def test_a_term_reads_each_node_once_and_makes_no_folder_that_is_there() -> None:
    cluster = cluster_of(6, 12)
    tree: Any = CountingTree(cluster)
    tree.nodes[f"{paths.HOSTS}/stranger"] = b""
    snapshot = await read_snapshot(tree, 1)
    assert tree.made == [paths.host_state("stranger")]
    assert max(map(tree.reads.count, tree.reads)) == 1
    assert {name: dict(host.assigned) for name, host in snapshot.cluster.hosts.items() if name != "stranger"} == {
        name: dict(host.assigned) for name, host in cluster.hosts.items()
    }


def watcher_of(cluster: ClusterState, readings: list[HostReading]) -> ClusterWatcher:
    return ClusterWatcher(Mock(), cluster, readings, Tasks(lambda _: None), lambda queues, host: None)


async def test_what_was_read_at_the_beginning_is_no_news_to_the_watches() -> None:
    cluster = cluster_of(1, 2)
    tree: Any = CountingTree(cluster)
    reading = await read_host(tree, "host-1")
    view = watcher_of(cluster, [reading])
    changed = list[ClusterState]()
    view.on_change.append(lambda before, after: changed.append(after))
    view._report_seen("host-1", reading.report)
    assert changed == []
    assert reading.report is not None
    view._report_seen("host-1", reading.report._replace(mzxid=8))
    assert len(changed) == 1


async def test_a_report_wakes_whom_it_concerns_and_soon_everybody_once() -> None:
    cluster = cluster_of(2, 2)  # q-0 on host-1, q-1 on host-2
    view = watcher_of(cluster, [])
    looks: dict[str, int] = {"q-0": 0, "q-1": 0}

    async def wait(queue: str) -> None:
        def look(now: ClusterState) -> bool:
            looks[queue] += 1
            return False

        await view.until(queue, look)

    waiting = [asyncio.create_task(wait(queue)) for queue in looks]
    await asyncio.sleep(0)
    for revision in (2, 3, 4):
        host = reported(replace(cluster.host("host-1"), revision=revision))
        assert host.report is not None
        view._report_seen("host-1", Node(to_json(host.report), 0, 1, revision, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert looks == {"q-0": 4, "q-1": 1}
    await asyncio.sleep(2 * WAKE_SECONDS)
    assert looks == {"q-0": 5, "q-1": 2}
    view.end()
    await asyncio.gather(*waiting, return_exceptions=True)
    view.close()


# --- shuffles --------------------------------------------------------------------------------------------------------------


def test_lost_holders_are_replaced_by_those_that_rank_next() -> None:
    hosts = frozenset(f"h{number}" for number in range(9))
    table = table_of([Position(bytes([number]), 0, 0, 0) for number in range(1, 20)])
    record = ShuffleRecord("s", "id", Spec(("k",), b"", replicas=3), 0.0, "t", epoch=1, placement=Placement.RING)
    record = msgspec.structs.replace(record, table=with_holders(record, table, hosts))
    live = hosts - {"h1", "h4"}
    for before, after in zip(record.table, refilled(record, live, live), strict=True):
        kept = [host for host in before.holders if host in live]
        ranked = [host for host in holders("id", before.identity, live, len(live)) if host not in kept]
        assert after.holders == (*kept, *ranked[: 3 - len(kept)])
