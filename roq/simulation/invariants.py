"""The machines of a run, checked again and again: each has a `check` that says what must hold between two of its steps."""

from __future__ import annotations

import functools
from typing import Any

from hcm.supervisor import Child
from roq.client.order import OrderMachine
from roq.client.path import PathMachine
from roq.client.ring import Ring
from roq.monitor.membership import Membership
from roq.simulation.loop import PROCESS, Fate, Process, SimulatedLoop

LOOK_SECONDS = 0.25
MACHINES: tuple[type, ...] = (Child, Membership, OrderMachine, PathMachine, Ring)


class Inspector:
    """Looks at every machine that a living process has made, and at the coordinator's tree."""

    def __init__(self, loop: SimulatedLoop, context: Any, tree: Any) -> None:
        self._loop, self._context, self._tree = loop, context, tree
        self._machines: list[tuple[Process, Any]] = []
        self.wrong: list[str] = []
        self.looks = 0
        self._later()

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """For the table of surroundings: machines that are made are known here."""
        return [(machine, "__init__", self._known(machine)) for machine in MACHINES]

    def _known(self, machine: Any) -> Any:
        make = machine.__init__

        @functools.wraps(make)
        def made(one: Any, *args: Any, **options: Any) -> None:
            make(one, *args, **options)
            process = PROCESS.get()
            if process is not None:
                self._machines.append((process, one))

        return made

    def _later(self) -> None:
        self._loop.call_later(LOOK_SECONDS, self._look, context=self._context)

    def _look(self) -> None:
        self._machines = [(process, one) for process, one in self._machines if process.fate is not Fate.DEAD]
        for process, one in self._machines:
            self._check(process.name, one)
        self._check("the coordinator", self._tree)
        self._later()

    def _check(self, name: str, machine: Any) -> None:
        self.looks += 1
        try:
            machine.check()
        except AssertionError as error:
            self.wrong.append(f"{name}: {type(machine).__name__}: {error}")
