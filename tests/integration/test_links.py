"""Broadcaster, SubscriberLink, PublisherLink and a Forwarder with libzmq's PUB, SUB, XPUB and XSUB at the other end.

Not covered: full queues and peers that misbehave (test_forwarder.py, test_links_bad_peers.py), the bytes (test_zmtp.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
import zmq

from roq.errors import PortTaken
from roq.runtime.connections import Peer
from roq.runtime.links import Broadcaster
from roq.wire import zmtp
from roq.wire.frame import SUBSCRIBE_ALL, FrameKind, parse, text_body, welcome
from roq.wire.limits import FRAME_OVERHEAD_BYTES
from tests.harness import libzmq
from tests.harness.ports import free_port
from tests.integration.link_rig import (
    HERE,
    TOKEN,
    ForwardingScene,
    Listening,
    RawPeer,
    Telling,
    data,
    end,
    libzmq_socket,
    note_failures,
    receive,
)
from tests.integration.zmtp_rig import LOCAL, until

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
LARGE = bytes(range(256)) * 4096  # 1 MiB
MANY = [b"%d" % number for number in range(10_000)]
PING_TIMEOUT_MS = 1500


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


@pytest.fixture
async def broadcaster() -> AsyncIterator[Broadcaster]:
    failed = note_failures()
    made = Broadcaster(LOCAL, 0)
    yield made
    await end(made)
    assert not failed


def subscribed(broadcaster: Broadcaster, key: bytes) -> int:
    return len(broadcaster._subscriptions.route(key))


async def while_called(true: Callable[[], object], *peers: zmq.Socket[bytes]) -> None:
    """libzmq sends subscriptions to a new connection when the owner of its socket calls it."""
    await until(lambda: not any(peer.poll(0) for peer in peers) and true())


@pytest.mark.quick
async def test_libzmqs_sub_and_xsub_at_a_broadcaster(broadcaster: Broadcaster) -> None:
    endpoint = f"{HERE}{broadcaster.port}"
    with libzmq_socket(zmq.SUB, endpoint) as sub, libzmq_socket(zmq.XSUB, endpoint) as xsub:
        for topic in (b"a", b"b"):
            sub.subscribe(topic)
        xsub.send(b"\x01ab")
        await until(lambda: subscribed(broadcaster, b"abc") == 2 and subscribed(broadcaster, b"b") == 1)
        for message in ([b"abc", b"", LARGE], [b"c"], [b"b", b"x" * 255, b"x" * 256], [b"ab"]):
            broadcaster.send(message)
        assert await receive(sub, 3) == [[b"abc", b"", LARGE], [b"b", b"x" * 255, b"x" * 256], [b"ab"]]
        assert await receive(xsub, 2) == [[b"abc", b"", LARGE], [b"ab"]]
        sub.unsubscribe(b"a")
        xsub.send(b"\x00ab")
        xsub.send(b"\x01c")
        await until(lambda: not subscribed(broadcaster, b"abc") and subscribed(broadcaster, b"c") == 1)
        for message in ([b"abc"], [b"b", b"last"], [b"c", b"last"]):
            broadcaster.send(message)
        assert await receive(sub, 1) == [[b"b", b"last"]]
        assert await receive(xsub, 1) == [[b"c", b"last"]]
    await until(lambda: not broadcaster.peers)
    assert not subscribed(broadcaster, b"b")


async def test_many_messages_of_a_broadcaster_come_in_order(broadcaster: Broadcaster) -> None:
    listening = Listening(broadcaster.port, b"")
    with libzmq_socket(zmq.SUB, f"{HERE}{broadcaster.port}") as sub:
        sub.subscribe(b"")
        await until(lambda: subscribed(broadcaster, b"a") == 2)
        for body in MANY:
            broadcaster.send([body])
        assert await receive(sub, len(MANY)) == [[body] for body in MANY]
        await until(lambda: len(listening.messages) == len(MANY))
        assert listening.frames == MANY
    listening.link.close()


async def test_subscribers_come_back_to_a_broadcaster_with_their_subscriptions() -> None:
    servers = [Broadcaster(LOCAL, 0)]
    port = servers[0].port
    with pytest.raises(PortTaken):
        Broadcaster(LOCAL, port)
    listening = Listening(port, b"a", b"b")
    with libzmq_socket(zmq.SUB, f"{HERE}{port}") as sub, libzmq_socket(zmq.XSUB, f"{HERE}{port}") as xsub:
        sub.subscribe(b"a")
        xsub.send(b"\x01a")
        for life in (b"a first", b"a second"):
            await while_called(lambda: subscribed(servers[-1], b"a") == 3, sub, xsub)
            servers[-1].send([life])
            assert await receive(sub, 1) == await receive(xsub, 1) == [[life]]
            await until(lambda: listening.messages)
            assert listening.messages == [[life]]
            listening.messages.clear()
            await end(servers[-1])
            if life == b"a first":
                servers.append(Broadcaster(LOCAL, port))
    listening.link.close()


@pytest.mark.quick
@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
async def test_a_subscriber_link_at_libzmqs_pub_and_xpub_that_comes_back(kind: int) -> None:
    port = free_port(LOCAL)
    listening = Listening(port, b"a", b"b", b"\xff")
    for _ in range(2):
        with libzmq_socket(kind, XPUB_VERBOSE=1) if kind == zmq.XPUB else libzmq_socket(kind) as pub:
            libzmq.bind(pub, LOCAL, port)
            if kind == zmq.XPUB:
                assert await receive(pub, 3) == [[b"\x01a"], [b"\x01b"], [b"\x01\xff"]]
            else:
                async with asyncio.timeout(5):
                    while not listening.messages:
                        pub.send(b"\xff")
                        await asyncio.sleep(0.01)
                listening.messages.clear()
            sent = [[b"a", b"", LARGE], [b"b" * 255], [b"b" * 256], *([body] for body in MANY), [b"a last"]]
            for message in sent:
                pub.send_multipart(message)
            await until(lambda: [b"a last"] in listening.messages)
            wanted = [message for message in sent if message[0][:1] in (b"a", b"b")]
            assert [message for message in listening.messages if message != [b"\xff"]] == wanted
            listening.messages.clear()
        await until(lambda: not listening.link.connected)
    listening.link.close()


async def test_a_paused_subscriber_link_leaves_unread_what_comes() -> None:
    with libzmq_socket(zmq.XPUB) as pub:
        listening = Listening(libzmq.bind(pub, LOCAL), b"")
        assert await receive(pub, 1) == [[b"\x01"]]
        listening.link.pause(True)
        for body in MANY[:100]:
            pub.send(body)
        await asyncio.sleep(0.1)
        assert not listening.messages
        listening.link.read_now()
        assert listening.frames == MANY[:100]
        pub.send(b"behind")
        listening.link.show_life()
        listening.link.pause(False)
        await until(lambda: listening.frames[-1:] == [b"behind"])
        assert listening.frames == [*MANY[:100], b"behind"]
        listening.link.close()
        listening.link.read_now()
        listening.link.pause(True)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
async def test_a_publisher_link_at_libzmqs_sub_and_xsub_that_come_back(kind: int) -> None:
    port = free_port(LOCAL)
    telling = Telling(port)
    for _ in range(2):
        with libzmq_socket(kind) as sub:
            if kind == zmq.SUB:
                sub.subscribe(b"")
            else:
                sub.send(b"\x01")
            libzmq.bind(sub, LOCAL, port)
            await while_called(lambda: telling.heard == [SUBSCRIBE_ALL], sub)
            sent = [b"", b"x" * 255, *MANY, *[LARGE] * 16, b"last"]
            for body in sent:
                telling.send(body)
            assert telling.waiting_bytes
            assert await receive(sub, len(sent)) == [[body] for body in sent]
            assert (telling.waiting_bytes, bool(telling.rooms)) == (0, True)
            telling.heard.clear()
        await until(lambda: not telling.connected)
        telling.send(b"lost")
    telling.close()


@pytest.mark.quick
async def test_frames_of_libzmqs_pub_reach_libzmqs_sub_through_a_forwarder(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder()
    with (
        libzmq_socket(zmq.SUB, f"{HERE}{forwarder.back_port}") as sub,
        libzmq_socket(zmq.SUB, f"{HERE}{forwarder.back_port}") as every,
        libzmq_socket(zmq.XPUB, f"{HERE}{forwarder.front_port}") as pub,
    ):
        for topic in (b"ab", b"\xff"):
            sub.subscribe(topic)
        every.subscribe(b"")
        assert await receive(pub, 2) == [[SUBSCRIBE_ALL], [welcome(TOKEN)]]
        await until(lambda: len(forwarder.subscriptions.route(b"ab")) == 2)
        ((attached,),) = await receive(sub, 1)
        assert text_body(parse(attached)[2]) == TOKEN
        limit = (1 << 20) + FRAME_OVERHEAD_BYTES
        sent = [b"a", b"ab", b"", b"abc", b"b", data(b"ab", 1, 5), data(b"b", 1), LARGE, b"ab".ljust(limit), *MANY, b"ab last"]
        for body in sent:
            pub.send(body)
        assert await receive(every, len(sent)) == [[body] for body in sent]
        wanted = [[body] for body in sent if body.startswith(b"ab")]
        assert await receive(sub, len(wanted)) == wanted
        assert forwarder.traffic.frames_in == len(sent)
        assert forwarder.traffic.frames_out == len(sent) + len(wanted)
        sub.unsubscribe(b"ab")
        await until(lambda: len(forwarder.subscriptions.route(b"ab")) == 1)
        pub.send(b"ab not wanted any more")
        pub.send(b"\xff")
        assert await receive(sub, 1) == [[b"\xff"]]


async def test_a_message_of_several_parts_ends_the_connection_of_libzmqs_pub(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder()
    works, every = await scene.pair(forwarder), await scene.subscriber(forwarder, b"two", b"one")
    with libzmq_socket(zmq.XPUB, f"{HERE}{forwarder.front_port}") as pub:
        assert await receive(pub, 2) == [[SUBSCRIBE_ALL], [welcome(TOKEN)]]
        pub.send_multipart([b"one", b"two"])
        await until(lambda: forwarder.counters["refused_publisher"])
    await works()
    assert not every.messages


async def test_heartbeats_of_libzmq_are_answered_by_each(scene: ForwardingScene, broadcaster: Broadcaster) -> None:
    forwarder = scene.forwarder()
    with contextlib.ExitStack() as stack:
        xpub, xsub, sub, front, back = (
            stack.enter_context(libzmq_socket(kind, HEARTBEAT_IVL=100, HEARTBEAT_TIMEOUT=PING_TIMEOUT_MS))
            for kind in (zmq.XPUB, zmq.XSUB, zmq.SUB, zmq.PUB, zmq.SUB)
        )
        ends = [stack.enter_context(peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)) for peer in (xpub, xsub, sub, front, back)]
        listening, telling = Listening(libzmq.bind(xpub, LOCAL), b""), Telling(libzmq.bind(xsub, LOCAL))
        sub.connect(f"{HERE}{broadcaster.port}")
        front.connect(f"{HERE}{forwarder.front_port}")
        back.connect(f"{HERE}{forwarder.back_port}")
        await until(lambda: listening.link.open and telling.open and broadcaster.peers)
        await until(lambda: forwarder._front.peers and forwarder._back.peers)
        await asyncio.sleep(2 * PING_TIMEOUT_MS / 1000)
        assert [one.poll(0) for one in ends] == [0] * 5, "a connection ended without a PONG"
        for peer in (xpub, xsub, sub, front, back):
            peer.disable_monitor()
        listening.link.close()
        telling.close()


async def test_publishers_are_welcomed_and_subscribers_are_told_when_they_are_attached(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder()
    with libzmq_socket(zmq.XPUB, f"{HERE}{forwarder.front_port}") as pub:
        assert await receive(pub, 2) == [[SUBSCRIBE_ALL], [welcome(TOKEN)]]
        async with RawPeer(forwarder.back_port) as reader:
            await reader.send(zmtp.hello(b"SUB") + zmtp.frame(b"\x01eu."))
            await until(lambda: forwarder.subscriptions.route(b"eu.paris\0"))
            assert not reader.messages, "it has not said that this is all"
            await reader.send(zmtp.frame(b"\x01\xff"))
            (told,) = await reader.take(1)
            _, header, body = parse(told)
            assert (header.kind, text_body(body)) == (FrameKind.ATTACHED, TOKEN)


def test_a_loop_that_ends_leaves_no_connection_behind(event_loop_policy: asyncio.AbstractEventLoopPolicy) -> None:
    """What has not left by then is given up with the loop."""
    kept = list[RawPeer]()

    async def lives() -> None:
        broadcaster = Broadcaster(LOCAL, 0)
        peer = RawPeer(broadcaster.port, b"SUB", receive_bytes=4096)
        kept.append(await peer.__aenter__())
        await peer.say(b"\1")
        served = await appeared(broadcaster)
        while not broadcaster.unsent():
            broadcaster.send((LARGE,))
            await asyncio.sleep(0)
        broadcaster.close()
        assert served.transport.is_closing()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=event_loop_policy.new_event_loop) as runner:
            runner.run(lives())
        gc.collect()
    kept[0].socket.close()
    assert [str(one.message) for one in warned if issubclass(one.category, ResourceWarning)] == []


async def appeared(broadcaster: Broadcaster) -> Peer:
    """Its peer, once it has subscribed."""
    await until(lambda: broadcaster._subscriptions.route(b"x"))
    (peer,) = broadcaster.peers.values()
    assert isinstance(peer, Peer)
    return peer
