"""A Forwarder with subscribers that do not read, and what it says to publishers on their own connections.

Not covered: peers that break the protocol (test_links_bad_peers.py), libzmq's peers (test_links.py), who belongs to a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from roq.pubsub.exchange import forwarder as forwarding
from roq.pubsub.exchange.forwarder import TAPED_PREFIX, Forwarder
from roq.pubsub.exchange.recorder import Recorder
from roq.runtime import connections
from roq.wire import zmtp
from roq.wire.assignment import Overflow
from roq.wire.frame import SUBSCRIBE_ALL, FrameKind, confirmation, control_prefix, encode_bundle, parse, watermark_body, welcome
from roq.wire.recording import Record, Recording
from tests.integration.link_rig import TOKEN, ForwardingScene, Listening, RawPeer, Telling, control, data
from tests.integration.zmtp_rig import WAIT_SECONDS, until

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
QUEUE_BYTES = 256 * 1024
FRAME_BYTES = 64 * 1024
RECEIVE_BYTES = 16 * 1024  # in the kernel of a subscriber that does not read
SIZE = 8_000
GREETING = [SUBSCRIBE_ALL, welcome(TOKEN)]


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Python's loop and the one that RoQ's processes use."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForwardingScene]:
    """With small queues."""
    monkeypatch.setattr(forwarding, "DROP_BYTES_QUEUED", QUEUE_BYTES)
    monkeypatch.setattr(forwarding, "BLOCK_BYTES_QUEUED", QUEUE_BYTES)
    made = ForwardingScene()
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def stuck(forwarder: Forwarder, prefix: bytes = b"") -> AsyncIterator[RawPeer]:
    """A subscriber that does not read unless it is told to."""
    before = len(forwarder.subscriptions.route(prefix))
    async with RawPeer(forwarder.back_port, b"SUB", RECEIVE_BYTES) as peer:
        await peer.say(b"\x01" + prefix)
        await until(lambda: len(forwarder.subscriptions.route(prefix)) > before)
        yield peer


async def has(subscriber: Listening, count: int) -> None:
    """So many frames in all."""
    await until(lambda: len(subscriber.frames) >= count)


async def fill(forwarder: Forwarder, publisher: Telling) -> list[bytes]:
    """Data until somebody is full. What was sent."""
    sent = list[bytes]()
    while not forwarder._full:
        sent.append(data(b"t", len(sent) + 1, SIZE))
        publisher.send(sent[-1])
        await asyncio.sleep(0)
    return sent


@pytest.mark.quick
async def test_drop_a_subscriber_that_does_not_read_misses_data_but_no_control_frames(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder(Overflow.DROP, FRAME_BYTES)
    good, publisher = await scene.subscriber(forwarder, b""), await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        sent = list[bytes]()
        for number in range(1, 400):
            sent.append(data(b"t", number, SIZE))
            if number % 20 == 0:
                sent += [control(FrameKind.WATERMARK, number), encode_bundle(7, 1, number, [sent[-1]], 0)]
            for frame in sent[len(good.frames) :] if number % 20 == 0 else ():
                publisher.send(frame)
            if number % 20 == 0:
                await has(good, len(sent))  # so it is never full
        for frame in sent[len(good.frames) :]:
            publisher.send(frame)
        await has(good, len(sent))
        assert good.frames == sent
        dropped = forwarder.counters["frames_dropped"]
        assert dropped > 0
        came = await slow.take(len(sent) - dropped)
        assert came == [frame for frame in sent if frame in set(came)], "in order"
        for kind in (FrameKind.WATERMARK, FrameKind.BUNDLE):
            begin = control_prefix(kind)
            missing = [frame for frame in sent if frame.startswith(begin) and frame not in came]
            assert bool(missing) == (kind == FrameKind.BUNDLE), "what is sent again is data"
        await until(lambda: not forwarder._full)
        publisher.send(b"t\0and then everything again")
        assert await slow.take(1) == [b"t\0and then everything again"]
        assert forwarder.counters["frames_dropped"] == dropped
        assert not forwarder.counters["subscribers_cut"]


@pytest.mark.parametrize("told", [False, True], ids=["not told of the tape", "told of the tape"])
async def test_what_is_dropped_is_told_before_more_counts_as_stored(scene: ForwardingScene, told: bool) -> None:
    """By the Exchange itself, to those whose position follows what it says of its tape."""
    forwarder = scene.forwarder(Overflow.DROP, FRAME_BYTES)
    publisher = await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        await slow.say(b"\x01" + (TAPED_PREFIX if told else b"t"))
        await until(lambda: bool(forwarder._told_of_tape) == told)
        sent = await fill(forwarder, publisher)
        while forwarder.counters["frames_dropped"] < 3:
            sent.append(data(b"t", len(sent) + 1, SIZE))
            publisher.send(sent[-1])
            await asyncio.sleep(0)
        forwarder.stored(41)
        forwarder.stored(42)
        came = await slow.take(len(sent) - forwarder.counters["frames_dropped"])
        if not told:
            assert came == sent[: len(came)]
            return
        came += await slow.take(3)
        begins, stored = [frame for frame in came if frame.startswith(TAPED_PREFIX)]
        lost = [frame for frame in came if frame.startswith(control_prefix(FrameKind.WATERMARK))]
        assert came.index(begins) == 0
        assert came[-2:] == [*lost, stored], "last of all, and behind what says that something is missing"
        assert parse(stored)[1].sequence == 42
        last = parse(sent[-1])[1].sequence
        assert watermark_body(parse(lost[0])[2]) == {"t": (last, last)}
        forwarder.stored(43)
        assert parse((await slow.take(1))[0])[1].sequence == 43


async def test_what_is_dropped_before_its_place_on_the_tape_is_known_is_told(scene: ForwardingScene) -> None:
    """Of a new Exchange, whose stores are starting."""
    forwarder = scene.forwarder(Overflow.DROP, FRAME_BYTES)
    forwarder.recorder = Recorder("q", "e", Recording(Record(), "t"), lambda full: None, forwarder.stored, forwarder.counters)
    publisher = await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        await slow.say(b"\x01" + TAPED_PREFIX)
        await until(lambda: len(forwarder.recorder._asked) == 1)  # type: ignore[union-attr]
        sent = await fill(forwarder, publisher)
        publisher.send(data(b"t", len(sent) + 1, SIZE))
        await until(lambda: forwarder.counters["frames_dropped"] == 1)
        ((told, number),) = forwarder.recorder._asked
        told(number)
        forwarder.stored(42)
        begins, lost, stored = (await slow.take(len(sent) + 3))[-3:]
        assert (begins.startswith(TAPED_PREFIX), parse(begins)[1].sequence) == (True, number)
        assert watermark_body(parse(lost)[2]) == {"t": (len(sent) + 1, len(sent) + 1)}
        assert parse(lost)[1].previous == len(sent) + 1
        assert (stored.startswith(TAPED_PREFIX), parse(stored)[1].sequence) == (True, 42)


async def test_drop_a_subscriber_that_takes_not_even_control_frames_is_cut_alone(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder(Overflow.DROP, FRAME_BYTES)
    good, publisher = await scene.subscriber(forwarder, control_prefix(FrameKind.WATERMARK)), await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        await fill(forwarder, publisher)
        sent = list[bytes]()
        while not forwarder.counters["refused_slow_subscriber"]:
            assert len(sent) * SIZE < 100 * QUEUE_BYTES
            sent += [control(FrameKind.WATERMARK, 1, "x" * SIZE) for _ in range(10)]
            for frame in sent[len(good.frames) :]:
                publisher.send(frame)
            await has(good, len(sent))
        assert len(sent) * SIZE > QUEUE_BYTES
        await until(lambda: len(forwarder._back.peers) == 1)
        assert await slow.is_cut()
        publisher.send(sent[0])
        await until(lambda: good.frames == [*sent, sent[0]])
        assert forwarder.counters["refused_slow_subscriber"] == 1


@pytest.mark.quick
async def test_block_a_full_subscriber_holds_publishers_back_and_nothing_is_lost(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder(Overflow.BLOCK, FRAME_BYTES)
    good, publisher = await scene.subscriber(forwarder, b""), await scene.publisher(forwarder)
    sent = [data(b"t", number, SIZE) for number in range(1, 2000)]
    async with stuck(forwarder) as slow:
        for frame in sent:
            publisher.send(frame)
        await until(lambda: forwarder.held)
        late = await scene.publisher(forwarder)  # it is not read either
        late.send(data(b"late", 1))
        await asyncio.sleep(0.1)
        assert forwarder.held
        assert publisher.waiting_bytes
        assert len(good.frames) < len(sent) / 2
        assert not [frame for frame in good.frames if frame.startswith(b"late")]
        (queue,) = (peer.transport.get_write_buffer_size() for peer in forwarder._full)
        assert queue < QUEUE_BYTES + (1 << 18) + FRAME_BYTES
        came = await slow.take(len(sent) + 1)
        await until(lambda: len(good.frames) == len(sent) + 1)
        for got in (came, good.frames):
            assert [frame for frame in got if frame.startswith(b"t\0")] == sent
            assert data(b"late", 1) in got
        assert not forwarder.held
        assert not forwarder.counters


@pytest.mark.parametrize("how", [socket.socket.close, "cut"])
async def test_block_the_end_of_a_full_subscriber_releases_publishers(
    scene: ForwardingScene, how: Callable[[socket.socket], None] | str
) -> None:
    forwarder = scene.forwarder(Overflow.BLOCK, FRAME_BYTES)
    good, publisher = await scene.subscriber(forwarder, b""), await scene.publisher(forwarder)
    async with stuck(forwarder) as slow, stuck(forwarder, b"t") as other:
        sent = await fill(forwarder, publisher)
        sent += [data(b"t", number, SIZE) for number in range(1000)[1:]]
        for frame in sent[len(sent) - 999 :]:
            publisher.send(frame)
        await asyncio.sleep(0.05)
        assert forwarder.held
        for one in (slow, other):
            assert len(good.frames) < len(sent)
            if how == "cut":
                await one.send(b"\xff" * 100)
            else:
                one.socket.close()
        await has(good, len(sent))
        assert good.frames == sent
        assert not forwarder.held


async def flood(peer: RawPeer, topic: bytes) -> None:
    """Without pause, until it is cancelled."""
    block = zmtp.frame(data(topic, 1, SIZE)) * 8
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(peer.socket, block)


async def test_block_publishers_that_waited_are_read_in_turn(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder(Overflow.BLOCK, FRAME_BYTES)
    async with contextlib.AsyncExitStack() as stack:
        slow = await stack.enter_async_context(stuck(forwarder))
        topics = [b"%d" % number for number in range(4)]
        floods = []
        for topic in topics:
            publisher = await stack.enter_async_context(RawPeer(forwarder.front_port, b"PUB"))
            await publisher.take(2)
            floods.append(asyncio.create_task(flood(publisher, topic)))
        await until(lambda: forwarder.held)
        await asyncio.sleep(0.05)  # all have filled what the kernel keeps
        shares = Counter[bytes]()
        while shares.total() < 6000:
            await slow.read(FRAME_BYTES)
            shares.update(parts[0][:1] for parts in slow.messages)
            slow.messages.clear()
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
    assert min(shares[topic] for topic in topics) >= max(shares.values()) / 3, shares


async def silence(_: RawPeer) -> None:
    await asyncio.sleep(0.02)


async def ping(peer: RawPeer) -> None:
    await asyncio.sleep(0.02)
    await peer.send(zmtp.PING)


async def pong(peer: RawPeer) -> None:
    """Nothing is said to it for that."""
    await asyncio.sleep(0.02)
    await peer.say_command(b"\x04PONG")


async def read_little(peer: RawPeer) -> None:
    await asyncio.sleep(0.02)
    await peer.read(RECEIVE_BYTES)


@pytest.mark.parametrize("life", [silence, ping, pong, read_little])
async def test_block_only_a_subscriber_without_a_sign_of_life_is_cut(
    scene: ForwardingScene, monkeypatch: pytest.MonkeyPatch, life: Callable[[RawPeer], Awaitable[None]]
) -> None:
    monkeypatch.setattr(forwarding, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(forwarding, "SILENT_LOOKS_MAX", 5)
    forwarder = scene.forwarder(Overflow.BLOCK, FRAME_BYTES)
    good, publisher = await scene.subscriber(forwarder, b""), await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        sent = await fill(forwarder, publisher)
        sent += [data(b"t", number, SIZE) for number in range(1, 5000)]
        for frame in sent[len(sent) - 4999 :]:
            publisher.send(frame)
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 1.5 and not forwarder.counters["subscribers_cut"]:
            await life(slow)
        assert forwarder.counters["subscribers_cut"] == (life is silence)
        if life is not silence:
            assert len(forwarder._back.peers) == 2
            slow.socket.close()
        else:
            assert asyncio.get_running_loop().time() > begun + 0.4
        await has(good, len(sent))
        assert good.frames == sent


@pytest.mark.quick
async def test_mark_and_fin_are_answered_on_their_own_connection_behind_what_came_before(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder(Overflow.BLOCK, FRAME_BYTES)
    good, other = await scene.subscriber(forwarder, b""), await scene.publisher(forwarder)
    async with RawPeer(forwarder.front_port, b"PUB") as publisher, stuck(forwarder) as slow:
        assert await publisher.take(2) == GREETING
        sent = [data(b"t", 1, 10), control(FrameKind.MARK, 1, 5), data(b"u", 2), control(FrameKind.FIN, 2), b"\xff", b"\xff\1"]
        await publisher.say(*sent)
        assert await publisher.take(2) == [confirmation(1, 5), confirmation(1, 0)]
        await until(lambda: good.frames == sent)
        full = await fill(forwarder, other)
        large = data(b"t", 3, 3 * SIZE)
        mark = control(FrameKind.MARK, 3, 2**64 - 1)
        await publisher.say(large, mark)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(publisher.take(1), 0.2)
        assert large not in good.frames
        came = await slow.take(len(sent) + len(full) + 2)
        assert [frame for frame in came if frame in (large, mark)] == [large, mark]
        assert await publisher.take(1) == [confirmation(1, 2**64 - 1)]
    assert other.heard == GREETING, "nothing of the other's"


async def test_a_control_frame_in_pieces_is_answered_too(scene: ForwardingScene) -> None:
    forwarder = scene.forwarder()
    async with RawPeer(forwarder.front_port, b"PUB") as publisher:
        assert await publisher.take(2) == GREETING
        fin = zmtp.frame(control(FrameKind.FIN, 1, "x" * 40_000))
        for at in range(0, len(fin), 5000):
            await publisher.send(fin[at : at + 5000])
            await asyncio.sleep(0.002)
        assert await publisher.take(1) == [confirmation(1, 0)]


@pytest.mark.parametrize("asked", ["pongs", "confirmations"])
async def test_a_publisher_that_asks_and_does_not_read_is_dropped_at_the_bound(
    scene: ForwardingScene, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(connections, "WAITING_BYTES_MAX", QUEUE_BYTES)
    forwarder = scene.forwarder()
    works = await scene.pair(forwarder)
    mark = zmtp.frame(control(FrameKind.MARK, 1, 5))
    request = (mark if asked == "confirmations" else zmtp.frame(b"\x04PING\0\0" + b"c" * 16, zmtp.COMMAND)) * 200
    async with RawPeer(forwarder.front_port, b"PUB", RECEIVE_BYTES) as peer:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(2 * WAIT_SECONDS):
                while True:
                    await peer.send(request)
        await until(lambda: len(forwarder._front.peers) == 1)
    await works()


async def test_a_full_queue_is_no_reason_to_cut_who_asks_whether_we_live(
    scene: ForwardingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAITING_BYTES_MAX", QUEUE_BYTES // 2)
    forwarder = scene.forwarder(Overflow.DROP, FRAME_BYTES)
    publisher = await scene.publisher(forwarder)
    async with stuck(forwarder) as slow:
        await fill(forwarder, publisher)
        (peer,) = forwarder._full
        heard = peer.heard
        await slow.send(zmtp.PING)
        await until(lambda: peer.heard > heard)
        assert not peer.transport.is_closing()
