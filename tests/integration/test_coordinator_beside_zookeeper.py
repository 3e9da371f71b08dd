"""Any run of requests through kazoo has the same results, errors and watch events at the coordinator and at a real ZooKeeper.

Numbers of transactions and sessions differ; that they correspond, one to one and in order, is compared instead. Paths kazoo
would mend on its own, sessions that expire and setWatches: test_coordinator_conformance.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kazoo.exceptions import KazooException, NoAuthError, NoNodeError  # type: ignore[import-untyped]
from kazoo.protocol.states import EventType, ZnodeStat  # type: ignore[import-untyped]
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, make_digest_acl  # type: ignore[import-untyped]

from tests.harness.direct_kazoo import close, connected

CLIENTS = 2
EXAMPLES, STEPS = 50, 30
_numbers = itertools.count()

# Few, so that requests meet: mostly nodes that are there, their parents and their children.
PATHS = st.sampled_from(["a", "a", "a", "a/b", "a/b", "b", "a/b/c", "a/s-0000000001"])
MULTI_PATHS = st.sampled_from(["a", "a/b", "a/c"])
CLIENT = st.integers(0, CLIENTS - 1)
DATA = st.sampled_from([None, b"", b"x", b"longer"])
VERSIONS = st.sampled_from([-1, -1, 0, 0, 1])
FLAGS = st.sampled_from([(False, False), (False, False), (False, False), (True, False), (False, True), (True, True)])
READ, WRITE, CREATE, DELETE = 1, 2, 4, 8
CLEANER = make_digest_acl("cleaner", "may do all", all=True)
ACLS = st.sampled_from(
    [
        OPEN_ACL_UNSAFE,
        OPEN_ACL_UNSAFE,
        OPEN_ACL_UNSAFE,
        [CLEANER, ACL(31, Id("auth", "")), ACL(READ, Id("world", "anyone"))],
        [CLEANER, make_digest_acl("me", "secret", all=True), ACL(WRITE | CREATE, Id("world", "anyone"))],
        [CLEANER, make_digest_acl("you", "other", all=True), ACL(READ | DELETE, Id("world", "anyone"))],
        [CLEANER, ACL(30, Id("world", "anyone"))],
        [ACL(31, Id("auth", "")), *OPEN_ACL_UNSAFE, *OPEN_ACL_UNSAFE],
        [CLEANER, ACL(31, Id("digest", "me"))],
        [],
    ]
)
SHOWN = st.sampled_from(["me:secret", "me:wrong", "you:other", "nobody"])
OPS = st.one_of(
    st.tuples(st.just("create"), MULTI_PATHS, DATA, FLAGS),
    st.tuples(st.just("delete"), MULTI_PATHS, VERSIONS),
    st.tuples(st.just("set"), MULTI_PATHS, DATA, VERSIONS),
    st.tuples(st.just("check"), MULTI_PATHS, VERSIONS),
)


class Side:
    """One server with its clients."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.clients: list[Any] = [connected(address) for _ in range(CLIENTS)]
        self.sessions: dict[int, int] = {}  # session id -> its number
        self.events: list[tuple[int, str, str]] = []
        self.cleaner = connected(address, auth_data=[("digest", "cleaner:may do all")])
        self.base = ""
        self.known: set[int] = set()  # clients that have shown an identity
        for client in self.clients:
            self.sessions[client.client_id[0]] = len(self.sessions)

    def begin(self, base: str) -> None:
        for number in self.known:  # a connection does not forget who it is
            self.reopen(number)
        self.known.clear()
        self.base = base
        for path in (base, f"{base}/a", f"{base}/a/b"):
            self.clients[0].create(path)
        self.events.clear()

    def clear(self) -> None:
        self.cleaner.delete(self.base, recursive=True)

    def reopen(self, number: int) -> None:
        close(self.clients[number])
        self.clients[number] = connected(self.address)
        self.sessions[self.clients[number].client_id[0]] = len(self.sessions)

    def watcher(self, number: int) -> Callable[[Any], None]:
        def told(event: Any) -> None:
            if event.type != EventType.NONE:  # of the closed client itself, some time later
                self.events.append((number, event.type, event.path))

        return told

    def fence(self) -> list[tuple[int, str, str]]:
        """What watches have told since the last call."""
        for client in self.clients:
            client.exists("/")
        told, self.events = self.events, []
        return told

    def do(self, act: Callable[[Any, str], Any], number: int) -> Any:
        """Its result, or the error it raised."""
        try:
            return act(self.clients[number], self.base)
        except KazooException as error:
            return error


class Correspondence:
    """Which transaction of one side is which of the other."""

    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}

    def same(self, one: int, other: int) -> bool:
        return self.pairs.setdefault(one, other) == other

    def check(self) -> None:
        pairs = sorted(self.pairs.items())
        assert [other for _, other in pairs] == sorted(set(self.pairs.values())), pairs


class Beside(RuleBasedStateMachine):
    """Each rule does the same at both."""

    sides: tuple[Side, Side]

    def __init__(self) -> None:
        super().__init__()
        self.zxids = Correspondence()
        base = f"/beside-{next(_numbers)}"
        for side in self.sides:
            side.begin(base)

    def both(self, act: Callable[[Side], Any]) -> None:
        ours, theirs = (act(side) for side in self.sides)
        self.compare(ours, theirs)
        ours, theirs = (sorted(side.fence()) for side in self.sides)
        assert ours == theirs

    def compare(self, ours: Any, theirs: Any) -> None:
        if isinstance(ours, ZnodeStat) and isinstance(theirs, ZnodeStat):
            self.compare_stats(ours, theirs)
        elif isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
            assert len(ours) == len(theirs), (ours, theirs)
            for one, other in zip(ours, theirs, strict=True):
                self.compare(one, other)
        elif isinstance(ours, Exception) or isinstance(theirs, Exception):
            assert type(ours) is type(theirs), (ours, theirs)
        else:
            assert ours == theirs

    def compare_stats(self, ours: ZnodeStat, theirs: ZnodeStat) -> None:
        for name in ("czxid", "mzxid", "pzxid"):
            assert self.zxids.same(getattr(ours, name), getattr(theirs, name)), (name, ours, theirs)
        for name in ("version", "cversion", "aversion", "dataLength", "numChildren"):
            assert getattr(ours, name) == getattr(theirs, name), (name, ours, theirs)
        owners = [side.sessions.get(stat.ephemeralOwner) for side, stat in zip(self.sides, (ours, theirs), strict=True)]
        assert owners[0] == owners[1]
        assert (ours.ctime < ours.mtime) <= (theirs.mzxid > theirs.czxid)

    @rule(client=CLIENT, path=PATHS, data=DATA, flags=FLAGS, with_stat=st.booleans())
    def create(self, client: int, path: str, data: bytes | None, flags: tuple[bool, bool], with_stat: bool) -> None:
        def act(kazoo: Any, base: str) -> Any:
            place = path.rstrip("0123456789") if flags[1] else path
            return kazoo.create_async(
                f"{base}/{place}", data, ephemeral=flags[0], sequence=flags[1], include_data=with_stat
            ).get()

        self.both(lambda side: side.do(act, client))

    @rule(client=CLIENT, path=PATHS, version=VERSIONS)
    def delete(self, client: int, path: str, version: int) -> None:
        self.both(lambda side: side.do(lambda kazoo, base: kazoo.delete_async(f"{base}/{path}", version).get(), client))

    @rule(client=CLIENT, path=PATHS, data=DATA, version=VERSIONS)
    def set(self, client: int, path: str, data: bytes | None, version: int) -> None:
        self.both(lambda side: side.do(lambda kazoo, base: kazoo.set(f"{base}/{path}", data, version), client))

    @rule(client=CLIENT, shown=SHOWN)
    def show(self, client: int, shown: str) -> None:
        def act(side: Side) -> Any:
            side.known.add(client)
            return side.do(lambda kazoo, base: kazoo.add_auth("digest", shown), client)

        self.both(act)

    @rule(client=CLIENT, path=PATHS, acl=ACLS)
    def create_for(self, client: int, path: str, acl: list[Any]) -> None:
        self.both(lambda side: side.do(lambda kazoo, base: kazoo.create_async(f"{base}/{path}", b"", acl).get(), client))

    @rule(client=CLIENT, path=PATHS, version=VERSIONS, acl=ACLS)
    def set_acl(self, client: int, path: str, version: int, acl: list[Any]) -> None:
        self.both(lambda side: side.do(lambda kazoo, base: kazoo.set_acls(f"{base}/{path}", acl, version), client))

        def act(kazoo: Any, base: str) -> Any:
            found, stat = kazoo.get_acls(f"{base}/{path}")
            return sorted(found), stat  # ZooKeeper has no order of the identities that "auth" stands for

        self.both(lambda side: side.do(act, client))

    @rule(client=CLIENT, path=PATHS, watch=st.booleans())
    def get(self, client: int, path: str, watch: bool) -> None:
        def act(side: Side) -> Any:
            watcher = side.watcher(client) if watch else None
            return side.do(lambda kazoo, base: kazoo.get(f"{base}/{path}", watcher), client)

        self.both(act)

    @rule(client=CLIENT, path=PATHS, watch=st.booleans())
    def exists(self, client: int, path: str, watch: bool) -> None:
        def act(side: Side) -> Any:
            watcher = side.watcher(client) if watch else None
            return side.do(lambda kazoo, base: kazoo.exists(f"{base}/{path}", watcher), client)

        self.both(act)

    @rule(client=CLIENT, path=st.one_of(PATHS, st.just("")), watch=st.booleans(), with_stat=st.booleans())
    def children(self, client: int, path: str, watch: bool, with_stat: bool) -> None:
        def act(side: Side) -> Any:
            watcher = side.watcher(client) if watch else None
            found = side.do(lambda kazoo, base: kazoo.get_children(f"{base}/{path}".rstrip("/"), watcher, with_stat), client)
            if isinstance(found, Exception):
                return found
            return (sorted(found[0]), found[1]) if with_stat else sorted(found)

        self.both(act)

    @rule(client=CLIENT, ops=st.lists(OPS, min_size=1, max_size=3))
    def multi(self, client: int, ops: list[Any]) -> None:
        def act(kazoo: Any, base: str) -> Any:
            transaction = kazoo.transaction()
            for op in ops:
                match op:
                    case ("create", path, data, (ephemeral, sequence)):
                        place = path.rstrip("0123456789") if sequence else path
                        transaction.create(f"{base}/{place}", data or b"", ephemeral=ephemeral, sequence=sequence)
                    case ("delete", path, version):
                        transaction.delete(f"{base}/{path}", version)
                    case ("set", path, data, version):
                        transaction.set_data(f"{base}/{path}", data or b"", version)
                    case ("check", path, version):
                        transaction.check(f"{base}/{path}", version)
            return transaction.commit()

        self.both(lambda side: side.do(act, client))

    @rule(client=CLIENT)
    def sync(self, client: int) -> None:
        self.both(lambda side: side.do(lambda kazoo, base: kazoo.sync(base), client))

    @rule(client=CLIENT)
    def close_session(self, client: int) -> None:
        self.both(lambda side: side.reopen(client))

    @invariant()
    def transactions_correspond(self) -> None:
        self.zxids.check()

    def teardown(self) -> None:
        def everything(side: Side, path: str) -> Any:
            try:
                data, stat = side.clients[0].get(path)
            except (NoAuthError, NoNodeError) as error:
                return error
            return path, data, stat, [everything(side, f"{path}/{name}") for name in sorted(side.clients[0].get_children(path))]

        try:
            self.both(lambda side: everything(side, side.base))
        finally:
            for side in self.sides:
                side.clear()


@pytest.mark.timeout(240)
def test_any_run_of_requests_has_the_same_results(zookeeper: str, coordinator: str) -> None:
    ours, theirs = Side(coordinator), Side(zookeeper)

    class Here(Beside):
        sides = (ours, theirs)

    try:
        run_state_machine_as_test(Here, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None))
    finally:
        for side in (ours, theirs):
            for client in (*side.clients, side.cleaner):
                close(client)
