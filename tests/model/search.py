"""Breadth-first search of a model (moves.py, shared_log.py): every state once, the shortest way to a breach."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from tests.model.moves import Breach, Model
from tests.model.state import Config

S = TypeVar("S", bound=Hashable)


class Explorable(Protocol[S]):
    """What can be searched."""

    def start(self) -> S:
        """The first state."""

    def steps(self, state: S) -> Iterator[tuple[bool, str, S]]:
        """Whether it must happen, what it is, what comes of it. Breach: a promise is broken."""

    def end(self, state: S) -> None:
        """Nothing must happen any more. Breach: a promise is not kept."""


class Found(NamedTuple):
    """What a search saw. trail: the shortest way to a breach, and the breach itself; empty if there is none."""

    states: int
    ends: int
    depth: int
    trail: tuple[str, ...]


def search(config: Config, states_max: int = 2_000_000) -> Found:
    """All states of the model of moves, nearest first, until one breaks a promise."""
    return explore(Model(config), states_max)


def explore(model: Explorable[S], states_max: int = 2_000_000) -> Found:
    """All states of any model, nearest first, until one breaks a promise."""
    collecting = gc.isenabled()
    gc.disable()  # frozen values have no cycles, and looking for some takes a third of the time
    try:
        return _search(model, states_max)
    finally:
        if collecting:
            gc.enable()


def _search(model: Explorable[S], states_max: int) -> Found:
    start = model.start()
    came_from: dict[S, S | None] = {start: None}
    layer, depth, ends = [start], 0, 0
    while layer:
        following: list[S] = []
        for state in layer:
            moving = False
            try:
                for must, _, next_state in model.steps(state):
                    moving = moving or must
                    if next_state not in came_from:
                        came_from[next_state] = state
                        following.append(next_state)
                if not moving:
                    ends += 1
                    model.end(state)
            except (Breach, AssertionError) as breach:
                return Found(len(came_from), ends, depth, (*_trail(model, came_from, state), f"==> {breach}"))
        assert len(came_from) <= states_max, f"more than {states_max} states"
        layer, depth = following, depth + 1
    return Found(len(came_from), ends, depth, ())


def _trail(model: Explorable[S], came_from: dict[S, S | None], state: S) -> list[str]:
    """The steps from the start to `state`."""
    labels: list[str] = []
    while (before := came_from[state]) is not None:
        labels.append(next(label for _, label, after in model.steps(before) if after == state))
        state = before
    return labels[::-1]
