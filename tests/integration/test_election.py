"""The election and the hosts' registration against a real ZooKeeper."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

import pytest

from roq.coordination import paths
from roq.coordination.election import LeaderLatch, participants
from roq.coordination.link import ANY_VERSION, CreateEphemeral, Delete
from roq.coordination.registration import Registration, ServiceInstance, parse_instance
from roq.coordination.session import Session, SessionState
from roq.errors import Closed, HostConflict, ZooKeeperUnavailable
from tests.integration.faults import Connect, Expire, Wire

PATH = paths.LATCH


def through(wire: Wire, chroot: str) -> str:
    return f"{wire.address}/{chroot.partition('/')[2]}"


async def leads(latch: LeaderLatch, seconds: float = 5.0) -> int:
    term = await asyncio.wait_for(latch.wait_leader(), seconds)
    assert latch.is_leader
    return term


async def loses(latch: LeaderLatch, term: int, seconds: float = 5.0) -> None:
    await asyncio.wait_for(latch.wait_lost(term), seconds)


async def holds(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # what others see in ZooKeeper has no event here
            await asyncio.sleep(0.01)


# --- latch ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_the_first_leads_and_hands_over_in_order(chroot: str, sessions: Connect) -> None:
    latches = []
    for name in ("one", "two", "three"):
        latch = LeaderLatch(await sessions(chroot), PATH, name)
        latch.start()
        await holds(lambda latch=latch: immediately(bool(latch.node)))  # type: ignore[misc]
        latches.append(latch)
    watcher = await sessions(chroot)
    one, two, three = latches
    await leads(one)
    assert not two.is_leader
    assert not three.is_leader
    assert await participants(watcher, PATH) == ["one", "two", "three"]
    prefix, _, number = one.node.rpartition("-latch-")
    assert len(number) == 10
    assert str(uuid.UUID(prefix.removeprefix("_c_"))) == prefix.removeprefix("_c_")
    await two.stop()  # a gap in the line
    began = time.monotonic()
    await one.stop()
    await leads(three)
    assert time.monotonic() - began < 1.5, "its session would last for 2 s"
    assert await participants(watcher, PATH) == ["three"]
    with pytest.raises(Closed):
        await one.wait_leader()
    await three.stop()
    assert await watcher.children(PATH) == []


async def immediately(value: bool) -> bool:
    return value


async def test_a_foreign_curator_node_before_us_is_respected(chroot: str, sessions: Connect) -> None:
    session, curator = await sessions(chroot), await sessions(chroot)
    await curator.ensure_path(PATH)
    # its uuid sorts behind ours, its number before
    foreign = await curator.create_ephemeral_sequential(f"{PATH}/_c_ffffffff-ffff-4fff-bfff-ffffffffffff-latch-", b"java")
    latch = LeaderLatch(session, PATH, "we")
    latch.start()
    await holds(lambda: immediately(bool(latch.node)))
    await asyncio.sleep(0.1)
    assert not latch.is_leader
    assert await participants(session, PATH) == ["java", "we"]
    await curator.delete(foreign)
    await leads(latch)
    await latch.stop()


async def test_a_cut_leader_stops_leading_before_the_next_one_leads(chroot: str, wire: Wire, sessions: Connect) -> None:
    cut, other = await sessions(through(wire, chroot)), await sessions(chroot)
    one, two = LeaderLatch(cut, PATH, "one"), LeaderLatch(other, PATH, "two")
    one.start()
    term = await leads(one)
    two.start()
    await holds(lambda: immediately(bool(two.node)))
    wire.cut()
    began = time.monotonic()
    stopped = asyncio.create_task(loses(one, term))
    await leads(two)
    assert stopped.done()
    assert not one.is_leader
    assert time.monotonic() - began < 2.0 + 1.0  # session and two ticks
    wire.heal()
    await holds(lambda: immediately(cut.state is SessionState.CONNECTED))
    await asyncio.sleep(0.2)
    assert not one.is_leader
    assert await participants(other, PATH) == ["two", "one"]
    await two.stop()
    assert await leads(one) == term + 1
    await one.stop()


async def test_a_short_break_ends_the_term_but_keeps_the_node(chroot: str, wire: Wire, sessions: Connect) -> None:
    session = await sessions(through(wire, chroot))
    latch = LeaderLatch(session, PATH, "one")
    latch.start()
    term, node = await leads(latch), latch.node
    lost = asyncio.create_task(loses(latch, term))
    await asyncio.sleep(0)
    wire.reset()
    await lost
    assert await leads(latch) == term + 1
    assert latch.node == node
    await latch.stop()


async def test_an_expired_leader_queues_up_again_with_a_new_node(
    chroot: str, sessions: Connect, expire_session: Expire
) -> None:
    session = await sessions(chroot)
    latch = LeaderLatch(session, PATH, "one")
    latch.start()
    term, node = await leads(latch), latch.node
    await expire_session(session)
    await loses(latch, term)
    assert await leads(latch) == term + 1
    assert latch.node != node
    assert await session.children(PATH) == [latch.node]
    await latch.stop()


async def test_a_node_removed_by_somebody_ends_the_term(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    latch = LeaderLatch(session, PATH, "one")
    latch.start()
    term, node = await leads(latch), latch.node
    await other.delete(f"{PATH}/{node}")
    await loses(latch, term)
    assert await leads(latch) == term + 1
    assert latch.node != node
    await latch.stop()


async def test_a_node_of_another_session_never_makes_us_leader(chroot: str, sessions: Connect) -> None:
    """An earlier try of ours, left by a session that is still to expire (CURATOR-696)."""
    session, former = await sessions(chroot), await sessions(chroot)
    await former.ensure_path(PATH)
    latch = LeaderLatch(session, PATH, "one")
    latch._prefix = f"_c_{uuid.uuid4()}-latch-"
    left = await former.create_ephemeral_sequential(f"{PATH}/{latch._prefix}", b"one")
    latch.start()
    await leads(latch)
    assert latch.node != left.rpartition("/")[2]
    assert await session.children(PATH) == [latch.node]
    await latch.stop()

    latch = LeaderLatch(session, PATH, "one")
    latch._node = (await former.create_ephemeral_sequential(f"{PATH}/x-latch-", b"one")).rpartition("/")[2]
    left = latch._node
    latch.start()
    await leads(latch)
    assert latch.node != left
    await latch.stop()


async def test_a_node_whose_making_was_never_confirmed_is_adopted(chroot: str, sessions: Connect) -> None:
    session = await sessions(chroot)
    await session.ensure_path(PATH)
    latch = LeaderLatch(session, PATH, "one")
    latch._prefix = f"_c_{uuid.uuid4()}-latch-"
    made = await session.create_ephemeral_sequential(f"{PATH}/{latch._prefix}", b"one")
    latch.start()
    await leads(latch)
    assert f"{PATH}/{latch.node}" == made
    await latch.stop()


async def test_a_reaped_election_folder_is_made_again(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    latch = LeaderLatch(session, PATH, "one")
    latch.start()
    term = await leads(latch)
    await other.multi([Delete(f"{PATH}/{latch.node}"), Delete(PATH)])  # as ZooKeeper does to Curator's container nodes
    await loses(latch, term)
    await leads(latch)
    await latch.stop()


async def test_closing_the_session_ends_leading_and_waiting(chroot: str, sessions: Connect) -> None:
    one, two = await sessions(chroot), await sessions(chroot)
    first, second = LeaderLatch(one, PATH, "one"), LeaderLatch(two, PATH, "two")
    first.start()
    term = await leads(first)
    second.start()
    waiting = asyncio.create_task(second.wait_leader())
    await asyncio.sleep(0.05)
    await two.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 2)
    await one.close()
    await loses(first, term)
    await first.stop()
    await second.stop()


# --- registration -----------------------------------------------------------------------------------------------------

HOST = paths.host("h1")


def instance(payload: object = None) -> ServiceInstance:
    return ServiceInstance(name="hcm", id="h1", address="127.0.1.1", port=5, payload=payload)


async def payload_of(session: Session) -> object:
    node = await session.get(HOST)
    return None if node is None else parse_instance(node.data).payload


@pytest.mark.quick
async def test_a_host_is_registered_updated_and_gone(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    registration = Registration(session, HOST, instance({"n": 1}))
    starting = asyncio.create_task(registration.start())
    await asyncio.sleep(0.05)
    assert not starting.done()  # only a GCM makes the chroot
    await other.ensure_path("")
    await asyncio.wait_for(starting, 2)
    node = await other.get(HOST)
    assert node is not None
    assert (node.owner, node.czxid) == (session.session_id, registration.generation)
    await registration.update({"n": 2})
    assert await payload_of(other) == {"n": 2}
    assert registration.generation == node.czxid
    await registration.stop()
    assert await other.get(HOST) is None


async def test_a_new_session_registers_again_with_a_new_generation(
    chroot: str, sessions: Connect, expire_session: Expire
) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    await other.ensure_path("")
    generations: list[int] = []
    registration = Registration(session, HOST, instance(), on_registered=generations.append)
    await registration.start()
    await expire_session(session)
    await holds(lambda: immediately(len(generations) == 2))
    node = await other.get(HOST)
    assert node is not None
    assert (node.owner, node.czxid) == (session.session_id, registration.generation)
    assert generations[1] > generations[0]
    await registration.stop()


async def test_a_node_removed_or_overwritten_by_somebody_is_put_right(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    await other.ensure_path("")
    registration = Registration(session, HOST, instance({"n": 1}))
    await registration.start()
    first = registration.generation
    await other.delete(HOST)
    await holds(lambda: immediately(registration.generation != first))
    await other.set(HOST, b"rubbish", ANY_VERSION)

    async def right_again() -> bool:
        node = await other.get(HOST)
        return node is not None and node.data != b"rubbish"

    await holds(right_again)
    await registration.stop()


async def test_an_update_during_a_break_is_written_after_it(chroot: str, wire: Wire, sessions: Connect) -> None:
    session, other = await sessions(through(wire, chroot)), await sessions(chroot)
    await other.ensure_path("")
    registration = Registration(session, HOST, instance({"n": 1}))
    await registration.start()
    wire.cut()
    with pytest.raises(ZooKeeperUnavailable):
        await registration.update({"n": 2})
    wire.heal()

    async def written() -> bool:
        return await payload_of(other) == {"n": 2}

    await holds(written)
    await registration.stop()


async def test_a_live_host_of_the_same_name_is_a_conflict(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot, session_seconds=1.0), await sessions(chroot)
    await other.ensure_path("")
    first = Registration(other, HOST, instance({"n": 1}))
    await first.start()
    began = time.monotonic()
    with pytest.raises(HostConflict):
        await Registration(session, HOST, instance({"n": 2})).start()
    assert 1.0 < time.monotonic() - began < 4.0
    assert await payload_of(session) == {"n": 1}
    await first.stop()


async def test_a_dead_predecessors_node_is_waited_for(chroot: str, sessions: Connect) -> None:
    session, former, admin = await sessions(chroot), await sessions(chroot), await sessions(chroot)
    await admin.ensure_path(paths.HOSTS)
    await former.create_ephemeral(HOST, b"{}")
    registration = Registration(session, HOST, instance())
    starting = asyncio.create_task(registration.start())
    await asyncio.sleep(0.2)
    assert not starting.done()
    await former.close()
    await asyncio.wait_for(starting, 2)
    await registration.stop()


async def test_our_own_former_sessions_node_is_replaced_at_once(chroot: str, sessions: Connect) -> None:
    session, former = await sessions(chroot), await sessions(chroot)
    await former.ensure_path(paths.HOSTS)
    old = await former.create_ephemeral(HOST, b"{}")
    registration = Registration(session, HOST, instance(), former_sessions=[former.session_id])
    await asyncio.wait_for(registration.start(), 1.5)  # the former session would end after 2 s
    assert registration.generation > old.czxid
    await registration.stop()


async def test_a_name_that_another_takes_is_told(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot, session_seconds=1.0), await sessions(chroot)
    await other.ensure_path("")
    told: list[HostConflict] = []
    registration = Registration(session, HOST, instance(), on_conflict=told.append)
    await registration.start()

    node = await other.get(HOST)
    assert node is not None
    # in one step: whoever finds its node gone makes it anew at once
    await other.multi((Delete(HOST, node.version), CreateEphemeral(HOST, b"{}")))
    await holds(lambda: immediately(bool(told)), 8)
    await registration.stop()
    assert await other.get(HOST) is not None
