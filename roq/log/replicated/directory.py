"""Where the stores are: endpoint by host name, from the hosts' reports in ZooKeeper.

A directory keeps what it knew when ZooKeeper is away: traffic with stores goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from roq.coordination import paths
from roq.coordination.operations import Node
from roq.coordination.session import Session
from roq.coordination.watch import Watch
from roq.errors import FrameError
from roq.wire.assignment import HostReport, ProcessKind, ProcessState, from_json

PORT = "clients"


class Directory(Protocol):
    """Finds stores."""

    def endpoint(self, host: str) -> str | None:
        """ZeroMQ endpoint of the host's store, None while it is not known."""

    def hosts(self) -> frozenset[str]:
        """Hosts that live and whose store runs."""


class StaticDirectory:
    """A fixed directory, for tests and tools. `alive` may be changed."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self.endpoints = dict(endpoints)
        self.alive = set(endpoints)

    def endpoint(self, host: str) -> str | None:
        """Where the store is."""
        return self.endpoints.get(host)

    def hosts(self) -> frozenset[str]:
        """What is said to live."""
        return frozenset(self.alive)


class StoreDirectory:
    """The cluster's stores. `on_change` is called when the answer of `hosts` or `endpoint` changes."""

    def __init__(self, session: Session, on_change: Callable[[], None] | None = None) -> None:
        self._session, self._on_change = session, on_change
        self._registered: frozenset[str] = frozenset()
        self._running: dict[str, bool] = {}
        self._endpoints: dict[str, str] = {}
        self._watches: dict[str, Watch[Node | None]] = {}
        self._roots: list[Watch[list[str]]] = []
        self._seen = {"registered": asyncio.Event(), "states": asyncio.Event()}
        self._first: dict[str, asyncio.Event] = {}

    async def start(self) -> StoreDirectory:
        """Returns itself when everything was read once."""
        self._roots.append(self._session.watch_children(paths.hosts(), self._registered_now))
        self._roots.append(self._session.watch_children(paths.host_states(), self._states_now))
        for seen in self._seen.values():
            await seen.wait()
        for first in list(self._first.values()):
            await first.wait()
        return self

    def close(self) -> None:
        """Stop watching."""
        for root in self._roots:
            root.close()
        for watch in self._watches.values():
            watch.close()

    def endpoint(self, host: str) -> str | None:
        """Where the host's store serves, also while it is away."""
        return self._endpoints.get(host)

    def hosts(self) -> frozenset[str]:
        """Registered hosts whose store runs."""
        return frozenset(host for host in self._registered if self._running.get(host))

    def _registered_now(self, hosts: list[str]) -> None:
        self._registered = frozenset(hosts)
        self._seen["registered"].set()
        self._tell()

    def _states_now(self, hosts: list[str]) -> None:
        for host in hosts:
            if host not in self._watches:
                self._first[host] = asyncio.Event()
                self._watches[host] = self._session.watch_data(paths.running(host), partial(self._report, host))
        for host in set(self._watches) - set(hosts):
            self._watches.pop(host).close()
            self._running.pop(host, None)
            self._endpoints.pop(host, None)
        self._seen["states"].set()
        self._tell()

    def _report(self, host: str, node: Node | None) -> None:
        self._first[host].set()
        self._running[host] = False
        if node is not None:
            try:
                report = from_json(node.data, HostReport)
            except FrameError:
                return
            for process in report.processes:
                if process.kind is ProcessKind.STORE and PORT in process.ports:
                    self._running[host] = process.state is ProcessState.RUNNING
                    self._endpoints[host] = f"tcp://{report.address}:{process.ports[PORT]}"
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()
