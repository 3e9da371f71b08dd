"""roq.blocking without a cluster: who waits in another thread when the connection is closed. With one: tests/integration."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roq import blocking
from roq.errors import Closed, RoqError
from tests.harness.ports import free_port, own_address

SECONDS = 10.0


class Reading:
    """A thread that iterates; `error`: how it ended."""

    def __init__(self, values: Callable[[], Iterator[Any]]) -> None:
        self.error: RoqError | None = None
        self._begun = threading.Event()
        self._values = values
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(SECONDS)

    def _read(self) -> None:
        values = self._values()
        self._begun.set()
        try:
            for _ in values:
                pass
        except RoqError as error:
            self.error = error

    def ended(self) -> bool:
        self._thread.join(SECONDS)
        return not self._thread.is_alive()


@pytest.fixture
def cluster() -> blocking.Cluster:
    """Of a ZooKeeper that is not there: whoever asks it waits."""
    address = own_address()
    return blocking.Cluster(f"{address}:{free_port(address)}")


@pytest.mark.parametrize("what", [lambda cluster: cluster.topology(), lambda cluster: cluster.kpis("orders")])
def test_who_iterates_in_another_thread_gets_closed(
    cluster: blocking.Cluster, what: Callable[[blocking.Cluster], Iterator[Any]]
) -> None:
    readings = [Reading(lambda: what(cluster)) for _ in range(3)]
    until = time.monotonic() + SECONDS
    while len(cluster._iterating) < len(readings):  # each is about to wait
        assert time.monotonic() < until
        time.sleep(0.001)
    cluster.close()
    assert all(reading.ended() for reading in readings)
    assert {type(reading.error) for reading in readings} == {Closed}
    with pytest.raises(Closed, match="this cluster connection is closed"):
        next(what(cluster))


def test_a_publisher_whose_connection_is_closed_says_so(cluster: blocking.Cluster) -> None:
    publisher = cluster.publisher("orders")
    publisher._entered = True
    cluster.close()
    with pytest.raises(Closed, match="this cluster connection is closed"):
        publisher.publish("eu", b"...")
    with pytest.raises(Closed):
        publisher.flush()
