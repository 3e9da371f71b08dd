"""A Session on the tree in memory: the tests that run against a real ZooKeeper (tests/integration), on a simulated clock."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from roq.coordination.session import Session
from roq.tools.simulation.clocks import Wall
from roq.tools.simulation.coordination import SimulatedCoordinator
from roq.tools.simulation.loop import SimulatedLoop
from roq.tools.simulation.machines import Machine
from roq.tools.simulation.network import Network
from roq.tools.simulation.replacements import replaced
from tests.integration import test_coordination, test_election, test_session_states

pytestmark = pytest.mark.quick
HERE, SERVER, BEHIND_THE_WIRE = "10.0.3.1", "10.0.0.1", "10.0.0.2"
Test = Callable[..., Coroutine[Any, Any, None]]


class SimulatedWire:
    """As tests.integration.faults.Wire."""

    address = f"{BEHIND_THE_WIRE}:2181"

    def __init__(self, network: Network, sessions: list[Session]) -> None:
        self._network, self._sessions = network, sessions

    def cut(self) -> None:
        self._network.cut(HERE, BEHIND_THE_WIRE)
        self._network.cut(BEHIND_THE_WIRE, HERE)

    def heal(self) -> None:
        self._network.heal(HERE, BEHIND_THE_WIRE)
        self._network.heal(BEHIND_THE_WIRE, HERE)

    def reset(self) -> None:
        for session in self._sessions:
            if session.address.hosts == self.address:
                session._link.drop()


FIXTURES = {"chroot", "sessions", "wire", "expire_session"}


def _fits(parameters: set[str]) -> bool:
    """It needs a coordinator, and nothing else of the real world."""
    return parameters <= FIXTURES and not parameters.isdisjoint({"chroot", "wire"})


SUITE = {
    f"{module.__name__.rpartition('.')[2]}::{name}": test
    for module in (test_coordination, test_session_states, test_election)
    for name, test in vars(module).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(test) and _fits(set(inspect.signature(test).parameters))
}
TESTS_MIN = 30


def run_simulated(test: Test, tmp_path: Any) -> None:
    loop = SimulatedLoop(Random(1))
    network = Network(loop, Random(2))
    wall = Wall(loop, 1)
    coordinator = SimulatedCoordinator(network, SERVER, wall)
    made: list[Session] = []
    outcome: list[BaseException | None] = []

    async def connect(zookeeper: str, session_seconds: float = 2.0, reread_seconds: float = 10.0) -> Session:
        session = await Session.connect(zookeeper, session_seconds, reread_seconds=reread_seconds)
        made.append(session)
        return session

    async def expire(session: Session) -> None:
        coordinator.expire(session.session_id)

    given = {
        "chroot": f"{SERVER}:2181/test",
        "sessions": connect,
        "wire": SimulatedWire(network, made),
        "expire_session": expire,
    }

    async def program(stop: asyncio.Event) -> None:
        try:
            await test(**{name: given[name] for name in inspect.signature(test).parameters})
            outcome.append(None)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            outcome.append(error)
        for session in made:
            await session.close()
        done.set_result(None)

    with replaced(loop, network, coordinator, wall, Random(3)):
        done = loop.create_future()
        machine = Machine("client", HERE, network, tmp_path)
        machine.run("client", program)
        loop.run_until_complete(done)
        for process in list(machine.processes.values()):
            machine.kill(process)
        loop.dispose()
    if outcome[0] is not None:
        raise outcome[0]


@pytest.mark.parametrize("name", SUITE)
def test_the_tree_does_what_zookeeper_does(name: str, tmp_path: Any) -> None:
    run_simulated(SUITE[name], tmp_path)


def test_the_suite_is_there() -> None:
    assert len(SUITE) >= TESTS_MIN
