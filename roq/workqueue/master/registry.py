"""Where big payloads are, and what is to be done about them (Blizzard). Pure: no IO, no clock; what happened comes in, with the
time, and what is to be done goes out (blobs.py does it, and says what came of it).

    Reserve ─► pending ─► uploaded by the client ─► PayloadStored ─► verified ─► copied to n stores ─► in the log ─► answered
                  │ time-out                             │ master gone
                  └─► deleted                            └─► nobody knows it: an orphan, found by inventory

A blob belongs to a task from the log's Push on until the log says that the task is gone; only then it is deleted. A pending one
is not logged: its name is never used again, so whoever takes over may treat it as an orphan. Stores are asked for a heartbeat
and counted as dead after `missed_beats`; what they held is copied to others, and what they still hold when they come back is
removed. Nothing is deleted for being an orphan before the log has confirmed that we still own it, and while a name is being
deleted on a host it is not copied there.

The inventory of one host, one at a time; what came or went while it was made is neither an orphan nor lost:

    ListHeld ── strangers, old ones ──► Confirm ── still strangers ──► DeleteBlobs ──► what it lost
        └─────── none ──────────────────────┴────── none any more ───────────────► what it lost
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roq.errors import LogUnavailable, RoqError, TaskNotFound, TemporaryError
from roq.log.replicated.health import Directory, StoreHealth, rank
from roq.log.replicated.repair import Copy, Holding, plan
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.store import BlobView
from roq.wire.task import StoreAddress
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.master.service import MasterService, check_stored
from roq.workqueue.records import BlobRef, Push, TaskKey

PENDING_MAX = 1_000
ROUNDS = 3  # of copies, until a put is given back to its client


@dataclass(frozen=True)
class RegistryPace:
    """When what is looked at. Tests take smaller numbers."""

    heartbeat_seconds: float = 3.0
    missed_beats: int = 3
    pending_seconds: float = 60.0  # from the reservation to the end of the upload
    inventory_seconds: float = 60.0
    orphan_seconds: float = 120.0  # a blob nobody knows is left alone for so long: its upload or copy may be under way
    copies_at_once: int = 8  # that make up for lost ones: they are not to slow down the rest
    first_copies_at_once: int = 64  # that somebody waits for
    deletions_at_once: int = 64


class Verify(NamedTuple):
    """Look what the host has under this name: its size and checksum."""

    blob: str
    host: str


class MakeCopies(NamedTuple):
    """Perform it: the targets that have it then. first: somebody waits for it."""

    copy: Copy
    first: bool


class ListHeld(NamedTuple):
    """Look what the host has of ours: BlobViews."""

    host: str


class Confirm(NamedTuple):
    """Wait until all that was applied is durable: what is gone is gone for good then, and we are still the master."""

    host: str


class DeleteBlobs(NamedTuple):
    """Delete these on these hosts; what can't be deleted now is an orphan. orphans: of the one host whose inventory waits."""

    blobs: tuple[str, ...]
    hosts: tuple[str, ...]
    orphans: bool = False


class AskStores(NamedTuple):
    """Ask all of them whether they live: by host, disk and life of the store that answered, None without an answer."""

    hosts: tuple[str, ...]


class Warn(NamedTuple):
    """Log it."""

    text: str


Instruction = Verify | MakeCopies | ListHeld | Confirm | DeleteBlobs | AskStores | Warn


class Performed(NamedTuple):
    """What came of an instruction, as that says, or why it could not be done."""

    instruction: Instruction
    result: Any


class Asked(NamedTuple):
    """A request of a client."""

    peer: bytes
    id: int
    request: wire.Reserve | wire.PayloadStored


class WatchDue(NamedTuple):
    """A heartbeat has passed."""


Event = Performed | Asked | WatchDue


# --- what is under way ----------------------------------------------------------------------------------------------------


@dataclass
class _Pending:
    """An upload under way, or stored and being verified and copied. waiting: who is to be answered, with what was asked."""

    host: str
    size: int
    crc: int
    deadline: float
    number: tuple[int, int]  # producer, sequence
    waiting: list[tuple[bytes, int]] = field(default_factory=list)
    request: wire.PayloadStored | None = None


@dataclass
class _Spread:
    """Copies being made of a blob. holders: who has it now; before: who had it. key: of its task, None while it has none."""

    blob: BlobRef
    before: tuple[str, ...]
    wanted: int
    key: TaskKey | None
    holders: tuple[str, ...]
    tried: set[str]
    rounds: int = 0


@dataclass
class _Inventory:
    """What a host should have had when it was asked; old: what it has, long enough to be a stranger; has: all that it has."""

    before: dict[str, tuple[TaskKey, BlobRef]]
    of_round: bool
    again: bool = False
    old: list[str] = field(default_factory=list)
    has: frozenset[str] = frozenset()
    removing: frozenset[str] = frozenset()


# --- the registry ---------------------------------------------------------------------------------------------------------


class BlobRegistry:
    """All blobs of one term. token: a name that no other term ever has. service: is told what becomes of tasks and requests;
    its fold says which blobs there are."""

    def __init__(
        self,
        spec: WorkQueueSpec,
        directory: Directory,
        service: MasterService,
        counters: Counters,
        pace: RegistryPace,
        token: str,
        now: float,
    ) -> None:
        self.spec, self._directory, self._service, self._counters, self._pace = spec, directory, service, counters, pace
        self.prefix = f"{spec.log}/"
        self._token, self._count = token, 0
        self._now, self._ms = now, 0
        self.health = StoreHealth(directory, lambda: self._now, pace.missed_beats)
        self._pending: dict[str, _Pending] = {}  # none of them is in the log
        self._spreads: dict[str, _Spread] = {}  # by blob; those without a task are pending
        self._short: OrderedDict[TaskKey, None] = OrderedDict()  # tasks whose blobs lack copies and are not being copied
        # (blob, target) -> until when the copy may still turn up there; no blob is copied to where it is being removed
        self._copying: dict[tuple[str, str], float] = {}
        self._inventories: dict[str, _Inventory] = {}  # by host, one each
        self._round: deque[str] = deque()  # hosts that are still to be listed in this round
        self._lives: dict[str, tuple[str, str]] = {}  # host -> (disk, life) of the store that answered last
        self._round_at = now + pace.inventory_seconds
        self._repair_at: float | None = now  # when to look for blobs that lack copies, None: nothing has changed

    def handle(self, event: Event, now: float, ms: int) -> list[Instruction]:
        """What is to be done now. now: monotonic seconds; ms: the time for records."""
        self._now, self._ms = now, ms
        out = self._handle(event)
        if self._repair_at is not None and self._repair_at <= now:
            self._repair_at = None
            out += self._look_for_short()
        return out

    def _handle(self, event: Event) -> list[Instruction]:
        match event:
            case Asked(peer, id, request):
                return self._asked(peer, id, request)
            case WatchDue():
                return self._watch()
            case Performed(Verify(blob, _), result):
                return self._not_added(blob, result) if isinstance(result, RoqError) else self._verified(blob, *result)
            case Performed(MakeCopies(copy, _), result):
                return self._copies_made(copy, () if isinstance(result, RoqError) else result)
            case Performed(ListHeld(host) | Confirm(host), RoqError()):
                return self._inventory_ended(host)
            case Performed(ListHeld(host), held):
                return self._listed(host, held)
            case Performed(Confirm(host), _):
                return self._confirmed(host)
            case Performed(DeleteBlobs(_, (host, *_), True), _):
                return self._removed(host)
            case Performed(AskStores(), lives):
                return self._beats(lives)
        return []

    @property
    def pending(self) -> int:
        """Payloads on their way to becoming tasks."""
        return len(self._pending)

    def stores(self, producer: int, sequence: int) -> bool:
        """Whether the payload of this task is stored, and being verified and copied."""
        return any(one.number == (producer, sequence) and one.waiting for one in self._pending.values())

    def stores_keys(self, keys: Iterable[str]) -> bool:
        """Whether that of a task with one of these dedup keys is."""
        wanted = {*keys}
        requests = (one.request for one in self._pending.values() if one.waiting)
        return any(request is not None and request.task.dedup_key in wanted for request in requests)

    def configure(self, spec: WorkQueueSpec) -> None:
        """The quorums may be others."""
        self.spec = spec
        self._repair_soon()

    # --- put ----------------------------------------------------------------------------------------------------------

    def _asked(self, peer: bytes, id: int, request: wire.Reserve | wire.PayloadStored) -> list[Instruction]:
        try:
            if isinstance(request, wire.PayloadStored):
                return self._stored(peer, id, request)
            self._service.reserved(peer, id, self._reserve(request))
        except RoqError as error:
            self._service.refuse(peer, id, error)
        return []

    def _reserve(self, request: wire.Reserve) -> wire.Reserved:
        self._service.check_big(request.size)
        number = request.producer, request.sequence
        for broken in [blob for blob, one in self._pending.items() if one.number == number and not one.waiting]:
            del self._pending[broken]  # what there is of it is an orphan
        if len(self._pending) >= PENDING_MAX:
            raise TemporaryError("too many payloads are on their way: try again")
        self._count += 1
        blob = f"{self.prefix}{self._token}.{self._count}"
        roomy = self.health.roomy() or self.health.live()
        roomy = self.health.staying(roomy) or roomy
        for host in rank(blob, [host for host in roomy if host not in request.avoid] or roomy):
            endpoint = self._directory.endpoint(host)
            if endpoint is not None:
                self._pending[blob] = _Pending(host, request.size, request.crc, self._now + self._pace.pending_seconds, number)
                return wire.Reserved(blob, StoreAddress(host, endpoint))
        raise LogUnavailable("no store answers")

    def _stored(self, peer: bytes, id: int, request: wire.PayloadStored) -> list[Instruction]:
        check_stored(request)
        pending = self._pending.get(request.blob)
        if pending is None:
            if self._service.waiting.join(peer, id, request):  # asked for before, and on its way to the log
                return []
            raise TaskNotFound("this upload is not known: put the task again")
        pending.waiting.append((peer, id))
        if len(pending.waiting) > 1:
            return []
        pending.request = request
        return [Verify(request.blob, pending.host)]

    def _verified(self, blob: str, size: int, crc: int) -> list[Instruction]:
        pending = self._pending[blob]
        if (size, crc) != (pending.size, pending.crc):
            return self._not_added(blob, TaskNotFound("what was stored is not what was announced: put the task again"))
        holders = (pending.host,)
        ref = BlobRef(blob, size, crc, holders)
        return self._spread(_Spread(ref, holders, self._wanted(len(self.health.roomy())), None, holders, set(holders)))

    def _wanted(self, live: int) -> int:
        """How many copies a new blob has."""
        return max(self.spec.ack_quorum, min(self.spec.write_quorum, live))

    def _not_added(self, blob: str, error: RoqError) -> list[Instruction]:
        """It may be repeated until its deadline."""
        pending = self._pending[blob]
        while pending.waiting:
            self._service.refuse(*pending.waiting.pop(), error)
        return [Warn(f"payload {blob} could not be stored: {error}")]

    def _added(self, spread: _Spread) -> list[Instruction]:
        blob, holders = spread.blob, spread.holders
        wanted = self._wanted(len({*holders, *self.health.roomy()}))  # some turned out to be full
        if len(holders) < wanted:
            error = LogUnavailable(f"{wanted} stores are needed for a payload, {len(holders)} have it")
            return self._not_added(blob.blob, error)
        pending = self._pending.pop(blob.blob)
        asked = pending.request
        assert asked is not None
        task, ref = asked.task, BlobRef(blob.blob, blob.size, blob.crc, holders)
        push = Push(self._ms, asked.producer, asked.sequence, ref, task.priority, task.delay_ms, task.dedup_key)
        self._service.add_big(pending.waiting, push)
        self._counters["blobs_added"] += 1
        return []

    # --- copies -------------------------------------------------------------------------------------------------------

    def _spread(self, spread: _Spread) -> list[Instruction]:
        """The next copies of it, until enough hosts have it. One that can't take it keeps no other from it."""
        blob, holders = spread.blob, spread.holders
        if len(holders) < spread.wanted and spread.rounds < ROUNDS:
            spread.rounds += 1
            removing = {host for host, one in self._inventories.items() if blob.blob in one.removing}
            targets = set(self.health.roomy()) - spread.tried - removing
            staying = set(self.health.staying(targets))
            if spread.key is not None or len(staying) >= spread.wanted - len(holders):
                targets = staying
            holding = Holding(blob.blob, holders, size=blob.size)
            for copy in plan([holding], spread.wanted, targets.union(holders), targets_max=spread.wanted):
                spread.tried.update(copy.targets)
                self._copying.update({(blob.blob, target): float("inf") for target in copy.targets})
                self._spreads[blob.blob] = spread
                return [MakeCopies(copy, spread.key is None)]
        self._spreads.pop(blob.blob, None)
        return self._added(spread) if spread.key is None else self._restored(spread, spread.key)

    def _copies_made(self, copy: Copy, done: tuple[str, ...]) -> list[Instruction]:
        spread = self._spreads[copy.holding.name]
        turns_up = self._now + self._pace.orphan_seconds
        self._copying.update({(copy.holding.name, target): turns_up for target in copy.targets})
        spread.holders += done
        if not done and spread.key is None:
            spread.rounds = ROUNDS  # it is more likely that the first copy is gone than all the others
        return self._spread(spread) + self._restore()

    def _restored(self, spread: _Spread, key: TaskKey) -> list[Instruction]:
        task, blob = self._service.fold.blobs.get(key), spread.blob
        staying = tuple(self.health.staying(spread.holders))
        holders = staying if len(staying) >= min(self.spec.write_quorum, len(blob.holders)) else spread.holders
        if holders != spread.before and task is not None and task.payload == blob:
            self._service.replace(key, blob, holders, self._ms)
            self._counters["blobs_restored"] += 1
        if len(spread.holders) < spread.wanted:
            self._repair_soon(self._pace.heartbeat_seconds)
        return []

    def _repair_soon(self, seconds: float = 0.0) -> None:
        at = self._now + seconds
        self._repair_at = at if self._repair_at is None else min(at, self._repair_at)

    def _look_for_short(self) -> list[Instruction]:
        """Blobs with too few living holders get others."""
        live = frozenset(self.health.live())
        for key, task in self._service.fold.blobs.items():
            if isinstance(task.payload, BlobRef) and task.payload.blob not in self._spreads and self._lacks(task.payload, live):
                self._short[key] = None
        return self._restore()

    def _lacks(self, blob: BlobRef, live: frozenset[str]) -> bool:
        alive = [host for host in blob.holders if host in live]
        staying = len(self.health.staying(alive))
        spare = len(alive) > staying >= self.spec.write_quorum  # those that leave need not be named any more
        return bool(alive) and (spare or len(alive) < self._possible(alive))

    def _possible(self, alive: Iterable[str]) -> int:
        """How many copies there can be of what these hosts have, those on hosts that are being evacuated besides."""
        alive, staying = set(alive), set(self.health.staying({*alive, *self.health.roomy()}))
        wanted = self.spec.write_quorum
        return max(min(wanted, len(alive | staying)), min(wanted, len(staying)) + len(alive - staying))

    def _restore(self) -> list[Instruction]:
        """Begin as many restorations as may be under way, each from what is known when its turn has come."""
        out: list[Instruction] = []
        while self._short and sum(one.key is not None for one in self._spreads.values()) < self._pace.copies_at_once:
            key, _ = self._short.popitem(last=False)
            task, live = self._service.fold.blobs.get(key), frozenset(self.health.live())
            if task is None or not isinstance(blob := task.payload, BlobRef) or not self._lacks(blob, live):
                continue
            alive = tuple(host for host in blob.holders if host in live)
            out += self._spread(_Spread(blob, alive, self._possible(alive), key, alive, set(alive)))
        return out

    # --- lease, delete ------------------------------------------------------------------------------------------------

    def places(self, hosts: tuple[str, ...]) -> tuple[StoreAddress, ...]:
        """Where a client finds a blob, the living first."""
        found = [(self.health.dead(host), host, self._directory.endpoint(host)) for host in hosts]
        return tuple(StoreAddress(host, endpoint) for _, host, endpoint in sorted(found, key=lambda one: one[0]) if endpoint)

    def deletion(self, blob: str, holders: Iterable[str]) -> DeleteBlobs:
        """Its task is gone for good. Dead stores have orphans when they come back."""
        return DeleteBlobs((blob,), tuple(host for host in holders if not self.health.dead(host)))

    # --- stores -------------------------------------------------------------------------------------------------------

    def _watch(self) -> list[Instruction]:
        """Uploads that took too long end. Stores are asked for a heartbeat, unless there is no blob and all of them live."""
        now, out = self._now, list[Instruction]()
        self._copying = {key: until for key, until in self._copying.items() if until > now}
        for blob in [blob for blob, one in self._pending.items() if one.deadline < now and not one.waiting]:
            self._counters["uploads_discarded"] += 1
            out.append(self.deletion(blob, (self._pending.pop(blob).host,)))
        if now >= self._round_at:
            self._round_at = now + self._pace.inventory_seconds
            self._repair_soon()
            if not self._round:
                self._round.extend(self.health.live())
                out += self._next_of_round()
        hosts = self._directory.hosts()
        if self._service.fold.blobs or self._pending or hosts.difference(self.health.live()):
            if self.health.changed():
                self._repair_soon()
            holders = {host for _, blob in self._refs() for host in blob.holders}
            out.append(AskStores(tuple(sorted(hosts | holders))))
        return out

    def _refs(self) -> list[tuple[TaskKey, BlobRef]]:
        tasks = self._service.fold.blobs.items()
        return [(key, task.payload) for key, task in tasks if isinstance(task.payload, BlobRef)]

    def _beats(self, lives: Mapping[str, tuple[str, str] | None]) -> list[Instruction]:
        out: list[Instruction] = []
        for host, life in lives.items():
            if life is not None and self._lives.get(host) != life:
                self._lives[host] = life  # its disk may be another one, or damaged: what it has is not what it had
                out += self._list(host)
            if self.health.beat(host, life is not None):
                out.append(Warn(f"store of host {host} {'does not answer' if self.health.dead(host) else 'is back'}"))
                self._repair_soon()
        return out

    def held_on(self, host: str) -> int:
        """How many payloads are to be on this host, or on their way there."""
        return len(self._wanted_on(host)) + sum(one.host == host for one in self._pending.values())

    # --- inventories --------------------------------------------------------------------------------------------------

    def _next_of_round(self) -> list[Instruction]:
        return self._list(self._round.popleft(), of_round=True) if self._round else []

    def _list(self, host: str, *, of_round: bool = False) -> list[Instruction]:
        """Look what it has; if that is being done already, once more after that."""
        if (one := self._inventories.get(host)) is not None:
            one.again = True
            return self._next_of_round() if of_round else []
        self._inventories[host] = _Inventory(self._wanted_on(host), of_round)
        return [ListHeld(host)]

    def _wanted_on(self, host: str) -> dict[str, tuple[TaskKey, BlobRef]]:
        """What the host should have, by name."""
        return {blob.blob: (key, blob) for key, blob in self._refs() if host in blob.holders}

    def _orphans(self, host: str, blobs: Iterable[str]) -> tuple[str, ...]:
        wanted = self._wanted_on(host)
        known = self._pending.keys() | wanted.keys()
        return tuple(blob for blob in blobs if blob not in known and self._copying.get((blob, host), self._now) <= self._now)

    def _listed(self, host: str, held: Sequence[BlobView]) -> list[Instruction]:
        one = self._inventories[host]
        one.old = [blob.blob for blob in held if blob.age > self._pace.orphan_seconds]
        one.has = frozenset(blob.blob for blob in held)
        return [Confirm(host)] if self._orphans(host, one.old) else self._compared(host)

    def _confirmed(self, host: str) -> list[Instruction]:
        one = self._inventories[host]
        if not (orphans := self._orphans(host, one.old)):
            return self._compared(host)
        one.removing = frozenset(orphans)
        return [DeleteBlobs(orphans, (host,), orphans=True)]

    def _removed(self, host: str) -> list[Instruction]:
        one = self._inventories[host]
        self._counters["orphans_deleted"] += len(one.removing)
        one.removing = frozenset()
        return self._compared(host)

    def _compared(self, host: str) -> list[Instruction]:
        """What it should have had all the time and has not, a living store has lost, or put aside as damaged."""
        one, out, lost = self._inventories[host], list[Instruction](), 0
        for name in sorted(one.before.keys() - one.has):
            key, blob = one.before[name]
            task = self._service.fold.blobs.get(key)
            if task is None or task.payload != blob:
                continue
            lost += 1
            if others := tuple(holder for holder in blob.holders if holder != host):
                self._service.replace(key, blob, others, self._ms)
                self._repair_soon()
            else:
                out.append(Warn(f"payload {name} was on host {host} only, which lacks it: its task can't be worked on"))
        self._counters["copies_lost"] += lost
        if lost:
            out.append(Warn(f"host {host} lacks {lost} payloads of log {self.spec.log}: they are copied again"))
        return out + self._inventory_ended(host)

    def _inventory_ended(self, host: str) -> list[Instruction]:
        one = self._inventories.pop(host)
        out = self._list(host) if one.again else []
        return out + (self._next_of_round() if one.of_round else [])

    def check(self) -> None:
        """The invariants."""
        logged = {blob.blob for _, blob in self._refs()}
        assert not logged & self._pending.keys(), "a blob is in the log and still pending"
        for name, spread in self._spreads.items():
            assert (spread.key is None) == (name in self._pending), "copies are made for a put that nobody waits for"
            assert set(spread.before) <= set(spread.holders) <= spread.tried, "a holder is not one of those tried"
        restoring = sum(one.key is not None for one in self._spreads.values())
        assert restoring <= self._pace.copies_at_once, "too many restorations at once"
        for host, one in self._inventories.items():
            for blob in one.removing:
                assert self._copying.get((blob, host), 0.0) != float("inf"), "a blob is copied to where it is being deleted"
