"""Control endpoint of every RoQ process (its Shutdown Monitor): REQUEST Shutdown | Ping | Configure | Fence → Done | Pong.

Bound on the process's own `control` port. Configure replaces the process's ProcessSpec while it runs (a changed policy).
"""

from __future__ import annotations

import msgspec

from roq.wire.assignment import ProcessSpec


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


Request = Shutdown | Ping | ConfigureProcess | FenceProcess
Reply = ProcessDone | Pong
