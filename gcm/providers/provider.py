"""What a provider of hosts is: three calls. They block, may take long, and are made in threads (calls.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from roq.errors import RoqError


class ProviderFailed(RoqError):
    """The provider of hosts did not do what it was asked: see its own log for why."""


class ProviderExhausted(ProviderFailed):
    """The provider of hosts has no more to give now: raise the quota there, or lower `roq fleet set --max`."""


@dataclass(frozen=True)
class HostSpec:
    """A machine that is wanted. fleet: the cluster's part of all names, also a label. environment: settings of its roq-hcm, as
    ROQ_… variables. card: its card's file, b"" in a cluster without security."""

    name: str
    fleet: str
    environment: Mapping[str, str] = field(default_factory=dict)
    card: bytes = field(default=b"", repr=False)


class HostProvider(Protocol):
    """Each call is idempotent by name, and may have taken effect in part when it fails. Any two may be made at the same time,
    but for one name. Raises ProviderFailed or ProviderExhausted."""

    def create(self, spec: HostSpec) -> None:
        """There is a machine of this name, which runs roq-hcm with this environment, sooner or later."""

    def names(self, fleet: str) -> list[str]:
        """Names of all machines of this fleet that cost something, in whatever state; one twice if it was made twice."""

    def destroy(self, name: str, fleet: str) -> None:
        """There is no machine of this name in the fleet any more, soon. One that is not the fleet's is left alone."""
