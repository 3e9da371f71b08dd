"""What an ACL lets whom do, at the tree. Beside a real ZooKeeper: tests/integration/test_coordinator_beside_zookeeper.py."""

from __future__ import annotations

import pytest

from roq.coordinator.acl import Permission, identity
from roq.coordinator.changes import FORMAT, FORMAT_ACL, encode
from roq.coordinator.tree import IDENTITIES_MAX
from roq.wire.zookeeper import (
    OPEN_ACL,
    READ_ACL,
    Acl,
    AclReply,
    Auth,
    CheckRequest,
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
    Reply,
    Request,
    Results,
    SetAcl,
    SetDataRequest,
    Type,
)
from tests.unit.coordinator.tree_rig import ONE, TWO, Driven, create

MINE, YOURS = Auth("digest", b"me:secret"), Auth("digest", b"you:secret")


def acl_of(one: Auth, permissions: int = 31) -> Acl:
    who = identity(one.scheme, one.shown)
    assert who is not None
    return Acl(permissions, *who)


MINE_ALONE = (acl_of(MINE),)
READABLE = (*MINE_ALONE, Acl(1, "world", "anyone"))
# By what is asked of /mine and what is below it: the permission it takes, on the node or on its parent.
ASKED: list[tuple[Request, Permission]] = [
    (ExistsRequest("/mine", True), Permission.READ),
    (GetData("/mine", True), Permission.READ),
    (GetChildren("/mine", True, True), Permission.READ),
    (Multi((CheckRequest("/mine", 0),)), Permission.READ),
    (GetAcl("/mine"), Permission.READ | Permission.ADMIN),
    (SetDataRequest("/mine", b"x", -1), Permission.WRITE),
    (create("/mine/new"), Permission.CREATE),
    (Multi((create("/other"), create("/mine/new"))), Permission.CREATE),
    (DeleteRequest("/mine/child", -1), Permission.DELETE),
    (DeleteRequest("/mine/none", -1), Permission.DELETE),
    (SetAcl("/mine", OPEN_ACL, -1), Permission.ADMIN),
]


def refused(reply: Reply) -> bool:
    replies = reply.replies if isinstance(reply, Results) else (reply,)
    return ErrorResponse(Code.NO_AUTH) in replies


@pytest.mark.parametrize(("request_", "needed"), ASKED)
@pytest.mark.parametrize("given", [Permission(bits) for bits in range(32)])
def test_each_request_needs_its_permission(driven: Driven, request_: Request, needed: Permission, given: Permission) -> None:
    driven.ask(MINE)
    driven.ask(create("/mine"))
    driven.ask(create("/mine/child"))
    driven.ask(SetAcl("/mine", (*MINE_ALONE, acl_of(YOURS, given)), -1))
    driven.ask(YOURS, TWO)
    before = driven.tree.image()
    assert refused(driven.ask(request_, TWO)) is not bool(given & needed)
    if not given & needed:
        assert driven.tree.image() == before
        assert driven.tree.watches.total() == 0
    assert not refused(driven.ask(request_))


def test_whoever_shows_nothing_may_do_what_the_world_may(driven: Driven) -> None:
    driven.ask(MINE)
    driven.ask(CreateRequest("/mine", b"1", READABLE, 0, False))
    driven.ask(CreateRequest("/mine/child", b"2", (Acl(31, "auth", ""),), 0, False))
    assert isinstance(driven.ask(GetData("/mine", False), TWO), DataReply)
    assert driven.names("/mine") == ("child",)
    hidden = AclReply((Acl(31, "digest", "me:x"), READABLE[1]), driven.stat("/mine"))
    assert driven.ask(GetAcl("/mine"), TWO) == hidden
    child = "/mine/child"
    reads = (ExistsRequest(child, True), GetData(child, True), GetAcl(child))
    for request in (*reads, create("/mine/x"), DeleteRequest(child, -1)):
        assert driven.ask(request, TWO) == ErrorResponse(Code.NO_AUTH)
    assert driven.ask(GetAcl(child)) == AclReply(MINE_ALONE, driven.stat(child))
    driven.tree.left(ONE)
    assert driven.ask(GetData(child, False)) == ErrorResponse(Code.NO_AUTH), "another connection of the same session"


def test_watches_tell_nothing_of_nodes_that_may_not_be_read(driven: Driven) -> None:
    driven.ask(MINE)
    for session in (ONE, TWO):
        driven.ask(ExistsRequest("/mine", True), session)
    assert driven.fired(CreateRequest("/mine", b"", MINE_ALONE, 0, False)) == [(ONE, EventType.CREATED, "/mine")]
    driven.ask(SetAcl("/mine", OPEN_ACL, -1))
    for session in (ONE, TWO):
        driven.ask(GetData("/mine", True), session)
        driven.ask(GetChildren("/mine", True, False), session)
    driven.ask(SetAcl("/mine", MINE_ALONE, -1))
    assert driven.fired(SetDataRequest("/mine", b"x", -1)) == [(ONE, EventType.CHANGED, "/mine")]
    assert driven.fired(create("/mine/child")) == [(ONE, EventType.CHILDREN, "/mine")]
    assert driven.tree.watches.total() == 0


def test_a_connection_shows_few_identities(driven: Driven) -> None:
    for number in range(IDENTITIES_MAX):
        assert driven.ask(Auth("digest", b"me:%d" % number)) == EmptyResponse(Type.AUTH)
    assert driven.ask(Auth("digest", b"me:more")) == ErrorResponse(Code.AUTH_FAILED)


def test_what_has_an_acl_is_not_read_by_who_knows_none(driven: Driven) -> None:
    open_, mine = (
        driven.outcome(CreateRequest(path, b"", acl, 0, False)).transaction
        for path, acl in (("/open", OPEN_ACL), ("/mine", READ_ACL))
    )
    assert open_ is not None
    assert mine is not None
    assert (encode(open_)[0], encode(mine)[0], encode(driven.tree.image())[0]) == (FORMAT, FORMAT_ACL, FORMAT_ACL)
    driven.ask(DeleteRequest("/mine", -1))
    assert encode(driven.tree.image())[0] == FORMAT
