"""Followers: hosts whose store runs and takes part in shuffles, as the leader sees them. A store that restarts is no loss yet,
nor is a host that has not come back when a term begins. Not covered: what becomes of a loss (roq.shuffle.plan)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from gcm.cluster import ClusterState, is_running
from roq.errors import Unavailable
from roq.runtime.liveness import FailureDetector
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.shuffle.record import FollowerHosts
from roq.wire import shuffle as wire
from roq.wire.assignment import ProcessKind, RunningProcess

PORT = "shuffle"
SETTLE_SECONDS = 5.0  # until who is away counts as lost; no less than a report takes: what a former leader told is used by then
RESTART_SECONDS = 10.0  # a live host may take so long to restart its store
JOIN_SECONDS = 1.0  # others may join at the same time: their shares are moved together
STORE = str(ProcessKind.STORE)
T = TypeVar("T", bound=msgspec.Struct)


def endpoints(cluster: ClusterState) -> dict[str, str]:
    """Where the followers that run serve, by host."""
    return {host: f"tcp://{address}:{port}" for host, address, port in _running(cluster)}


def _running(cluster: ClusterState) -> Iterator[tuple[str, str, int]]:
    for host in cluster.hosts.values():
        if host.report is not None and is_running(cluster, host.name, STORE) and PORT in host.running[STORE].ports:
            yield host.name, host.report.address, host.running[STORE].ports[PORT]


def follower_of(cluster: ClusterState, name: str) -> tuple[bool, bool, str, RunningProcess | None]:
    """All that a follower's part in shuffles depends on: of the host, and of its store."""
    host = cluster.host(name)
    return host.alive, host.draining, host.report.address if host.report is not None else "", host.running.get(STORE)


class FollowerMembership:
    """Which followers ranges may be placed on. All times: seconds, steady."""

    def __init__(self, now: float) -> None:
        self._begin = now
        self._since: dict[str, float] = {}  # it has been running
        self._detector = FailureDetector[str]()  # heard: it runs
        self._members: set[str] = set()

    def hosts(self, cluster: ClusterState, now: float) -> tuple[FollowerHosts, float | None]:
        """Who runs and who is a member now, and in how many seconds that may change by itself."""
        running = set(endpoints(cluster))
        self._since = {host: self._since.get(host, now) for host in running}
        for host in running:
            self._detector.heard(host, now)
        settled = now >= self._begin + SETTLE_SECONDS
        waits = [] if settled else [self._begin + SETTLE_SECONDS - now]
        for host in running - self._members:
            wait = self._since[host] + JOIN_SECONDS - now
            if wait <= 0 or not settled:
                self._members.add(host)
            else:
                waits.append(wait)
        for host in self._members - running:
            wait = RESTART_SECONDS - self._detector.silence(host, now)
            if wait <= 0 or not cluster.host(host).alive:
                self._members.discard(host)
            else:
                waits.append(wait)
        members = frozenset(host for host in self._members if not cluster.host(host).draining)
        joining = frozenset(host for host in running - self._members if not cluster.host(host).draining)
        return FollowerHosts(frozenset(running), members, settled, joining), min(waits, default=None)

    def admit(self, cluster: ClusterState, now: float) -> None:
        """Who runs now is a member at once."""
        running = endpoints(cluster).keys()
        self._members |= running
        for host in running:
            self._detector.heard(host, now)


class FollowerLinks:
    """Connections to followers, on the running loop."""

    def __init__(self) -> None:
        self.endpoints: dict[str, str] = {}
        self._clients: dict[str, RpcClient] = {}  # by endpoint

    def update(self, found: dict[str, str]) -> None:
        """Where followers are now; connections to other endpoints are closed."""
        self.endpoints = found
        for endpoint in sorted(self._clients.keys() - {*found.values()}):
            self._clients.pop(endpoint).close()

    async def request(self, host: str, request: msgspec.Struct, expect: type[T], seconds: float) -> T:
        """A follower's answer. Raises what it raises, Unavailable, DeadlineExceeded, Closed."""
        endpoint = self.endpoints.get(host)
        if endpoint is None:
            raise Unavailable(f"no follower runs on host {host}")
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = RpcClient(endpoint, wire.Reply, on_disconnect=OnDisconnect.FAIL)
        return await client.request(request, expect, seconds)

    def close(self) -> None:
        """Requests under way fail with Closed."""
        self.update({})
