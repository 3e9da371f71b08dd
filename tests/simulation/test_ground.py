"""What simulated programs stand on: threads that wait for each other and for the clock, disks that forget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from roq.pubsub.replay_buffer import ReplayBuffer
from roq.tools.simulation.blocking import SELECT, SimulatedStopEvent, Sockets
from roq.tools.simulation.clocks import APART_SECONDS, EPOCH, Wall
from roq.tools.simulation.cluster import COORDINATOR, SimulatedCluster
from roq.tools.simulation.coordination import SimulatedCoordinator
from roq.tools.simulation.disks import SimulatedDisk
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.invariants import Inspector
from roq.tools.simulation.loop import BOOTED_SECONDS, SimulatedLoop
from roq.tools.simulation.machines import Machine
from roq.tools.simulation.network import Network
from roq.tools.simulation.pages import SECTOR_BYTES
from roq.tools.simulation.replacements import replaced
from roq.tools.simulation.threads import SimulatedThreads, sleep
from tests.simulation.known_bugs import put

pytestmark = pytest.mark.quick
HERE, THERE = "10.0.3.1", "10.0.3.2"
Program = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


class Ground:
    """A loop with threads and a network, and two machines."""

    def __init__(self, folder: Path) -> None:
        self.loop = SimulatedLoop(Random(1))
        self.network = Network(self.loop, Random(2))
        self.threads = SimulatedThreads(self.loop)
        self.module = self.threads.module()
        self.here, self.there = (Machine(name, name, self.network, folder / name) for name in (HERE, THERE))
        self.told: list[object] = []

    def tell(self, what: object) -> None:
        self.told.append((what, round(self.loop.time() - BOOTED_SECONDS, 2)))

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def end(self) -> None:
        for machine in (self.here, self.there):
            for process in list(machine.processes.values()):
                machine.kill(process)
        self.loop.dispose()
        assert not self.threads.failures
        assert not self.threads.known


@pytest.fixture
def ground(tmp_path: Path) -> Any:
    made = Ground(tmp_path)
    yield made
    made.end()


def test_threads_wait_for_each_other_and_for_the_clock(ground: Ground) -> None:
    condition, lock, event = ground.module.Condition(), ground.module.Lock(), ground.module.Event()

    def first() -> None:
        with lock:
            sleep(1.0)
        ground.tell("released")
        with condition:
            assert condition.wait(10.0)
        ground.tell("notified")
        assert not event.wait(0.5)
        ground.tell("in vain")

    def second() -> None:
        sleep(0.1)
        assert not lock.acquire(timeout=0.2)
        ground.tell("not yet")
        with lock:
            ground.tell("locked")
            sleep(2.0)
        with condition:
            condition.notify()

    async def program(stop: asyncio.Event) -> None:
        threads = [ground.module.Thread(target=target) for target in (first, second)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(threads[0].join)
        ground.tell("joined")

    ground.here.run("program", program)
    ground.run(5.0)
    steps = [("not yet", 0.3), ("released", 1.0), ("locked", 1.0), ("notified", 3.0), ("in vain", 3.5), ("joined", 3.5)]
    assert ground.told == steps


def test_the_thread_of_a_killed_process_never_goes_on_and_that_of_a_stopped_one_waits(ground: Ground) -> None:
    def work(name: str) -> None:
        try:
            sleep(1.0)
        finally:
            ground.tell(name)

    async def program(stop: asyncio.Event) -> None:
        await asyncio.to_thread(work, "killed or not")

    killed, stopped = ground.here.run("killed", program), ground.there.run("stopped", program)
    ground.run(0.5)
    ground.here.kill(killed)
    ground.loop.stop_process(stopped)
    ground.run(2.0)
    assert not ground.told
    ground.loop.go_on(stopped)
    ground.run(1.0)
    assert ground.told == [("killed or not", 2.5)]


def test_what_a_thread_raises_comes_to_who_waits_for_it(ground: Ground) -> None:
    def work() -> None:
        sleep(0.1)
        raise ValueError("no")

    async def program(stop: asyncio.Event) -> None:
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(work)
        ground.tell("raised")

    ground.here.run("program", program)
    ground.run(1.0)
    assert ground.told == [("raised", 0.1)]


def test_a_blocking_socket_waits_for_data_for_the_stop_event_and_for_its_time(ground: Ground) -> None:
    event = SimulatedStopEvent()

    async def answer(stop: asyncio.Event) -> None:
        class Echo(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def data_received(self, data: bytes) -> None:
                asyncio.get_running_loop().call_later(1.0, self.transport.write, data)

        await asyncio.get_running_loop().create_server(Echo, sock=cast(Any, ground.network.listen(THERE, 7)))
        await stop.wait()

    def ask() -> None:
        module = Sockets(ground.network).module()
        with pytest.raises(ConnectionRefusedError):
            module.create_connection((THERE, 8), 2.0)
        connection = module.create_connection((THERE, 7), 2.0)
        connection.send(b"hello")
        with pytest.raises(BlockingIOError):
            connection.recv(10, module.MSG_DONTWAIT)
        poller = SELECT.poll()
        poller.register(connection, SELECT.POLLIN)
        poller.register(event, SELECT.POLLIN)
        poller.poll(500.0)
        ground.tell(connection.readable())
        poller.poll(5000.0)
        ground.tell(connection.recv(3) + connection.recv(10))
        assert event.wait(10.0)
        ground.tell("set")

    async def program(stop: asyncio.Event) -> None:
        asyncio.get_running_loop().call_later(3.0, event.set)
        await asyncio.to_thread(ask)

    ground.there.run("answer", answer)
    ground.here.run("ask", program)
    ground.run(5.0)
    assert ground.told == [(False, 0.5), (b"hello", 1.0), ("set", 3.0)]


def test_a_machine_is_checked_after_each_step_that_it_takes(ground: Ground) -> None:
    """What is wrong for a moment is seen by whoever looks at once."""
    inspector = Inspector(ground.loop)

    async def program(stop: asyncio.Event) -> None:
        buffer = ReplayBuffer()
        buffer.sent(b"frame", 1, 0.0)
        await asyncio.sleep(0)
        looks = inspector.looks
        await asyncio.sleep(0)
        ground.tell(inspector.looks - looks)
        buffer.sent_to += 1
        buffer.keep(b"frame", 2, 0.0)
        await asyncio.sleep(0)
        buffer.sent_to -= 1
        buffer.prune(0.0)

    with put(*inspector.replacements()):
        ground.here.run("program", program)
        ground.run(1.0)
    assert ground.told == [(0, 0.0)], "who does nothing is not looked at"
    assert [wrong.split(": ")[:2] for wrong in inspector.wrong] == [["program", "ReplayBuffer"]]


def test_each_machine_has_a_wall_clock_of_its_own(ground: Ground, tmp_path: Path) -> None:
    """All are within half a second at first; a step is one machine's or everybody's; nobody's monotonic clock steps."""
    wall = Wall(ground.loop, "seed")
    coordinator = SimulatedCoordinator(ground.network, COORDINATOR, wall)
    cluster = SimulatedCluster(
        ground.loop, ground.network, coordinator, wall, tmp_path, Random(3), hosts=2, gcms=0, session_seconds=4.0
    )
    seen: dict[str, list[float]] = {}

    async def look(stop: asyncio.Event) -> None:
        began = time.monotonic()
        for _ in range(4):
            await asyncio.sleep(1.0)
            for clock in (time.time(), time.time_ns() / 1e9, time.clock_gettime(time.CLOCK_REALTIME)):
                seen.setdefault(HERE, []).append(clock - EPOCH - ground.loop.time())
        ground.tell(round(time.monotonic() - began, 2))

    def step(second: float) -> None:
        cluster.do(Fault(0.0, FaultKind.STEP_CLOCK, 0.0, 0.75, second))

    with replaced(ground.loop, ground.network, coordinator, wall, Random(4)):
        cluster.hosts[0].run("look", look)
        for at, second in ((1.5, 0.2), (2.5, 0.59), (3.5, 0.1)):  # that host's, the other one's, all
            ground.loop.call_later(at, step, second)
        ground.run(5.0)
        cluster.end()
    first, *later = (seen[HERE][place] for place in (0, 3, 6, 9))
    assert abs(first) <= max(APART_SECONDS)
    assert [round(clock - first, 1) for clock in later] == [5.0, 5.0, 10.0]
    assert max(seen[HERE][:3]) - min(seen[HERE][:3]) < 0.001, "however it is asked for"
    assert [round(wall.ahead(one) / 5) for one in (cluster.hosts[1].address, COORDINATOR)] == [2, 1]
    assert ground.told == [(4.0, 4.0)]


def _disk(ground: Ground, seed: int) -> tuple[SimulatedDisk, int]:
    disk = SimulatedDisk(ground.loop, Random(seed), Path("/nowhere"))
    path = Path("/nowhere/journal")
    disk.write_zeros(path, 8 * SECTOR_BYTES)
    return disk, disk.open(path)


def test_a_loss_of_power_keeps_what_was_synced_and_of_the_rest_any_sectors(ground: Ground) -> None:
    outcomes = set()
    for seed in range(40):
        disk, file = _disk(ground, seed)
        disk.write(file, b"a" * SECTOR_BYTES, 0)
        disk.sync(file)
        disk.write(file, b"b" * 3 * SECTOR_BYTES, SECTOR_BYTES)
        assert disk.read(file, 1, SECTOR_BYTES) == b"b"
        disk.lose_power()
        data = disk.read(disk.open(Path("/nowhere/journal")), 4 * SECTOR_BYTES, 0)
        assert data[:SECTOR_BYTES] == b"a" * SECTOR_BYTES
        sectors = [data[begin : begin + SECTOR_BYTES] for begin in range(SECTOR_BYTES, 4 * SECTOR_BYTES, SECTOR_BYTES)]
        assert all(sector in (b"b" * SECTOR_BYTES, bytes(SECTOR_BYTES)) for sector in sectors)
        outcomes.add(tuple(sector[:1] for sector in sectors))
    assert {(b"b",) * 3, (b"\0",) * 3} < outcomes


def test_after_a_sync_that_failed_the_pages_are_clean_and_no_later_sync_writes_them(ground: Ground) -> None:
    seen = set()
    for seed in range(20):
        disk, file = _disk(ground, seed)
        disk.write(file, b"a", 0)
        disk.failing = "sync"
        with pytest.raises(OSError, match="the sync failed"):
            disk.sync(file)
        seen.add(disk.read(file, 1, 0))
        disk.write(file, b"b", 1)
        disk.sync(file)
        assert disk.read(file, 1, 1) == b"b"
        disk.lose_power()
        assert disk.read(disk.open(Path("/nowhere/journal")), 2, 0) == b"\0b"
    assert seen == {b"a", b"\0"}


def test_a_read_fails_once_and_what_is_there_stays(ground: Ground, tmp_path: Path) -> None:
    disk, file = _disk(ground, 1)
    disk.write(file, b"a", 0)
    payload = tmp_path / "payload"
    payload.write_bytes(b"b")

    def read_payload() -> bytes:
        with disk.read_payload(payload) as opened:
            return opened.read()

    def read_journal() -> bytes:
        return disk.read(file, 1, 0)

    for read in (read_journal, read_payload):
        disk.failing = "read"
        with pytest.raises(OSError, match="the read failed"):
            read()
        assert read() in (b"a", b"b")


def test_a_loss_of_power_undoes_any_renames_and_removals_whose_folder_was_not_synced(ground: Ground, tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(150):
        folder = tmp_path / f"store-{seed}"
        (folder / "00").mkdir(parents=True)
        disk = SimulatedDisk(ground.loop, Random(seed), folder)
        for name in ("kept", "moved", "replaced", "removed"):
            (folder / "00" / name).write_bytes(name.encode())
        disk.sync_folder(folder / "00")
        (folder / "00" / "moved").rename(folder / "00" / "here")
        (folder / "00" / "new").write_bytes(b"new")
        (folder / "00" / "new").rename(folder / "00" / "replaced")
        (folder / "00" / "removed").unlink()
        if seed % 3 == 0:
            disk.sync_folder(folder / "00")
        for _ in range(2):  # what one loss of power left, the next one leaves, too
            disk.lose_power()
            left = {path.name: path.read_bytes().decode() for path in (folder / "00").iterdir()}
            assert left["kept"] == "kept"
            assert left["replaced"] in ("replaced", "new")
            assert {left.get("moved"), left.get("here")} <= {"moved", None}
            if seed % 3 == 0:
                assert left == {"kept": "kept", "here": "moved", "replaced": "new"}
            outcomes.add((seed, tuple(sorted(left.items()))))
    assert len(outcomes) == 150, "each seed has one outcome"
    assert len({left for _, left in outcomes}) == 16, "each change is undone or not"


def test_what_is_written_over_the_pages_of_a_failed_sync_is_what_is_seen(ground: Ground) -> None:
    disk, file = _disk(ground, 1)
    disk.evicted_part = 0.0
    disk.write(file, b"aa", 0)
    disk.failing = "sync"
    with pytest.raises(OSError, match="the sync failed"):
        disk.sync(file)
    disk.write(file, b"b", 0)
    assert disk.read(file, 2, 0) == b"ba"
    disk.sync(file)
    assert disk.read(file, 2, 0) == b"ba"
    disk.drop_cache()
    assert disk.read(file, 2, 0) == b"b\0"
