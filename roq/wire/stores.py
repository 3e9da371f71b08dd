"""Where stores serve: names of the nodes in the folder `stores`, one for each host, ephemeral, without data.

Whoever writes or reads a log, a tape or a payload asks for all of them with one watch. A host's report says the same, but it
has all its processes in it and changes with each of them. A host of 0.1 has no such node.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from roq.wire.assignment import HostReport, ProcessKind, ProcessState

PORT = "clients"  # of a store's process
SEPARATOR = "="  # a host's name may have one, what follows it has none


class StoreState(StrEnum):
    """What its users make of it. LEAVING: it runs, gets nothing new, and gives away what it has. AWAY: it is being started."""

    RUNNING = "running"
    LEAVING = "leaving"
    AWAY = "away"


RUNNING, LEAVING, AWAY = StoreState


class StoreRegistration(msgspec.Struct, frozen=True):
    """One host's store, as its HCM says."""

    host: str
    address: str
    port: int
    state: StoreState

    @property
    def endpoint(self) -> str:
        """Of its ZeroMQ server."""
        return f"tcp://{self.address}:{self.port}"

    @property
    def node_name(self) -> str:
        """In the folder."""
        return SEPARATOR.join((self.host, f"{self.address}:{self.port}", self.state))


def parse_registration(node_name: str) -> StoreRegistration | None:
    """None: a later version wrote what this one can't read."""
    try:
        host, served, state = node_name.rsplit(SEPARATOR, 2)
        address, _, port = served.rpartition(":")
        return StoreRegistration(host, address, int(port), StoreState(state))
    except ValueError:
        return None


def store_of(report: HostReport) -> StoreRegistration | None:
    """What the host's report says of its store; None: it has none that was ever started."""
    for process in report.processes:
        if process.kind is ProcessKind.STORE and PORT in process.ports:
            runs = LEAVING if report.leaving else RUNNING
            state = runs if process.state is ProcessState.RUNNING else AWAY
            return StoreRegistration(report.host, report.address, process.ports[PORT], state)
    return None
