"""Peers that break the protocol at a Forwarder's front and back and at a Broadcaster: they are cut, and others go on.

Not covered: full queues (test_forwarder.py), memory of unfinished messages (test_unfinished_frames.py), a Router and a Dealer
(test_zmtp_sockets.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest
import uvloop

from roq.runtime import connections, links
from roq.runtime.connections import Server
from roq.runtime.links import Broadcaster
from roq.wire import zmtp
from roq.wire.frame import SUBSCRIBE_ALL, FrameKind, confirmation, control_prefix, welcome
from roq.wire.limits import FRAME_OVERHEAD_BYTES, SUBSCRIPTION_BYTES_MAX
from tests.integration.link_rig import TOKEN, ForwardingScene, Listening, RawPeer, Telling, control, data, end
from tests.integration.zmtp_rig import LOCAL, until

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
FRAME_BYTES_MAX = (1 << 20) + FRAME_OVERHEAD_BYTES
PUB, SUB = zmtp.hello(b"PUB"), zmtp.hello(b"SUB")
FUZZ_SECONDS = 2.0


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Python's loop and the one that RoQ's processes use."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture
async def scene() -> AsyncIterator[ForwardingScene]:
    made = ForwardingScene()
    yield made
    await made.close()


class Victim(NamedTuple):
    """A server. works(): raises if those who mean well are not served by it."""

    server: Server
    works: Callable[[], Awaitable[None]]


@pytest.fixture(params=["front", "back", "broadcaster"])
async def victim(request: pytest.FixtureRequest, scene: ForwardingScene) -> AsyncIterator[Victim]:
    if request.param != "broadcaster":
        forwarder = scene.forwarder()
        works = await scene.pair(forwarder)
        yield Victim(forwarder._front if request.param == "front" else forwarder._back, works)
        return
    broadcaster = Broadcaster(LOCAL, 0)
    listening = Listening(broadcaster.port, b"good")
    await until(lambda: broadcaster._subscriptions.route(b"good"))

    async def heard() -> None:
        listening.messages.clear()
        broadcaster.send([b"good", b"x" * 1000])
        await until(lambda: listening.messages == [[b"good", b"x" * 1000]])

    yield Victim(broadcaster, heard)
    listening.link.close()
    await end(broadcaster)


def changed(at: int, byte: int) -> bytes:
    return PUB[:at] + bytes([byte]) + PUB[at + 1 :]


BAD = {
    "zeros": bytes(64),
    "http": b"GET / HTTP/1.1\r\nHost: somewhere\r\n".ljust(64, b"\n"),
    "a greeting of ZMTP 2": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x02\0\0".ljust(64, b"\0"),
    "CURVE": PUB[:12] + b"CURVE".ljust(20, b"\0") + PUB[32:],
    "garbage behind the greeting": PUB[:64] + b"\xff" * 100,
    "garbage behind READY": PUB + b"\x02\xff" + bytes(9) + b"\xff",
    "an unknown flag": PUB + b"\x08\0",
    "a frame too large": PUB + b"\x02" + (FRAME_BYTES_MAX + 1).to_bytes(8, "big"),
    "a frame far too large": PUB + b"\x02" + b"\xff" * 8,
    "a command too large": PUB + b"\x06" + (FRAME_BYTES_MAX + 1).to_bytes(8, "big"),
    "too many parts": PUB + zmtp.frame(b"", zmtp.MORE) * 17,
}


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in pieces"])
async def test_one_that_breaks_the_protocol_is_cut_and_others_go_on(victim: Victim, *, apart: bool) -> None:
    peers = len(victim.server.peers)
    for what, junk in BAD.items():
        async with RawPeer(victim.server.port) as peer:
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(junk), 50) if apart else ():
                    await peer.send(junk[at : at + 50])
                    await asyncio.sleep(0.002)
                if not apart:
                    await peer.send(junk)
            assert await peer.is_cut(), what
        await victim.works()
    assert len(victim.server.peers) == peers


@pytest.mark.parametrize("said", [b"", b"\xff", PUB[:63], PUB[:64], PUB[:70], b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x02\0\0"])
async def test_one_that_does_not_greet_in_time_is_cut(victim: Victim, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.1)
    async with RawPeer(victim.server.port) as peer:
        await peer.send(said)
        assert await peer.is_cut()
    await victim.works()


async def test_more_connections_than_there_may_be_are_turned_away(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    most = len(victim.server.peers) + 1
    monkeypatch.setattr(connections, "PEERS_MAX", most)
    async with RawPeer(victim.server.port, b"SUB") as last:
        await last.read()
        for _ in range(3):
            async with RawPeer(victim.server.port) as peer:
                assert await peer.is_cut()
        await victim.works()
    await until(lambda: len(victim.server.peers) < most)
    async with RawPeer(victim.server.port, b"SUB") as again:
        await again.read()
        assert not again.cut
    await victim.works()


async def test_what_anybody_subscribes_to_reaches_no_publisher(scene: ForwardingScene) -> None:
    """A publisher takes what begins with FE or FF for the cluster's word; libzmq's proxy hands subscriptions on to it."""
    strange = [bytes([first]) + b"x" * 40 for first in (0xFE, 0xFF, 0x00)]
    forwarder = scene.forwarder()
    works, telling = await scene.pair(forwarder), Telling(forwarder.front_port)
    await until(lambda: telling.heard)
    before = telling.heard.copy()
    async with RawPeer(forwarder.back_port, b"SUB") as peer:
        await peer.say(*(b"\x01" + prefix for prefix in strange))
        await until(lambda: forwarder.subscriptions.route(strange[-1]))
        await works()
        await peer.say(*(b"\x00" + prefix for prefix in strange))
        await until(lambda: not forwarder.subscriptions.route(strange[-1]))
        await works()
    assert telling.connected
    assert telling.heard == before
    telling.close()


@pytest.mark.parametrize("victim", ["back", "broadcaster"], indirect=True)
async def test_more_subscriptions_than_one_may_have(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SUBSCRIPTIONS_MAX", 20)
    async with RawPeer(victim.server.port, b"SUB") as most, RawPeer(victim.server.port, b"SUB") as bad:
        await most.say(*(b"\x01%d" % number for number in range(20)), b"\x00" + b"5", b"\x01" + b"again")
        await bad.say(*(b"\x01%d" % number for number in range(10)))
        await bad.send(b"".join(zmtp.frame(b"\x09SUBSCRIBE%d" % number, zmtp.COMMAND) for number in range(10, 21)))
        assert await bad.is_cut()
        await most.send(zmtp.PING)
        await most.read()
        assert not most.cut
        await victim.works()


@pytest.mark.parametrize("victim", ["back", "broadcaster"], indirect=True)
async def test_a_subscription_larger_than_it_may_be(victim: Victim) -> None:
    async with RawPeer(victim.server.port, b"SUB") as most, RawPeer(victim.server.port, b"SUB") as bad:
        await most.say(b"\x01".ljust(SUBSCRIPTION_BYTES_MAX, b"t"))
        await bad.say(b"\x01".ljust(SUBSCRIPTION_BYTES_MAX + 1, b"t"))
        assert await bad.is_cut()
        await victim.works()
        assert not most.cut


PARTS = zmtp.frame(b"bad", zmtp.MORE), zmtp.frame(b"bad")
FRONT_BAD = {
    "parts in one piece with READY": [PUB + PARTS[0] + PARTS[1]],
    "the first part with READY": [PUB + PARTS[0], PARTS[1]],
    "an empty first part with READY": [PUB + zmtp.frame(b"", zmtp.MORE), PARTS[1]],
    "parts behind READY": [PUB, PARTS[0], PARTS[1]],
    "a large first part": [PUB, zmtp.frame(b"bad".ljust(100_000), zmtp.MORE)],
    "a frame that is a byte too large": [PUB, zmtp.frame(b"bad".ljust(FRAME_BYTES_MAX + 1))],
    "a MARK below zero": [PUB, zmtp.frame(control(FrameKind.MARK, 1, -1))],
    "a MARK of text": [PUB, zmtp.frame(control(FrameKind.MARK, 1, "five"))],
    "a MARK without a header": [PUB, zmtp.frame(b"\xff\x01\x04")],
    "a FIN of another version": [PUB, zmtp.frame(b"\xff\x09\x03" + bytes(60))],
}


@pytest.mark.parametrize("what", FRONT_BAD)
async def test_what_only_a_publisher_can_do_wrong(scene: ForwardingScene, what: str) -> None:
    forwarder = scene.forwarder()
    works, every = await scene.pair(forwarder), await scene.subscriber(forwarder, b"bad")
    async with RawPeer(forwarder.front_port) as peer:
        with contextlib.suppress(ConnectionError):
            for piece in FRONT_BAD[what]:
                await peer.send(piece)
                await asyncio.sleep(0.02)
        assert await peer.is_cut()
    await works()
    assert forwarder.counters["refused_publisher"] == 1
    assert not every.messages


async def test_valid_conversations_in_single_bytes(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder()
    works = await scene.pair(forwarder)
    small, mark, long = data(b"drip", 1, 5), control(FrameKind.MARK, 1, 5), data(b"drip", 2, 300)
    subscribing = SUB + zmtp.frame(b"\x01drip") + zmtp.PING + zmtp.frame(b"\x09SUBSCRIBE\xff", zmtp.COMMAND)
    publishing = PUB + zmtp.frame(small) + zmtp.PING + zmtp.frame(mark) + zmtp.frame(long)
    async with RawPeer(forwarder.back_port) as subscriber, RawPeer(forwarder.front_port) as publisher:
        for peer, stream in ((subscriber, subscribing), (publisher, publishing)):
            for at in range(len(stream)):
                await peer.send(stream[at : at + 1])
                await asyncio.sleep(0)
            if peer is subscriber:
                await until(lambda: forwarder.subscriptions.route(b"\xff") and forwarder.subscriptions.route(b"drip"))
        attached, *rest = await subscriber.take(4)
        assert attached.startswith(control_prefix(FrameKind.ATTACHED))
        assert rest == [small, mark, long]
        assert await publisher.take(3) == [SUBSCRIBE_ALL, welcome(TOKEN), confirmation(1, 5)]
    await works()


def mutated(stream: bytes, chance: random.Random) -> bytes:
    """It with a few changes."""
    changing = bytearray(stream)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changing)) if changing else 0
        stop = at + chance.choice((1, 2, 8, 50))
        match chance.randrange(5):
            case 0:
                changing[at:stop] = b""
            case 1:
                changing[at:at] = chance.randbytes(stop - at)
            case 2:
                changing[at:stop] = chance.randbytes(stop - at)
            case 3:
                changing[at:at] = changing[at:stop]
            case _:
                del changing[at + 1 :]
    return bytes(changing)


STREAMS = (
    PUB + b"".join(map(zmtp.frame, (data(b"t", 1, 5), control(FrameKind.MARK, 1, 5), data(b"t", 2, 400), b"")))
    + zmtp.PING + zmtp.frame(data(b"t", 3, 20_000)) + zmtp.frame(control(FrameKind.FIN, 3)),
    SUB + b"".join(map(zmtp.frame, (b"\x01t", b"\x01", b"\x00t", b"\x01" + b"x" * 300))) + zmtp.PING
    + zmtp.frame(b"\x09SUBSCRIBEt", zmtp.COMMAND) + zmtp.frame(b"\x06CANCELt", zmtp.COMMAND) + PARTS[0] + PARTS[1],
)  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
async def test_mutated_streams_harm_nobody_else(scene: ForwardingScene, seed: int) -> None:
    forwarder, chance = scene.forwarder(), random.Random(seed)
    works = await scene.pair(forwarder)

    async def one(port: int, stream: bytes) -> None:
        async with RawPeer(port) as peer:
            with contextlib.suppress(ConnectionError):
                at = 0
                while at < len(stream):
                    step = chance.choice((1, 7, 64, 100, 5000, 30_000))
                    await peer.send(stream[at : at + step])
                    await asyncio.sleep(0)
                    at += step

    until_when = asyncio.get_running_loop().time() + FUZZ_SECONDS
    tried = 0
    while asyncio.get_running_loop().time() < until_when:
        victims = [(port, mutated(chance.choice(STREAMS), chance)) for port in (forwarder.front_port, forwarder.back_port) * 4]
        await asyncio.gather(*(one(port, stream) for port, stream in victims))
        tried += len(victims)
    assert tried > 50
    await works()
    await until(lambda: len(forwarder._front.peers) == len(forwarder._back.peers) == 1)
    assert not forwarder.held
    assert not scene.failed
