"""One suite, two servers: a real ZooKeeper and the coordinator answer alike, byte by byte where kazoo looks at none.

Runs of requests at random are in test_coordinator_beside_zookeeper.py, RoQ's own sessions in test_coordinator_sessions.py,
kazoo's recipes in test_coordinator_recipes.py.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.harness.raw_zookeeper import (
    CLOSE,
    CREATE,
    DELETE,
    EXISTS,
    GET_CHILDREN,
    GET_DATA,
    MULTI,
    MULTI_READ,
    OPEN,
    PING,
    PING_XID,
    SET_DATA,
    SET_WATCHES,
    SET_WATCHES_2,
    SET_WATCHES_XID,
    STAT,
    Event,
    RawClient,
    buffer,
    create,
    text,
    texts,
)

CREATE_2, GET_ACL, SET_ACL, SYNC, CHECK, GET_CHILDREN_2 = 15, 6, 7, 9, 13, 12
OK, UNIMPLEMENTED, BAD_ARGUMENTS = 0, -6, -8
NO_NODE, NO_AUTH, BAD_VERSION, EPHEMERAL_PARENT, EXISTS_ALREADY, NOT_EMPTY = -101, -102, -103, -108, -110, -111
INVALID_ACL = -114
EPHEMERAL, SEQUENTIAL = 1, 2
FRAME_BYTES_MAX = 1_048_575
NO_SESSION = (0, 0, bytes(16), b"\0")


def version(number: int = -1) -> bytes:
    return struct.pack("!i", number)


def unwatched(path: str) -> bytes:
    return text(path) + b"\0"


def watched(path: str) -> bytes:
    return text(path) + b"\1"


def multi(*ops: tuple[int, bytes]) -> bytes:
    heads = b"".join(struct.pack("!i?i", kind, False, -1) + record for kind, record in ops)
    return heads + struct.pack("!i?i", -1, True, -1)


@pytest.fixture(params=["zookeeper", "coordinator"])
def server(request: pytest.FixtureRequest) -> str:
    """ "address:port" of either."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def client(server: str) -> Iterator[RawClient]:
    """A client with a session, which it closes."""
    with RawClient(server) as made:
        made.welcome()
        yield made
        made.ask(CLOSE)


@pytest.fixture
def base(client: RawClient) -> str:
    """A node of the test's own."""
    path = f"/test-{uuid.uuid4().hex[:12]}"
    assert client.ask(CREATE, create(path)).error == OK
    return path


# --- requests ---------------------------------------------------------------------------------------------------------

PATHS = [  # path, create below a node that is there ("~") as it is answered
    ("", BAD_ARGUMENTS),
    ("a", BAD_ARGUMENTS),
    ("a/b", NO_NODE),
    ("//", BAD_ARGUMENTS),
    ("//a", BAD_ARGUMENTS),
    ("~/", BAD_ARGUMENTS),
    ("~//a", NO_NODE),
    ("~//", NO_NODE),
    ("~/none/a", NO_NODE),
    ("~/./a", NO_NODE),
    ("~/.", BAD_ARGUMENTS),
    ("~/..", BAD_ARGUMENTS),
    ("~/...", OK),
    ("~/.a", OK),
    ("~/a b", OK),
    ("~/\u00fc\u4e2d", OK),
    ("~/a\0b", BAD_ARGUMENTS),
    ("~/a\x01", BAD_ARGUMENTS),
    ("~/a\n", BAD_ARGUMENTS),
    ("~/a\x7f", BAD_ARGUMENTS),
    ("~/a\x9f", BAD_ARGUMENTS),
    ("~/a\xa0", OK),
    ("~/a\ue000", BAD_ARGUMENTS),
    ("~/a\uf8ff", BAD_ARGUMENTS),
    ("~/a\uf900", OK),
    ("~/a\uffef", OK),
    ("~/a\ufff0", BAD_ARGUMENTS),
    ("~/\U0001f600", BAD_ARGUMENTS),
    ("~", EXISTS_ALREADY),
    ("/", EXISTS_ALREADY),
    ("/zookeeper", EXISTS_ALREADY),
    ("/zookeeper/config/a", NO_AUTH),
]


@pytest.mark.parametrize("kind", [CREATE, CREATE_2])
def test_paths_are_taken_or_refused(client: RawClient, base: str, kind: int) -> None:
    found = [(path, client.ask(kind, create(path.replace("~", base))).error) for path, _ in PATHS]
    assert found == PATHS


def test_what_is_asked_wrongly_is_refused_in_zookeepers_order(client: RawClient, base: str) -> None:
    a, e, full = f"{base}/a", f"{base}/e", f"{base}/full"
    for path, flags in ((a, 0), (e, EPHEMERAL), (full, 0), (f"{full}/x", 0)):
        assert client.ask(CREATE, create(path, flags=flags)).error == OK
    none, data = f"{base}/none", buffer(b"x")
    asked = [
        (CREATE, create(f"{e}/x"), EPHEMERAL_PARENT),
        (CREATE, create(f"{e}/x//"), NO_NODE),
        (CREATE, create(f"{e}/."), BAD_ARGUMENTS),
        (CREATE, create(f"{base}/x", flags=-1), BAD_ARGUMENTS),
        (CREATE, create(f"{base}/x", flags=7), BAD_ARGUMENTS),
        (CREATE, create(f"{base}/x", flags=5), UNIMPLEMENTED),
        (CREATE, create(f"{none}/x", acl=struct.pack("!i", 0)), INVALID_ACL),
        (CREATE, create(f"{none}/x", acl=struct.pack("!i", -1)), INVALID_ACL),
        (CREATE, create("", acl=struct.pack("!i", 0)), BAD_ARGUMENTS),
        (CREATE, create(f"{base}/twice", acl=struct.pack("!i", 2) + OPEN[4:] * 2), OK),
        (DELETE, text(none) + version(), NO_NODE),
        (DELETE, text(a) + version(7), BAD_VERSION),
        (DELETE, text(full) + version(7), BAD_VERSION),
        (DELETE, text(full) + version(0), NOT_EMPTY),
        (DELETE, text("/") + version(), BAD_ARGUMENTS),
        (DELETE, text("/zookeeper") + version(), BAD_ARGUMENTS),
        (DELETE, text("/zookeeper/config") + version(), BAD_ARGUMENTS),
        (DELETE, text("a") + version(), BAD_ARGUMENTS),
        (DELETE, text(f"{a}/") + version(), NO_NODE),
        (DELETE, text("") + version(), BAD_ARGUMENTS),
        (SET_DATA, text(none) + data + version(), NO_NODE),
        (SET_DATA, text(a) + data + version(7), BAD_VERSION),
        (SET_DATA, text(f"{a}/") + data + version(), BAD_ARGUMENTS),
        (SET_DATA, text("") + data + version(), BAD_ARGUMENTS),
        (SET_DATA, text("/zookeeper/config") + data + version(7), NO_AUTH),
        (SET_ACL, text(none) + OPEN + version(), NO_NODE),
        (SET_ACL, text(a) + OPEN + version(7), BAD_VERSION),
        (SET_ACL, text(none) + struct.pack("!i", 0) + version(), INVALID_ACL),
        (SET_ACL, text("//") + struct.pack("!i", 0) + version(), BAD_ARGUMENTS),
        (EXISTS, unwatched(none), NO_NODE),
        (EXISTS, unwatched("//"), NO_NODE),
        (EXISTS, unwatched("a"), NO_NODE),
        (EXISTS, unwatched(""), OK),
        (EXISTS, unwatched("/a\0"), BAD_ARGUMENTS),
        (GET_DATA, unwatched(f"{a}/"), NO_NODE),
        (GET_DATA, unwatched("/a\0"), NO_NODE),
        (GET_CHILDREN, unwatched(none), NO_NODE),
        (GET_CHILDREN_2, unwatched(none), NO_NODE),
        (GET_ACL, text(none), NO_NODE),
        (SYNC, text("//"), OK),
    ]
    found = [(kind, record, client.ask(kind, record).error) for kind, record, _ in asked]
    assert found == asked


@pytest.mark.quick
def test_nodes_that_every_server_has(client: RawClient) -> None:
    expected = {"/zookeeper": (-2, 0, 2), "/zookeeper/quota": (0, 0, 0), "/zookeeper/config": (0, -1, 0)}
    for path, (cversion, aversion, children) in expected.items():
        stat = STAT.unpack(client.ask(EXISTS, unwatched(path)).record)
        assert stat == (0, 0, 0, 0, 0, cversion, aversion, 0, 0, children, 0)
    acl = client.ask(GET_ACL, text("/zookeeper/config")).record
    assert acl.startswith(struct.pack("!ii", 1, 1) + text("world") + text("anyone"))
    assert client.ask(GET_ACL, text("/")).record.startswith(OPEN)


def test_records_of_replies(client: RawClient, base: str) -> None:
    made = client.ask(CREATE_2, create(f"{base}/s-", b"abc", EPHEMERAL | SEQUENTIAL))
    path = f"{base}/s-0000000000"
    assert made.record.startswith(text(path))
    stat = STAT.unpack(made.record[len(text(path)) :])
    czxid, mzxid, ctime, mtime, *rest, pzxid = stat
    assert made.zxid == czxid == mzxid == pzxid
    assert ctime == mtime
    assert abs(ctime - time.time() * 1000) < 60_000
    assert rest[:3] == [0, 0, 0]
    assert rest[4:] == [3, 0]
    assert client.ask(GET_DATA, unwatched(path)).record == buffer(b"abc") + STAT.pack(*stat)
    assert client.ask(EXISTS, unwatched(path)).record == STAT.pack(*stat)
    assert client.ask(GET_CHILDREN, unwatched(base)).record == texts("s-0000000000")
    parent = client.ask(EXISTS, unwatched(base)).record
    assert client.ask(GET_CHILDREN_2, unwatched(base)).record == texts("s-0000000000") + parent
    assert client.ask(GET_ACL, text(path)).record == OPEN + STAT.pack(*stat)
    assert client.ask(SYNC, text(path)).record == text(path)
    assert client.ask(CREATE, create(f"{base}/n", None)).record == text(f"{base}/n")
    assert client.ask(GET_DATA, unwatched(f"{base}/n")).record.startswith(buffer(None))
    assert client.ask(DELETE, text(path) + version()).record == b""
    ping = client.ask(PING, xid=PING_XID)
    assert (ping.error, ping.record) == (OK, b"")
    client.send(struct.pack("!ii", 77, PING))
    assert client.frame().startswith(struct.pack("!i", PING_XID))  # whatever it was asked with


@pytest.mark.quick
def test_a_multi_answers_for_each_of_its_operations(client: RawClient, base: str) -> None:
    m = f"{base}/m"
    done = client.ask(
        MULTI,
        multi(
            (CREATE, create(m)),
            (CHECK, text(m) + version(0)),
            (SET_DATA, text(m) + buffer(b"d") + version(0)),
            (DELETE, text(m) + version(1)),
            (CREATE_2, create(m, b"x")),
        ),
    )
    at = 0

    def head(kind: int, error: int = 0, last: bool = False) -> None:
        nonlocal at
        assert struct.unpack_from("!i?i", done.record, at) == (kind, last, error)
        at += 9

    head(CREATE)
    assert done.record[at:].startswith(text(m))
    at += len(text(m))
    head(CHECK)
    head(SET_DATA)
    assert STAT.unpack_from(done.record, at)[4] == 1
    at += STAT.size
    head(DELETE)
    head(CREATE_2)
    at += len(text(m)) + STAT.size
    head(-1, -1, last=True)
    assert (done.error, at) == (OK, len(done.record))
    failed = client.ask(MULTI, multi((DELETE, text(m) + version()), (CREATE, create(f"{m}/x")), (CHECK, text(m) + version())))
    results = b"".join(struct.pack("!i?ii", -1, False, error, error) for error in (0, NO_NODE, -2))
    assert (failed.error, failed.record) == (OK, results + struct.pack("!i?i", -1, True, -1))
    assert client.ask(MULTI, multi()).record == struct.pack("!i?i", -1, True, -1)
    assert client.ask(GET_DATA, unwatched(m)).record.startswith(buffer(b"x"))


def test_many_nodes_are_read_at_once(client: RawClient, base: str) -> None:
    for name, data in (("a", b"1"), ("b", None), ("c", b"")):
        client.ask(CREATE, create(f"{base}/{name}", data))
    paths = [f"{base}/{name}" for name in ("a", "gone", "b", "c", "a")]
    found = client.ask(MULTI_READ, multi(*((GET_DATA, unwatched(path)) for path in paths)))
    expected = b""
    for path in paths:
        alone = client.ask(GET_DATA, unwatched(path))
        if alone.error:
            expected += struct.pack("!i?ii", -1, False, alone.error, alone.error)
        else:
            expected += struct.pack("!i?i", GET_DATA, False, 0) + alone.record
    assert (found.error, found.record) == (OK, expected + struct.pack("!i?i", -1, True, -1))
    assert client.ask(MULTI_READ, multi()).record == struct.pack("!i?i", -1, True, -1)


def test_what_only_zookeeper_has_is_refused_by_name(client: RawClient, base: str) -> None:
    ttl = text(f"{base}/t") + buffer(b"") + OPEN + struct.pack("!iq", 5, 1000)
    assert client.ask(21, ttl).error == UNIMPLEMENTED  # a real one, too, unless it is configured
    assert client.ask(EXISTS, unwatched(f"{base}/t")).error == NO_NODE


def test_a_check_stands_in_a_multi_only(server: str) -> None:
    with RawClient(server) as client:
        client.welcome(1000)
        assert client.ask(CHECK, text("/") + version(0)).error == UNIMPLEMENTED


# --- watches ----------------------------------------------------------------------------------------------------------


def test_events_come_before_the_reply_that_shows_what_they_tell(client: RawClient, base: str) -> None:
    a = f"{base}/a"
    client.ask(EXISTS, watched(a))
    client.ask(GET_CHILDREN, watched(base))
    client.ask(CREATE, create(a))
    assert client.events == [Event(1, 3, a), Event(4, 3, base)]
    client.events.clear()
    client.ask(GET_DATA, watched(a))
    client.ask(GET_CHILDREN_2, watched(a))
    client.ask(SET_DATA, text(a) + buffer(b"") + version())
    client.ask(SET_DATA, text(a) + buffer(b"") + version())
    assert client.events == [Event(3, 3, a)]
    client.ask(GET_DATA, watched(a))
    client.ask(DELETE, text(a) + version())
    assert client.events == [Event(3, 3, a), Event(2, 3, a)]  # once for data and children


@pytest.mark.quick
def test_watches_are_set_again_on_another_connection(server: str, client: RawClient, base: str) -> None:
    for name in ("same", "changed", "removed", "parent"):
        client.ask(CREATE, create(f"{base}/{name}"))
    with RawClient(server) as watcher:
        session = watcher.welcome()
        watcher.ask(GET_DATA, watched(f"{base}/same"))
        seen = client.ask(SYNC, text("/")).zxid
    client.ask(SET_DATA, text(f"{base}/changed") + buffer(b"") + version())
    client.ask(DELETE, text(f"{base}/removed") + version())
    client.ask(CREATE, create(f"{base}/parent/x"))
    client.ask(CREATE, create(f"{base}/made"))
    data = [f"{base}/{name}" for name in ("same", "changed", "removed")]
    exist = [f"{base}/{name}" for name in ("made", "never")]
    child = [f"{base}/{name}" for name in ("same", "parent", "removed")]
    for kind, lasting in ((SET_WATCHES, b""), (SET_WATCHES_2, texts() + texts())):
        record = struct.pack("!q", seen) + texts(*data) + texts(*exist) + texts(*child) + lasting
        with RawClient(server) as watcher:
            again = watcher.welcome(session=session.session, password=session.password)
            assert again == session
            told = watcher.ask(kind, record, xid=SET_WATCHES_XID)
            assert (told.error, told.record) == (OK, b"")
            assert sorted(watcher.events) == sorted(
                [
                    Event(3, 3, f"{base}/changed"),
                    Event(2, 3, f"{base}/removed"),
                    Event(1, 3, f"{base}/made"),
                    Event(4, 3, f"{base}/parent"),
                    Event(2, 3, f"{base}/removed"),
                ]
            )
            watcher.events.clear()
            client.ask(SET_DATA, text(f"{base}/same") + buffer(b"") + version())
            client.ask(CREATE, create(f"{base}/never"))
            watcher.ask(SYNC, text("/"))
            assert watcher.events == [Event(3, 3, f"{base}/same"), Event(1, 3, f"{base}/never")]
            seen = client.ask(DELETE, text(f"{base}/never") + version()).zxid
        client.ask(SET_DATA, text(f"{base}/changed") + buffer(b"") + version())
        client.ask(DELETE, text(f"{base}/parent/x") + version())
        client.ask(CREATE, create(f"{base}/parent/x"))


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "granted"), [(-1, 1000), (0, 1000), (4321, 4321), (10**6, 60_000)])
def test_a_time_out_is_negotiated(server: str, wanted: int, granted: int) -> None:
    with RawClient(server) as client:
        welcome = client.welcome(wanted)
        assert (welcome.timeout_ms, len(welcome.password), welcome.rest) == (granted, 16, b"\0")
        assert welcome.session > 0
        closed = client.ask(CLOSE)
        assert (closed.error, closed.record) == (OK, b"")
        assert client.ended()


def test_an_old_client_hears_nothing_of_read_only_servers(server: str) -> None:
    with RawClient(server) as client:
        assert client.welcome(read_only=b"").rest == b""
        client.ask(CLOSE)


def test_a_session_goes_on_only_for_who_knows_its_password(server: str) -> None:
    with RawClient(server) as client:
        welcome = client.welcome(4000)
    with RawClient(server) as thief:
        assert thief.welcome(session=welcome.session, password=b"x" * 16) == NO_SESSION
        assert thief.ended()
    with RawClient(server) as stranger:
        assert stranger.welcome(session=12345) == NO_SESSION
        assert stranger.ended()
    with RawClient(server) as client, RawClient(server) as again:
        assert client.welcome(5000, welcome.session, welcome.password) == welcome._replace(timeout_ms=5000)
        assert again.welcome(4000, welcome.session, welcome.password) == welcome
        assert client.ended()  # a session has one connection
        assert again.ask(EXISTS, unwatched("/")).error == OK
        again.ask(CLOSE)
    with RawClient(server) as late:
        assert late.welcome(session=welcome.session, password=welcome.password) == NO_SESSION
        assert late.ended()


def test_a_silent_session_ends_in_its_time_and_its_ephemeral_nodes_with_it(client: RawClient, base: str, server: str) -> None:
    with RawClient(server) as silent, RawClient(server) as alive:
        ours = silent.welcome(1000)
        alive.welcome(1000)
        silent.ask(CREATE, create(f"{base}/silent", flags=EPHEMERAL))
        alive.ask(CREATE, create(f"{base}/alive", flags=EPHEMERAL))
        began = time.monotonic()
        client.ask(GET_CHILDREN, watched(base))
        while not client.events and time.monotonic() - began < 20:
            time.sleep(0.1)
            alive.ask(PING, xid=PING_XID)
            client.ask(PING, xid=PING_XID)
        assert client.events == [Event(4, 3, base)]
        assert 0.9 < time.monotonic() - began < 5
        assert silent.ended()
        assert client.ask(GET_CHILDREN, unwatched(base)).record == texts("alive")
        alive.ask(CLOSE)
    assert client.ask(GET_CHILDREN, unwatched(base)).record == texts()
    with RawClient(server) as late:
        assert late.welcome(session=ours.session, password=ours.password) == NO_SESSION


# --- limits and nonsense ----------------------------------------------------------------------------------------------


def test_a_frame_has_a_limit(server: str, client: RawClient, base: str) -> None:
    def filling(size: int) -> bytes:
        empty = create(f"{base}/big")
        return create(f"{base}/big", bytes(size - len(empty) - 8))

    with RawClient(server) as large:
        large.welcome()
        assert large.ask(CREATE, filling(FRAME_BYTES_MAX)).error == OK
        large.ask(CLOSE)
    assert client.ask(DELETE, text(f"{base}/big") + version()).error == OK
    with RawClient(server) as larger:
        larger.welcome()
        with pytest.raises((EOFError, BrokenPipeError)):
            larger.ask(CREATE, filling(FRAME_BYTES_MAX + 1))
    assert client.ask(EXISTS, unwatched(f"{base}/big")).error == NO_NODE


def test_bytes_come_in_any_pieces_and_requests_before_their_replies(server: str) -> None:
    with RawClient(server) as client:
        client.welcome()
        asked = [struct.pack("!ii", xid, EXISTS) + unwatched("/zookeeper" if xid % 2 else "/none") for xid in range(1, 301)]
        stream = b"".join(struct.pack("!i", len(body)) + body for body in asked)
        for at in range(200):
            client.socket.sendall(stream[at : at + 1])
        client.socket.sendall(stream[200:])
        heads = [struct.unpack_from("!iqi", client.frame()) for _ in asked]
        assert [(xid, error) for xid, _, error in heads] == [(xid, OK if xid % 2 else NO_NODE) for xid in range(1, 301)]
        client.ask(CLOSE)


def test_a_flood_of_writes_is_answered_in_order(client: RawClient, base: str) -> None:
    """More than a server lets wait for its disk at a time."""
    count = 3000
    bodies = [struct.pack("!ii", xid, CREATE) + create(f"{base}/n", flags=SEQUENTIAL) for xid in range(count)]
    client.socket.sendall(b"".join(struct.pack("!i", len(body)) + body for body in bodies))
    zxids = []
    for number in range(count):
        answer = client.frame()
        xid, zxid, error = struct.unpack_from("!iqi", answer)
        assert (xid, error, answer[16:]) == (number, OK, text(f"{base}/n{number:010d}"))
        zxids.append(zxid)
    assert zxids == sorted(set(zxids))


def test_a_client_of_another_cluster_is_sent_away(server: str) -> None:
    with RawClient(server) as client, pytest.raises(EOFError):
        client.welcome(zxid=1 << 60)


@pytest.mark.parametrize(
    ("word", "answer"), [(b"ruok", b"imok"), (b"srvr", b"Mode: standalone"), (b"stat", b"stat is not executed")]
)
def test_words_of_four_letters(server: str, word: bytes, answer: bytes) -> None:
    with RawClient(server) as client:
        client.socket.sendall(word)
        told = b""
        while chunk := client.socket.recv(4096):
            told += chunk
        assert answer in told


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\0", b"\0\0\0\x05hello"])
def test_nonsense_is_cut_off(server: str, nonsense: bytes) -> None:
    with RawClient(server) as client:
        client.socket.sendall(nonsense)
        assert client.ended()
