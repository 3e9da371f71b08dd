"""kazoo's recipes, which other programs use, on a real ZooKeeper and on the coordinator."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.exceptions import LockTimeout  # type: ignore[import-untyped]

WAIT = 20.0
Connect = Callable[[], Any]


@pytest.fixture(params=["zookeeper", "coordinator"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of either server; they are closed after the test."""
    server, chroot = request.getfixturevalue(request.param), f"/recipes-{uuid.uuid4().hex[:12]}"
    made: list[Any] = []

    def connected(place: str = chroot) -> Any:
        client = KazooClient(hosts=server + place, timeout=10.0)
        client.start(WAIT)
        made.append(client)
        return client

    connected("").create(chroot)
    yield connected
    for client in made:
        client.stop()
        client.close()


@pytest.mark.quick
def test_a_lock_is_held_by_one_and_handed_on(connect: Connect) -> None:
    one, two = connect(), connect()
    with ThreadPoolExecutor(1) as pool:
        first, second = one.Lock("/lock", "one"), two.Lock("/lock", "two")
        assert first.acquire(timeout=WAIT)
        with pytest.raises(LockTimeout):
            second.acquire(timeout=0.2)
        waiting = pool.submit(second.acquire, timeout=WAIT)
        while first.contenders() != ["one", "two"]:
            assert not waiting.done()
        first.release()
        assert waiting.result(WAIT)
        assert second.contenders() == ["two"]
        assert not first.acquire(blocking=False)
        second.release()


def test_a_semaphore_and_a_read_lock_let_several_in(connect: Connect) -> None:
    one, two = connect(), connect()
    assert one.Semaphore("/sem", max_leases=2).acquire(timeout=WAIT)
    assert two.Semaphore("/sem", max_leases=2).acquire(timeout=WAIT)
    assert not one.Semaphore("/sem", max_leases=2).acquire(blocking=False)
    assert one.ReadLock("/rw").acquire(timeout=WAIT)
    assert two.ReadLock("/rw").acquire(timeout=WAIT)
    assert not two.WriteLock("/rw").acquire(blocking=False)


def test_an_election_has_one_leader_after_the_other(connect: Connect) -> None:
    clients = [connect(), connect()]
    led: list[int] = []
    leading = threading.Lock()

    def lead(number: int) -> None:
        assert leading.acquire(blocking=False)
        led.append(number)
        leading.release()

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(client.Election("/election", str(n)).run, lead, n) for n, client in enumerate(clients)]
        for run in runs:
            run.result(WAIT)
    assert sorted(led) == [0, 1]


def test_barriers_hold_and_let_go(connect: Connect) -> None:
    one, two = connect(), connect()
    barrier = one.Barrier("/barrier")
    barrier.create()
    assert not two.Barrier("/barrier").wait(0.1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(two.Barrier("/barrier").wait, WAIT)
        barrier.remove()
        assert waiting.result(WAIT)
        doubles = [client.DoubleBarrier("/double", 2) for client in (one, two)]
        for step in ("enter", "leave"):
            for done in [pool.submit(getattr(double, step)) for double in doubles]:
                done.result(WAIT)
    assert not one.exists("/double/ready")


def test_a_counter_counts_everybody(connect: Connect) -> None:
    clients = [connect(), connect()]

    def count(client: Any) -> None:
        counter = client.Counter("/counter")
        for _ in range(20):
            counter += 1

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(count, client) for client in clients]:
            done.result(WAIT)
    assert clients[0].Counter("/counter").value == 40


def test_a_party_knows_who_is_there(connect: Connect) -> None:
    one, two = connect(), connect()
    parties = [one.Party("/party", "one"), two.Party("/party", "two")]
    for party in parties:
        party.join()
    assert len(parties[0]) == 2
    two.stop()
    assert list(parties[0]) == ["one"]


def test_queues_give_each_item_once(connect: Connect) -> None:
    one, two = connect(), connect()
    queue, other = one.Queue("/queue"), two.Queue("/queue")
    for number, priority in ((1, 100), (2, 50), (3, 100)):
        queue.put(b"%d" % number, priority)
    assert [other.get(), queue.get(), other.get(), queue.get()] == [b"2", b"1", b"3", None]
    locking, locked = one.LockingQueue("/locking"), two.LockingQueue("/locking")
    locking.put_all([b"a", b"b"])
    assert locking.get(WAIT) == b"a"
    assert locked.get(WAIT) == b"b"
    assert locking.consume()
    two.stop()
    two.start(WAIT)
    assert locking.get(WAIT) == b"b"  # who held it is gone
    assert locking.consume()


def test_watchers_see_every_newest_value(connect: Connect) -> None:
    one, two = connect(), connect()
    seen: list[Any] = []
    last, gone = threading.Event(), threading.Event()
    one.ensure_path("/watched")

    @one.DataWatch("/watched/data")  # type: ignore[untyped-decorator]
    def data(value: bytes | None, stat: Any) -> None:
        seen.append(value)
        if value == b"19":
            last.set()

    @one.ChildrenWatch("/watched")  # type: ignore[untyped-decorator]
    def children(names: list[str]) -> None:
        if last.is_set() and not names:
            gone.set()

    two.create("/watched/data", b"0")
    for number in range(20):
        two.set("/watched/data", b"%d" % number)
    assert last.wait(WAIT)
    two.delete("/watched/data")
    assert gone.wait(WAIT)
    assert seen[0] is None
