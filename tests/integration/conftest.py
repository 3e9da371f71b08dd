"""A real ZooKeeper for all integration tests, a chroot of its own for each, and the ways to hurt a session."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import roq
from roq.coordination.session import Session
from roq.tools.local.zookeeper import LocalZooKeeper
from tests.integration.console_rig import Program, RunningConsole, console, program
from tests.integration.console_scene import Scene, started_browser
from tests.integration.coordinator_rig import RunningCoordinator
from tests.integration.faults import Wire, expire
from tests.integration.log_servers import SERVERS, LogServer
from tests.integration.running import RunningCluster
from tests.integration.workqueue_rig import KINDS, Faces, new_address, removed_at_the_end


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """ "address:port" of a ZooKeeper that lives as long as the test run."""
    server = LocalZooKeeper()
    with ThreadPoolExecutor(1) as thread:  # a loop of its own: the tests' loops come and go
        thread.submit(asyncio.run, server.start(tmp_path_factory.mktemp("zookeeper"))).result()
        try:
            yield server.connect_string
        finally:
            thread.submit(asyncio.run, server.stop()).result()


@pytest.fixture(scope="session")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """ "address:port" of a coordinator that lives as long as the test run."""
    running = RunningCoordinator(tmp_path_factory.mktemp("coordinator") / "data")
    running.start()
    yield running.address
    assert running.stop() == 0, running.log()


@pytest.fixture
def chroot(zookeeper: str) -> str:
    """ "address:port/unique": a cluster's address nobody else uses; the chroot is not made yet."""
    return f"{zookeeper}/test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def sessions() -> AsyncIterator[Callable[..., Awaitable[Session]]]:
    """Makes sessions (2 s) that are closed after the test."""
    made: list[Session] = []

    async def connect(zookeeper: str, session_seconds: float = 2.0, reread_seconds: float = 10.0) -> Session:
        session = await Session.connect(zookeeper, session_seconds, reread_seconds=reread_seconds)
        made.append(session)
        return session

    yield connect
    await asyncio.gather(*(session.close() for session in made))


@pytest.fixture
def expire_session() -> Callable[[Session], Awaitable[None]]:
    """ends a session at ZooKeeper, behind the back of its owner"""
    return expire


@pytest.fixture
async def wire(zookeeper: str) -> AsyncIterator[Wire]:
    """A cuttable connection to ZooKeeper."""
    made = Wire(zookeeper)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One cluster (1 GCM, 2 hosts) for the tests that do it no harm."""
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), gcms=1, hosts=2, exchanges_max=40, session_seconds=4.0)
    yield running
    assert running.stop() == []


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[roq.Cluster]:
    """A connection to the shared cluster."""
    async with roq.connect(cluster.zookeeper) as connected:
        yield connected


@pytest.fixture
async def queue(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh queue with overflow "block", removed after the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block")
    yield name
    await client.remove_queue(name)


@pytest.fixture(scope="session")
def log_servers() -> Iterator[Callable[[str], LogServer]]:
    """Servers of logs by the scheme of their addresses, for tests that do them no harm; each begins when asked for."""
    running: dict[str, LogServer] = {}

    def server(kind: str) -> LogServer:
        if kind not in running:
            running[kind] = SERVERS[kind]()
        return running[kind]

    yield server
    for one in running.values():
        one.close()


@pytest.fixture(params=KINDS)
def work_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A work queue nobody has opened yet; one of every kind."""
    if request.param in SERVERS:
        server = request.getfixturevalue("log_servers")(request.param)
        yield server.address(f"w-{uuid.uuid4().hex[:12]}")
        return
    if request.param != "roq":
        yield new_address(str(request.param), tmp_path)
        return
    cluster = request.getfixturevalue("cluster")
    with removed_at_the_end(cluster, new_address("roq", cluster.zookeeper)) as address:
        yield address


@pytest.fixture
def faces(request: pytest.FixtureRequest, work_address: str) -> Iterator[Faces]:
    """Opens that work queue, asynchronous or plain, behind plain calls; tests say which pairs of a kind and a face."""
    made = Faces(str(request.param), work_address)
    yield made
    made.close()


@pytest.fixture
def work_queue(faces: Faces) -> Any:
    """That work queue, opened once."""
    return faces.open()


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster of three hosts of its own, with sessions that end soon."""
    running = RunningCluster(tmp_path_factory.mktemp("mortal"), zookeeper=None, gcms=1, hosts=3, session_seconds=2.0)
    yield running
    running.stop()


@pytest.fixture
async def asked(served: RunningConsole) -> AsyncIterator[Program]:
    """A program that has signed in at the console that a file of tests serves."""
    async with program(served) as made:
        await made.sign_in()
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A cluster with something of everything, and traffic."""
    with Scene(tmp_path_factory.mktemp("scene")) as scene:
        yield scene


@pytest.fixture(scope="module")
def writable(scene: Scene) -> Iterator[str]:
    """Where a console serves that may change things."""
    with console(scene.address, "--writable") as running:
        yield running.url
