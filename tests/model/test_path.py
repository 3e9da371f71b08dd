"""The publisher's path machine alone: whatever the Monitor and the Exchanges say in whatever order, its table knows what
follows, and no link is left open or closed twice. Every transition of the table is taken. What subscribers get: test_moves.py.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator

from roq.pubsub.path import TRANSITIONS, CloseLink, Instruction, OpenLink, PathEvent, PathMachine, PathState, Reuse, SendFin
from roq.wire.monitor import ExchangeAddress

EXCHANGES = tuple(ExchangeAddress(name, "", 0, 0) for name in "AB")
PATHS_MAX = 4
STATES_MIN = 500
Input = tuple[str, *tuple[object, ...]]  # a method, its arguments
Transition = tuple[PathState, PathEvent]


class Recorder(PathMachine):
    """One that notes the transitions it takes."""

    taken: set[Transition]

    def _on(self, event: PathEvent) -> None:
        self.taken.add((self.state, event))
        super()._on(event)


def inputs() -> Iterator[Input]:
    """All that may be said to it, old news too."""
    paths = range(1, PATHS_MAX + 1)
    yield from (("assign", *one) for one in itertools.product(EXCHANGES, paths))
    yield from itertools.product(("welcome", "attached", "lost", "forwarded"), paths)
    yield ("close",)


def key(machine: PathMachine) -> tuple[object, ...]:
    leaving = tuple(sorted(machine.leaving.items()))
    return machine.state, machine.path, machine.current, machine.target, machine.target_path, leaving, machine.broken


def links(machine: PathMachine) -> set[int]:
    """The paths whose links should be open."""
    current = {machine.path} if machine.current is not None else set()
    return {*machine.leaving, *current, *({machine.target_path} if machine.target is not None else ())}


def perform(open_links: set[int], instructions: list[Instruction]) -> set[int]:
    """The links that are open after that."""
    for one in instructions:
        match one:
            case OpenLink(_, path):
                assert path not in open_links, f"a second link for path {path}"
                open_links.add(path)
            case CloseLink(path):
                open_links.remove(path)
            case Reuse(old, new):
                open_links.remove(old)
                open_links.add(new)
            case SendFin(path):
                assert path in open_links, f"FIN on path {path}, which has no link"
    return open_links


def test_every_transition_is_taken_and_no_other_is_asked_for() -> None:
    taken: set[Transition] = set()
    first = Recorder()
    first.taken = taken
    known, waiting = {key(first)}, deque([first])
    while waiting:
        before = waiting.popleft()
        for method, *arguments in inputs():
            machine = copy.copy(before)
            machine.leaving = dict(before.leaving)
            instructions = getattr(machine, method)(*arguments)
            machine.check()
            assert before.state is not PathState.FINISHED or (machine.state, instructions) == (PathState.FINISHED, [])
            assert machine.closing or not before.closing, f"{method} {arguments} at {key(before)}: it was closed"
            assert perform(links(before), instructions) == links(machine), f"{method} {arguments} at {key(before)}"
            if machine.path <= PATHS_MAX and key(machine) not in known:
                known.add(key(machine))
                waiting.append(machine)
    assert len(known) >= STATES_MIN
    assert taken == {(state, event) for state, events in TRANSITIONS.items() for event in events}
