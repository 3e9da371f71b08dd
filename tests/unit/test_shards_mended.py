"""What the next leader makes of shards whose records are damaged, or half written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from gcm import shards
from gcm.cluster import ClusterState
from roq.errors import UnknownFormat
from roq.wire.assignment import STORES, work_subject
from roq.wire.gcm import CreateWorkQueue
from roq.wire.shards import ClosingShard, SetShards, ShardList, shard_name
from tests.unit.test_recorded_queues import cluster_of, written

CHANCE = random.Random(4)


def changed(cluster: ClusterState, after: ClusterState) -> ClusterState:
    return written(cluster, after, work_subject("w"), STORES)


def made(count: int) -> ClusterState:
    cluster = cluster_of("a", "b", "c")
    return changed(cluster, shards.create(cluster, CreateWorkQueue("w", "t", shards=count), 7.0, CHANCE))


def with_shards(cluster: ClusterState, count: int) -> ClusterState:
    return changed(cluster, shards.set_shards(cluster, SetShards("w", count, "s"), 9.0, CHANCE))


def damaged(cluster: ClusterState, name: str) -> ClusterState:
    """As a leader reads it when one record can't be read."""
    kept = {one: record for one, record in cluster.work_queues.items() if one != name}
    return replace(cluster, work_queues=kept, unreadable=frozenset({work_subject(name)}))


def with_closed(cluster: ClusterState, name: str, closed: bool) -> ClusterState:
    record = cluster.work_queues[name]
    record = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, closed=closed))
    return changed(cluster, replace(cluster, work_queues={**cluster.work_queues, name: record}))


def completed(cluster: ClusterState) -> ClusterState:
    return changed(cluster, shards.completed(cluster, "w", 20.0, CHANCE))


@pytest.mark.parametrize("count", [3, 1], ids=["open", "closing"])
def test_a_shard_that_cannot_be_read_is_neither_made_anew_nor_dropped(count: int) -> None:
    cluster = damaged(with_shards(made(3), count), shard_name("w", 2))
    assert shards.lacking(cluster) == []
    assert shards.completed(cluster, "w", 20.0, CHANCE) is cluster


def test_another_shard_of_that_queue_is_still_made() -> None:
    whole = damaged(made(3), shard_name("w", 2))
    cluster = replace(whole, work_queues={"w": whole.work_queues["w"]})
    assert shards.lacking(cluster) == ["w"]
    assert {*completed(cluster).work_queues} == {"w", shard_name("w", 1)}


def test_a_list_that_was_forgotten_is_not_made_without_a_shard_that_cannot_be_read() -> None:
    whole = damaged(made(3), shard_name("w", 2))
    record = msgspec.structs.replace(whole.work_queues["w"], shards=None)
    cluster = replace(whole, work_queues={**whole.work_queues, "w": record})
    assert shards.lacking(cluster) == []
    assert shards.completed(cluster, "w", 20.0, CHANCE) is cluster
    with pytest.raises(UnknownFormat, match=r"_roq\.shard\.2\.w"):
        with_shards(cluster, 4)


@pytest.mark.parametrize(
    "ask",
    [
        lambda now: shards.create(now, CreateWorkQueue("w", "t"), 7.0, CHANCE),
        lambda now: with_shards(damaged(made(1), shard_name("w", 1)), 2),
    ],
    ids=["queue", "shard"],
)
def test_nothing_is_made_in_the_place_of_what_cannot_be_read(ask: Callable[[ClusterState], ClusterState]) -> None:
    with pytest.raises(UnknownFormat, match="damaged"):
        ask(damaged(made(1), "w"))


def test_nobody_waits_for_a_closing_shard_that_is_not_there() -> None:
    """Its record may never be written: what drops it from the list wakes nobody who waits for the shard."""
    whole = with_shards(made(3), 2)
    kept = {name: record for name, record in whole.work_queues.items() if name != shard_name("w", 2)}
    cluster = replace(whole, work_queues=kept)
    assert shards.serves(cluster, "w", shard_name("w", 2))
    assert not shards.serves(cluster, "w", shard_name("w", 1)), "no host has said that it runs"


def test_a_shard_that_was_closed_before_the_list_was_written_closes() -> None:
    cluster = with_closed(made(3), shard_name("w", 2), closed=True)
    assert shards.lacking(cluster) == ["w"]
    after = completed(cluster)
    assert after.work_queues["w"].shards == ShardList(20, (0, 1), (0, 1, 2), (ClosingShard(2, 20.0),), 3)
    assert shards.lacking(after) == []


def test_a_shard_that_was_not_closed_after_the_list_was_written_closes() -> None:
    cluster = with_closed(with_shards(made(3), 2), shard_name("w", 2), closed=False)
    assert shards.lacking(cluster) == ["w"]
    after = completed(cluster)
    specs = [spec for host in after.hosts.values() for spec in host.assigned.values() if spec.queue == shard_name("w", 2)]
    assert specs
    assert all(spec.work is not None and spec.work.closed for spec in specs), "their masters hear of it"
    assert after.work_queues["w"].shards is not None
    assert after.work_queues["w"].shards.closing == (ClosingShard(2, 9.0),)
    assert shards.lacking(after) == []
