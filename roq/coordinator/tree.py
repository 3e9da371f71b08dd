"""The tree of nodes, sessions and watches: requests in, replies, changes and watch events out. Pure; it answers as one
ZooKeeper 3.9 does.

A request is first *prepared* on drafts of the nodes it touches: refused there, it has changed nothing, and a multi sees its own
earlier operations. What comes out is a transaction, which alone changes the tree (`apply`), now and whenever the journal is
read again. Transactions have consecutive numbers (zxid). What is refused takes none, other than in ZooKeeper, which shows in
gaps only.

    reply to whoever asked     Outcome.reply       not before the transaction is durable
    for the journal            Outcome.transaction None if nothing changed
    to watchers                Outcome.firings     before the reply, as ZooKeeper does

Stat.cversion is counted in creates and derived: creates twice, less the children there are. The number of a sequential node is
the count of creates alone. A connection is anybody until it shows who it is; of nodes that it may not read its watches
tell nothing, but for what SetWatches finds changed, as ZooKeeper has it. Not covered: what an ACL permits (acl.py), quotas,
containers, TTLs, lasting watches; when a session is over (sessions.py); bytes (roq/wire/jute.py, changes.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from roq.coordinator.acl import AclList, Identity, Permission, identity, permits, settled, shown
from roq.coordinator.changes import (
    AclSet,
    Change,
    DataReplaced,
    Made,
    NodeImage,
    Removed,
    SessionEnded,
    SessionOpened,
    TreeImage,
    TreeTransaction,
)
from roq.coordinator.sessions import Firing, Watches, WatchKind
from roq.errors import StorageFailed
from roq.wire.zookeeper import (
    OPEN_ACL,
    READ_ACL,
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
    Read,
    Reply,
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
    Write,
)

ANY_VERSION = -1
EPHEMERAL, SEQUENTIAL = 1, 2  # bits of Create.flags
FLAGS_KNOWN, FLAGS_MAX = 3, 6  # above the first: containers and nodes with a time to live
SYSTEM, CONFIG = "/zookeeper", "/zookeeper/config"  # nodes every ZooKeeper has
FIXED = frozenset({"/", SYSTEM, "/zookeeper/quota", CONFIG})  # never deleted
NOBODY = frozenset[Identity]()
IDENTITIES_MAX = 16  # that one connection may show
MANY_BYTES_MAX = 24 * 1024 * 1024  # of one multiRead's reply
NO_ZXID = -1  # of events that no transaction caused
# Control characters, surrogates and private use as ZooKeeper sees them (in UTF-16), and parts that are empty, "." or "..".
_ILLEGAL = re.compile(r"[\0-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]|//|/\.\.?(?:/|\Z)")


class RequestRefused(Exception):
    """ZooKeeper's answer is this error."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class Outcome(NamedTuple):
    """What a request led to. zxid: of the event's cause."""

    reply: Reply
    transaction: TreeTransaction | None = None
    firings: tuple[Firing, ...] | list[Firing] = ()
    zxid: int = NO_ZXID


class TreeSession:
    """One session: its password, its time-out, its ephemeral nodes in the order in which they were made."""

    __slots__ = ("ephemerals", "password", "timeout_ms")

    def __init__(self, password: bytes, timeout_ms: int) -> None:
        self.password, self.timeout_ms = password, timeout_ms
        self.ephemerals: dict[str, None] = {}


class _Draft:
    """What a node would be behind the operations prepared so far."""

    __slots__ = ("acl", "aversion", "children", "creates", "owner", "version")

    def __init__(
        self, owner: int, acl: AclList, version: int = 0, aversion: int = 0, creates: int = 0, children: int = 0
    ) -> None:
        self.owner, self.acl, self.version, self.aversion = owner, acl, version, aversion
        self.creates, self.children = creates, children


class _Node:
    __slots__ = (
        "acl",
        "aversion",
        "children",
        "creates",
        "ctime",
        "czxid",
        "data",
        "mtime",
        "mzxid",
        "owner",
        "pzxid",
        "version",
    )

    def __init__(self, data: bytes | None, owner: int, zxid: int, at: int, acl: AclList = ()) -> None:
        self.data, self.owner = data, owner
        self.acl = acl or OPEN_ACL
        self.czxid = self.mzxid = self.pzxid = zxid
        self.ctime = self.mtime = at
        self.version = self.aversion = self.creates = 0
        self.children: dict[str, None] = {}  # names

    def draft(self) -> _Draft:
        return _Draft(self.owner, self.acl, self.version, self.aversion, self.creates, len(self.children))

    def stat(self) -> Stat:
        children = len(self.children)
        return Stat(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            self.creates * 2 - children,
            self.aversion,
            self.owner,
            len(self.data or b""),
            children,
            self.pzxid,
        )


def parent_of(path: str) -> str:
    """Of "/a/b" it is "/a", of "/a" it is "/"."""
    return path.rpartition("/")[0] or "/"


def check_path(path: str) -> None:
    """Raises Refused unless a node may have this path."""
    if not path.startswith("/") or (path.endswith("/") and path != "/") or _ILLEGAL.search(path):
        raise RequestRefused(Code.BAD_ARGUMENTS)


def _check_version(wanted: int, found: int) -> None:
    if wanted not in (ANY_VERSION, found):
        raise RequestRefused(Code.BAD_VERSION)


def _kept_acl(acl: AclList, who: Set[Identity]) -> AclList:
    kept = settled(acl, who)
    if kept is None:
        raise RequestRefused(Code.INVALID_ACL)
    return kept


def _check_permission(node: _Draft | _Node, who: Set[Identity], wanted: Permission) -> None:
    if not permits(node.acl, who, wanted):
        raise RequestRefused(Code.NO_AUTH)


def _written(acl: AclList) -> AclList:
    """As changes and images have it."""
    return () if acl is OPEN_ACL else acl


class Tree:
    """Everything the coordinator knows. `sessions` by id; `zxid` of the last transaction."""

    def __init__(self, image: TreeImage | None = None) -> None:
        self.zxid = 0  # of no node a higher one
        self.sessions: dict[int, TreeSession] = {}  # their ephemerals are exactly the nodes that have them as owners
        self.watches = Watches()
        self._shown: dict[int, frozenset[Identity]] = {}  # by watcher
        root = _Node(b"", 0, 0, 0)
        self._nodes: dict[str, _Node] = {"/": root}  # FIXED among them; each is its parent's child; no parent has an owner
        if image is None:
            for path in (SYSTEM, "/zookeeper/quota", CONFIG):
                self._insert(path, _Node(b"", 0, 0, 0))
            self._nodes[CONFIG].aversion = -1  # as ZooKeeper has it
            self._nodes[CONFIG].acl = READ_ACL
        else:
            self._load(image)

    def __len__(self) -> int:
        return len(self._nodes)

    # --- requests -----------------------------------------------------------------------------------------------------

    def open_session(self, session: int, password: bytes, timeout_ms: int, at: int) -> TreeTransaction:
        """Begin a session with a new id. at: ms since 1970, here and below."""
        return self._commit((SessionOpened(session, password, timeout_ms),), at)[0]

    def handle(self, session: int, watcher: int, request: Request, at: int) -> Outcome:
        """Answer a request of a session from a connection; that, as `watcher`, gets the watches it leaves."""
        who = self._shown.get(watcher, NOBODY)
        try:
            if session not in self.sessions:
                raise RequestRefused(Code.SESSION_EXPIRED)
            match request:
                case CreateRequest() | DeleteRequest() | SetDataRequest() | SetAcl():
                    return self._write(session, request, at, who)
                case ExistsRequest() | GetData() | GetAcl() | GetChildren() | Sync():
                    return Outcome(self._read(watcher, request, who))
                case Multi(ops):
                    return self._multi(session, ops, at, who)
                case MultiRead(reads):
                    return Outcome(self._read_many(watcher, reads, who))
                case Close():
                    return self.end_session(session, at)
                case SetWatches():
                    return Outcome(EmptyResponse(Type.SET_WATCHES), None, list(self._watch_again(watcher, request)))
                case PingRequest():
                    return Outcome(EmptyResponse(Type.PING))
                case Auth():
                    return Outcome(self._show(watcher, request))
                case Unsupported():
                    raise RequestRefused(Code.UNIMPLEMENTED)
        except RequestRefused as refused:
            return Outcome(ErrorResponse(refused.code))

    def left(self, watcher: int) -> None:
        """The connection is over: what it waited for, and who it was."""
        self.watches.drop(watcher)
        self._shown.pop(watcher, None)

    def _show(self, watcher: int, request: Auth) -> Reply:
        one = identity(request.scheme, request.shown)
        known = self._shown.get(watcher, NOBODY)
        if one is None or len(known) >= IDENTITIES_MAX:
            raise RequestRefused(Code.AUTH_FAILED)
        self._shown[watcher] = known | {one}
        return EmptyResponse(Type.AUTH)

    def end_session(self, session: int, at: int) -> Outcome:
        """The client closed it, or it was not heard of."""
        transaction, _, firings = self._commit((SessionEnded(session),), at)
        return Outcome(EmptyResponse(Type.CLOSE), transaction, firings, transaction.zxid)

    def _write(self, session: int, request: Write, at: int, who: Set[Identity]) -> Outcome:
        change = self._prepare(request, session, {}, who)
        transaction, replies, firings = self._commit((change,), at)
        return Outcome(_as_asked(request, replies[0]), transaction, firings, transaction.zxid)

    def _multi(
        self,
        session: int,
        ops: tuple[CreateRequest | DeleteRequest | SetDataRequest | CheckRequest, ...],
        at: int,
        who: Set[Identity],
    ) -> Outcome:
        drafts: dict[str, _Draft | None] = {}
        changes: list[Change] = []
        for number, op in enumerate(ops):
            try:
                if isinstance(op, CheckRequest):
                    self._check(op, drafts, who)
                else:
                    changes.append(self._prepare(op, session, drafts, who))
            except RequestRefused as refused:
                before, behind = ErrorResponse(Code.OK), ErrorResponse(Code.RUNTIME_INCONSISTENCY)
                guilty = ErrorResponse(refused.code)
                return Outcome(Results((*[before] * number, guilty, *[behind] * (len(ops) - number - 1))))
        if not changes:
            return Outcome(Results(tuple(EmptyResponse(Type.CHECK) for _ in ops)))
        transaction, done, firings = self._commit(tuple(changes), at)
        left = iter(done)
        replies = tuple(EmptyResponse(Type.CHECK) if isinstance(op, CheckRequest) else _as_asked(op, next(left)) for op in ops)
        return Outcome(Results(replies), transaction, firings, transaction.zxid)  # type: ignore[arg-type]

    # --- preparing: order of the refusals as in ZooKeeper ---------------------------------------------------------------

    def _draft(self, path: str, drafts: dict[str, _Draft | None]) -> _Draft:
        """Raises Refused if there is no such node."""
        if path not in drafts:
            node = self._nodes.get(path)
            drafts[path] = node.draft() if node is not None else None
        draft = drafts[path]
        if draft is None:
            raise RequestRefused(Code.NO_NODE)
        return draft

    def _prepare(self, op: Write, session: int, drafts: dict[str, _Draft | None], who: Set[Identity]) -> Change:
        match op:
            case CreateRequest():
                return self._prepare_create(op, session, drafts, who)
            case DeleteRequest():
                return self._prepare_delete(op, drafts, who)
            case SetDataRequest(path, data, version):
                check_path(path)
                node = self._draft(path, drafts)
                _check_permission(node, who, Permission.WRITE)
                _check_version(version, node.version)
                node.version += 1
                return DataReplaced(path, data, node.version)
            case SetAcl(path, acl, version):
                check_path(path)
                kept = _kept_acl(acl, who)
                node = self._draft(path, drafts)
                _check_permission(node, who, Permission.ADMIN)
                _check_version(version, node.aversion)
                node.aversion += 1
                return AclSet(path, node.aversion, _written(kept))

    def _prepare_create(self, op: CreateRequest, session: int, drafts: dict[str, _Draft | None], who: Set[Identity]) -> Change:
        if not 0 <= op.flags <= FLAGS_MAX:
            raise RequestRefused(Code.BAD_ARGUMENTS)
        if op.flags > FLAGS_KNOWN:
            raise RequestRefused(Code.UNIMPLEMENTED)
        path = op.path
        if "/" not in path or "\0" in path:
            raise RequestRefused(Code.BAD_ARGUMENTS)
        acl = _kept_acl(op.acl, who)
        parent = self._draft(parent_of(path), drafts)
        _check_permission(parent, who, Permission.CREATE)
        if op.flags & SEQUENTIAL:
            path = f"{path}{parent.creates:010d}"
        check_path(path)
        if drafts[path] is not None if path in drafts else path in self._nodes:
            raise RequestRefused(Code.NODE_EXISTS)
        if parent.owner:
            raise RequestRefused(Code.NO_CHILDREN_FOR_EPHEMERALS)
        parent.creates += 1
        parent.children += 1
        owner = session if op.flags & EPHEMERAL else 0
        drafts[path] = _Draft(owner, acl)
        return Made(path, op.data, owner, parent.creates, _written(acl))

    def _prepare_delete(self, op: DeleteRequest, drafts: dict[str, _Draft | None], who: Set[Identity]) -> Change:
        if "/" not in op.path or "\0" in op.path or op.path in FIXED:
            raise RequestRefused(Code.BAD_ARGUMENTS)
        parent = self._draft(parent_of(op.path), drafts)
        _check_permission(parent, who, Permission.DELETE)
        node = self._draft(op.path, drafts)
        _check_version(op.version, node.version)
        if node.children:
            raise RequestRefused(Code.NOT_EMPTY)
        parent.children -= 1
        drafts[op.path] = None
        return Removed(op.path)

    def _check(self, op: CheckRequest, drafts: dict[str, _Draft | None], who: Set[Identity]) -> None:
        check_path(op.path)
        node = self._draft(op.path, drafts)
        _check_permission(node, who, Permission.READ)
        _check_version(op.version, node.version)

    # --- changing -----------------------------------------------------------------------------------------------------

    def _commit(self, changes: tuple[Change, ...], at: int) -> tuple[TreeTransaction, list[Reply], list[Firing]]:
        transaction = TreeTransaction(self.zxid + 1, at, changes)
        return transaction, *self.apply(transaction)

    def apply(self, transaction: TreeTransaction) -> tuple[list[Reply], list[Firing]]:
        """Change the tree: now, or again when the journal is read. Raises StorageFailed if it does not follow what is there."""
        if transaction.zxid != self.zxid + 1:
            raise StorageFailed(f"transaction {transaction.zxid:#x} follows {self.zxid:#x}: some are missing between them")
        replies: list[Reply] = []
        firings: list[Firing] = []
        for change in transaction.changes:
            try:
                replies.append(self._apply(change, transaction, firings))
            except KeyError as error:
                raise StorageFailed(f"transaction {transaction.zxid:#x} changes {error} which is not there") from None
        self.zxid = transaction.zxid
        return replies, firings

    def _apply(self, change: Change, transaction: TreeTransaction, firings: list[Firing]) -> Reply:
        zxid, at = transaction.zxid, transaction.at
        match change:
            case Made(path, data, session, creates, acl):
                node = _Node(data, session, zxid, at, acl)
                if session:
                    self.sessions[session].ephemerals[path] = None
                parent = self._insert(path, node)
                parent.creates, parent.pzxid = creates, zxid
                firings += self._heard(self.watches.created(path, parent_of(path)), node, parent)
                return PathStat(path, node.stat())
            case Removed(path):
                owner = self._nodes[path].owner
                if owner:
                    del self.sessions[owner].ephemerals[path]
                self._remove(path, zxid, firings)
                return EmptyResponse(Type.DELETE)
            case DataReplaced(path, data, version):
                node = self._nodes[path]
                node.data, node.version, node.mzxid, node.mtime = data, version, zxid, at
                firings += self._heard(self.watches.changed(path), node, node)
                return StatReply(node.stat())
            case AclSet(path, aversion, acl):
                node = self._nodes[path]
                node.aversion, node.acl = aversion, acl or OPEN_ACL
                return StatReply(node.stat())
            case SessionOpened(session, password, timeout_ms):
                self.sessions[session] = TreeSession(password, timeout_ms)
                return EmptyResponse(Type.PING)
            case SessionEnded(session):
                for path in self.sessions.pop(session).ephemerals:
                    self._remove(path, zxid, firings)
                return EmptyResponse(Type.CLOSE)

    def _insert(self, path: str, node: _Node) -> _Node:
        """Put a node in its place; its parent."""
        parent = self._nodes[parent_of(path)]
        parent.children[path.rpartition("/")[2]] = None
        self._nodes[path] = node
        return parent

    def _remove(self, path: str, zxid: int, firings: list[Firing]) -> None:
        parent_path, _, name = path.rpartition("/")
        parent = self._nodes[parent_path or "/"]
        del parent.children[name]
        parent.pzxid = zxid
        firings += self._heard(self.watches.removed(path, parent_path or "/"), self._nodes.pop(path), parent)

    def _heard(self, firings: list[Firing], node: _Node, parent: _Node) -> list[Firing]:
        """Those of watchers that may read the node that it is about; the others' watches are over, too."""
        if node.acl is OPEN_ACL and parent.acl is OPEN_ACL:
            return firings

        def may(firing: Firing) -> bool:
            watcher, kind, _ = firing
            about = parent if kind is EventType.CHILDREN else node
            return permits(about.acl, self._shown.get(watcher, NOBODY), Permission.READ)

        return [one for one in firings if may(one)]

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, watcher: int, request: Read, who: Set[Identity]) -> Reply:
        if isinstance(request, Sync):
            return PathReply(request.path)
        path = request.path
        node = self._nodes.get(path or "/")
        if isinstance(request, ExistsRequest) and "\0" in path:
            raise RequestRefused(Code.BAD_ARGUMENTS)
        if node is not None:
            _check_permission(node, who, Permission.READ | (Permission.ADMIN if isinstance(request, GetAcl) else 0))
        if isinstance(request, ExistsRequest) and request.watch:  # also on a node that is not there
            self.watches.add(WatchKind.DATA, path, watcher)
        if node is None:
            raise RequestRefused(Code.NO_NODE)
        match request:
            case ExistsRequest():
                return StatReply(node.stat())
            case GetData(_, watch):
                if watch:
                    self.watches.add(WatchKind.DATA, path, watcher)
                return DataReply(node.data, node.stat())
            case GetChildren(_, watch, with_stat):
                if watch:
                    self.watches.add(WatchKind.CHILDREN, path, watcher)
                return NamesReply(tuple(node.children), node.stat() if with_stat else None)
            case GetAcl():
                return AclReply(shown(node.acl, who), node.stat())

    def _read_many(self, watcher: int, reads: Iterable[GetData], who: Set[Identity]) -> Results:
        """A short request may ask for a long reply, so that is bounded."""
        found: list[DataReply | ErrorResponse] = []
        size = 0
        for read in reads:
            try:
                one = self._read(watcher, read, who)
            except RequestRefused as refused:
                found.append(ErrorResponse(refused.code))
                continue
            assert isinstance(one, DataReply)
            size += len(one.data or b"")
            if size > MANY_BYTES_MAX:
                raise RequestRefused(Code.BAD_ARGUMENTS)
            found.append(one)
        return Results(tuple(found))

    def _watch_again(self, watcher: int, request: SetWatches) -> Iterator[Firing]:
        """Tell what happened since, and wait for the rest."""
        for path in request.data:
            node = self._nodes.get(path)
            if node is None:
                yield watcher, EventType.DELETED, path
            elif node.mzxid > request.since:
                yield watcher, EventType.CHANGED, path
            else:
                self.watches.add(WatchKind.DATA, path, watcher)
        for path in request.exist:
            if path in self._nodes:
                yield watcher, EventType.CREATED, path
            else:
                self.watches.add(WatchKind.DATA, path, watcher)
        for path in request.child:
            node = self._nodes.get(path)
            if node is None:
                yield watcher, EventType.DELETED, path
            elif node.pzxid > request.since:
                yield watcher, EventType.CHILDREN, path
            else:
                self.watches.add(WatchKind.CHILDREN, path, watcher)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def image(self) -> TreeImage:
        """Everything but watches, which end with their connections."""
        nodes = [
            NodeImage(
                path,
                node.data,
                node.owner,
                node.version,
                node.aversion,
                node.creates,
                node.czxid,
                node.mzxid,
                node.pzxid,
                node.ctime,
                node.mtime,
                () if path == CONFIG else _written(node.acl),
            )
            for path, node in self._nodes.items()
        ]
        sessions = [SessionOpened(id_, session.password, session.timeout_ms) for id_, session in self.sessions.items()]
        return TreeImage(self.zxid, nodes, sessions)

    def _load(self, image: TreeImage) -> None:
        self.zxid = image.zxid
        self.sessions = {opened.session: TreeSession(opened.password, opened.timeout_ms) for opened in image.sessions}
        for kept in image.nodes:
            node = _Node(kept.data, kept.owner, kept.czxid, kept.ctime, kept.acl)
            node.version, node.aversion, node.creates = kept.version, kept.aversion, kept.creates
            node.mzxid, node.pzxid, node.mtime = kept.mzxid, kept.pzxid, kept.mtime
            if kept.path == CONFIG:
                node.acl = READ_ACL  # always: nobody may change it
            if kept.path == "/":
                self._nodes["/"] = node
                continue
            self._insert(kept.path, node)
            if kept.owner:
                self.sessions[kept.owner].ephemerals[kept.path] = None

    def check(self) -> None:
        """Every invariant; for tests."""
        self.watches.check()
        owned = {path: id_ for id_, session in self.sessions.items() for path in session.ephemerals}
        assert owned == {path: node.owner for path, node in self._nodes.items() if node.owner}
        below: dict[str, set[str]] = {path: set() for path in self._nodes}
        for path, node in self._nodes.items():
            assert max(node.czxid, node.mzxid, node.pzxid) <= self.zxid
            assert node.czxid <= min(node.mzxid, node.pzxid)
            assert node.creates * 2 - len(node.children) >= -len(FIXED)
            if path != "/":
                assert not self._nodes[parent_of(path)].owner
                below[parent_of(path)].add(path.rpartition("/")[2])
        assert below == {path: set(node.children) for path, node in self._nodes.items()}
        assert set(self._nodes) >= FIXED


def _as_asked(op: Write, reply: Reply) -> Reply:
    """A create tells its stat to those who asked for it."""
    if isinstance(op, CreateRequest) and not op.with_stat and isinstance(reply, PathStat):
        return PathReply(reply.path)
    return reply
