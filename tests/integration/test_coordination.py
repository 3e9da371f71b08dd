"""Calls, fenced writes and connecting against a real ZooKeeper: what kazoo's traps must not do to us (RELIABILITY §2.2).

Broken connections and watches are in test_session_states.py, election and registration in test_election.py, the local ZooKeeper
itself in test_local_zookeeper.py.
"""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.election import Fence, fenced, take_epoch
from roq.coordination.link import (
    ANY_VERSION,
    Check,
    Create,
    CreateEphemeral,
    Delete,
    Node,
    NodeExists,
    NodeNotEmpty,
    NoNode,
    Op,
    SetData,
    VersionConflict,
)
from roq.coordination.locate import read_leader
from roq.coordination.session import (
    CALLS_IN_FLIGHT,
    DATA_BYTES_MAX,
    MANY_IN_FLIGHT,
    READ_TOGETHER,
    Session,
    SessionState,
)
from roq.errors import CallError, Closed, ClusterNotFound, StaleEpoch, Unavailable, ZooKeeperUnavailable
from roq.wire.gcm import LeaderAddress
from tests.integration.faults import Connect, roq_threads

# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_nodes_are_made_read_changed_and_removed(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    assert await session.get("") is None
    assert await session.children("a") == []
    with pytest.raises(NoNode):
        await session.create("a")
    await session.ensure_path("a/b")
    await session.ensure_path("a/b")
    made = await session.create("a/b/c", b"1")
    assert await session.get("a/b/c") == made
    assert (made.data, made.version, made.owner) == (b"1", 0, 0)
    assert await session.set("a/b/c", b"2", 0) == 1
    with pytest.raises(VersionConflict) as conflict:
        await session.set("a/b/c", b"3", 0)
    assert conflict.value.path == "a/b/c"
    assert await session.set("a/b/c", b"3", ANY_VERSION) == 2
    with pytest.raises(NodeExists):
        await session.create("a/b/c")
    with pytest.raises(NodeNotEmpty):
        await session.delete("a/b")
    with pytest.raises(VersionConflict):
        await session.delete("a/b/c", 0)
    mine = await session.create_ephemeral("a/b/e")
    assert mine.owner == session.session_id
    assert await session.create_ephemeral_sequential("a/b/s-") == "a/b/s-0000000002"
    assert await session.children("a/b") == ["c", "e", "s-0000000002"]
    await session.delete("a/b/c", 2)
    with pytest.raises(NoNode):
        await session.delete("a/b/c")
    with pytest.raises(NoNode):
        await session.set("a/b/c", b"", ANY_VERSION)


async def test_many_nodes_are_read_at_once(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path("a")
    names = [f"a/{number}" for number in range(2 * READ_TOGETHER * MANY_IN_FLIGHT + 3)]
    there = {name: await session.create(name, name.encode()) for name in names[::3]}
    assert await session.get_many(names) == [there.get(name) for name in names]
    await session.set(names[0], b"", ANY_VERSION)
    assert await session.get_many([names[0], names[0]]) == [await session.get(names[0])] * 2
    assert await session.get_many([]) == []


async def test_large_nodes_are_read_together(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot, session_seconds=10)
    names = [f"large-{number}" for number in range(READ_TOGETHER)]
    await session.ensure_path("")
    for name in names:
        await session.create(name, name.encode() + bytes(DATA_BYTES_MAX - len(name)))
    found = await session.get_many(names)
    assert [node.data[: len(name)].decode() for name, node in zip(names, found, strict=True) if node is not None] == names
    await session.multi([Delete(name) for name in names])


async def test_a_deep_chroot_is_made_and_its_root_awaited(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot + "/x/y"), await sessions(chroot + "/x/y")
    waiting = asyncio.create_task(other.wait_root())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await session.ensure_path("")
    await asyncio.wait_for(waiting, 2)
    top = await sessions(chroot)
    assert await top.children("x") == ["y"]


@pytest.mark.quick
async def test_ephemeral_nodes_end_with_the_session(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    await session.ensure_path("")
    await session.create_ephemeral("e")
    await session.close()
    assert await other.get("e") is None
    with pytest.raises(Closed):
        await session.get("e")
    with pytest.raises(Closed):
        session.watch_data("e", lambda node: None)


async def test_too_much_data_is_refused_before_zookeeper_cuts_the_connection(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    large = bytes(DATA_BYTES_MAX)
    with pytest.raises(CallError):
        await session.create("a", large + b"x")
    with pytest.raises(CallError):
        await session.multi([Create("a", large), Create("b", b"x")])
    await session.create("a", large)
    assert session.state is SessionState.CONNECTED


async def test_many_calls_at_once_and_cancelled_ones_leave_the_session_whole(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    await session.create("n")
    calls = [asyncio.create_task(session.set("n", str(n).encode(), ANY_VERSION)) for n in range(CALLS_IN_FLIGHT * 5)]
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, int | asyncio.CancelledError) for result in results)
    await session.set("n", b"last", ANY_VERSION)
    assert (await session.get("n") or made_up()).data == b"last"


def made_up() -> Node:
    return Node(b"", -1, 0, 0, 0)


# --- multi and fence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guilty", "error"),
    [
        (Check("n", 7), VersionConflict),
        (SetData("n", b"", 7), VersionConflict),
        (Delete("n", 7), VersionConflict),
        (Create("n"), NodeExists),
        (CreateEphemeral("n"), NodeExists),
        (Delete("none"), NoNode),
        (Create("none/x"), NoNode),
        (Check("none", 0), NoNode),
        (Delete("full"), NodeNotEmpty),
    ],
)
async def test_a_multi_with_one_failing_operation_does_nothing(
    chroot: str, sessions: Connect, guilty: Op, error: type[Exception]
) -> None:
    session = await sessions(chroot)
    await session.ensure_path("n")
    await session.ensure_path("full/child")
    with pytest.raises(error) as raised:
        await session.multi([Check("n", 0), SetData("n", b"new", 0), guilty, Create("made")])
    assert getattr(raised.value, "path", None) == guilty.path
    assert await session.get("made") is None
    assert (await session.get("n") or made_up()).version == 0


@pytest.mark.quick
async def test_a_multi_does_all(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path("n")
    await session.multi([])
    await session.multi([Check("n", 0), Delete("n", 0), Create("n", b"2"), CreateEphemeral("e"), SetData("n", b"3", 0)])
    node, mine = await session.get("n"), await session.get("e")
    assert node is not None
    assert mine is not None
    assert (node.data, node.version, mine.owner) == (b"3", 1, session.session_id)


@pytest.mark.quick
async def test_only_the_newest_term_can_write(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    old = await take_epoch(session)
    await fenced(session, old, Create("by-old"))
    new = await take_epoch(session)
    assert new.epoch > old.epoch >= 1
    with pytest.raises(StaleEpoch):
        await fenced(session, old, Create("late"))
    with pytest.raises(NodeExists):
        await fenced(session, new, Create("by-old"))
    with pytest.raises(VersionConflict):
        await fenced(session, new, SetData("by-old", b"", 9))
    await session.delete(paths.EPOCH)
    with pytest.raises(StaleEpoch):
        await fenced(session, new, Create("late"))
    assert await session.get("late") is None


async def test_of_two_who_take_the_epoch_at_once_each_gets_another_one(chroot: str, sessions: Connect) -> None:
    one, two = await sessions(chroot), await sessions(chroot)
    await one.ensure_path(paths.EPOCH)
    results = await asyncio.gather(take_epoch(one), take_epoch(two), return_exceptions=True)
    fences = [result for result in results if isinstance(result, Fence)]
    assert fences
    assert len({fence.epoch for fence in fences}) == len(fences)
    assert all(isinstance(result, Fence | VersionConflict) for result in results)


# --- connecting -------------------------------------------------------------------------------------------------------


async def test_no_zookeeper_is_told_in_time_and_leaves_no_thread() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], 1):  # one that says nothing, one that refuses
            began = time.monotonic()
            with pytest.raises(ZooKeeperUnavailable):
                await Session.connect(f"127.0.0.1:{port}", connect_seconds=0.3)
            assert time.monotonic() - began < 1.5
            assert roq_threads() == []


async def test_a_silent_server_beside_a_good_one_costs_little(zookeeper: str, chroot: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{chroot}"
        for _ in range(4):  # kazoo shuffles them
            session = await Session.connect(hosts, 2.0, connect_seconds=5.0)
            assert await session.get("") is None
            await session.close()


async def test_reading_the_leader_is_quick_and_leaves_no_thread(chroot: str, sessions: Connect) -> None:
    with pytest.raises(ClusterNotFound):
        await read_leader(chroot)
    session = await sessions(chroot)
    await session.ensure_path("gcm")
    with pytest.raises(Unavailable):
        await read_leader(chroot)
    await session.create_ephemeral(paths.LEADER, b"{")
    with pytest.raises(Unavailable):
        await read_leader(chroot)
    address = LeaderAddress(epoch=3, host="127.0.0.1", port=7, broadcast=8)
    await session.set(paths.LEADER, msgspec.json.encode(address), ANY_VERSION)
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert await read_leader(chroot) == address
        times.append(time.monotonic() - began)
    assert min(times) < 0.3
    await session.close()
    assert roq_threads() == []
