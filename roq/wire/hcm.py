"""Conversation with a Host Configuration Manager's own interface (its ROUTER ↔ DEALER), and its registration payload."""

from __future__ import annotations

import msgspec

from roq.wire.assignment import HostReport

LOG_BYTES_MAX = 256 * 1024  # of a log in one answer: what people read


class GetProcesses(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What runs here?"""


class GetCapacity(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many Exchanges run here, and how many may? How are clock and disk?"""


class SetDraining(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuse (or again accept) anything new on this host, whatever the GCM wants."""

    draining: bool


class ShutdownHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop every process of this host cleanly, then the HCM itself. drain_seconds: so long at most, what runs there may move to
    other hosts before; one of 0.1 does not wait."""

    reason: str = ""
    drain_seconds: float = 0.0


class GetLog(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of what a process logs. name: of one that is or was here, "" for the HCM itself."""

    name: str
    bytes_max: int


class Processes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetProcesses."""

    report: HostReport
    draining: bool


class Capacity(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetCapacity. Fractions 0..1. time: the host's clock, seconds since 1970; version: of RoQ, as the HCM was
    started; disk_free_bytes: where it keeps its state, for us to use. 0, "" and -1: an older HCM, which does not tell."""

    exchanges: int
    exchanges_max: int
    cpu_fraction: float
    memory_fraction: float
    memory_bytes: int
    time: float = 0.0
    version: str = ""
    disk_free_bytes: int = -1


class LogEnd(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetLog. size: of the whole log; data: whole lines from its end, LOG_BYTES_MAX at most."""

    size: int
    data: bytes


class OrderTaken(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """The order was taken."""


class HostPayload(msgspec.Struct, frozen=True):
    """`payload` of the Curator registration in `hcm-list/hcm/<host>`. stopping: the host ends soon, and waits a while for what
    it runs to move to others; none of 0.1 says or hears it."""

    incarnation: str
    exchanges_max: int
    draining: bool = False
    cpu_fraction: float = 0.0
    memory_fraction: float = 0.0
    stopping: bool = False


Request = GetProcesses | GetCapacity | SetDraining | ShutdownHost | GetLog
Reply = Processes | Capacity | OrderTaken | LogEnd
