"""What every process of a host is handed when its HCM forks it (through the fork server, as msgpack; never pickle), and its
control endpoint (its Shutdown Monitor): REQUEST Shutdown | Ping | Configure | Fence → Done | Pong.

Bound on the process's own `control` port. Configure replaces the process's ProcessSpec while it runs (a changed policy).
"""

from __future__ import annotations

import msgspec

from roq.wire.assignment import MonitorAddress, ProcessSpec


class ChildSpec(msgspec.Struct, frozen=True):
    """Everything a child needs. `monitor` is always filled in for what belongs to a queue. `data_dir`: folder of the store's
    data in the host's state directory; only the store makes it and writes there. A child sends the datagram
    `ready <pid> <name>` to `ready_socket` once it serves, and beats `slot` of the board at `board` about once a second."""

    process: ProcessSpec
    host: str
    address: str  # to bind and to be reached at
    ports: dict[str, int]
    monitor: MonitorAddress
    board: str
    slot: int
    ready_socket: str
    zookeeper: str  # "zk1:2181,zk2:2181/RoQ"
    log_path: str
    log_level: str = "INFO"
    data_dir: str = ""
    card: str = ""  # file of the host's card; "": no security
    access: str = ""  # file of the access list, if there is one yet
    mixed: bool = False  # see roq.wire.card.SecurityMode
    restarted: bool = False  # a process of this name has served here before: others may count on what it knew


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop cleanly; the reply comes before the process ends."""

    reason: str = ""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Are you alive, and who are you?"""


class ConfigureProcess(msgspec.Struct, frozen=True, tag="Configure", array_like=True):
    """Go on with this specification."""

    spec: ProcessSpec


class FenceProcess(msgspec.Struct, frozen=True, tag="Fence", array_like=True):
    """The queue is led elsewhere under this term: stop if you are the process of this name and your term is lower. CallError
    otherwise: what is meant is gone, or belongs to that term by now."""

    name: str
    term: int


class TakeAccess(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The cluster's access list from now on (wire/card.py), signed by its authority."""

    signed: bytes


class Named(msgspec.Struct, frozen=True, array_like=True):
    """The subscribers that a Monitor had told that they are ready, with the seconds since it heard each. all: there is nobody
    else whom a Monitor up to the term of the order may have told that."""

    subscribers: dict[int, float]
    all: bool


class ProcessDone(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """The order was taken. named: by a Monitor that is fenced."""

    named: Named | None = None


class Pong(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who answers: process name, pid, and its counters."""

    name: str
    pid: int
    counters: dict[str, int]


Request = Shutdown | Ping | ConfigureProcess | FenceProcess | TakeAccess
Reply = ProcessDone | Pong
