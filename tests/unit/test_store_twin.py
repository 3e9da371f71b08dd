"""The model's twin of a store says what the real Storage says: random conversations with both, crashes included."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from roq.wire.store import Found, Refusal
from tests.model.replicated_log import Model
from tests.model.replicated_state import SEGMENT, Message, Scenario, Store, World, value
from tests.unit.test_store_storage import Bench, add, power_cut

POSITIONS = st.integers(1, 3)
EPOCHS = st.integers(1, 3)
VERBS = st.one_of(
    st.tuples(st.just("open"), EPOCHS),
    st.tuples(st.just("fence"), EPOCHS),
    st.tuples(st.just("add"), EPOCHS, POSITIONS, st.integers(1, 2)),
    st.tuples(st.just("look"), EPOCHS, POSITIONS),
    st.tuples(st.just("restart")),
    st.tuples(st.just("lose")),
)


class Twin:
    """The model's store "a", asked directly. Epoch 9 stands for nobody: its replies stay in the network."""

    def __init__(self) -> None:
        self.model = Model(Scenario(nodes="a", ack_quorum=1, fenced_means_unknown=False))
        self.world: World = self.model.start()
        self.put(Store(opened=False))

    @property
    def store(self) -> Store:
        return self.world.stores[0]

    def put(self, store: Store) -> None:
        self.world = self.world._replace(stores=(store,), net=frozenset())

    def ask(self, verb: tuple[Any, ...]) -> Any:
        model, world = self.model, self.world

        def kept(world: World, node: str, store: Store, message: Message) -> World:
            return model._put(world, node, store)._replace(net=world.net | {message})

        model._reply = kept  # type: ignore[method-assign]
        match verb:
            case ("open", epoch):
                if epoch < self.store.fenced:
                    return Refusal.FENCED
                self.put(self.store._replace(opened=True, fenced=epoch, fenced_durably=epoch))
                return None
            case ("fence", epoch):
                self.world = model._fence(world, "a", epoch)._replace(net=world.net)
                return None if self.store.fenced == epoch else Refusal.FENCED
            case ("add", epoch, first, count):
                after = model._add(world, "a", epoch, range(first, first + count), 0)
                self.put(after.stores[0])
                if epoch < self.store.fenced:
                    return Refusal.FENCED
                return None if self.store.opened else Refusal.NOT_OPEN
            case ("look", epoch, position):
                if epoch < self.store.fenced:
                    return Refusal.FENCED
                after = model._recover(world, "a", epoch, position)
                self.put(after.stores[0])
                return next(message[4] for message in after.net if message[0] == "recovered")
            case ("lose",):
                self.put(Store(opened=False))
        return None


def real(bench: Bench, verb: tuple[Any, ...]) -> Any:
    match verb:
        case ("open", epoch):
            return bench.ask("open_segment", SEGMENT, epoch)
        case ("fence", epoch):
            return bench.ask("fence", SEGMENT, epoch)
        case ("add", epoch, first, count):
            return bench.ask("add", add(SEGMENT, first, *(value(at) for at in range(first, first + count)), epoch=epoch))
        case ("look", epoch, position):
            refusal = bench.ask("fence", SEGMENT, epoch)
            return refusal if refusal is not None else bench.storage.look(SEGMENT, position)[0]
    return None


@settings(max_examples=300)
@given(st.lists(VERBS, max_size=30), st.randoms(use_true_random=False))
def test_the_twin_answers_as_the_store(verbs: list[tuple[Any, ...]], draw: random.Random) -> None:
    twin, bench = Twin(), Bench()
    for verb in verbs:
        if verb == ("restart",):
            bench = bench.reopened(power_cut(bench.disk, draw))
        elif verb == ("lose",):
            bench = Bench()
        assert real(bench, verb) == twin.ask(verb), verb
        for position in (1, 2, 3, 4):
            known = bench.storage.look(SEGMENT, position)[0]
            held = position in twin.store.held
            assert known == (Found.ENTRY if held else Found.NO_SUCH if twin.store.opened else Found.UNKNOWN)
