"""What an HCM hands to the child process it forks (through the template, as msgpack; never pickle)."""

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
    restarted: bool = False  # a process of this name has served here before: others may count on what it knew
