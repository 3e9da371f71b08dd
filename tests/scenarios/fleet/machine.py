"""The fleet for its scenarios: one leader, that decides until nothing is to be recorded any more whenever something happened.

Machines are named by their number: 1 is roq-f-1. A host `full` without a slot is always there, and a machine's host takes two
Exchanges. `wait 30` lets so many seconds pass, with one decision per second; only what comes of them is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gcm import fleet
from gcm.cluster import STORE_NAME, ClusterState, Host, HostRegistration
from gcm.fleet import FleetCall, FleetMemory, FleetReport, FleetVerb, FleetWrite
from gcm.reconcile import STORE
from roq.wire.assignment import Leaving, ProcessKind, ProcessSpec
from roq.wire.fleet import FleetLimits
from roq.wire.hcm import HostPayload

SLOTS = 2
EXCHANGE = ProcessSpec(ProcessKind.EXCHANGE, "q", "x")


class Machine:
    """A cluster that may have no machine yet: `limits` allows some."""

    def __init__(self) -> None:
        full = Host("full", HostRegistration("10.0.0.1", 1, HostPayload("1", 0)))
        self._cluster, self._memory, self._now = ClusterState(hosts={full.name: full}), FleetMemory(), 0.0
        self._made = set[str]()  # what the provider lists

    def check(self) -> None:
        """The invariants of the records."""
        fleet.check(self._cluster)

    def limits(self, least: int, most: int, boot: float = 60.0, idle: float = 100.0) -> Iterator[str]:
        """What an operator allows."""
        limits = FleetLimits(least, most, boot_seconds=boot, idle_seconds=idle)
        self._cluster = fleet.set_limits(self._cluster, limits, "f")
        yield from self._decided()

    def demand(self, queue: str) -> Iterator[str]:
        """It was refused an Exchange."""
        self._memory = fleet.demanded(self._memory, queue, self._now)
        yield from self._decided()

    def wait(self, seconds: int) -> Iterator[str]:
        """So long, without any other event."""
        for _ in range(seconds):
            self._now += 1
            yield from self._decided()

    def die(self) -> Iterator[str]:
        """The leader: what it has seen is gone with it, and nobody hears what becomes of its calls."""
        self._memory = FleetMemory()
        yield from self._decided()

    def created(self, number: int, problem: str = "") -> Iterator[str]:
        """The answer."""
        yield from self._answered(FleetVerb.CREATE, number, problem)

    def destroyed(self, number: int, problem: str = "") -> Iterator[str]:
        """The answer."""
        yield from self._answered(FleetVerb.DESTROY, number, problem)

    def inspected(self, number: int, problem: str = "") -> Iterator[str]:
        """The answer: nothing counts on it, or what does."""
        yield from self._answered(FleetVerb.INSPECT, number, problem)

    def listed(self, problem: str = "", *, without: int = 0) -> Iterator[str]:
        """The answer: all that there are, but for that one, or why there is none."""
        assert FleetCall(FleetVerb.LIST) in self._memory.calls, "nobody waits for a list"
        names = sorted(self._made - {self._name(without)})
        self._memory = fleet.listed(self._memory, None if problem else names, self._now, problem)
        yield from self._decided()

    def appears(self, number: int) -> None:
        """At the provider, whatever was answered."""
        self._made.add(self._name(number))

    def vanishes(self, number: int) -> None:
        """At the provider, with its host."""
        self._made.discard(self._name(number))
        self._change(number, registration=None)

    def registers(self, number: int) -> Iterator[str]:
        """A host of its name."""
        self._change(number, registration=HostRegistration("10.0.0.2", 1, HostPayload("1", SLOTS)))
        yield from self._decided()

    def lost(self, number: int) -> Iterator[str]:
        """Its host."""
        self._change(number, registration=None)
        yield from self._decided()

    def runs(self, number: int, what: str = "") -> Iterator[str]:
        """What is assigned to its host from now on: `exchange,store`, or nothing."""
        kinds = {"exchange": (EXCHANGE.name, EXCHANGE), "store": (STORE_NAME, STORE)}
        self._change(number, assigned=dict(kinds[kind] for kind in what.split(",") if kind))
        yield from self._decided()

    def uncordoned(self, number: int) -> Iterator[str]:
        """By an operator."""
        self._change(number, draining_wanted=False, leaving=Leaving.NOTHING)
        yield from self._decided()

    def state(self) -> Iterator[str]:
        """Every record, and what of its host matters here."""
        for name, machine in self._cluster.machines.items():
            host = self._cluster.host(name)
            closed = host.draining_wanted and host.leaving is Leaving.EVERYTHING
            marks = {"alive": host.alive, "closed": closed, "store": STORE_NAME in host.assigned}
            yield ", ".join((f"{fleet.number_of(name)}: {machine.state}", *(mark for mark, so in marks.items() if so)))

    def _name(self, number: int) -> str:
        return f"roq-f-{number}"

    def _change(self, number: int, **fields: object) -> None:
        host = self._cluster.host(self._name(number))
        self._cluster = self._cluster.with_host(replace(host, **fields))  # type: ignore[arg-type]

    def _answered(self, verb: FleetVerb, number: int, problem: str) -> Iterator[str]:
        name = self._name(number)
        call = FleetCall(verb, name)
        assert call in self._memory.calls, f"nobody waits for {verb} {number}"
        if not problem and verb is FleetVerb.CREATE:
            self._made.add(name)
        if not problem and verb is FleetVerb.DESTROY:
            self._made.discard(name)
            self._change(number, registration=None)
        self._memory = fleet.answered(self._memory, call, problem, self._now)
        yield from self._decided()

    def _decided(self) -> Iterator[str]:
        recorded = True
        while recorded:
            recorded = False
            steps, self._memory = fleet.decide(self._cluster, self._memory, self._now, SLOTS)
            for step in steps:
                match step:
                    case FleetWrite():
                        yield self._recorded(step)
                        recorded = True
                    case FleetCall(verb, name):
                        yield f"{self._now:g} s: {verb} {fleet.number_of(name) or 'all'}"
                    case FleetReport(what):
                        yield f"{self._now:g} s: report: {what}"

    def _recorded(self, write: FleetWrite) -> str:
        before, self._cluster = self._cluster.machines, fleet.after(self._cluster, write, self._now)
        now = self._cluster.machines
        (name,) = (name for name in {**before, **now} if before.get(name) != now.get(name))
        state, reason = now[name].state if name in now else "forgotten", write.reason and f" ({write.reason})"
        return f"{self._now:g} s: {write.event}: {fleet.number_of(name)} is {state}{reason}"
