"""Election with Apache Curator's LeaderLatch layout, so that both agree on who leads.

    <path>/_c_<uuid>-latch-<10 digits>   ephemeral sequential, data = participant id (UTF-8)

Sorted by the text after the last "latch-"; the first leads; each other one watches only its predecessor. Before it claims
leadership, a latch reads its own node and requires that its current session owns it (CURATOR-696). SUSPENDED ends leadership at
once; the same session back and our node still first: it leads again, as a new term. LOST: new node.

Safety never rests on the latch alone. Every write of a GCM is fenced: it carries the version of `gcm/epoch` that its term began
with (RELIABILITY §2.4). A GCM that has been replaced without knowing it can't change anything: ZooKeeper itself refuses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from roq.coordination import paths
from roq.coordination.link import Check, CoordinationError, Node, NoNode, Op, VersionConflict
from roq.coordination.session import Session, SessionState, Watch
from roq.errors import Closed, StaleEpoch, ZooKeeperUnavailable
from roq.runtime.backoff import delays
from roq.runtime.observe import logger

log = logger(__name__)

LOCK_NAME = "latch-"
RETRY_SECONDS_MAX = 1.0


def order(name: str) -> str:
    """What participants are sorted by (Curator: a name without "latch-" counts whole)."""
    return name.rpartition(LOCK_NAME)[2]


async def participants(session: Session, path: str) -> list[str]:
    """Ids of everyone in the election, the leader first."""
    nodes = [await session.get(f"{path}/{name}") for name in sorted(await session.children(path), key=order)]
    return [node.data.decode(errors="replace") for node in nodes if node is not None]


class LeaderLatch:
    """One participant. start(), then wait_leader() and wait_lost() in turns, and stop()."""

    def __init__(self, session: Session, path: str, participant: str) -> None:
        self._session = session
        self._path = path
        self._participant = participant
        self._prefix = ""  # of our node's name, with its uuid; set before the node is made
        self._node = ""  # our node's name, "" while it isn't known
        self._renew = False  # the session of our node is over
        self._term = 0
        self._leading = False
        self._told = asyncio.Event()  # replaced at every change of leadership
        self._stale = asyncio.Event()  # the election must be looked at again
        self._watch: Watch[Node | None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    @property
    def is_leader(self) -> bool:
        """We lead now, as far as anyone can know without asking ZooKeeper."""
        return self._leading and self._session.state is SessionState.CONNECTED

    @property
    def term(self) -> int:
        """How often this latch has won."""
        return self._term

    @property
    def node(self) -> str:
        """Name of our node in the election, "" while we are not in it."""
        return self._node

    def start(self) -> None:
        """Take part until stop()."""
        if self._task is None:
            self._unsubscribe = self._session.on_state(self._on_state)
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"latch {self._path}")

    async def wait_leader(self) -> int:
        """Wait until we lead; returns the term. Raises Closed once the latch is stopped or its session closed."""
        while not self._leading:
            if self._task is None or self._session.state is SessionState.CLOSED:
                raise Closed("this participant left the election")
            await self._told.wait()
        return self._term

    async def wait_lost(self, term: int | None = None) -> None:
        """Wait until the current term (or that one) is over."""
        wanted = self._term if term is None else term
        while self._leading and self._term == wanted:
            await self._told.wait()

    async def stop(self) -> None:
        """Leave the election; the next participant leads at once."""
        task, self._task = self._task, None
        self._unsubscribe()
        self._unwatch()
        self._lose()
        self._tell()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        try:
            await self._leave()
        except (ZooKeeperUnavailable, Closed):
            log.info("election could not be left; its znode ends with the session", extra={"fields": {"node": self._node}})

    # --- what the session tells -----------------------------------------------------------------------------------------

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._stale.set()
            return
        self._lose()
        if state is SessionState.LOST:
            self._renew = True
        if state is SessionState.CLOSED:
            self._tell()

    def _on_predecessor(self, node: Node | None) -> None:
        if node is None:
            self._stale.set()

    def _on_own_node(self, node: Node | None) -> None:
        if node is None or node.owner != self._session.session_id:
            self._lose()
            self._stale.set()

    # --- the election ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        waits = delays(0.05, RETRY_SECONDS_MAX)
        while True:
            self._stale.clear()
            try:
                await self._session.wait_connected()
                await self._look()
            except ZooKeeperUnavailable:
                continue  # wait_connected waits
            except Closed:
                return
            except CoordinationError as error:
                log.warning(
                    "election is unreadable: trying again", extra={"fields": {"path": self._path, "reason": str(error)}}
                )
                await asyncio.sleep(next(waits))  # a node vanished under our hands, or ZooKeeper refuses: don't spin
                continue
            await self._stale.wait()

    async def _look(self) -> None:
        """Where are we in the line?"""
        if self._renew:
            await self._leave()
            self._renew = False
        if not self._node:
            await self._enter()
        names = sorted(await self._session.children(self._path), key=order)
        if self._node not in names:
            self._forget()
            return
        place = names.index(self._node)
        if place > 0:
            self._lose()
            self._observe(names[place - 1], self._on_predecessor)
            return
        own = await self._session.get(f"{self._path}/{self._node}")
        if own is None or own.owner != self._session.session_id:
            await self._leave()  # left behind by another session: it must not make us leader
            self._stale.set()
        elif self._session.state is SessionState.CONNECTED and not self._renew:
            self._observe(self._node, self._on_own_node)
            self._gain()

    async def _enter(self) -> None:
        """Make our node, or find it: an earlier try may have worked although the answer was lost."""
        if self._prefix and await self._adopt():
            return
        self._prefix = f"_c_{uuid.uuid4()}-{LOCK_NAME}"
        prefix = f"{self._path}/{self._prefix}"
        data = self._participant.encode()
        try:
            path = await self._session.create_ephemeral_sequential(prefix, data)
        except NoNode:  # at the first start; Curator's container nodes also vanish when they are empty
            await self._session.ensure_path(self._path)
            path = await self._session.create_ephemeral_sequential(prefix, data)
        self._node = path.rpartition("/")[2]

    async def _adopt(self) -> bool:
        for name in await self._session.children(self._path):
            if name.startswith(self._prefix):
                self._node = name
                node = await self._session.get(f"{self._path}/{name}")
                if node is not None and node.owner == self._session.session_id:
                    return True
                await self._leave()
                return False
        return False

    async def _leave(self) -> None:
        if self._prefix and not self._node:
            found = [name for name in await self._session.children(self._path) if name.startswith(self._prefix)]
            self._node = found[0] if found else ""
        if self._node:
            try:
                await self._session.delete(f"{self._path}/{self._node}")
            except NoNode:
                log.debug("our node of the election is gone already")
        self._node = self._prefix = ""

    def _forget(self) -> None:
        """Somebody removed our node."""
        self._node = self._prefix = ""
        self._lose()
        self._stale.set()

    def _observe(self, name: str, callback: Callable[[Node | None], None]) -> None:
        self._unwatch()
        self._watch = self._session.watch_data(f"{self._path}/{name}", callback)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _gain(self) -> None:
        if not self._leading:
            self._leading = True
            self._term += 1
            log.info("election is won", extra={"fields": {"path": self._path, "node": self._node, "term": self._term}})
            self._tell()

    def _lose(self) -> None:
        if self._leading:
            self._leading = False
            log.info("election is lost", extra={"fields": {"path": self._path, "term": self._term}})
            self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, asyncio.Event()
        told.set()


# --- the fence --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fence:
    """One term of a leading GCM. `epoch` goes into every order; `version` of `gcm/epoch` is checked by every write."""

    epoch: int
    version: int


async def take_epoch(session: Session) -> Fence:
    """Begin a new term: bump `gcm/epoch` (made if missing). Only the winner of the latch calls this, before it reads anything.

    Raises VersionConflict if somebody else did so at the same moment, ZooKeeperUnavailable.
    """
    await session.ensure_path(paths.EPOCH)
    node = await session.get(paths.EPOCH)
    if node is None:
        raise NoNode("gcm/epoch vanished", paths.EPOCH)
    version = await session.set(paths.EPOCH, str(node.version + 1).encode(), node.version)
    return Fence(epoch=version, version=version)


async def fenced(session: Session, fence: Fence, *ops: Op) -> None:
    """All of `ops` or none, and only while `fence` is the current leadership term.

    Raises StaleEpoch (step down at once), VersionConflict, NodeExists, NoNode of the other operations, ZooKeeperUnavailable
    (whether it took effect is unknown).
    """
    try:
        await session.multi((Check(paths.EPOCH, fence.version), *ops))
    except (VersionConflict, NoNode) as error:
        if error.path == paths.EPOCH:
            raise StaleEpoch(f"epoch {fence.epoch} is over") from error
        raise
