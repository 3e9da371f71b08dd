"""A host's registration: Apache Curator's service discovery, one ephemeral node per host at `hcm-list/hcm/<host>`.

The node always belongs to the current session: after a lost session it is made again, and its czxid, the generation, is then
another one. A node of this name that belongs to somebody else is given one session time-out to vanish (it may be our own
dead predecessor's); then it is a HostConflict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import msgspec

from roq.coordination import paths
from roq.coordination.link import CoordinationError, CreateEphemeral, Delete, Node, NodeExists, NoNode, VersionConflict
from roq.coordination.session import Session, Watch
from roq.errors import Closed, FrameError, HostConflict, ZooKeeperUnavailable
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.wire.stores import StoreRegistration, parse_registration

log = logger(__name__)

T = TypeVar("T")

SERVICE_NAME = "hcm"
CONFLICT_MARGIN_SECONDS = 1.0  # ZooKeeper ends sessions at the next tick only


class ServiceInstance(
    msgspec.Struct,
    frozen=True,
    rename={"ssl_port": "sslPort", "registered": "registrationTimeUTC", "service_type": "serviceType", "uri_spec": "uriSpec"},
):
    """Curator's ServiceInstance. registered: milliseconds since 1970. Unknown fields are ignored when read."""

    name: str
    id: str
    address: str | None = None
    port: int | None = None
    ssl_port: int | None = None
    payload: Any = None  # JSON; a msgspec Struct when written
    registered: int = 0
    service_type: str = "DYNAMIC"
    uri_spec: Any = None
    enabled: bool = True  # Curator leaves it out by default

    def payload_as(self, kind: type[T]) -> T:
        """The payload as a Struct; Curator clients may have put it into a string. Raises FrameError."""
        try:
            if isinstance(self.payload, str):
                return msgspec.json.decode(self.payload, type=kind)
            return msgspec.convert(self.payload, kind)
        except msgspec.MsgspecError as error:
            raise FrameError(f"payload of {self.id!r} is no {kind.__name__}: {error}") from None


def parse_instance(data: bytes) -> ServiceInstance:
    """The instance in a znode; raises FrameError."""
    try:
        return msgspec.json.decode(data, type=ServiceInstance)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a Curator ServiceInstance: {error}") from None


def instance_json(instance: ServiceInstance) -> bytes:
    """The bytes of a znode, fields in Curator's order; `enabled` is left out unless false, as Curator does by default."""
    fields = {
        "name": instance.name,
        "id": instance.id,
        "address": instance.address,
        "port": instance.port,
        "sslPort": instance.ssl_port,
        "payload": instance.payload,
        "registrationTimeUTC": instance.registered,
        "serviceType": instance.service_type,
        "uriSpec": instance.uri_spec,
    }
    if not instance.enabled:
        fields["enabled"] = False
    return msgspec.json.encode(fields)


class Registration:
    """Keeps one instance registered. start(), update() whenever its payload changes, stop().

    on_registered(generation): the node was made (again), at the start and after each new session.
    on_conflict: another live host took the name after we had it; nothing more is done then.
    before_joining: awaited while no node is there, before one is made; not when the node of a former session is replaced.
    former_sessions: session ids of this host's earlier lives; their node is replaced without waiting.
    """

    def __init__(
        self,
        session: Session,
        path: str,
        instance: ServiceInstance,
        *,
        on_registered: Callable[[int], None] | None = None,
        on_conflict: Callable[[HostConflict], None] | None = None,
        former_sessions: Collection[int] = (),
        before_joining: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._session = session
        self._path = path
        self._instance = instance
        self._on_registered = on_registered
        self._on_conflict = on_conflict
        self._before_joining = before_joining
        self._own_sessions = set(former_sessions)
        self._generation = 0
        self._stale = asyncio.Event()
        self._lock = asyncio.Lock()  # start, update and the background task take turns
        self._watch: Watch[Node | None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def instance(self) -> ServiceInstance:
        """What is (or will be, once ZooKeeper is back) registered."""
        return self._instance

    @property
    def generation(self) -> int:
        """czxid of our node: one life of this registration. 0 before start()."""
        return self._generation

    async def start(self) -> None:
        """Register; waits for a GCM to make the chroot. Raises HostConflict after about a session time-out,
        ZooKeeperUnavailable."""
        async with self._lock:
            await self._reconcile()
        self._watch = self._session.watch_data(self._path, self._seen)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"registration {self._path}")

    async def update(self, payload: Any) -> None:
        """Register with this payload from now on. ZooKeeperUnavailable: it will be written after the reconnection."""
        self._instance = msgspec.structs.replace(self._instance, payload=payload)
        async with self._lock:
            await self._reconcile()

    async def _reconcile(self) -> None:
        """Make the node ours and current, whatever is there now."""
        while True:
            data = instance_json(self._instance)
            node = await self._session.get(self._path)
            try:
                if node is None:
                    if self._before_joining is not None:
                        await self._before_joining()
                    self._registered(await self._session.create_ephemeral(self._path, data))
                    return
                if node.owner == self._session.session_id:
                    if node.data != data:
                        await self._session.set(self._path, data, node.version)
                    self._registered(node)
                    return
                if node.owner in self._own_sessions:  # in one step: nobody sees the host gone
                    await self._session.multi((Delete(self._path, node.version), CreateEphemeral(self._path, data)))
                else:
                    await self._wait_for_end_of(node)
            except NoNode:
                if node is None:  # a parent is missing: a new cluster
                    await self._session.wait_root()
                    await self._session.ensure_path(self._path.rpartition("/")[0])
            except (NodeExists, VersionConflict):
                continue  # somebody was faster: look again

    async def _wait_for_end_of(self, foreign: Node) -> None:
        """Until the other session's node is gone. Raises HostConflict if it isn't soon, or if it was made again."""
        changed: asyncio.Event = asyncio.Event()
        seen: list[Node | None] = [foreign]

        def look(node: Node | None) -> None:
            seen[0] = node
            if node is None or node.owner != foreign.owner:
                changed.set()

        log.info(
            "name is still registered; waiting for the predecessor's session to expire", extra={"fields": {"path": self._path}}
        )
        watch = self._session.watch_data(self._path, look)
        try:
            if foreign.owner:  # a persistent node never vanishes
                async with asyncio.timeout(self._session.session_seconds + CONFLICT_MARGIN_SECONDS):
                    await changed.wait()
        except TimeoutError:
            log.info("name is registered by another live host", extra={"fields": {"path": self._path}})
        finally:
            watch.close()
        last = seen[0]
        if last is not None and last.owner != self._session.session_id and last.owner not in self._own_sessions:
            raise HostConflict(f"{self._instance.id!r} is registered by session {last.owner & (2**64 - 1):#x}")

    def _registered(self, node: Node) -> None:
        self._own_sessions.add(node.owner)
        if node.czxid != self._generation:
            self._generation = node.czxid
            log.info("registered", extra={"fields": {"path": self._path, "generation": node.czxid}})
            if self._on_registered is not None:
                self._on_registered(node.czxid)

    async def stop(self) -> None:
        """Unregister."""
        if self._watch is not None:
            self._watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            node = await self._session.get(self._path)
            if node is not None and node.owner == self._session.session_id:
                await self._session.delete(self._path, node.version)
        except (ZooKeeperUnavailable, Closed, NoNode, VersionConflict):
            log.info("registration could not be removed; it ends with the session", extra={"fields": {"path": self._path}})

    def _seen(self, node: Node | None) -> None:
        if node is None or node.owner != self._session.session_id or node.data != instance_json(self._instance):
            self._stale.set()

    async def _run(self) -> None:
        waits = delays(0.05, 1.0)
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._session.wait_connected()
                async with self._lock:
                    await self._reconcile()
            except ZooKeeperUnavailable:
                self._stale.set()
            except HostConflict as conflict:
                log.error(
                    "another host is registered under this name",
                    extra={"fields": {"path": self._path, "reason": str(conflict)}},
                )
                if self._on_conflict is not None:
                    self._on_conflict(conflict)
                return
            except Closed:
                return
            except CoordinationError as error:
                log.warning("registration failed: trying again", extra={"fields": {"path": self._path, "reason": str(error)}})
                await asyncio.sleep(next(waits))
                self._stale.set()


async def register_store(session: Session, host: str, store: StoreRegistration | None) -> None:
    """In the folder of all stores, for as long as the session lives, instead of whatever is there of this host: in one step.
    The host must be registered with this session."""
    while True:
        names = await session.children(paths.stores())
        ours = [name for name in names if (found := parse_registration(name)) is not None and found.host == host]
        wanted = [CreateEphemeral(paths.store(store.node_name))] if store is not None else []
        try:
            await session.multi([*(Delete(paths.store(name)) for name in ours), *wanted])
            return
        except (NoNode, NodeExists):  # what was read is older than what is there, or a GCM of 0.1 made the tree
            await session.ensure_path(paths.stores())
