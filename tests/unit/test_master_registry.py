"""The registry of big payloads, without stores: what it has done when, and what may happen between two steps of it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from roq.errors import LogUnavailable, RoqError, ShardClosed, TemporaryError
from roq.log.replicated.stores import StaticDirectory
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.store import BlobView
from roq.wire.task import TaskToPut
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.fold import Fold
from roq.workqueue.master import closed
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.registry import (
    PENDING_MAX,
    Asked,
    AskStores,
    BlobRegistry,
    Confirm,
    DeleteBlobs,
    Event,
    Instruction,
    ListHeld,
    MakeCopies,
    Performed,
    RegistryPace,
    Verify,
    Warn,
    WatchDue,
)
from roq.workqueue.master.service import MasterService
from roq.workqueue.records import BlobRef, Purge

SIZE, CRC = 100_000, 7
PACE = RegistryPace(missed_beats=1, copies_at_once=2)
OLD = PACE.orphan_seconds + 1


class Rig:
    """A registry, stores that are sets of names, and instructions that nobody has done yet."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stores: dict[str, set[str]] = {host: set() for host in "abcd"}
        self.directory = StaticDirectory({host: f"tcp://{host}" for host in self.stores})
        self.service = MasterService(Fold(), Recent(), 1, 65536, lambda hosts: ())
        self.counters = Counters()
        self.registry = BlobRegistry(
            WorkQueueSpec("log", 3, 2), self.directory, self.service, self.counters, PACE, "t", self.now
        )
        self.due: list[Instruction] = []
        self.answers: dict[int, wire.Reply | RoqError] = {}
        self.warned: list[str] = []
        self._ids = 0

    def happens(self, event: Event) -> list[Instruction]:
        """What is to be done because of this."""
        out = self.registry.handle(event, self.now, round(self.now * 1000))
        self.registry.check()
        self.warned += [one.text for one in out if isinstance(one, Warn)]
        todo: list[Instruction] = [one for one in out if not isinstance(one, Warn)]
        self.due += todo
        batches = self.service.cut()
        while batches:
            batch = batches.popleft()
            self.service.waiting.durable(batch)
            self.answers |= {id: body for _, id, body in batch.answers}
            self.due += [self.registry.deletion(blob.blob, blob.holders) for blob in batch.dropped]
        return todo

    def do(self, one: Instruction) -> list[Instruction]:
        """As living stores do it; what is to be done next."""
        self.due.remove(one)
        result: object = None
        match one:
            case Verify(blob, host):
                result = (SIZE, CRC) if blob in self.stores[host] else (0, 0)
            case MakeCopies(copy, _):
                good = any(copy.holding.name in self.stores[source] for source in copy.sources)
                result = tuple(host for host in copy.targets if good and host in self.directory.alive)
                for host in result:
                    self.stores[host].add(copy.holding.name)
            case ListHeld(host):
                result = [BlobView(blob, SIZE, OLD) for blob in sorted(self.stores[host])]
            case DeleteBlobs(blobs, hosts):
                for host in hosts:
                    self.stores[host] -= set(blobs)
            case AskStores(hosts):
                result = {host: ("disk", "life") if host in self.directory.alive else None for host in hosts}
        return self.happens(Performed(one, result))

    def settle(self, *but: type) -> None:
        """Do all that is due, except these."""
        while todo := [one for one in self.due if not isinstance(one, but)]:
            self.do(todo[0])

    def ask(self, request: wire.Reserve | wire.PayloadStored) -> wire.Reply | RoqError | None:
        self._ids += 1
        self.happens(Asked(b"peer", self._ids, request))
        return self.answers.get(self._ids)

    def reserve(self, sequence: int) -> str:
        reserved = self.ask(wire.Reserve(7, sequence, SIZE, CRC, []))
        assert isinstance(reserved, wire.Reserved)
        self.stores[reserved.store.host].add(reserved.blob)
        return reserved.blob

    def put(self, sequence: int = 1, *but: type) -> BlobRef:
        self.ask(wire.PayloadStored(7, sequence, self.reserve(sequence), TaskToPut(b"")))
        self.settle(*but)
        assert self.answers[self._ids] == wire.TasksAdded([])
        return self.ref(sequence)

    def ref(self, sequence: int = 1) -> BlobRef:
        payload = self.service.fold.blobs[7, sequence].payload
        assert isinstance(payload, BlobRef)
        return payload

    def refs(self) -> list[BlobRef]:
        return [task.payload for task in self.service.fold.blobs.values() if isinstance(task.payload, BlobRef)]

    def watch(self) -> None:
        self.now += PACE.heartbeat_seconds
        self.happens(WatchDue())

    def later(self) -> None:
        """So much that no copy is young, and an inventory is due."""
        self.now += OLD
        self.watch()

    def named_is_there(self) -> None:
        for ref in self.refs():
            assert all(ref.blob in self.stores[host] for host in ref.holders if host in self.directory.alive)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.registry.check()
    made.service.fold.check()


def test_an_upload_that_is_begun_again_takes_no_further_room(rig: Rig) -> None:
    """Stores that refuse for a while: what broke must not keep others out later."""
    for _ in range(2 * PENDING_MAX):
        last = rig.reserve(1)
    for sequence in range(2, PENDING_MAX + 1):
        rig.reserve(sequence)
    assert isinstance(rig.ask(wire.Reserve(7, PENDING_MAX + 1, SIZE, CRC, [])), TemporaryError)
    rig.ask(wire.PayloadStored(7, 1, last, TaskToPut(b"")))
    rig.settle()
    assert rig.answers[rig._ids] == wire.TasksAdded([])


def test_a_put_with_too_few_stores_fails_and_may_be_repeated(rig: Rig) -> None:
    request = wire.PayloadStored(7, 1, rig.reserve(1), TaskToPut(b""))
    rig.directory.alive.clear()
    rig.ask(request)
    rig.settle()
    assert isinstance(rig.answers[2], LogUnavailable)
    rig.directory.alive |= rig.stores.keys()
    rig.ask(request)
    rig.settle()
    assert rig.answers[3] == wire.TasksAdded([])
    assert len(rig.ref().holders) == 3


def test_who_asks_twice_is_answered_twice_with_one_copying(rig: Rig) -> None:
    request = wire.PayloadStored(7, 1, rig.reserve(1), TaskToPut(b""))
    rig.ask(request)
    rig.ask(request)
    assert len(rig.due) == 1
    rig.settle()
    assert rig.answers[2] == rig.answers[3] == wire.TasksAdded([])


@pytest.mark.parametrize("when", [Confirm, DeleteBlobs])
def test_a_copy_made_while_orphans_are_removed_is_not_removed(rig: Rig, when: type) -> None:
    ref = rig.put()
    (spare,) = rig.stores.keys() - set(ref.holders)
    rig.stores[spare].add(ref.blob)  # as on a store that came back
    rig.later()
    rig.settle(Confirm)
    confirm = next(one for one in rig.due if isinstance(one, Confirm) and one.host == spare)
    orphans = rig.do(confirm) if when is DeleteBlobs else []
    rig.directory.alive.discard(ref.holders[0])
    rig.watch()
    rig.settle(Confirm, DeleteBlobs)  # a copy is wanted now, and that host is the only one left
    for one in [one for one in rig.due if one == confirm or one in orphans]:
        rig.do(one)
    rig.settle()
    rig.named_is_there()
    if when is Confirm:
        assert spare in rig.ref().holders
    else:
        rig.watch()
        rig.watch()
        rig.settle()
        assert spare in rig.ref().holders, "once it is deleted it may be copied there again"
        rig.named_is_there()


def test_what_is_put_during_an_inventory_is_not_taken_for_lost(rig: Rig) -> None:
    rig.put()
    rig.later()
    held: dict[Instruction, list[BlobView]] = {
        one: [BlobView(blob, SIZE, OLD) for blob in rig.stores[one.host]] for one in rig.due if isinstance(one, ListHeld)
    }
    assert held
    rig.settle(ListHeld)
    for sequence in (2, 3, 4):
        rig.put(sequence, ListHeld)
    for one, found in held.items():
        if one in rig.due:
            rig.due.remove(one)
            rig.happens(Performed(one, found))
    assert rig.counters["copies_lost"] == 0


def test_a_copy_that_a_living_store_lost_is_made_again(rig: Rig) -> None:
    ref = rig.put()
    rig.stores[ref.holders[0]].clear()
    rig.later()
    rig.settle()
    assert rig.counters["copies_lost"] == 1
    rig.watch()
    rig.settle()
    assert len(rig.ref().holders) == 3
    rig.named_is_there()
    assert any("lacks 1 payloads" in text for text in rig.warned)


def test_no_more_are_restored_at_once_than_may_be(rig: Rig) -> None:
    for sequence in range(1, 8):
        rig.put(sequence)
    rig.directory.alive.discard("a")
    rig.watch()
    rig.settle(MakeCopies)
    assert sum(isinstance(one, MakeCopies) for one in rig.due) == PACE.copies_at_once
    rig.settle()
    assert all("a" not in rig.ref(sequence).holders for sequence in range(1, 8))
    rig.named_is_there()


@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_nothing_that_is_named_is_deleted(seed: int) -> None:
    """Puts, purges, stores that go and come back with what they had, losses; then all is quiet: every payload has its copies
    and nothing else is kept."""
    random, rig, sequence = Random(seed), Rig(), 0
    for _ in range(120):
        rig.now += random.random()
        match random.randrange(9):
            case 0 if len(rig.service.fold.blobs) < 6 and rig.registry.health.live():
                sequence += 1
                rig.ask(wire.PayloadStored(7, sequence, rig.reserve(sequence), TaskToPut(b"")))
            case 1:
                rig.directory.alive ^= {random.choice("abcd")} if len(rig.directory.alive) > 2 else set("abcd")
                rig.directory.alive |= set("ab"[: 2 - len(rig.directory.alive)])
            case 2 if random.random() < 0.2:
                rig.service.apply(Purge(round(rig.now * 1000)))
            case 3:
                rig.later()
            case 4:
                rig.watch()
            case _ if rig.due:
                rig.do(random.choice(rig.due))
        rig.named_is_there()
    rig.directory.alive |= set("abcd")
    for _ in range(4):
        rig.later()
        rig.settle()
    rig.named_is_there()
    wanted: dict[str, set[str]] = {host: set() for host in rig.stores}
    for ref in rig.refs():
        assert len(ref.holders) == 3
        for host in ref.holders:
            wanted[host].add(ref.blob)
    assert rig.stores == wanted


def test_dead_stores_are_asked_again_also_when_no_payload_is_left(rig: Rig) -> None:
    rig.put()
    rig.directory.alive.clear()
    rig.watch()
    rig.settle()
    rig.service.apply(Purge(round(rig.now * 1000)))
    assert isinstance(rig.ask(wire.Reserve(7, 2, SIZE, CRC, [])), LogUnavailable)
    rig.directory.alive |= rig.stores.keys()
    rig.watch()
    rig.settle()
    assert rig.put(2)


def test_a_store_that_begins_another_life_while_it_is_listed_is_listed_once_more(rig: Rig) -> None:
    rig.put()
    rig.watch()
    rig.settle()
    rig.later()
    listing = next(one for one in rig.due if isinstance(one, ListHeld))
    ask = next(one for one in rig.due if isinstance(one, AskStores))
    rig.due.remove(ask)
    rig.happens(Performed(ask, dict.fromkeys(ask.hosts, ("another disk", "life"))))
    assert ListHeld(listing.host) in rig.do(listing)


def test_a_payload_that_comes_when_its_shard_has_closed_is_no_second_task_of_its_key(rig: Rig) -> None:
    """Whoever puts the same key elsewhere has asked this shard, and was told that the key stands for nothing."""

    def stored(sequence: int, key: str) -> wire.PayloadStored:
        return wire.PayloadStored(7, sequence, rig.reserve(sequence), TaskToPut(b"", dedup_key=key))

    def refusal(request: wire.Reserve | wire.PayloadStored) -> RoqError | None:
        return closed.refusal(rig.service.fold, request, rig.registry.stores(request.producer, request.sequence))

    late, keyless, early = stored(1, "late"), stored(2, ""), stored(3, "early")
    rig.ask(early)
    rig.service.closed = True
    assert isinstance(refusal(late), ShardClosed)
    assert not rig.registry.stores_keys(["late", "", "other"])
    assert refusal(keyless) is refusal(early) is None
    assert rig.registry.stores_keys(["late", "early"]), "asked for the key, it has no answer yet"
    rig.settle()
    assert rig.ref(3).blob == early.blob
    assert not rig.registry.stores_keys(["early"]), "it is in the fold, which says so"
    assert refusal(early) is None, "a repeat is answered as the first one was"
    assert isinstance(refusal(wire.Reserve(7, 4, SIZE, CRC, [])), ShardClosed)
