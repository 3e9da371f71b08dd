"""A model of the replicated log over its real machines: Appending, Recovery and the changes of the metadata.

Stores are small twins (tests/unit/test_store_twin.py compares one with the real Storage). The network is a set of messages
that only grows: a message may be late for ever (lost), or come again. ZooKeeper is one versioned value. Stores may crash,
lose their disk or an entry within the scenario's budget; the old writer lives through everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roq.log.replicated import metadata
from roq.log.replicated.appending import Appending
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.recovery import SegmentRecovery
from roq.wire.store import Found, entry_crc
from tests.model.replicated_state import (
    SEGMENT,
    Breach,
    Message,
    Recoverer,
    Scenario,
    Store,
    World,
    Writer,
    freeze_appending,
    freeze_recovery,
    thaw_appending,
    thaw_recovery,
    value,
)


class Model:
    """All steps from a world, and what must hold in each."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.names = scenario.nodes + scenario.spares
        self._reactions: dict[Any, dict[Message, tuple[tuple[Any, ...], frozenset[Message]]]] = {}
        self._heard: dict[Any, tuple[tuple[Any, ...], int]] = {}

    def start(self) -> World:
        scenario = self.scenario
        nodes = tuple(scenario.nodes)
        segment = SegmentMetadata(SEGMENT, 1, SegmentState.OPEN, (Fragment(1, nodes),))
        meta = LogMeta(1, 1, 2, len(nodes), scenario.ack_quorum, 0, (segment,))
        machine = freeze_appending(Appending(SEGMENT, 1, nodes, scenario.ack_quorum, 1))
        left = frozenset(range(1, scenario.entries + 1))
        stores = tuple(
            Store(opened=name in scenario.nodes, held=left if name in scenario.planted else frozenset()) for name in self.names
        )
        budget = (*self._harms(), scenario.changes, scenario.replacements, scenario.images)
        writer = Writer(machine, meta, stopped=bool(scenario.planted))
        return World(meta, stores, writer, (), frozenset(), scenario.planted_acked, frozenset(), budget)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        for message in world.net:
            if (after := self._deliver(world, message)) is not None and after is not world and after != world:
                yield f"deliver {message}", after
        yield from self._writer_steps(world)
        yield from self._recoverer_steps(world)
        yield from self._faults(world)

    # --- the stores ---------------------------------------------------------------------------------------------------

    def _deliver(self, world: World, message: Message) -> World | None:
        match message:
            case ("add", node, epoch, first, count, confirmed):
                return self._add(world, node, epoch, range(first, first + count), confirmed)
            case ("fence", node, epoch):
                return self._fence(world, node, epoch)
            case ("recover", node, epoch, position):
                return self._recover(world, node, epoch, position)
            case ("added" | "refused", *_):
                return self._to_writer(world, message)
        raise AssertionError(message)

    def _put(self, world: World, node: str, store: Store) -> World:
        at = self.names.index(node)
        if store is world.stores[at]:
            return world
        return world._replace(stores=(*world.stores[:at], store, *world.stores[at + 1 :]))

    def _reply(self, world: World, node: str, store: Store, message: Message) -> World:
        """The old writer may get it late or never; who recovers gets it at once: being late, he only waits longer."""
        if message[1] != 1:
            return self._to_recoverer(world, node, store, message)
        world = self._put(world, node, store)
        return world if message in world.net else world._replace(net=world.net | {message})

    def _add(self, world: World, node: str, epoch: int, positions: range, confirmed: int) -> World:
        at = self.names.index(node)
        store = world.stores[at]
        first_entry = epoch == positions[0] == 1 and 0 < at < len(self.scenario.nodes)
        if first_entry and ("added", 1, self.names[at - 1], 1, len(positions)) not in world.net:
            return world  # the nodes are alike: let them get the first entry in the order of their names
        if epoch < store.fenced or (not store.opened and self.scenario.lost_disk_refuses):
            told = epoch == 1 and not self.scenario.fenced_means_unknown  # a writer that never hears it is the worse one
            return world._replace(net=world.net | {("refused", epoch, node, epoch < store.fenced)}) if told else world
        fresh = frozenset(positions) - (store.held - store.rotten)
        if not fresh and confirmed <= store.confirmed and epoch == 1 and ("added", 1, node, *_run(positions)) in world.net:
            return world
        if fresh or confirmed > store.confirmed:
            store = store._replace(
                held=store.held | fresh, rotten=store.rotten - fresh, confirmed=max(store.confirmed, confirmed),
                unsynced=store.unsynced if self.scenario.sync_before_ack else store.unsynced | fresh,
            )  # fmt: skip
        return self._reply(world, node, store, ("added", epoch, node, positions[0], len(positions)))

    def _fenced(self, store: Store, epoch: int) -> Store:
        durable = epoch if self.scenario.fence_is_durable else store.fenced_durably
        if (store.fenced, store.fenced_durably) == (epoch, durable):
            return store
        return store._replace(fenced=epoch, fenced_durably=durable)

    def _fence(self, world: World, node: str, epoch: int) -> World:
        store = world.stores[self.names.index(node)]
        if epoch < store.fenced:
            return world
        return self._reply(world, node, self._fenced(store, epoch), ("fenced", epoch, node, store.confirmed))

    def _recover(self, world: World, node: str, epoch: int, position: int) -> World:
        store = world.stores[self.names.index(node)]
        if epoch < store.fenced:
            return world
        if self.scenario.reads_fence:
            store = self._fenced(store, epoch)
        if position in store.held and position not in store.rotten:
            found = Found.ENTRY
        elif position in store.rotten:
            found = Found.UNKNOWN if self.scenario.rot_is_unknown else Found.NO_SUCH
        else:
            found = Found.NO_SUCH if store.opened or not self.scenario.lost_disk_is_unsure else Found.UNKNOWN
        return self._reply(world, node, store, ("recovered", epoch, node, position, found))

    # --- the old writer -----------------------------------------------------------------------------------------------

    def _writer_steps(self, world: World) -> Iterator[tuple[str, World]]:
        writer, scenario = world.writer, self.scenario
        if writer.stopped:
            return
        machine = thaw_appending(writer.machine, scenario)
        assert machine is not None
        if machine.next <= scenario.entries:
            machine.append(value(machine.next))
            yield "append", self._sent(world, machine)
        elif writer.change is None and world.budget[3]:
            for bad in machine.nodes:
                for spare in sorted(set(self.names) - set(machine.nodes)):
                    if (store := world.stores[self.names.index(spare)]).fenced <= 1:
                        changing = thaw_appending(writer.machine, scenario)
                        assert changing is not None
                        nodes = tuple(spare if node == bad else node for node in changing.nodes)
                        first = changing.begin_change()
                        opened = self._put(world, spare, store._replace(opened=True))
                        after = writer._replace(machine=freeze_appending(changing), change=(first, nodes))
                        yield f"begin to change {bad} to {spare}", self._spend(opened, 3)._replace(writer=after)
        if writer.change is not None:
            yield "change the ensemble", self._change(world, machine, *writer.change)

    def _change(self, world: World, machine: Appending, first: int, nodes: tuple[str, ...]) -> World:
        writer = world.writer
        if self.scenario.compare_and_set and world.meta != writer.meta:
            return world._replace(writer=writer._replace(stopped=True))
        meta = metadata.change_ensemble(writer.meta, SEGMENT, first, nodes)
        machine.finish_change(nodes)
        world = world._replace(meta=meta, writer=writer._replace(meta=meta, change=None))
        return self._told(self._sent(world, machine), machine)

    def _sent(self, world: World, machine: Appending) -> World:
        frames = frames_of(machine)
        return world._replace(writer=world.writer._replace(machine=freeze_appending(machine)), net=world.net | frames)

    def _told(self, world: World, machine: Appending) -> World:
        return world._replace(acked=max(world.acked, machine.acked))

    def _to_writer(self, world: World, message: Message) -> World | None:
        writer = world.writer
        if writer.stopped:
            return None
        if message[0] == "refused":
            machine = thaw_appending(writer.machine, self.scenario)
            if not message[3] or machine is None:
                return None
            failed = frozenset() if self.scenario.fenced_means_unknown else frozenset(range(machine.acked + 1, machine.next))
            return world._replace(writer=writer._replace(stopped=True), failed=failed)
        key = (writer.machine, message)
        if key not in self._heard:
            machine = thaw_appending(writer.machine, self.scenario)
            assert machine is not None
            machine.added(*message[2:])
            machine.check()
            self._heard[key] = freeze_appending(machine), machine.acked
        frozen, acked = self._heard[key]
        if frozen == writer.machine:
            return None
        return world._replace(writer=writer._replace(machine=frozen), acked=max(world.acked, acked))

    # --- those who take over ------------------------------------------------------------------------------------------

    def _recoverer_steps(self, world: World) -> Iterator[tuple[str, World]]:
        if len(world.recoverers) < self.scenario.recoverers and world.meta.segments and not closed(world.meta):
            meta = metadata.take(world.meta, 1)
            one = self._recovery(meta)
            sent = {("fence", node, meta.epoch) for node in one.nodes}
            after = Recoverer(freeze_recovery(one), meta)
            yield (
                f"take over as {meta.epoch}",
                world._replace(meta=meta, recoverers=(*world.recoverers, after), net=world.net | sent),
            )
        for at, recoverer in enumerate(world.recoverers):
            if recoverer.committed:
                continue
            one = thaw_recovery(recoverer.machine, self.scenario)
            if one.done and (world.meta == recoverer.meta or not self.scenario.compare_and_set):
                assert one.end is not None
                meta = metadata.close_last(recoverer.meta, one.end, one.written)
                after = recoverer._replace(meta=meta, committed=True)
                yield f"close by {one.epoch}", self._with(world._replace(meta=meta), at, after)
            elif not one.done and one.writing is not None and world.budget[4]:
                yield from self._replacements(world, at, recoverer)

    def _recovery(self, meta: LogMeta) -> SegmentRecovery:
        one = SegmentRecovery(meta.segments[-1], meta.epoch, self.scenario.ack_quorum)
        if not self.scenario.coverage:
            one.coverage -= 1
        if not self.scenario.start_behind_fragment:
            one.fragment = Fragment(1, one.fragment.nodes)
        return one

    def _replacements(self, world: World, at: int, recoverer: Recoverer) -> Iterator[tuple[str, World]]:
        for bad in recoverer.machine[3][0]:
            one = thaw_recovery(recoverer.machine, self.scenario)
            assert one.writing is not None
            opens = one.spares(self.names)  # all others hold what the log's metadata say they do, or say that they don't
            if not self.scenario.named_stay_as_they_are:
                opens = frozenset(self.names) - frozenset(one.writing.nodes)
            for spare in sorted(opens.union(one.returning)):
                store = world.stores[self.names.index(spare)]
                if store.fenced > one.epoch:
                    continue
                one = thaw_recovery(recoverer.machine, self.scenario)
                assert one.writing is not None
                one.replace(tuple(spare if node == bad else node for node in one.writing.nodes))
                if spare in opens:
                    store = store._replace(opened=True, fenced=one.epoch, fenced_durably=one.epoch)
                after = self._spend(self._put(world, spare, store), 4)
                meta = recoverer.meta
                if not self.scenario.fragments_with_the_end:  # name the spare at once
                    if world.meta != meta:
                        continue
                    last = meta.segments[-1]
                    named = SegmentMetadata(last.id, last.first, last.state, one.written)
                    meta = LogMeta(meta.epoch, 1, 2, meta.write_quorum, meta.ack_quorum, 0, (named,))
                    after = after._replace(meta=meta)
                sent = frames_of(one)
                done = recoverer._replace(machine=freeze_recovery(one), meta=meta)
                yield f"{one.epoch} takes {spare} for {bad}", self._with(after._replace(net=after.net | sent), at, done)

    def _with(self, world: World, at: int, one: Recoverer) -> World:
        return world._replace(recoverers=(*world.recoverers[:at], one, *world.recoverers[at + 1 :]))

    def _to_recoverer(self, world: World, node: str, store: Store, message: Message) -> World:
        """In one step with what became of the store: most of what can come again changes nothing, which is seen at once."""
        epoch, at = message[1], 0
        while world.recoverers[at].machine[1] != epoch:
            at += 1
        recoverer = world.recoverers[at]
        world = self._put(world, node, store)
        if recoverer.committed:
            return world
        reactions = self._reactions.setdefault(recoverer.machine, {})
        if message not in reactions:
            reactions[message] = self._react(recoverer, epoch, message)
        machine, sent = reactions[message]
        if not sent <= world.net:
            world = world._replace(net=world.net | sent)
        if machine == recoverer.machine:
            return world
        return self._with(world, at, recoverer._replace(machine=machine))

    def _react(self, recoverer: Recoverer, epoch: int, message: Message) -> tuple[tuple[Any, ...], frozenset[Message]]:
        one = thaw_recovery(recoverer.machine, self.scenario)
        if not self.scenario.start_behind_fragment:
            one.fragment = self._recovery(recoverer.meta).fragment
        asked = one.position if one.writing is not None else 0
        match message:
            case ("fenced", _, node, confirmed):
                one.node_fenced(node, confirmed)
            case ("recovered", _, node, position, found):
                entry = value(position) if found == Found.ENTRY else b""
                one.answered(node, position, [(found, entry_crc(SEGMENT, position, entry), entry)])
            case ("added", _, node, first, count):
                assert one.writing is not None
                one.writing.added(node, first, count)
        sent: set[Message] = set()
        if one.writing is not None:
            one.writing.check()
            sent |= frames_of(one)
            if one.end is None and one.position != asked:
                sent |= {("recover", node, epoch, one.position) for node in one.nodes}
        return freeze_recovery(one), frozenset(sent)

    # --- faults and promises ------------------------------------------------------------------------------------------

    def _spend(self, world: World, which: int) -> World:
        budget = list(world.budget)
        budget[which] -= 1
        return world._replace(budget=tuple(budget))

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        crashes, losses, rots, _, _, images = world.budget
        for node, store in zip(self.names, world.stores, strict=True):
            if crashes and (store.unsynced or store.fenced != store.fenced_durably):
                back = store._replace(held=store.held - store.unsynced, unsynced=frozenset(), fenced=store.fenced_durably)
                yield f"{node} crashes", self._put(self._spend(world, 0), node, back)
            if losses and store.held | {store.fenced} != {0}:
                yield f"{node} loses its disk", self._put(self._spend(world, 1), node, Store(opened=False))
            if images and store.held | {store.fenced} != {0}:
                sure = node in self.scenario.nodes and not self.scenario.old_image_is_noticed
                yield f"{node} is an old image", self._put(self._spend(world, 5), node, Store(opened=sure))
            if rots:
                for position in sorted(store.held - store.rotten):
                    rotten = store._replace(rotten=store.rotten | {position})
                    yield f"{position} rots on {node}", self._put(self._spend(world, 2), node, rotten)

    def check(self, world: World) -> None:
        """The promises (RELIABILITY 3.4)."""
        world.meta.check()
        segments = world.meta.segments
        least = 1 if self._harmed(world) else self.scenario.ack_quorum
        if segments and not closed(world.meta):
            if self.scenario.count_copies_while_open:
                self._check_copies(world, segments[-1], world.acked, least)
            return
        last = segments[-1].last if segments else 0
        if world.acked > last:
            raise Breach(f"{world.acked} was acknowledged, the log ends at {last}")
        if any(position <= last for position in world.failed):
            raise Breach("an entry that was said to have failed is in the log")
        if segments:
            self._check_copies(world, segments[-1], last, least)
        ends = {one.meta.segments[-1].last if one.meta.segments else 0 for one in world.recoverers if one.committed}
        if len(ends) > 1:
            raise Breach(f"two ends: {ends}")

    def _harms(self) -> tuple[int, ...]:
        return self.scenario.crashes, self.scenario.losses, self.scenario.rots

    def _harmed(self, world: World) -> bool:
        return (*world.budget[:3], world.budget[5]) != (*self._harms(), self.scenario.images)

    def _check_copies(self, world: World, segment: SegmentMetadata, last: int, least: int) -> None:
        for position in range(1, last + 1):
            nodes = segment.fragment_of(position).nodes
            stores = [world.stores[self.names.index(node)] for node in nodes]
            copies = sum(position in store.held - store.rotten for store in stores)
            if copies < least:
                raise Breach(f"{position} is on {copies} of its nodes {nodes}")


def closed(meta: LogMeta) -> bool:
    return not meta.segments or meta.segments[-1].state is SegmentState.CLOSED


def _run(positions: range) -> tuple[int, int]:
    return positions[0], len(positions)


def frames_of(machine: Appending | SegmentRecovery) -> set[Message]:
    return {("add", node, one.epoch, one.first, len(one.entries), one.confirmed) for node, one in machine.frames()}
