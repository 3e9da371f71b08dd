"""Followers join and leave a cluster of containers while a shuffle is written, and while it is read.

Hosts that join are new ones; those that leave are drained and stopped, or killed, and never come back. Every row must arrive
once and in key order, every range have all its copies (counted at each holder), a host that joins get its share of the
data, and the bytes that moved are held against the fewest that had to.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator

import pytest

import roq
from roq.testing import DockerCluster
from roq.wire.shuffle import Description, ShuffleState
from tests.harness.shuffle_membership import RANGES, REPLICAS, Scene, given, least_between, size_at

CLUSTER = {"gcms": 2, "hcms": 3, "session_seconds": 6.0}  # no host shall be lost but those that are killed: bytes are counted
MOVED_MIN, MOVED_MAX = 0.8, 1.05  # of the fewest bytes by the table: borders cut blocks, halves of which may be there already
CUT_BYTES = 300 * 60 * RANGES  # where borders are moved, too: a block's head for each piece of a run, of which there are 60
SHARE_MIN = 0.2  # of 24 ranges with two copies each, drawn by the hash of a new name: less comes once in 50,000 runs


@pytest.fixture
async def scene(machines: DockerCluster, client: roq.Cluster) -> AsyncIterator[Scene]:
    made = Scene(machines, client)
    yield made
    await machines.heal()
    await made.close()


async def has_share(scene: Scene, host: str, table: Description) -> int:
    """The joined host holds its share on its own disk; how many bytes. A share: what each host has if all have the same."""
    mine, held = size_at(table.ranges, host), await scene.held(host)
    share = REPLICAS * table.size / len(scene.machines.hosts)
    assert mine > SHARE_MIN * share, f"{host} holds {mine} of {table.size} bytes"
    assert held > 0.9 * mine, f"{host} should have {mine} bytes, and has {held}"
    return held


def check_bill(moved: int, least: int, cut_bytes: int = 0) -> None:
    """What had to move has moved, and nothing else but cut_bytes."""
    assert MOVED_MIN * least <= moved <= MOVED_MAX * least + cut_bytes, f"{moved} bytes moved, {least} had to"


# --- while a shuffle is written ----------------------------------------------------------------------------------------------


async def test_a_host_joins_before_ranges_are_cut(scene: Scene) -> None:
    await scene.begin(3)
    host = await scene.join()
    assert (await scene.describe()).epoch == 0
    await scene.filling()
    table = await scene.sealed()
    held = await has_share(scene, host, table)
    fetched = sum((await scene.fetched()).values())
    check_bill(table.moved, table.moved_least, CUT_BYTES)
    assert fetched == table.moved < table.size / 4, "nearly all of it was sent where it belongs at once"
    await scene.judge("a host joined before ranges were cut", held=held, fetched=fetched)


async def test_a_host_is_drained_while_attempts_are_written_and_stopped_when_they_are_sealed(scene: Scene) -> None:
    await scene.begin(4)
    await scene.filling()
    leaving = scene.machines.hosts[0]
    held = await scene.held(leaving)
    await scene.client.drain_host(leaving)
    table = await scene.sealed()
    assert size_at(table.ranges, leaving) == 0
    assert not scene.load.errors, "a planned leave costs no attempt"
    await scene.machines.stop(leaving)
    await scene.machines.remove_host(leaving)
    await scene.judge("a host was drained during writes and stopped after them", held_by_it=held)
    assert (await scene.describe()).moved == table.moved, "nothing more had to be copied"
    check_bill(table.moved, table.moved_least, CUT_BYTES)


async def test_a_host_joins_while_attempts_are_written(scene: Scene) -> None:
    await scene.begin(3)
    early = await scene.filling()
    host = await scene.join()
    assert (await scene.describe()).state is ShuffleState.FILLING
    assert host not in {each for one in early.ranges for each in one.holders}
    table = await scene.sealed()
    held = await has_share(scene, host, table)
    fetched = await scene.fetched()
    assert fetched[host] > 0
    check_bill(table.moved, table.moved_least, CUT_BYTES)
    await scene.judge("a host joined while attempts were written", held=held, fetched=fetched)


async def test_a_host_is_killed_for_good_while_attempts_are_written(scene: Scene) -> None:
    await scene.begin(4)
    await scene.filling()
    lost = scene.machines.hosts[0]
    held = await scene.held(lost)
    await scene.machines.remove_host(lost)
    table = await scene.sealed()
    assert size_at(table.ranges, lost) == 0
    copied = sum((await scene.fetched()).values()) - table.moved
    await scene.judge("a host was killed for good during writes", held_by_it=held, copied=copied)
    assert copied <= 2 * held, "what it held is copied, and not everything"


# --- while it is read --------------------------------------------------------------------------------------------------------


async def test_a_host_joins_while_ranges_are_read(scene: Scene) -> None:
    await scene.begin(3)
    await scene.filling()
    before = await scene.sealed()
    earlier = await scene.fetched()
    reading = await scene.reading()
    host = await scene.join()
    after = await scene.placed(holding=[host])
    await scene.read(reading)
    held, fetched = await has_share(scene, host, after), await scene.fetched()
    least, moved = least_between(before.ranges, after.ranges), after.moved - before.moved
    assert given(before.ranges, after.ranges) == {host}, "nobody else was given anything"
    assert fetched == {**earlier, host: moved}, "what the leader counts is what was sent, and to this host alone"
    check_bill(moved, least)
    await scene.judge("a host joined while ranges were read", held=held, moved_now=moved, least_now=least)


async def test_a_host_is_drained_and_stopped_while_ranges_are_read(scene: Scene) -> None:
    await scene.begin(4)
    await scene.filling()
    before = await scene.sealed()
    leaving = scene.machines.hosts[0]
    reading = await scene.reading()
    await scene.client.drain_host(leaving)
    after = await scene.placed(without=[leaving])
    await scene.machines.stop(leaving)
    await scene.machines.remove_host(leaving)
    await scene.read(reading)
    least, moved = least_between(before.ranges, after.ranges), after.moved - before.moved
    assert least == size_at(before.ranges, leaving), "only what it held"
    check_bill(moved, least)
    await scene.judge("a host was drained and stopped during reads", moved_now=moved, least_now=least)
    assert (await scene.describe()).moved == after.moved, "nothing more had to be copied"


async def test_a_host_is_killed_for_good_while_ranges_are_read(scene: Scene) -> None:
    await scene.begin(4)
    await scene.filling()
    before = await scene.sealed()
    reading = await scene.reading()
    lost = scene.machines.hosts[0]
    await scene.machines.remove_host(lost)
    after = await scene.placed()
    await scene.read(reading)
    least, moved = least_between(before.ranges, after.ranges), after.moved - before.moved
    assert least == size_at(before.ranges, lost), "only what it held"
    check_bill(moved, least)
    await scene.judge("a host was killed for good during reads", moved_now=moved, least_now=least)


# --- both --------------------------------------------------------------------------------------------------------------------


async def join_and_kill(scene: Scene, draw: random.Random) -> tuple[str, str]:
    """At once, in the order that is drawn, as is which of the others is killed. (joined, killed)"""
    joined = killed = ""
    for what in draw.sample(["join", "kill"], 2):
        if what == "join":
            joined = await scene.machines.add_host()
        else:
            killed = draw.choice([host for host in scene.machines.hosts if host != joined])
            await scene.machines.remove_host(killed)
        sys.stdout.write(f"\n{what} {joined if what == 'join' else killed}")
    return joined, killed


@pytest.mark.parametrize("seed", [2, 5])  # between them, each order in each phase
async def test_a_host_joins_and_one_is_killed_together(scene: Scene, seed: int) -> None:
    """During writes, and again during reads."""
    sys.stdout.write(f"\nseed {seed}")
    draw = random.Random(seed)
    await scene.begin(3)
    await scene.filling()
    await join_and_kill(scene, draw)
    await scene.sealed()
    before = await scene.placed(holding=scene.machines.hosts)
    reading, earlier = await scene.reading(), await scene.fetched()
    joined, killed = await join_and_kill(scene, draw)
    after = await scene.placed(holding=scene.machines.hosts)
    await scene.read(reading)
    moved, least = after.moved - before.moved, least_between(before.ranges, after.ranges)
    fetched = sum(count - earlier.get(host, 0) for host, count in (await scene.fetched()).items())
    figures = {"moved_now": moved, "least_now": least, "fetched_now": fetched}
    await scene.judge("a host joined and one was killed together", seed=seed, **figures)
    one_by_one = size_at(before.ranges, killed) + size_at(after.ranges, joined)
    assert moved <= MOVED_MAX * one_by_one, f"{moved} bytes moved, {least} to {one_by_one} had to"
    assert fetched >= MOVED_MIN * least, "what came while a host was lost is fetched, though the leader may not count it"
