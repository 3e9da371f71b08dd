"""Broken connections, lost sessions and watches against a real ZooKeeper (RELIABILITY §2.2).

Calls and fenced writes are in test_coordination.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from roq.coordination.kazoo_link import KazooLink
from roq.coordination.link import ANY_VERSION, Node
from roq.coordination.session import Session, SessionState
from roq.errors import ZooKeeperUnavailable
from tests.integration.faults import Connect, Expire, Seen, Wire, roq_threads


def data_is(data: bytes) -> Callable[[Node | None], bool]:
    return lambda node: node is not None and node.data == data


def states_of(session: Session) -> Seen:
    seen = Seen()
    session.on_state(seen)
    return seen


def is_state(state: SessionState) -> Callable[[SessionState], bool]:
    return lambda value: value is state


# --- states -----------------------------------------------------------------------------------------------------------


async def test_a_cut_connection_fails_fast_becomes_lost_and_comes_back_as_a_new_session(
    chroot: str, wire: Wire, sessions: Connect
) -> None:
    session = await sessions(f"{wire.address}/{chroot.partition('/')[2]}")
    other = await sessions(chroot)
    await session.ensure_path("")
    await session.create_ephemeral("e")
    states, seen = states_of(session), Seen()
    first = session.session_id
    session.watch_data("n", seen)
    await seen.until(lambda node: node is None)
    wire.cut()
    began = time.monotonic()
    with pytest.raises(ZooKeeperUnavailable):
        await session.get("e")  # in flight: its deadline counts as SUSPENDED
    assert time.monotonic() - began < 2.0
    assert session.state is not SessionState.CONNECTED
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(ZooKeeperUnavailable):
            await session.set("e", b"", ANY_VERSION)  # refused, not queued
    assert time.monotonic() - began < 0.1
    await states.until(is_state(SessionState.LOST), 4)
    vanished = Seen()
    other.watch_data("e", vanished)
    await vanished.until(lambda node: node is None, 5)
    await other.create("n", b"meanwhile")
    wire.heal()
    await states.until(is_state(SessionState.CONNECTED))
    assert session.session_id != first
    assert states.values == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    await seen.until(data_is(b"meanwhile"))
    await other.set("n", b"later", ANY_VERSION)
    await seen.until(data_is(b"later"))


@pytest.mark.quick
async def test_a_reset_connection_keeps_the_session_and_its_watches(chroot: str, wire: Wire, sessions: Connect) -> None:
    session, other = await sessions(f"{wire.address}/{chroot.partition('/')[2]}"), await sessions(chroot)
    await session.ensure_path("n")
    mine = await session.create_ephemeral("e")
    states, nodes, names = states_of(session), Seen(), Seen()
    session.watch_data("n", nodes)
    session.watch_children("", names)
    await names.until(lambda found: "e" in found)
    wire.reset()
    await states.until(is_state(SessionState.CONNECTED))
    assert states.values == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert await session.get("e") == mine
    await other.set("n", b"new", ANY_VERSION)
    await other.create("m")
    await nodes.until(data_is(b"new"))
    await names.until(lambda found: found == ["e", "m", "n"])


async def test_an_expired_session_is_followed_by_a_new_one(chroot: str, sessions: Connect, expire_session: Expire) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    await session.ensure_path("")
    await session.create_ephemeral("e")
    states, seen = states_of(session), Seen()
    watch = session.watch_data("e", seen)
    await seen.until(lambda node: node is not None)
    first = session.session_id
    await expire_session(session)
    await states.until(is_state(SessionState.LOST))
    await session.wait_connected()
    assert session.session_id != first
    assert await session.get("e") is None
    await seen.until(lambda node: node is None)
    await other.create("e", b"theirs")
    await seen.until(data_is(b"theirs"))
    watch.close()
    count = len(seen.values)
    await other.set("e", b"unseen", ANY_VERSION)
    await session.get("e")
    await asyncio.sleep(0.05)
    assert len(seen.values) == count


async def test_a_process_that_stood_still_is_not_sure_of_its_session(
    chroot: str, sessions: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    states = states_of(session)
    with monkeypatch.context() as patch:
        patch.setattr(session._link, "silent_seconds", lambda: 1.9)  # as after SIGSTOP: nobody told us anything
        assert session.state is SessionState.SUSPENDED
        with pytest.raises(ZooKeeperUnavailable):
            await session.get("")
        await states.until(is_state(SessionState.SUSPENDED))
    await states.until(is_state(SessionState.CONNECTED))
    assert await session.get("") is not None


async def test_a_failure_in_kazoos_thread_starts_a_new_one(
    chroot: str, sessions: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = await sessions(chroot)
    await session.ensure_path("")
    states = states_of(session)

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("xids do not match")

    monkeypatch.setattr(cast(KazooLink, session._link)._connection, "_read_socket", fail)
    with pytest.raises(ZooKeeperUnavailable):
        await session.get("")
    await states.until(is_state(SessionState.CONNECTED))
    assert await session.get("") is not None
    assert "connection thread" in caplog.text


async def test_a_listener_that_fails_does_not_keep_others_from_hearing(
    chroot: str, wire: Wire, sessions: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    session = await sessions(f"{wire.address}/x")

    def fail(state: SessionState) -> None:
        raise ValueError(state)

    session.on_state(fail)
    states = states_of(session)
    wire.reset()
    await states.until(is_state(SessionState.CONNECTED))
    assert "listener failed" in caplog.text


async def test_closing_is_bounded_while_zookeeper_is_silent(wire: Wire, sessions: Connect) -> None:
    session = await sessions(f"{wire.address}/x")
    wire.cut()
    began = time.monotonic()
    await session.close()
    assert time.monotonic() - began < 3.5
    assert roq_threads() == []


# --- watches ----------------------------------------------------------------------------------------------------------


async def test_watches_see_what_comes_goes_and_comes_again(chroot: str, sessions: Connect) -> None:
    session, other = await sessions(chroot), await sessions(chroot)
    nodes, names = Seen(), Seen()
    session.watch_data("a/n", nodes)
    session.watch_children("a", names)
    await nodes.until(lambda node: node is None)
    await names.until(lambda found: found == [])
    await other.ensure_path("a")
    first = await other.create("a/n", b"1")
    await nodes.until(data_is(b"1"))
    await names.until(lambda found: found == ["n"])
    count = len(names.values)
    await other.delete("a/n")
    second = await other.create("a/n", b"1")
    assert first.czxid != second.czxid
    await nodes.until(lambda node: node is not None and node.czxid == second.czxid)
    await names.until(lambda _: len(names.values) > count)  # the same name again, but told
    await other.delete("a/n")
    await other.delete("a")
    await nodes.until(lambda node: nodes.values[-1] is None)
    await names.until(lambda found: names.values[-1] == [])
    await other.ensure_path("a/m")
    await names.until(lambda found: found == ["m"])


async def test_a_watch_reads_again_now_and_then_and_outlives_its_callbacks_faults(
    chroot: str, sessions: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    session = await sessions(chroot, reread_seconds=0.05)
    told = Seen()

    def fail_at_first(node: Node | None) -> None:
        told(node)
        if len(told.values) == 1:
            raise ValueError("first")

    session.watch_data("n", fail_at_first)
    await told.until(lambda _: len(told.values) >= 4)
    assert "watch callback failed" in caplog.text
