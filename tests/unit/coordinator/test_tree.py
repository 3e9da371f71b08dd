"""The tree by itself: every request, every refusal and their order, watches, multi, sessions, the image.

That ZooKeeper answers the same is tests/integration/test_coordinator_conformance.py and test_coordinator_beside_zookeeper.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from roq.coordination.session import READ_TOGETHER
from roq.coordinator.changes import decode_transaction
from roq.coordinator.connection import UNREAD_BYTES_MAX
from roq.coordinator.tree import MANY_BYTES_MAX, Tree
from roq.errors import StorageFailed
from roq.wire.jute import FRAME_BYTES_MAX
from roq.wire.zookeeper import (
    OPEN_ACL,
    READ_ACL,
    Acl,
    AclReply,
    Auth,
    CheckRequest,
    Close,
    Code,
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
from tests.unit.coordinator.tree_rig import ONE, TWO, Driven, create

# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_new_tree_has_what_every_zookeeper_has(driven: Driven) -> None:
    assert driven.names("/") == ("zookeeper",)
    assert driven.names("/zookeeper") == ("quota", "config")
    assert driven.stat("/") == Stat(0, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0)
    assert driven.stat("/zookeeper") == Stat(0, 0, 0, 0, 0, -2, 0, 0, 0, 2, 0)


def test_a_stat_tells_who_changed_what_when(driven: Driven) -> None:
    first = driven.ask(create("/a", b"abc", with_stat=True))
    zxid, made = driven.tree.zxid, driven.now
    assert first == PathStat("/a", Stat(zxid, zxid, made, made, 0, 0, 0, 0, 3, 0, zxid))
    assert driven.ask(SetDataRequest("/a", b"longer", 0)) == StatReply(
        Stat(zxid, zxid + 1, made, driven.now, 1, 0, 0, 0, 6, 0, zxid)
    )
    changed = driven.now
    assert driven.ask(create("/a/b")) == PathReply("/a/b")
    assert driven.ask(create("/a/c")) == PathReply("/a/c")
    assert driven.ask(DeleteRequest("/a/b", 0)) == EmptyResponse(Type.DELETE)
    assert driven.stat("/a") == Stat(zxid, zxid + 1, made, changed, 1, 3, 0, 0, 6, 1, zxid + 4)
    assert driven.ask(SetAcl("/a", OPEN_ACL, 0)) == StatReply(Stat(zxid, zxid + 1, made, changed, 1, 3, 1, 0, 6, 1, zxid + 4))
    assert driven.ask(SetDataRequest("/a", None, -1)) == StatReply(
        Stat(zxid, zxid + 6, made, driven.now, 2, 3, 1, 0, 0, 1, zxid + 4)
    )
    assert driven.ask(GetData("/a", False)) == DataReply(None, driven.stat("/a"))
    assert driven.ask(GetAcl("/a")) == AclReply(OPEN_ACL, driven.stat("/a"))
    assert driven.ask(GetAcl("/zookeeper/config")) == AclReply(READ_ACL, driven.stat("/zookeeper/config"))


def test_names_come_with_a_stat_if_it_is_asked_for(driven: Driven) -> None:
    driven.ask(create("/a"))
    driven.ask(create("/a/x"))
    assert driven.ask(GetChildren("/a", False, True)) == NamesReply(("x",), driven.stat("/a"))
    assert driven.ask(GetChildren("/a", False, False)) == NamesReply(("x",), None)
    assert driven.ask(Sync("/wherever")) == PathReply("/wherever")
    assert driven.ask(PingRequest()) == EmptyResponse(Type.PING)


def test_numbers_count_the_creates_and_never_come_again(driven: Driven) -> None:
    driven.ask(create("/q"))
    assert driven.ask(create("/q/n-", flags=2)) == PathReply("/q/n-0000000000")
    assert driven.ask(create("/q/other")) == PathReply("/q/other")
    assert driven.ask(create("/q/n-", flags=3)) == PathReply("/q/n-0000000002")
    assert driven.stat("/q/n-0000000002").owner == ONE
    driven.ask(DeleteRequest("/q/n-0000000002", -1))
    assert driven.ask(create("/q/", flags=2)) == PathReply("/q/0000000003")
    assert driven.names("/q") == ("n-0000000000", "other", "0000000003")


REFUSALS: list[tuple[Request, Code]] = [
    (create("/a"), Code.NODE_EXISTS),
    (create("/"), Code.NODE_EXISTS),
    (create("/none/x"), Code.NO_NODE),
    (create("/e/x"), Code.NO_CHILDREN_FOR_EPHEMERALS),
    (create("/e/x", flags=3), Code.NO_CHILDREN_FOR_EPHEMERALS),
    (create("/zookeeper/config/x"), Code.NO_AUTH),
    (create("a"), Code.BAD_ARGUMENTS),
    (create("/x", flags=-1), Code.BAD_ARGUMENTS),
    (create("/x", flags=7), Code.BAD_ARGUMENTS),
    (create("/x", flags=4), Code.UNIMPLEMENTED),
    (create("/x", flags=5), Code.UNIMPLEMENTED),
    (CreateRequest("/x", b"", (), 0, False), Code.INVALID_ACL),
    (CreateRequest("/none/x", b"", (Acl(31, "digest", "ab"),), 0, False), Code.INVALID_ACL),
    (CreateRequest("/x", b"", (Acl(31, "world", "me"),), 0, False), Code.INVALID_ACL),
    (CreateRequest("/x", b"", (Acl(31, "auth", ""),), 0, False), Code.INVALID_ACL),
    (CreateRequest("/x", b"", (Acl(31, "ip", "127.0.0.1"),), 0, False), Code.INVALID_ACL),
    (DeleteRequest("/none", -1), Code.NO_NODE),
    (DeleteRequest("/a", 7), Code.BAD_VERSION),
    (DeleteRequest("/full", 7), Code.BAD_VERSION),
    (DeleteRequest("/full", 0), Code.NOT_EMPTY),
    (DeleteRequest("/", -1), Code.BAD_ARGUMENTS),
    (DeleteRequest("/zookeeper", -1), Code.BAD_ARGUMENTS),
    (DeleteRequest("/zookeeper/quota", -1), Code.BAD_ARGUMENTS),
    (DeleteRequest("a", -1), Code.BAD_ARGUMENTS),
    (DeleteRequest("/a\0", -1), Code.BAD_ARGUMENTS),
    (SetDataRequest("/none", b"", -1), Code.NO_NODE),
    (SetDataRequest("/a", b"", 7), Code.BAD_VERSION),
    (SetDataRequest("/a/", b"", -1), Code.BAD_ARGUMENTS),
    (SetDataRequest("/zookeeper/config", b"", 7), Code.NO_AUTH),
    (SetAcl("/none", OPEN_ACL, -1), Code.NO_NODE),
    (SetAcl("/a", OPEN_ACL, 7), Code.BAD_VERSION),
    (SetAcl("/a", (), -1), Code.INVALID_ACL),
    (SetAcl("/zookeeper/config", OPEN_ACL, -1), Code.NO_AUTH),
    (SetAcl("//", (), -1), Code.BAD_ARGUMENTS),
    (ExistsRequest("/none", False), Code.NO_NODE),
    (ExistsRequest("/a\0", False), Code.BAD_ARGUMENTS),
    (GetData("/none", False), Code.NO_NODE),
    (GetChildren("//", False, False), Code.NO_NODE),
    (GetAcl("/none"), Code.NO_NODE),
    (Auth("sasl", b""), Code.AUTH_FAILED),
    (Unsupported(19), Code.UNIMPLEMENTED),
]


@pytest.mark.parametrize(
    ("request_", "code"), REFUSALS, ids=lambda value: value.name if isinstance(value, Code) else repr(value)[:50]
)
def test_what_is_refused_changes_nothing(driven: Driven, request_: Request, code: Code) -> None:
    driven.ask(create("/a"))
    driven.ask(create("/full"))
    driven.ask(create("/full/x"))
    driven.ask(create("/e", flags=1))
    before = driven.tree.image()
    outcome = driven.outcome(request_)
    assert outcome.reply == ErrorResponse(code)
    assert outcome.transaction is None
    assert not outcome.firings
    assert driven.tree.image() == before


@pytest.mark.parametrize("good", ["/b", "/...", "/.a", "/a..", "/ü", "/\u4e2d", "/a b", "/~", "/\ufaff", "/\uffef"])
def test_paths_that_may_be(driven: Driven, good: str) -> None:
    assert driven.ask(create(good)) == PathReply(good)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("", Code.BAD_ARGUMENTS),
        ("//", Code.BAD_ARGUMENTS),
        ("//a", Code.BAD_ARGUMENTS),
        ("/a/", Code.BAD_ARGUMENTS),
        ("/.", Code.BAD_ARGUMENTS),
        ("/..", Code.BAD_ARGUMENTS),
        ("/a/.", Code.BAD_ARGUMENTS),
        ("/a/..", Code.BAD_ARGUMENTS),
        ("/a\0b", Code.BAD_ARGUMENTS),
        ("/a\x1f", Code.BAD_ARGUMENTS),
        ("/a\n", Code.BAD_ARGUMENTS),
        ("/a\x7f", Code.BAD_ARGUMENTS),
        ("/a\x9f", Code.BAD_ARGUMENTS),
        ("/\ue000", Code.BAD_ARGUMENTS),
        ("/\uf8ff", Code.BAD_ARGUMENTS),
        ("/\ufff0", Code.BAD_ARGUMENTS),
        ("/\U0001f600", Code.BAD_ARGUMENTS),
        ("a/b", Code.NO_NODE),
        ("/a//b", Code.NO_NODE),  # the parent is looked for before the path is looked at
        ("/a/./b", Code.NO_NODE),
        ("/a/../b", Code.NO_NODE),
    ],
)
def test_paths_that_may_not_be(driven: Driven, bad: str, code: Code) -> None:
    driven.ask(create("/a"))
    assert driven.ask(create(bad)) == ErrorResponse(code)


def test_a_long_path_costs_no_more_than_its_length(driven: Driven) -> None:
    long = "/" + "x" * 500_000
    began = time.process_time()
    assert driven.ask(create(long)) == PathReply(long)
    assert driven.ask(create(f"{long}/.")) == ErrorResponse(Code.BAD_ARGUMENTS)
    assert time.process_time() - began < 1.0


# --- multi ------------------------------------------------------------------------------------------------------------


def test_a_multi_sees_its_own_operations_and_is_one_transaction(driven: Driven) -> None:
    driven.ask(create("/a", b"1"))
    before = driven.tree.zxid
    reply = driven.ask(
        Multi(
            (
                CheckRequest("/a", 0),
                SetDataRequest("/a", b"2", 0),
                CheckRequest("/a", 1),
                create("/a/n-", flags=2),
                create("/a/n-", b"x", flags=2, with_stat=True),
                DeleteRequest("/a/n-0000000000", 0),
                create("/a/n-0000000000"),
            )
        )
    )
    zxid = driven.tree.zxid
    assert zxid == before + 1
    assert isinstance(reply, Results)
    checked, replaced, again, path, with_stat, deleted, made_again = reply.replies
    assert (checked, again, deleted) == (EmptyResponse(Type.CHECK), EmptyResponse(Type.CHECK), EmptyResponse(Type.DELETE))
    assert isinstance(replaced, StatReply)
    assert (replaced.stat.version, replaced.stat.children) == (1, 0)  # as it was then
    assert path == made_again == PathReply("/a/n-0000000000")
    assert with_stat == PathStat("/a/n-0000000001", Stat(zxid, zxid, driven.now, driven.now, 0, 0, 0, 0, 1, 0, zxid))
    assert driven.stat("/a").cversion == 4
    assert driven.names("/a") == ("n-0000000001", "n-0000000000")


@pytest.mark.parametrize(
    ("guilty", "code"),
    [
        (CheckRequest("/a", 7), Code.BAD_VERSION),
        (CheckRequest("/none", -1), Code.NO_NODE),
        (CheckRequest("a", -1), Code.BAD_ARGUMENTS),
        (create("/made"), Code.NODE_EXISTS),
        (create("/e2/x"), Code.NO_CHILDREN_FOR_EPHEMERALS),
        (create("/x", flags=4), Code.UNIMPLEMENTED),
        (DeleteRequest("/gone", -1), Code.NO_NODE),
        (DeleteRequest("/made", -1), Code.NOT_EMPTY),
        (SetDataRequest("/a", b"", 0), Code.BAD_VERSION),
        (create("/gone/x"), Code.NO_NODE),
    ],
)
def test_a_multi_that_fails_says_where_and_changes_nothing(
    driven: Driven, guilty: CreateRequest | DeleteRequest | SetDataRequest | CheckRequest, code: Code
) -> None:
    driven.ask(create("/a"))
    driven.ask(create("/gone"))
    before = driven.tree.image()
    begin = (
        create("/made"),
        create("/made/x"),
        DeleteRequest("/gone", 0),
        SetDataRequest("/a", b"", 0),
        create("/e2", flags=1),
    )
    outcome = driven.outcome(Multi((*begin, guilty, create("/y"), CheckRequest("/", -1))))
    assert outcome.transaction is None
    assert driven.tree.image() == before
    rolled_back, behind = [ErrorResponse(Code.OK)] * len(begin), [ErrorResponse(Code.RUNTIME_INCONSISTENCY)] * 2
    assert outcome.reply == Results((*rolled_back, ErrorResponse(code), *behind))


def test_a_multi_of_nothing_but_checks_takes_no_transaction(driven: Driven) -> None:
    before = driven.tree.zxid
    assert driven.ask(Multi(())) == Results(())
    assert driven.ask(Multi((CheckRequest("/", 0),))) == Results((EmptyResponse(Type.CHECK),))
    assert driven.tree.zxid == before


def test_many_are_read_at_once_and_one_that_is_missing_hides_none(driven: Driven) -> None:
    driven.ask(create("/a", b"1"))
    before = driven.tree.zxid
    found = driven.ask(MultiRead((GetData("/a", False), GetData("/b", False), GetData("/a", True))))
    assert isinstance(found, Results)
    one, missing, again = found.replies
    assert one == again == driven.ask(GetData("/a", False))
    assert missing == ErrorResponse(Code.NO_NODE)
    assert driven.ask(MultiRead(())) == Results(())
    assert driven.tree.zxid == before


def test_a_short_request_for_a_long_reply_is_refused(driven: Driven) -> None:
    assert READ_TOGETHER * FRAME_BYTES_MAX < MANY_BYTES_MAX < UNREAD_BYTES_MAX, "what RoQ asks for is sent"
    driven.ask(create("/a", bytes(1_000_000)))
    as_many_as_fit = MANY_BYTES_MAX // 1_000_000
    found = driven.ask(MultiRead((GetData("/a", False),) * as_many_as_fit))
    assert isinstance(found, Results)
    assert driven.ask(MultiRead((GetData("/a", False),) * (as_many_as_fit + 1))) == ErrorResponse(Code.BAD_ARGUMENTS)


# --- watches ----------------------------------------------------------------------------------------------------------


def test_watches_fire_once_and_tell_what_happened(driven: Driven) -> None:
    driven.ask(ExistsRequest("/a", True), TWO)
    driven.ask(GetChildren("/", True, False), TWO)
    assert driven.fired(create("/a")) == [(TWO, EventType.CREATED, "/a"), (TWO, EventType.CHILDREN, "/")]
    assert driven.fired(SetDataRequest("/a", b"1", -1)) == []
    driven.ask(GetData("/a", True), TWO)
    driven.ask(GetData("/a", True), ONE)
    driven.ask(GetData("/a", True), ONE)
    assert driven.fired(SetDataRequest("/a", b"2", -1)) == [(TWO, EventType.CHANGED, "/a"), (ONE, EventType.CHANGED, "/a")]
    assert driven.fired(SetAcl("/a", OPEN_ACL, -1)) == []
    driven.ask(ExistsRequest("/a", True), TWO)
    driven.ask(GetChildren("/a", True, True), TWO)
    driven.ask(GetChildren("/a", True, True), ONE)
    driven.ask(GetChildren("/", True, True), ONE)
    assert driven.fired(DeleteRequest("/a", -1)) == [  # who watched both is told once
        (TWO, EventType.DELETED, "/a"),
        (ONE, EventType.DELETED, "/a"),
        (ONE, EventType.CHILDREN, "/"),
    ]
    assert driven.tree.watches.total() == 0


def test_a_read_that_fails_leaves_no_watch_except_exists(driven: Driven) -> None:
    driven.ask(GetData("/a", True))
    driven.ask(GetChildren("/a", True, False))
    assert driven.tree.watches.count(ONE) == 0
    driven.ask(ExistsRequest("/a", True))
    assert driven.tree.watches.count(ONE) == 1


def test_a_multi_fires_in_the_order_of_its_operations(driven: Driven) -> None:
    driven.ask(create("/a"))
    driven.ask(GetData("/a", True), TWO)
    driven.ask(ExistsRequest("/b", True), TWO)
    outcome = driven.outcome(Multi((create("/b"), SetDataRequest("/a", b"", 0), DeleteRequest("/b", 0))))
    assert outcome.firings == [(TWO, EventType.CREATED, "/b"), (TWO, EventType.CHANGED, "/a")]
    assert outcome.zxid == driven.tree.zxid


def test_watches_end_with_their_connection(driven: Driven) -> None:
    driven.ask(create("/a"))
    driven.ask(GetData("/a", True), TWO)
    driven.ask(GetChildren("/a", True, False), TWO)
    driven.ask(GetData("/a", True), ONE)
    driven.tree.watches.drop(TWO)
    assert driven.fired(SetDataRequest("/a", b"", -1)) == [(ONE, EventType.CHANGED, "/a")]
    driven.tree.watches.drop(TWO)


def test_watches_that_are_set_again_tell_what_happened_meanwhile(driven: Driven) -> None:
    for path in ("/same", "/changed", "/removed", "/parent"):
        driven.ask(create(path))
    seen = driven.tree.zxid
    driven.ask(SetDataRequest("/changed", b"", -1))
    driven.ask(DeleteRequest("/removed", -1))
    driven.ask(create("/parent/x"))
    driven.ask(create("/made"))
    outcome = driven.outcome(
        SetWatches(
            seen,
            data=("/same", "/changed", "/removed", "/parent"),
            exist=("/made", "/never"),
            child=("/same", "/parent", "/removed"),
        ),
        TWO,
    )
    assert outcome.reply == EmptyResponse(Type.SET_WATCHES)
    assert outcome.firings == [
        (TWO, EventType.CHANGED, "/changed"),
        (TWO, EventType.DELETED, "/removed"),
        (TWO, EventType.CREATED, "/made"),
        (TWO, EventType.CHILDREN, "/parent"),
        (TWO, EventType.DELETED, "/removed"),
    ]
    assert driven.fired(create("/never")) == [(TWO, EventType.CREATED, "/never")]
    assert driven.fired(SetDataRequest("/same", b"", -1)) == [(TWO, EventType.CHANGED, "/same")]
    assert driven.fired(SetDataRequest("/parent", b"", -1)) == [(TWO, EventType.CHANGED, "/parent")]
    assert driven.fired(create("/same/x")) == [(TWO, EventType.CHILDREN, "/same")]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_ephemeral_nodes_end_with_their_session(driven: Driven) -> None:
    driven.ask(create("/p"))
    driven.ask(create("/p/mine", flags=1))
    driven.ask(create("/p/too", flags=1))
    driven.ask(create("/p/gone", flags=1))
    driven.ask(DeleteRequest("/p/gone", -1), TWO)  # anybody may
    driven.ask(create("/p/theirs", flags=1), TWO)
    assert driven.stat("/p/mine").owner == ONE
    driven.ask(ExistsRequest("/p/mine", True), TWO)
    driven.ask(GetChildren("/p", True, False), TWO)
    before = driven.tree.zxid
    outcome = driven.outcome(Close())
    assert outcome.reply == EmptyResponse(Type.CLOSE)
    assert outcome.firings == [(TWO, EventType.DELETED, "/p/mine"), (TWO, EventType.CHILDREN, "/p")]
    assert driven.tree.zxid == before + 1
    assert driven.ask(GetChildren("/p", False, False), TWO) == NamesReply(("theirs",), None)
    assert driven.ask(ExistsRequest("/p", False)) == ErrorResponse(Code.SESSION_EXPIRED)
    assert driven.ask(create("/late")) == ErrorResponse(Code.SESSION_EXPIRED)
    assert driven.ask(Multi((create("/late"),))) == ErrorResponse(Code.SESSION_EXPIRED)
    assert driven.ask(Close()) == ErrorResponse(Code.SESSION_EXPIRED)


# --- what is written down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [lambda log: log[:3] + log[4:], lambda log: [*log, log[-1]], lambda log: log[1:]])
def test_a_journal_with_a_hole_or_a_repeat_is_not_believed(spoil: Callable[[list[bytes]], list[bytes]]) -> None:
    driven = Driven()
    driven.ask(create("/a"))
    driven.ask(create("/a/b"))
    driven.ask(SetDataRequest("/a/b", b"", -1))
    with pytest.raises(StorageFailed):
        replayed(spoil(driven.log))


def replayed(entries: list[bytes]) -> Tree:
    tree = Tree()
    for entry in entries:
        tree.apply(decode_transaction(entry))
    return tree
