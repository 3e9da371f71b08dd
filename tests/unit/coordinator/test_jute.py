"""ZooKeeper's bytes: what kazoo writes is read, what is written kazoo reads, nonsense is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.exceptions import BadVersionError, NoAuthError, NoNodeError, RolledBackError, RuntimeInconsistency  # type: ignore[import-untyped]
from kazoo.protocol import serialization as kz  # type: ignore[import-untyped]
from kazoo.protocol.states import ZnodeStat  # type: ignore[import-untyped]
from kazoo.security import OPEN_ACL_UNSAFE  # type: ignore[import-untyped]

from roq.coordination.kazoo_link import _MultiRead
from roq.errors import FrameError
from roq.wire import jute
from roq.wire.zookeeper import (
    OPEN_ACL,
    AclReply,
    Auth,
    CheckRequest,
    Close,
    Code,
    ConnectRequest,
    CreateRequest,
    DataReply,
    DeleteRequest,
    EmptyResponse,
    ErrorResponse,
    EventType,
    ExistsRequest,
    GetAcl,
    GetChildren,
    GetData,
    Multi,
    MultiRead,
    NamesReply,
    PathReply,
    PathStat,
    PingRequest,
    Request,
    Results,
    SetAcl,
    SetDataRequest,
    SetWatches,
    Stat,
    StatReply,
    Sync,
    Type,
    Unsupported,
)

STAT = Stat(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
ANYONE = OPEN_ACL_UNSAFE


def body_of(frame: bytes) -> bytes:
    (size,) = struct.unpack_from("!i", frame)
    assert size == len(frame) - 4
    return frame[4:]


def record_of(frame: bytes) -> bytes:
    return body_of(frame)[16:]


KAZOO_REQUESTS: list[tuple[Any, Request]] = [
    (kz.Create("/ä", b"x", ANYONE, 3), CreateRequest("/ä", b"x", OPEN_ACL, 3, False)),
    (kz.Create("/a", None, ANYONE, 0), CreateRequest("/a", None, OPEN_ACL, 0, False)),
    (kz.Create2("/a", b"", ANYONE, 1), CreateRequest("/a", b"", OPEN_ACL, 1, True)),
    (kz.Delete("/a", -1), DeleteRequest("/a", -1)),
    (kz.Exists("/a", None), ExistsRequest("/a", False)),
    (kz.Exists("/a", print), ExistsRequest("/a", True)),
    (kz.GetData("/a", print), GetData("/a", True)),
    (kz.SetData("/a", b"x" * 1000, 7), SetDataRequest("/a", b"x" * 1000, 7)),
    (kz.GetACL("/a"), GetAcl("/a")),
    (kz.SetACL("/a", ANYONE, 2), SetAcl("/a", OPEN_ACL, 2)),
    (kz.GetChildren("/a", None), GetChildren("/a", False, False)),
    (kz.GetChildren2("/a", print), GetChildren("/a", True, True)),
    (kz.Sync("/a"), Sync("/a")),
    (kz.PingInstance, PingRequest()),
    (kz.CloseInstance, Close()),
    (kz.Auth(0, "digest", "a:b"), Auth("digest", b"a:b")),
    (kz.Transaction([]), Multi(())),
    (
        kz.Transaction(
            [
                kz.Create("/a", b"", ANYONE, 0),
                kz.CheckVersion("/b", 1),
                kz.SetData("/c", b"d", 2),
                kz.Delete("/e", 3),
                kz.Create2("/f", b"", ANYONE, 2),
            ]
        ),
        Multi(
            (
                CreateRequest("/a", b"", OPEN_ACL, 0, False),
                CheckRequest("/b", 1),
                SetDataRequest("/c", b"d", 2),
                DeleteRequest("/e", 3),
                CreateRequest("/f", b"", OPEN_ACL, 2, True),
            )
        ),
    ),
    (kz.Reconfig("a", None, None, 1), Unsupported(16)),
]


@pytest.mark.parametrize(("theirs", "ours"), KAZOO_REQUESTS, ids=lambda value: type(value).__name__)
def test_what_kazoo_writes_is_read(theirs: Any, ours: Request) -> None:
    assert jute.parse_request(struct.pack("!ii", 42, theirs.type) + theirs.serialize()) == (42, ours)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_connect_of_kazoo_is_read(read_only: bool) -> None:
    body = bytes(kz.Connect(0, 99, 4000, 77, b"p" * 16, read_only).serialize())
    assert jute.parse_connect(body) == ConnectRequest(99, 4000, 77, b"p" * 16, read_only)
    assert jute.parse_connect(body[:-1]) == ConnectRequest(99, 4000, 77, b"p" * 16, None)


def test_kazoo_reads_a_welcome() -> None:
    frame = jute.connected(4000, 77, b"p" * 16, tells_read_only=True)
    assert kz.Connect.deserialize(body_of(frame), 0)[0] == kz.Connect(0, 0, 4000, 77, b"p" * 16, False)
    old = jute.connected(4000, 77, b"p" * 16, tells_read_only=False)
    assert len(old) == len(frame) - 1


def test_kazoo_reads_replies_and_events() -> None:
    theirs = ZnodeStat(*STAT)
    frame = jute.reply(5, 99, StatReply(STAT))
    header, _ = kz.ReplyHeader.deserialize(body_of(frame), 0)
    assert header == (5, 99, 0)
    assert kz.Exists.deserialize(record_of(frame), 0) == theirs
    assert kz.Create.deserialize(record_of(jute.reply(1, 1, PathReply("/ä"))), 0) == "/ä"
    assert kz.Create2.deserialize(record_of(jute.reply(1, 1, PathStat("/ä", STAT))), 0) == ("/ä", theirs)
    assert kz.GetData.deserialize(record_of(jute.reply(1, 1, DataReply(b"x", STAT))), 0) == (b"x", theirs)
    assert kz.GetData.deserialize(record_of(jute.reply(1, 1, DataReply(None, STAT))), 0) == (None, theirs)
    assert kz.GetChildren.deserialize(record_of(jute.reply(1, 1, NamesReply(("a", "b"), None))), 0) == ["a", "b"]
    assert kz.GetChildren2.deserialize(record_of(jute.reply(1, 1, NamesReply((), STAT))), 0) == ([], theirs)
    assert kz.GetACL.deserialize(record_of(jute.reply(1, 1, AclReply(OPEN_ACL, STAT))), 0) == (ANYONE, theirs)
    failed = jute.reply(6, 98, ErrorResponse(Code.NO_NODE))
    assert kz.ReplyHeader.deserialize(body_of(failed), 0)[0] == (6, 98, -101)
    assert record_of(failed) == b""
    assert record_of(jute.reply(6, 98, EmptyResponse(Type.DELETE))) == b""
    event = jute.event(EventType.DELETED, "/ä", 7)
    assert kz.ReplyHeader.deserialize(body_of(event), 0)[0] == (-1, 7, 0)
    assert kz.Watch.deserialize(record_of(event), 0)[0] == (2, 3, "/ä")


def test_kazoo_reads_the_results_of_a_multi() -> None:
    done = Results((PathReply("/a"), EmptyResponse(Type.CHECK), StatReply(STAT), EmptyResponse(Type.DELETE)))
    assert kz.Transaction.deserialize(record_of(jute.reply(1, 1, done)), 0) == ["/a", True, ZnodeStat(*STAT), True]
    failed = Results((ErrorResponse(Code.OK), ErrorResponse(Code.BAD_VERSION), ErrorResponse(Code.RUNTIME_INCONSISTENCY)))
    kinds = [type(error) for error in kz.Transaction.deserialize(record_of(jute.reply(1, 1, failed)), 0)]
    assert kinds == [RolledBackError, BadVersionError, RuntimeInconsistency]


def test_kazoo_reads_many_nodes_at_once() -> None:
    request = _MultiRead(["/a", "/ä"])
    asked = MultiRead((GetData("/a", False), GetData("/ä", False)))
    assert jute.parse_request(struct.pack("!ii", 42, request.type) + request.serialize()) == (42, asked)
    found = Results((DataReply(b"x", STAT), ErrorResponse(Code.NO_NODE), DataReply(None, STAT), ErrorResponse(Code.NO_AUTH)))
    first, missing, empty, denied = request.deserialize(record_of(jute.reply(1, 1, found)), 0)
    assert (first, empty) == ((b"x", ZnodeStat(*STAT)), (None, ZnodeStat(*STAT)))
    assert isinstance(missing, NoNodeError)
    assert isinstance(denied, NoAuthError)
    assert request.deserialize(record_of(jute.reply(1, 1, Results(()))), 0) == []


def test_a_counter_that_outgrows_its_field_wraps() -> None:
    stat = kz.Exists.deserialize(record_of(jute.reply(1, 1, StatReply(STAT._replace(cversion=(1 << 31) + 5)))), 0)
    assert stat.cversion == -(1 << 31) + 5
    assert kz.Exists.deserialize(record_of(jute.reply(1, 1, StatReply(STAT._replace(cversion=-2)))), 0).cversion == -2


def test_watches_are_set_again_in_either_way() -> None:
    def texts(*values: str) -> bytes:
        return struct.pack("!i", len(values)) + b"".join(kz.write_string(value) for value in values)

    lists = struct.pack("!q", 9) + texts("/a", "/b") + texts("/c") + texts()
    wanted = SetWatches(9, ("/a", "/b"), ("/c",), ())
    assert jute.parse_request(struct.pack("!ii", -8, 101) + lists) == (-8, wanted)
    assert jute.parse_request(struct.pack("!ii", -8, 105) + lists + texts() + texts()) == (-8, wanted)
    assert jute.parse_request(struct.pack("!ii", -8, 105) + lists + texts() + texts("/d")) == (-8, Unsupported(105))


def test_an_operation_that_only_zookeeper_has_makes_its_multi_unsupported() -> None:
    head = struct.pack("!i?i", 21, False, -1)
    assert jute.parse_request(struct.pack("!ii", 1, 14) + head) == (1, Unsupported(21))
    assert jute.parse_request(struct.pack("!ii", 1, 22) + head) == (1, Unsupported(21))


@pytest.mark.parametrize(("theirs", "_"), KAZOO_REQUESTS, ids=lambda value: type(value).__name__)
def test_every_cut_is_refused(theirs: Any, _: object) -> None:
    whole = struct.pack("!ii", 42, theirs.type) + theirs.serialize()
    if theirs.type in (16, 100):  # the rest of these is not looked at
        return
    for size in range(len(whole)):
        with pytest.raises(FrameError):
            jute.parse_request(whole[:size])


@given(st.binary(max_size=200), st.sampled_from([*Type, 16, 4242]))
def test_nonsense_is_a_request_or_a_frame_error(data: bytes, kind: int) -> None:
    for parse in (lambda: jute.parse_request(struct.pack("!ii", 1, kind) + data), lambda: jute.parse_connect(data)):
        try:
            parse()
        except FrameError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("!iii", 1, 8, 2**31 - 1) + b"/a",
        struct.pack("!ii", 1, 8) + kz.write_string("/a"),
        struct.pack("!iii", 1, 8, 1) + b"\xff\x00",
        struct.pack("!iiqi", 1, 101, 0, 2**31 - 1),
    ],
)
def test_lengths_that_lie_are_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        jute.parse_request(body)
