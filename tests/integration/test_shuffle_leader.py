"""The leader of shuffles: killed at every step, its successor goes on; followers that are lost and join; refusals.

GCMs are processes, followers real ones in this process on hosts that a test double plays; clients use roq.shuffle. What dies
together with its process: test_shuffle_cluster.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest

import roq.shuffle
from gcm.crash import SHUFFLE_STAGES
from roq.coordination import paths
from roq.coordination.locate import GcmClient
from roq.errors import (
    AttemptConflict,
    AttemptNotFound,
    InvalidConfiguration,
    InvalidName,
    ShuffleConflict,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
)
from roq.shuffle.node.server import Follower
from roq.shuffle.ranges import holders, imbalance
from roq.wire import gcm as wire
from roq.wire.assignment import ProcessKind
from roq.wire.shuffle import Description, Receipt, ShuffleState, Spec
from tests.integration.gcm_bench import FakeHost, eventually
from tests.integration.test_gcm_crash_points import ANSWER_SECONDS, Scene

T = TypeVar("T")
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])
MEMORY_BYTES = 32 * 1024 * 1024
HOSTS = ("h1", "h2", "h3")


class ShuffleScene(Scene):
    """Two GCMs and three hosts with followers."""

    def __init__(self, zookeeper: str, stack: AsyncExitStack, directory: Path) -> None:
        super().__init__(zookeeper, stack)
        self.directory = directory
        self.followers: dict[str, Follower] = {}
        self.shuffles = roq.shuffle.open(f"roq://{zookeeper}")
        stack.push_async_callback(asyncio.to_thread, self.shuffles.close)

    async def add_host(self, name: str) -> FakeHost:
        """One more host with a follower."""
        gcm = GcmClient(self.zookeeper)
        self._stack.callback(gcm.close)

        async def report(runs: wire.ReportRuns) -> wire.TableInfo:
            return await gcm.request(runs, wire.TableInfo, 5.0)

        follower = await Follower.open(name, self.directory / name, "127.0.0.1", 0, report, MEMORY_BYTES)
        self.followers[name] = follower
        self._stack.push_async_callback(follower.close)
        return await self.bench.host(name, ports={ProcessKind.STORE: {"shuffle": follower.port}})

    async def lose_host(self, name: str) -> None:
        """With all it has."""
        await self.followers.pop(name).close()
        await self.hosts.pop(name).stop()

    async def begin(self, point: str = "") -> None:
        """The leader dies at this point."""
        self.armed = await self._gcm(point)
        self.session = await self.bench.session()
        await eventually(self._leads)
        if point:
            await self._gcm("")
        for name in HOSTS:
            self.hosts[name] = await self.add_host(name)
        await self.bench.hosts_alive(len(HOSTS))

    async def _leads(self) -> bool:
        return await self.session.get(paths.LEADER) is not None

    async def create(self, name: str = "s", ranges: int = 6) -> Description:  # type: ignore[override]
        """See Shuffles.create."""
        return await blocking(lambda: self.shuffles.create(name, ["k"], SCHEMA, 2, ranges))

    async def write(self, partition: int, keys: range, name: str = "s", attempt: str | None = None) -> Receipt:
        """One attempt."""

        def body() -> Receipt:
            with self.shuffles.writer(name, partition, attempt) as writer:
                writer.write(pa.table({"k": [*keys], "v": ["v" * 50] * len(keys)}, schema=SCHEMA))
                return writer.finish()

        return await blocking(body)

    async def describe(self, name: str = "s") -> Description:
        """As it is now."""
        return await blocking(lambda: self.shuffles.describe(name))

    async def keys(self, name: str = "s") -> list[int]:
        """Everything, in the order it is read."""
        return await blocking(lambda: [key for batch in self.shuffles.read_all(name) for key in batch["k"].to_pylist()])

    async def fill(self) -> list[Receipt]:
        """Three partitions; the table is cut by the first, which is only a tenth of the keys."""
        return [await self.write(0, range(1000)), await self.write(1, range(5000)), await self.write(2, range(5000, 10_000))]


async def blocking(work: Callable[[], T]) -> T:
    async with asyncio.timeout(40):
        return await asyncio.to_thread(work)


ALL_KEYS = sorted([*range(1000), *range(10_000)])


@pytest.fixture
async def scene(chroot: str, tmp_path: Path) -> AsyncIterator[ShuffleScene]:
    async with AsyncExitStack() as stack:
        yield ShuffleScene(chroot, stack, tmp_path)


POINTS = [
    *(f"create_shuffle.{step}" for step in ("received", "recorded", "settled")),
    *(f"shuffle.{stage}.{step}" for stage in SHUFFLE_STAGES for step in ("decided", "written")),
]


@pytest.mark.parametrize("point", POINTS)
async def test_a_shuffle_survives_a_leader_killed_at(scene: ShuffleScene, point: str) -> None:
    """Whatever is asked for meanwhile is answered by the successor, once."""
    await scene.begin(point)
    created = await scene.create()
    receipts = await scene.fill()
    lost = await scene.write(1, range(77), attempt="loses")
    assert lost.rows == 77
    sealed = await blocking(lambda: scene.shuffles.commit("s", receipts))
    assert (sealed.state, sealed.id, sealed.rows, len(sealed.ranges)) == (ShuffleState.SEALED, created.id, 11_000, 6)
    assert imbalance([each.size for each in sealed.ranges]) <= 1.15
    assert await scene.keys() == ALL_KEYS
    again = await blocking(lambda: scene.shuffles.rebalance("s", 9))
    assert len(again.ranges) == 9
    assert {each.identity for each in sealed.ranges} & {each.identity for each in again.ranges}, "identities are taken over"
    assert again.moved >= again.moved_least
    assert await scene.keys() == ALL_KEYS
    assert [each.name for each in await blocking(scene.shuffles.list)] == ["s"]
    await blocking(lambda: scene.shuffles.remove("s"))
    await scene.leader_died()
    assert await blocking(scene.shuffles.list) == []
    with pytest.raises(ShuffleNotFound):
        await scene.describe()

    async def forgotten() -> bool:
        return not any(follower.storage.shuffles for follower in scene.followers.values())

    await eventually(forgotten)
    named = await scene.session.children(paths.SHUFFLES)
    parts = {id: await scene.session.children(paths.shuffle(id)) for id in named}
    assert parts == {created.id: [name for name in parts[created.id] if name.startswith("schema-")]}, "old parts are deleted"


async def test_what_a_lost_host_held_is_copied_and_a_new_one_gets_its_share(scene: ShuffleScene) -> None:
    await scene.begin()
    await scene.create()
    receipts = await scene.fill()
    sealed = await blocking(lambda: scene.shuffles.commit("s", receipts))
    await scene.lose_host("h1")

    async def at(hosts: set[str]) -> bool:
        told = await scene.client.request(wire.DescribeShuffle("s"), wire.ShuffleInfo, ANSWER_SECONDS)
        now = told.description
        if told.members != tuple(sorted(hosts)):
            return False
        wanted = [{*holders(now.id, each.identity, hosts, 2)} for each in now.ranges]
        return not now.former and [{*each.holders} for each in now.ranges] == wanted

    await eventually(lambda: at({"h2", "h3"}), 20)
    assert await scene.keys() == ALL_KEYS
    repaired = await scene.describe()
    assert [(each.interval, each.rows) for each in repaired.ranges] == [(each.interval, each.rows) for each in sealed.ranges]
    await scene.add_host("h4")
    await eventually(lambda: at({"h2", "h3", "h4"}), 20)
    joined = await scene.describe()
    assert joined.moved_least <= joined.moved <= joined.moved_least + 6 * 300 * 1024, "no more than border blocks beside it"
    assert await scene.keys() == ALL_KEYS


async def test_a_host_is_lost_while_attempts_are_written(scene: ShuffleScene) -> None:
    await scene.begin()
    await scene.create()
    receipts = [await scene.write(0, range(1000))]
    await scene.lose_host("h2")
    await scene.add_host("h5")
    receipts += [await scene.write(1, range(5000)), await scene.write(2, range(5000, 10_000))]
    sealed = await blocking(lambda: scene.shuffles.commit("s", receipts))
    assert not any("h2" in each.holders for each in sealed.ranges)
    assert all(len(each.holders) == 2 for each in sealed.ranges)
    assert await scene.keys() == ALL_KEYS


async def test_a_host_that_was_away_forgets_what_was_removed(scene: ShuffleScene) -> None:
    await scene.begin()
    await scene.create()
    await blocking(lambda: scene.shuffles.commit("s", []))
    receipts = [await scene.write(0, range(1000), "t")] if await scene.create("t") else []
    await blocking(lambda: scene.shuffles.commit("t", receipts))
    away = next(name for name, follower in scene.followers.items() if follower.storage.shuffles)
    host = scene.hosts.pop(away)
    await host.stop()

    async def lost() -> bool:
        hosts = (await scene.client.request(wire.ListHosts(), wire.Hosts, ANSWER_SECONDS)).hosts
        return not any(each.host == away and each.alive for each in hosts)

    await eventually(lost)
    await blocking(lambda: scene.shuffles.remove("t"))
    assert scene.followers[away].storage.shuffles
    port = scene.followers[away].port
    await scene.bench.host(away, ports={ProcessKind.STORE: {"shuffle": port}})

    async def forgotten() -> bool:
        return not scene.followers[away].storage.shuffles

    await eventually(forgotten)
    assert await scene.keys() == [], "an empty shuffle is read as nothing"


async def test_data_of_a_record_that_can_not_be_read_is_kept(scene: ShuffleScene) -> None:
    """A newer version may have written it, or it is damaged."""
    await scene.begin()
    await scene.create()
    await scene.create("gone")
    receipts = await scene.fill()
    sealed = await blocking(lambda: scene.shuffles.commit("s", receipts))
    await scene.write(0, range(1000), "gone")
    gone = (await scene.describe("gone")).id
    leftover = next(each for each in scene.followers.values() if gone in each.storage.shuffles)
    node = await scene.session.get(paths.shuffle(sealed.id))
    assert node is not None
    await scene.session.set(paths.shuffle(sealed.id), node.data.replace(b'"stage":"', b'"stage":"later-'), -1)
    for part in await scene.session.children(paths.shuffle(gone)):
        await scene.session.delete(paths.shuffle_part(gone, part), -1)
    await scene.session.delete(paths.shuffle(gone), -1)
    await scene._gcm("")
    scene.armed.kill()

    async def swept() -> bool:
        return gone not in leftover.storage.shuffles

    await eventually(swept, 30)  # what has no record at all is forgotten …
    kept = {host for host, each in scene.followers.items() if (of := each.storage.shuffles.get(sealed.id)) and of.live}
    assert kept >= {host for one in sealed.ranges for host in one.holders}, "… and this is not"
    now = await scene.session.get(paths.shuffle(sealed.id))
    assert now is not None
    await scene.session.set(paths.shuffle(sealed.id), node.data, -1)
    with pytest.raises(ShuffleNotFound):
        await scene.describe()


async def test_two_rebalancings_at_once_are_both_answered(scene: ShuffleScene) -> None:
    await scene.begin()
    await scene.create()
    receipts = await scene.fill()
    await blocking(lambda: scene.shuffles.commit("s", receipts))
    wanted = (7, 9)
    several = [blocking(lambda ranges=ranges: scene.shuffles.rebalance("s", ranges)) for ranges in wanted]  # type: ignore[misc]
    done = await asyncio.gather(*several)
    assert sorted(len(each.ranges) for each in done) == [*wanted]
    assert await scene.keys() == ALL_KEYS


async def test_a_shuffle_nobody_goes_on_filling_is_removed(scene: ShuffleScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROQ_SHUFFLE_ABANDONED_SECONDS", "4")
    await scene.begin()
    await scene.create("sealed")
    await blocking(lambda: scene.shuffles.commit("sealed", []))
    await scene.create()
    await scene.write(0, range(1000))

    async def removed() -> bool:
        return [each.name for each in await blocking(scene.shuffles.list)] == ["sealed"]

    await eventually(removed, 30)

    async def forgotten() -> bool:
        return not any(follower.storage.shuffles for follower in scene.followers.values())

    await eventually(forgotten, 30)


async def test_an_attempt_that_is_late_is_told_so(scene: ShuffleScene) -> None:
    """Also if nothing at all has won."""
    await scene.begin()
    for name, receipts in (("s", []), ("t", [Receipt(0, "x", 0, 0, 0)])):
        await scene.create(name)
        writer = await blocking(lambda name=name: scene.shuffles.writer(name, 0))  # type: ignore[misc]
        table = pa.table({"k": [1], "v": ["v"]}, schema=SCHEMA)
        await blocking(lambda writer=writer, table=table: writer.write(table))  # type: ignore[misc]
        await blocking(lambda name=name, receipts=receipts: scene.shuffles.commit(name, receipts))  # type: ignore[misc]
        with pytest.raises(ShuffleSealed):
            await blocking(writer.finish)


@pytest.mark.quick
async def test_refusals_say_what_is_wrong(scene: ShuffleScene) -> None:
    await scene.begin()
    first = await scene.create()
    assert (await scene.create()).id == first.id
    with pytest.raises(ShuffleConflict):
        await scene.create(ranges=7)
    with pytest.raises(ShuffleNotFound):
        await scene.describe("other")
    with pytest.raises(ShuffleNotSealed):
        await blocking(lambda: scene.shuffles.rebalance("s"))
    good = await scene.write(0, range(100))
    with pytest.raises(AttemptConflict):
        await blocking(lambda: scene.shuffles.commit("s", [good, Receipt(0, "other", 1, 1, 1)]))
    with pytest.raises(AttemptNotFound):
        await blocking(lambda: scene.shuffles.commit("s", [good, Receipt(1, "bogus", 5, 50, 1)]))
    assert (await scene.describe()).state is ShuffleState.FILLING, "it can be committed with winners that are there"
    for _ in range(2):
        sealed = await blocking(lambda: scene.shuffles.commit("s", [good]))
        assert sealed.winners == {0: good.attempt}
    with pytest.raises(ShuffleSealed):
        await blocking(lambda: scene.shuffles.commit("s", []))
    with pytest.raises(ShuffleSealed):
        await scene.write(3, range(5))
    removal = wire.RemoveShuffle("s", "once")
    for _ in range(2):
        await scene.client.request(removal, wire.Done, ANSWER_SECONDS)
    with pytest.raises(ShuffleNotFound):
        await scene.client.request(wire.RemoveShuffle("s", "twice"), wire.Done, ANSWER_SECONDS)
    spec = Spec(("k",), b"schema")
    for wrong in (
        Spec(("k" * 70_000,), b"s"),
        Spec((), b"s"),
        Spec(("k", "k"), b"s"),
        Spec(("k",), b""),
        Spec(("k",), b"s", 0),
        Spec(("k",), b"s", 2, -1),
    ):
        with pytest.raises(InvalidConfiguration):
            await scene.client.request(wire.CreateShuffle("w", "t", wrong), wire.ShuffleInfo, ANSWER_SECONDS)
    with pytest.raises(InvalidName):
        await scene.client.request(wire.CreateShuffle("a/b", "t", spec), wire.ShuffleInfo, ANSWER_SECONDS)
