"""CURVE on every kind of link, libzmq on the other side both ways, and RoQ's own with cards.

Not covered: which right a request needs (tests/unit/test_rights.py), a whole cluster (test_secured_cluster.py).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
from zmq.utils import z85

from roq.errors import AccessDenied
from roq.pubsub.exchange.forwarder import Forwarder
from roq.runtime.blocking_connection import BlockingConnection, StopEvent
from roq.runtime.links import Broadcaster, PublisherLink, SubscriberLink
from roq.runtime.loop_thread import LoopThread
from roq.runtime.observe import Counters
from roq.runtime.router import Dealer, Router
from roq.runtime.security import Security
from roq.tools.authority import Authority
from roq.wire.assignment import QueueSettings
from roq.wire.card import CardRole, Grant, Right, verify_card
from roq.wire.curve import KeyPair
from roq.wire.frame import FrameKind, PathOpening, encode_bundle, encode_control, encode_data
from roq.wire.member_id import NONCE_BYTES, MemberId, drawn_id
from tests.harness import libzmq
from tests.integration.link_rig import HERE, receive
from tests.integration.zmtp_rig import LOCAL, WAIT_SECONDS, until

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
LARGE = bytes(range(256)) * 4000
SIZES = (b"one", b"", b"x" * 255, b"x" * 256, LARGE)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Python's loop and the one that RoQ's processes use."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


class People:
    """An authority, a host's security, and those of clients."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.init(folder / "authority.json")
        self.host = Security(self.authority.issue("host-1", CardRole.HOST))

    def client(self, *grants: Grant, days: float = 1.0) -> Security:
        return Security(self.authority.issue("alice", CardRole.CLIENT, grants, days))

    def libzmq_keys(self) -> KeyPair:
        """Of a program that the access list knows."""
        public, secret = zmq.curve_keypair()
        grants = [Grant(Right.PUBLISH, "q"), Grant(Right.SUBSCRIBE, "q")]
        self.authority.admit("plain", z85.decode(public), grants)
        self.host.take(self.authority.access_list())
        return KeyPair(public, secret)


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


@contextlib.contextmanager
def libzmq_peer(kind: int, people: People, keys: KeyPair | None = None, endpoint: str = "") -> Iterator[zmq.Socket[bytes]]:
    """A client if it has an endpoint, else a server of the cluster's own key, bound."""
    made = libzmq.socket(kind, 0)
    made.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    try:
        if endpoint:
            assert keys is not None
            made.curve_serverkey = people.authority.server_key()
            made.curve_publickey, made.curve_secretkey = keys
            made.connect(endpoint)
        else:
            made.curve_server = True
            made.curve_secretkey = base64.b64decode(people.authority._file.servers[0][1])
        yield made
    finally:
        made.close(linger=0)


@pytest.fixture
async def router(people: People) -> AsyncIterator[Router]:
    def echo(parts: list[bytes]) -> None:
        made.send(parts[0], parts[-1])

    made = Router(LOCAL, 0, echo, security=people.host)
    yield made
    made.close()


@pytest.mark.quick
async def test_a_dealer_with_a_card_at_a_router(people: People, router: Router) -> None:
    came = list[list[bytes]]()
    dealer = Dealer(f"{HERE}{router.port}", came.append, lambda: None, people.client())
    for message in SIZES:
        dealer.send(message)
    await until(lambda: len(came) == len(SIZES))
    assert came == [[message] for message in SIZES]
    (name,) = router.peers
    card = router.card_of(name)
    assert card is not None
    assert (card.name, card.role) == ("alice", CardRole.CLIENT)
    dealer.close()


async def test_libzmqs_dealer_at_a_router(people: People, router: Router) -> None:
    keys = people.libzmq_keys()

    def ask() -> None:
        with libzmq_peer(zmq.DEALER, people, keys, f"{HERE}{router.port}") as peer:
            for message in SIZES:
                peer.send(message)
                assert peer.recv() == message
            peer.send_multipart([b"", b"two", b"parts"])
            assert peer.recv() == b"parts"
            for number in range(1000):
                peer.send(b"%d" % number)
            assert [peer.recv() for _ in range(1000)] == [b"%d" % number for number in range(1000)]

    await asyncio.to_thread(ask)


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
async def test_a_subscriber_link_at_libzmqs_pub_and_xpub(people: People, kind: int) -> None:
    with libzmq_peer(kind, people) as pub:
        got = list[list[bytes]]()
        link = SubscriberLink(f"{HERE}{libzmq.bind(pub, LOCAL)}", [b"a"], got.extend, 1 << 20, people.client())
        async with asyncio.timeout(WAIT_SECONDS):
            while not got:
                pub.send(b"a hello")
                await asyncio.sleep(0.01)
        for message in (b"b is not wanted", *(b"a" + message for message in SIZES), b"a last"):
            pub.send(message)
        await until(lambda: [b"a last"] in got)
        assert [parts for parts in got if parts != [b"a hello"]] == [*([b"a" + message] for message in SIZES), [b"a last"]]
        link.close()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
async def test_a_publisher_link_at_libzmqs_sub_and_xsub(people: People, kind: int) -> None:
    with libzmq_peer(kind, people) as sub:
        if kind == zmq.SUB:
            sub.subscribe(b"")
        link = PublisherLink(f"{HERE}{libzmq.bind(sub, LOCAL)}", people.client())
        await until(lambda: link.open)
        for message in SIZES:
            link.send(message)
        assert await receive(sub, len(SIZES)) == [[message] for message in SIZES]
        link.close()


async def test_a_dealer_and_a_blocking_one_at_libzmqs_router(people: People) -> None:
    with libzmq_peer(zmq.ROUTER, people) as peer:
        endpoint = f"{HERE}{libzmq.bind(peer, LOCAL)}"
        came = list[list[bytes]]()
        dealer = Dealer(endpoint, came.append, lambda: None, people.client())
        blocking = BlockingConnection(endpoint, StopEvent(), people.client())
        loop = asyncio.get_running_loop()

        def echo(count: int) -> None:
            for _ in range(count):
                peer.send_multipart(peer.recv_multipart())

        def ask() -> list[list[bytes] | None]:
            answers = list[list[bytes] | None]()
            for message in SIZES:
                blocking.send(message)
                answers.append(blocking.receive(loop.time() + WAIT_SECONDS))
            return answers

        for message in SIZES:
            dealer.send(message)
        answers, _ = await asyncio.gather(asyncio.to_thread(ask), asyncio.to_thread(echo, 2 * len(SIZES)))
        await until(lambda: len(came) == len(SIZES))
        assert came == answers == [[message] for message in SIZES]
        dealer.close()
        blocking.close()


def opening(member: MemberId) -> bytes:
    return encode_control(FrameKind.OPEN, member.id, 1, 0, PathOpening("", False, member.proof), 0)


def sent_by(member: MemberId, number: int, size: int = 0) -> bytes:
    return encode_data(b"t", member.id, 1, number, number - 1, number - 1, [b"x" * size], 0)


@contextlib.asynccontextmanager
async def exchange(people: People) -> AsyncIterator[Forwarder]:
    made = Forwarder(LOCAL, 0, 0, "A/1", QueueSettings(), Counters(), people.host, "q")
    yield made
    made.stop()
    for server in (made._front, made._back):
        for peer in list(server.peers.values()):
            peer.transport.abort()


@pytest.mark.parametrize("theirs", ["nobody", "publisher", "subscriber", "both"])
async def test_publishers_and_subscribers_of_both_kinds_at_an_exchange(people: People, theirs: str) -> None:
    keys = people.libzmq_keys()
    async with exchange(people) as made:
        with contextlib.ExitStack() as stack:
            got = list[list[bytes]]()
            ours = people.client(Grant(Right.PUBLISH, "q"), Grant(Right.SUBSCRIBE, "*"))
            nonce = b"n" * NONCE_BYTES
            member = MemberId(drawn_id("plain", nonce), nonce) if theirs in ("publisher", "both") else ours.draw_member_id()
            frames = [sent_by(member, number, size) for number, size in enumerate((10, 0, 100_000, 300), 1)]
            if theirs in ("subscriber", "both"):
                reader = stack.enter_context(libzmq_peer(zmq.SUB, people, keys, f"{HERE}{made.back_port}"))
                reader.subscribe(b"t")
            else:
                stack.callback(SubscriberLink(f"{HERE}{made.back_port}", [b"t"], got.extend, 1 << 20, ours).close)
            await until(lambda: made.subscriptions._prefixes)
            if theirs in ("publisher", "both"):
                writer = stack.enter_context(libzmq_peer(zmq.XPUB, people, keys, f"{HERE}{made.front_port}"))
                assert await asyncio.to_thread(writer.recv) == b"\x01"
                for frame in (opening(member), *frames):
                    writer.send(frame)
            else:
                link = PublisherLink(f"{HERE}{made.front_port}", ours)
                stack.callback(link.close)
                await until(lambda: link.open)
                for frame in (opening(member), *frames):
                    link.send(frame)
            if theirs in ("subscriber", "both"):
                got = [[await asyncio.to_thread(reader.recv)] for _ in frames]
            await until(lambda: len(got) == len(frames))
            assert got == [[frame] for frame in frames]


FORGED: dict[str, Callable[[MemberId, MemberId], list[bytes]]] = {
    "data": lambda own, other: [opening(own), sent_by(other, 1)],
    "behind own": lambda own, other: [opening(own), sent_by(own, 1), sent_by(other, 2)],
    "large data": lambda own, other: [opening(own), sent_by(other, 1, 100_000)],
    "nothing opened": lambda own, other: [sent_by(own, 1)],
    "opened without proof": lambda own, other: [opening(own._replace(proof=b""))],
    "opened with that one's proof": lambda own, other: [opening(other)],
    "opened with the own proof": lambda own, other: [opening(MemberId(other.id, own.proof))],
    "opened by a server's id": lambda own, other: [opening(MemberId(1, own.proof))],
    "end": lambda own, other: [opening(own), encode_control(FrameKind.FIN, other.id, 1, 0, None, 0)],
    "mark": lambda own, other: [opening(own), encode_control(FrameKind.MARK, other.id, 1, 0, 1, 0)],
    "watermark": lambda own, other: [opening(own), encode_control(FrameKind.WATERMARK, other.id, 1, 9, {"t": (9, 9)}, 0)],
    "bundle": lambda own, other: [opening(own), encode_bundle(own.id, 1, 0, [sent_by(own, 1), sent_by(other, 1)], 0)],
    "control that begins as data without a topic": lambda own, other: [
        opening(own),
        b"\0" + encode_control(FrameKind.FIN, own.id, 1, 0, None, 0)[1:],
    ],
    "the same in a bundle": lambda own, other: [
        opening(own),
        encode_bundle(own.id, 1, 0, [b"\0" + encode_bundle(own.id, 1, 0, [sent_by(other, 1)], 0)[1:]], 0),
    ],
    "a bundle in a bundle": lambda own, other: [
        opening(own),
        encode_bundle(own.id, 1, 0, [encode_bundle(own.id, 1, 0, [sent_by(own, 1)], 0)], 0),
    ],
    "no header": lambda own, other: [opening(own), b"t\0short"],
    "no topic": lambda own, other: [opening(own), b"t"],
}


@pytest.mark.parametrize("what", FORGED)
async def test_nothing_is_taken_in_the_name_of_another_publisher(people: People, what: str) -> None:
    """With every right to the queue, and an id that messages show."""
    mallory = Security(people.authority.issue("mallory", CardRole.CLIENT, [Grant(Right.PUBLISH, "q")]))
    own, other = mallory.draw_member_id(), people.client().draw_member_id()
    async with exchange(people) as made:
        got = list[list[bytes]]()
        reader = SubscriberLink(f"{HERE}{made.back_port}", [b""], got.extend, 1 << 20, people.host)
        await until(lambda: made.subscriptions._prefixes)
        link = PublisherLink(f"{HERE}{made.front_port}", mallory)
        await until(lambda: link.open)
        for frame in FORGED[what](own, other):
            link.send(frame)
        await until(lambda: made.counters["refused_publisher"])
        link.close()
        honest = PublisherLink(f"{HERE}{made.front_port}", people.host)
        await until(lambda: honest.open)
        honest.send(sent_by(MemberId(3), 1))
        await until(lambda: [sent_by(MemberId(3), 1)] in got)
        foreign = other.id.to_bytes(8, "little")
        assert not any(foreign in frame for parts in got for frame in parts)
        for one in (honest, reader):
            one.close()


async def test_a_broadcast_to_both_kinds(people: People) -> None:
    keys, got = people.libzmq_keys(), list[list[bytes]]()
    broadcaster = Broadcaster(LOCAL, 0, people.host)
    link = SubscriberLink(f"{HERE}{broadcaster.port}", [b"news"], got.extend, security=people.client())
    with libzmq_peer(zmq.SUB, people, keys, f"{HERE}{broadcaster.port}") as reader:
        reader.subscribe(b"news")
        await until(lambda: len(broadcaster._subscriptions._prefixes) == 2)
        broadcaster.send((b"news", b"body"))
        await until(lambda: got)
        assert got == [[b"news", b"body"]] == [await asyncio.to_thread(reader.recv_multipart)]
    link.close()
    broadcaster.close()


@pytest.mark.parametrize("who", ["no card", "unknown key", "expired", "other cluster", "no right", "revoked"])
async def test_who_is_not_let_in_hears_why(people: People, tmp_path: Path, who: str) -> None:
    security: Security | None = None
    if who == "unknown key":  # of a program without a card
        public, secret = zmq.curve_keypair()
        async with exchange(people) as made:
            with (
                libzmq_peer(zmq.SUB, people, KeyPair(public, secret), f"{HERE}{made.back_port}") as peer,
                peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ends,
            ):
                peer.subscribe(b"")
                assert await asyncio.to_thread(ends.poll, int(WAIT_SECONDS * 1000))
                peer.disable_monitor()
            assert not made.subscriptions._prefixes
        return
    expected = {
        "no card": "card",
        "expired": "expired",
        "other cluster": "another cluster",
        "no right": "subscribe",
        "revoked": "revoked",
    }[who]
    if who == "expired":
        file = people.authority.issue("alice", CardRole.CLIENT, [Grant(Right.SUBSCRIBE, "q")], days=1.0)
        security = Security(file)
        over = security.card.expires + 1
        people.host._clock = lambda: over
    elif who == "other cluster":
        other = Authority.init(tmp_path / "other.json")
        security = Security(other.issue("alice", CardRole.CLIENT, [Grant(Right.SUBSCRIBE, "q")]))
    elif who == "no right":
        security = people.client(Grant(Right.PUBLISH, "q"), Grant(Right.SUBSCRIBE, "other"))
    elif who == "revoked":
        security = people.client(Grant(Right.SUBSCRIBE, "q"))
        people.authority.revoke("alice")
        people.host.take(people.authority.access_list())
    async with exchange(people) as made:
        got = list[list[bytes]]()
        link = SubscriberLink(f"{HERE}{made.back_port}", [b""], got.extend, security=security)
        await until(lambda: link.denied)
        assert expected in link.denied
        assert not made.subscriptions._prefixes
        link.close()


async def test_a_revoked_card_is_out_at_once_and_stays_out(people: People, router: Router) -> None:
    ended = list[float]()
    loop = asyncio.get_running_loop()
    security = people.client()
    dealer = Dealer(f"{HERE}{router.port}", lambda parts: None, lambda: ended.append(loop.time()), security)
    stays = Dealer(f"{HERE}{router.port}", lambda parts: None, lambda: None, people.host)
    await until(lambda: len(router.peers) == 2 and dealer.open and stays.open)
    began = loop.time()
    people.authority.revoke("alice")
    assert people.host.take(people.authority.access_list())
    await until(lambda: ended)
    assert ended[0] - began < 1.0
    await until(lambda: dealer.denied)
    assert "revoked" in dealer.denied
    assert stays.open
    assert not people.host.take(people.authority.access_list()), "the same list again is no news"
    dealer.close()
    stays.close()


def test_a_card_shown_by_somebody_else_is_refused(people: People) -> None:
    security = people.client()
    authorities = security._authorities
    now = security.card.begins
    assert verify_card(security.signed, security.card.key, authorities, now).name == "alice"
    with pytest.raises(AccessDenied, match="somebody else"):
        verify_card(security.signed, KeyPair.new().public, authorities, now)
    altered = bytearray(security.signed)
    altered[80] ^= 1
    with pytest.raises(AccessDenied, match="authority"):
        verify_card(bytes(altered), security.card.key, authorities, now)


async def test_a_revoked_card_is_out_at_a_server_of_another_thread(people: People) -> None:
    """A store's follower has a loop of its own; the access list comes to the store's."""
    thread = LoopThread("other")
    made = list[Router]()

    async def make() -> None:
        made.append(Router(LOCAL, 0, lambda parts: None, security=people.host))

    await asyncio.to_thread(thread.call, make())
    dealer = Dealer(f"{HERE}{made[0].port}", lambda parts: None, lambda: None, people.client())
    await until(lambda: dealer.open)
    people.authority.revoke("alice")
    people.host.take(people.authority.access_list())
    await until(lambda: dealer.denied)
    dealer.close()

    async def close() -> None:
        made[0].close()

    await asyncio.to_thread(thread.call, close())
    thread.stop()


# --- while a cluster is being given cards ---------------------------------------------------------------------------------


async def answered(endpoint: str, security: Security | None) -> list[list[bytes]]:
    """What comes back of a Dealer's message, and then of a blocking one's."""
    came = list[list[bytes]]()
    dealer = Dealer(endpoint, came.append, lambda: None, security)
    blocking = BlockingConnection(endpoint, StopEvent(), security)

    def ask() -> None:
        blocking.send(b"second")
        reply = blocking.receive(time.monotonic() + WAIT_SECONDS)
        assert reply is not None
        came.append(reply)

    try:
        dealer.send(b"first")
        await until(lambda: len(came) == 1)
        await asyncio.to_thread(ask)
    finally:
        dealer.close()
        blocking.close()
    return came


@pytest.mark.parametrize("server", ["none", "mixed", "cards"])
@pytest.mark.parametrize("client", ["none", "mixed", "cards"])
async def test_who_meets_whom(people: People, server: str, client: str) -> None:
    """In any order in which GCMs and hosts are started anew."""
    card = people.authority.issue("host-2", CardRole.HOST)
    of = {"none": None, "mixed": Security(card, mixed=True), "cards": Security(card)}

    def echo(parts: list[bytes]) -> None:
        made.send(parts[0], parts[-1])

    made = Router(LOCAL, 0, echo, security=of[server])
    try:
        if {client, server} == {"none", "cards"}:
            with pytest.raises((AccessDenied, TimeoutError)):
                async with asyncio.timeout(1.0):
                    await answered(f"{HERE}{made.port}", of[client])
            assert not any(peer.parser.ready for peer in made.peers.values())
        else:
            assert await answered(f"{HERE}{made.port}", of[client]) == [[b"first"], [b"second"]]
    finally:
        made.close()


async def test_libzmq_of_both_kinds_at_a_server_that_takes_both(people: People) -> None:
    people.host.mixed = True
    keys = people.libzmq_keys()

    def echo(parts: list[bytes]) -> None:
        made.send(parts[0], parts[-1])

    made = Router(LOCAL, 0, echo, security=people.host)

    def ask() -> None:
        with libzmq_peer(zmq.DEALER, people, keys, f"{HERE}{made.port}") as sealed:
            plain = libzmq.socket(zmq.DEALER, 0)
            plain.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
            plain.connect(f"{HERE}{made.port}")
            for message in SIZES:
                for peer in (sealed, plain):
                    peer.send(message)
                    assert peer.recv() == message
            plain.close(linger=0)

    await asyncio.to_thread(ask)
    made.close()
