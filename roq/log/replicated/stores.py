"""The cluster's stores by host name: where they are, connections to them, blobs, and what they hold.

A directory keeps what it knew when ZooKeeper is away: traffic with stores goes on. Notices go out, answers come back with the
host's name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.session import Session, Watch
from roq.errors import DataLost, FrameError, LogUnavailable, RoqError, StorageFailed, TaskNotFound
from roq.log.replicated.health import Directory
from roq.log.replicated.repair import Comparison, Holding, OpenPart
from roq.runtime.observe import logger
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.wire import store as wire
from roq.wire.assignment import HostReport, from_json
from roq.wire.stores import AWAY, LEAVING, StoreRegistration, parse_registration, store_of

T = TypeVar("T", bound=msgspec.Struct)
REQUEST_SECONDS = 5.0
PART_SECONDS = 15.0  # one part of a blob: the last one waits for the disk
COPY_SECONDS = 60.0
log = logger(__name__)


class StaticDirectory:
    """A fixed directory, for tests and tools. `alive` and `evacuated` may be changed."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self.endpoints = dict(endpoints)
        self.alive = set(endpoints)
        self.evacuated: set[str] = set()

    def endpoint(self, host: str) -> str | None:
        """Where the store is."""
        return self.endpoints.get(host)

    def hosts(self) -> frozenset[str]:
        """What is said to live."""
        return frozenset(self.alive)

    def leaving(self) -> frozenset[str]:
        """What is said to be evacuated."""
        return frozenset(self.evacuated & self.alive)


class StoreDirectory:
    """The cluster's stores. `on_change` is called when the answer of `hosts`, `leaving` or `endpoint` changes."""

    def __init__(self, session: Session, on_change: Callable[[], None] | None = None) -> None:
        self._session, self._on_change = session, on_change
        self._registered: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # hosts that have a state, there or not
        self._serving: frozenset[str] = frozenset()  # hosts whose store is registered
        self._found: dict[str, StoreRegistration] = {}  # as it was last heard of
        self._reports: dict[str, Watch[Node | None]] = {}  # of hosts without a registered store: of 0.1, or away
        self._roots: list[Watch[list[str]]] = []
        self._unseen = {paths.hosts(), paths.host_states(), paths.stores()}
        self._unread: set[str] = set()  # reports
        self._seen = asyncio.Event()

    async def start(self) -> StoreDirectory:
        """Returns itself when everything was read once."""
        for folder, seen in (
            (paths.hosts(), self._registered_now),
            (paths.host_states(), self._states_now),
            (paths.stores(), self._stores_now),
        ):
            self._roots.append(self._session.watch_children(folder, partial(self._folder, folder, seen)))
        while self._unseen or self._unread:
            self._seen.clear()
            await self._seen.wait()
        return self

    def close(self) -> None:
        """Stop watching."""
        for root in self._roots:
            root.close()
        for watch in self._reports.values():
            watch.close()

    def endpoint(self, host: str) -> str | None:
        """Where the host's store serves, also while it is away."""
        found = self._found.get(host)
        return found.endpoint if found is not None else None

    def hosts(self) -> frozenset[str]:
        """Registered hosts whose store runs."""
        return frozenset(host for host in self._registered & self._found.keys() if self._found[host].state is not AWAY)

    def leaving(self) -> frozenset[str]:
        """Those of them that are being evacuated."""
        return frozenset(host for host in self._registered & self._found.keys() if self._found[host].state is LEAVING)

    def registered(self) -> int:
        """How many hosts there are, whether or not their store runs by now."""
        return len(self._registered)

    def _folder(self, folder: str, seen: Callable[[list[str]], None], names: list[str]) -> None:
        self._unseen.discard(folder)
        seen(names)
        if not self._unseen:
            self._look()
        self._changed()

    def _registered_now(self, hosts: list[str]) -> None:
        self._registered = frozenset(hosts)

    def _states_now(self, hosts: list[str]) -> None:
        self._known = frozenset(hosts)

    def _stores_now(self, names: list[str]) -> None:
        found = {one.host: one for one in map(parse_registration, names) if one is not None}
        self._found.update(found)
        self._serving = frozenset(found)

    def _look(self) -> None:
        """At the reports of those that say nothing of their store: a report is as long as all that runs there."""
        for host in self._found.keys() - self._known - self._serving:
            del self._found[host]
        wanted = self._known - self._serving
        for host in sorted(self._reports.keys() - wanted):
            self._reports.pop(host).close()
            self._unread.discard(host)
        for host in sorted(wanted - self._reports.keys()):
            self._unread.add(host)
            self._reports[host] = self._session.watch_data(paths.running(host), partial(self._report, host))

    def _report(self, host: str, node: Node | None) -> None:
        self._unread.discard(host)
        found = None
        if node is not None:
            with contextlib.suppress(FrameError):
                found = store_of(from_json(node.data, HostReport))
        if found is not None:
            self._found[host] = found
        elif host in self._found:
            self._found[host] = msgspec.structs.replace(self._found[host], state=AWAY)
        self._changed()

    def _changed(self) -> None:
        self._seen.set()
        if self._on_change is not None:
            self._on_change()


class Stores:
    """Open connections of one program. on_notice(host, notice): answers to entries sent, may be set anew."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.on_notice: Callable[[str, Any], None] | None = None
        self._clients: dict[str, RpcClient] = {}

    def _client(self, host: str) -> RpcClient:
        endpoint = self.directory.endpoint(host)
        client = self._clients.get(host)
        if client is not None and endpoint in (None, client.endpoint):
            return client
        if endpoint is None:
            raise LogUnavailable(f"the store of host {host} is not known")
        if client is not None:
            client.close()
        client = RpcClient(
            endpoint, wire.Reply, wire.NoticeToWriter, partial(self._noticed, host), on_disconnect=OnDisconnect.FAIL
        )
        self._clients[host] = client
        return client

    def _noticed(self, host: str, notice: Any) -> None:
        if self.on_notice is not None:
            self.on_notice(host, notice)

    def endpoint(self, host: str) -> str:
        """Where the host's store serves. Raises LogUnavailable."""
        endpoint = self.directory.endpoint(host)
        if endpoint is None:
            raise LogUnavailable(f"the store of host {host} is not known")
        return endpoint

    def send(self, host: str, add: wire.Add) -> None:
        """Send entries; what is lost on the way is never answered."""
        try:
            self._client(host).notify(add)
        except LogUnavailable:
            return

    async def request(self, host: str, request: wire.Request, expect: type[T], seconds: float = REQUEST_SECONDS) -> T:
        """One request. Raises what the store raised, LogUnavailable, Unavailable, DeadlineExceeded."""
        return await self._client(host).request(request, expect, seconds)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # --- blobs --------------------------------------------------------------------------------------------------------

    async def put_blob(
        self, hosts: Iterable[str], blob: str, data: bytes | memoryview, enough: int | None = None
    ) -> tuple[str, ...]:
        """Store a blob on all of `hosts`; those where it is durable. Raises the last error if fewer than `enough` (default
        all) have it."""
        hosts = tuple(hosts)
        crc = await asyncio.to_thread(crc32, data) if len(data) > wire.BLOB_PART_BYTES else crc32(data)
        results = await asyncio.gather(*(self._put(host, blob, data, crc) for host in hosts), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        stored = tuple(host for host, result in zip(hosts, results, strict=True) if not isinstance(result, BaseException))
        if errors and (len(stored) < (len(hosts) if enough is None else enough) or not isinstance(errors[-1], RoqError)):
            raise errors[-1]
        return stored

    async def _put(self, host: str, blob: str, data: bytes | memoryview, crc: int) -> None:
        total, offset = len(data), 0
        while offset < total or not offset:
            part = bytes(data[offset : offset + wire.BLOB_PART_BYTES])
            await self.request(host, wire.PutBlob(blob, offset, total, crc, part), wire.StoreDone, PART_SECONDS)
            offset += len(part)
            if not total:
                return

    async def get_blob(self, hosts: Iterable[str], blob: str) -> bytes:
        """The blob from the first host that has it complete. Raises DataLost (every host says that it is damaged or not there),
        LogUnavailable (some do not answer)."""
        errors: dict[str, RoqError] = {}
        for host in hosts:
            try:
                return await self._get(host, blob)
            except RoqError as failed:
                errors[host] = failed
        reasons = "; ".join(f"{host}: {error}" for host, error in errors.items()) or "it has no host"
        if all(isinstance(error, StorageFailed | TaskNotFound) for error in errors.values()):
            raise DataLost(f"{blob} is damaged or missing on every host that should hold it: {reasons}")
        raise LogUnavailable(f"{blob} can't be read now: {reasons}")

    async def _get(self, host: str, blob: str) -> bytes:
        parts: list[bytes] = []
        offset, total, crc = 0, 1, 0
        while offset < total:
            part = await self.request(host, wire.GetBlob(blob, offset, wire.BLOB_PART_BYTES), wire.BlobPart, PART_SECONDS)
            total, crc = part.total, part.crc
            if not part.data:
                break
            parts.append(part.data)
            offset += len(part.data)
        data = b"".join(parts)
        if len(data) != total or crc32(data) != crc:
            raise StorageFailed(f"blob {blob} on host {host} is damaged")
        return data

    async def copy_blob(self, source: str, target: str, blob: str, seconds: float = COPY_SECONDS) -> None:
        """Have `target` fetch the blob from `source`."""
        await self.request(target, wire.CopyBlob(blob, self.endpoint(source)), wire.StoreDone, seconds)

    async def delete_blob(self, hosts: Iterable[str], blob: str) -> tuple[str, ...]:
        """Delete it where possible; the hosts where it is gone for sure."""
        hosts = tuple(hosts)
        results = await asyncio.gather(
            *(self.request(host, wire.DeleteBlob(blob), wire.StoreDone) for host in hosts), return_exceptions=True
        )
        return tuple(host for host, result in zip(hosts, results, strict=True) if not isinstance(result, BaseException))

    # --- what they hold -----------------------------------------------------------------------------------------------

    async def answering(self, hosts: Iterable[str], seconds: float) -> frozenset[str]:
        """Those of `hosts` whose store answers in time."""
        named = sorted(hosts)

        async def ask(host: str) -> bool:
            try:
                await self.request(host, wire.DescribeStore(), wire.StoreView, seconds)
            except RoqError:
                return False
            return True

        answers = await asyncio.gather(*map(ask, named))
        return frozenset(host for host, answered in zip(named, answers, strict=True) if answered)

    async def inventory(self, host: str, prefix: str) -> list[wire.BlobView]:
        """All blobs on the host whose name begins with `prefix`."""
        found: list[wire.BlobView] = []
        while True:
            part = await self.request(host, wire.ListBlobs(prefix, found[-1].blob if found else ""), wire.BlobList)
            found += part.blobs
            if len(part.blobs) < wire.LIST_COUNT_MAX:
                return found

    async def segments(self, host: str, prefix: str) -> list[str]:
        """Names of all segments on the host that begin with `prefix`."""
        return [one.segment for one in await self.segment_views(host, prefix)]

    async def segment_views(self, host: str, prefix: str) -> list[wire.SegmentView]:
        """All segments on the host whose names begin with `prefix`."""
        found: list[wire.SegmentView] = []
        while True:
            request = wire.ListSegments(prefix, found[-1].segment if found else "")
            part = (await self.request(host, request, wire.SegmentList)).segments
            found += part
            if len(part) < wire.LIST_COUNT_MAX:
                return found

    async def compare(self, what: Iterable[Holding], parts: Iterable[OpenPart], live: Iterable[str]) -> Comparison:
        """What stores hold, compared with what the metadata say they should. Asks every live node that is named; who does not
        answer has proved nothing, neither way.

        One question per store, answered from its memory, so it can be asked in every round of repairs. That what is held can be
        read is found out elsewhere (scrub, `wire.Holes`): damage that was found is no longer held. The disk's identity comes
        with the answer: on another disk nothing was verified.
        """
        held: dict[str, list[Holding]] = {}
        opened: dict[str, list[OpenPart]] = {}
        for holding in what:
            for node in holding.nodes:
                held.setdefault(node, []).append(holding)
        for part in parts:
            opened.setdefault(part.node, []).append(part)
        found, alive = Comparison(), set(live)
        found.silent = dict.fromkeys((held.keys() | opened.keys()) - alive, "is away")
        asked = sorted((held.keys() | opened.keys()) & alive)
        await asyncio.gather(*(self._compare(node, held.get(node, []), opened.get(node, []), found) for node in asked))
        return found

    async def _compare(self, node: str, held: list[Holding], opened: list[OpenPart], found: Comparison) -> None:
        lacking: list[tuple[Holding, str]] = []
        parts: list[OpenPart] = []
        disk, most = "", wire.LIST_COUNT_MAX // 2
        try:
            for begin in range(0, max(len(held), len(opened), 1), most):
                some, open_some = held[begin : begin + most], opened[begin : begin + most]
                segments, blobs = [one for one in some if not one.is_blob], [one for one in some if one.is_blob]
                request = wire.Compare(
                    [(one.name, one.first, one.last) for one in segments],
                    [(one.name, one.first, one.last) for one in open_some],
                    [(one.name, one.size) for one in blobs],
                )
                answer = await self.request(node, request, wire.Compared)
                disk = answer.disk
                lacking += [(segments[place], node) for place in answer.segments]
                lacking += [(blobs[place], node) for place in answer.blobs]
                parts += [open_some[place] for place in answer.opened]
        except (RoqError, IndexError) as error:
            found.silent[node] = str(error)
            log.info("host %s did not say what it holds, asking again in the next round: %s", node, error)
            return
        found.lacking.update(lacking)
        found.parts += parts
        found.disks[node] = disk
