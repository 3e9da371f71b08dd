"""An Exchange whose subscribers' connections break, and a subscriber that finds out: publishers that come meanwhile wait."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

from roq.pubsub.exchange import absent
from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.links import ASK_SECONDS, QUIET_SECONDS, Attachment
from roq.wire.frame import CONTROL_PREFIX, SUBSCRIBE_ALL, FrameKind, control_prefix, encode_control, welcome
from roq.wire.monitor import ExchangeAddress
from tests.integration.link_rig import TOKEN, ForwardingScene, RawPeer, data
from tests.integration.zmtp_rig import LOCAL, until

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
GREETING = [SUBSCRIBE_ALL, welcome(TOKEN)]
CONTROL = b"\x01" + control_prefix(FrameKind.ATTACHED)
SHORT_SECONDS = 0.3


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Python's loop and the one that RoQ's processes use."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture
async def rig() -> AsyncIterator[ForwardingScene]:
    made = ForwardingScene()
    yield made
    await made.close()


async def subscribed(peer: RawPeer) -> None:
    await peer.say(b"\x01topic", CONTROL)
    (attached,) = await peer.take(1)
    assert attached.startswith(encode_control(FrameKind.ATTACHED, 0, 0, 0, TOKEN, 0)[:3])


def reset(peer: RawPeer) -> None:
    """The other end is told, as by a packet that was rejected on the way."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.socket.close()


async def welcomed_after(publisher: RawPeer) -> float:
    begun = time.monotonic()
    assert await publisher.take(2) == GREETING
    return time.monotonic() - begun


async def subscribers(forwarder: Forwarder, count: int) -> None:
    await until(lambda: len(forwarder.subscriptions._prefixes) == count)


@pytest.mark.quick
async def test_a_publisher_waits_for_a_subscriber_whose_connection_was_reset(rig: ForwardingScene) -> None:
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as before, RawPeer(forwarder.front_port, b"PUB") as there:
        await subscribed(before)
        assert await there.take(2) == GREETING
        reset(before)
        await subscribers(forwarder, 0)
        async with RawPeer(forwarder.front_port, b"PUB") as late, RawPeer(forwarder.back_port, b"SUB") as after:
            waits = asyncio.create_task(welcomed_after(late))
            done, _ = await asyncio.wait([waits], timeout=SHORT_SECONDS)
            assert not done
            await subscribed(after)
            assert SHORT_SECONDS <= await waits < absent.ABSENT_SECONDS / 2
            await late.say(data(b"a", 1))


async def test_who_does_not_come_back_is_waited_for_no_longer(rig: ForwardingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "ABSENT_SECONDS", SHORT_SECONDS)
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as one, RawPeer(forwarder.back_port, b"SUB") as other:
        await subscribed(one)
        await subscribed(other)
        reset(one)
        reset(other)
        await subscribers(forwarder, 0)
        async with RawPeer(forwarder.front_port, b"PUB") as late:
            assert SHORT_SECONDS / 2 < await welcomed_after(late) < absent.ABSENT_SECONDS + 1
        assert not forwarder.absent._absent


async def test_a_publisher_waits_for_as_long_as_for_one_however_many_break(
    rig: ForwardingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent, "ABSENT_SECONDS", 2 * SHORT_SECONDS)
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as one, RawPeer(forwarder.back_port, b"SUB") as other:
        await subscribed(one)
        await subscribed(other)
        reset(one)
        await subscribers(forwarder, 1)
        async with RawPeer(forwarder.front_port, b"PUB") as late, RawPeer(forwarder.front_port, b"PUB") as gone:
            waits = asyncio.create_task(welcomed_after(late))
            await until(lambda: len(forwarder.absent._waiting) == 2)
            gone.socket.close()
            await until(lambda: len(forwarder.absent._waiting) == 1)
            await asyncio.sleep(SHORT_SECONDS)
            reset(other)
            assert await waits < 3 * SHORT_SECONDS
        assert forwarder.absent.held == 2


async def test_nobody_waits_for_a_monitor(rig: ForwardingScene) -> None:
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as monitor:
        await monitor.say(CONTROL)
        await monitor.take(1)
        reset(monitor)
        await subscribers(forwarder, 0)
        async with RawPeer(forwarder.front_port, b"PUB") as late:
            assert await welcomed_after(late) < absent.ABSENT_SECONDS / 2


async def test_who_leaves_while_messages_come_is_not_waited_for(rig: ForwardingScene) -> None:
    """The kernel resets a connection that is closed with something unread."""
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as leaves:
        await subscribed(leaves)
        await leaves.say(b"\x00" + CONTROL[1:])
        (peer,) = forwarder.subscriptions._prefixes
        await until(lambda: forwarder.subscriptions.of(peer) == {b"topic"})
        reset(leaves)
        await subscribers(forwarder, 0)
        async with RawPeer(forwarder.front_port, b"PUB") as late:
            assert await welcomed_after(late) < absent.ABSENT_SECONDS / 2


async def test_nobody_waits_for_who_closed_its_connection_or_was_never_attached(rig: ForwardingScene) -> None:
    forwarder = rig.forwarder()
    async with RawPeer(forwarder.back_port, b"SUB") as stranger, RawPeer(forwarder.back_port, b"SUB") as closes:
        await stranger.say(b"\x01topic")
        await subscribed(closes)
        await subscribers(forwarder, 2)
        closes.socket.close()
        reset(stranger)
        await subscribers(forwarder, 0)
        async with RawPeer(forwarder.front_port, b"PUB") as late:
            assert await welcomed_after(late) < absent.ABSENT_SECONDS / 2


async def test_a_subscriber_asks_where_it_has_become_quiet(rig: ForwardingScene) -> None:
    forwarder = rig.forwarder()
    exchange = ExchangeAddress("A", LOCAL, forwarder.front_port, forwarder.back_port)
    attachment = Attachment(exchange, [CONTROL_PREFIX, b"a"], 1 << 20, lambda attachment: None)
    try:
        await subscribers(forwarder, 1)
        (peer,) = forwarder.subscriptions._prefixes
        await until(lambda: attachment.frames)  # ATTACHED
        publisher = await rig.publisher(forwarder)
        for number in (1, 2):
            before = attachment._pieces
            publisher.send(data(b"a", number))
            await until(lambda before=before: attachment._pieces > before)  # type: ignore[misc]
            attachment.look_if_quiet(number * 100.0)
            heard = peer.heard
            for seconds in (0.1, 1.0, ASK_SECONDS, QUIET_SECONDS + 1):  # the second and the last one ask nothing
                attachment.look_if_quiet(number * 100.0 + seconds)
            await until(lambda heard=heard: peer.heard >= heard + 1)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert peer.heard <= heard + 2, "two questions, which may come in one piece"
    finally:
        attachment.close()
