"""What an operator settles for a whole cluster: the JSON of `options`, where a field that is not there has its default; and
what is asked about it, as part of the conversation with the GCM (roq/wire/gcm.py)."""

from __future__ import annotations

import msgspec

from roq.errors import InvalidConfiguration
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.limits import FRAME_BYTES_CEILING, FRAME_BYTES_MAX, FRAME_OVERHEAD_BYTES
from roq.wire.policy import Policy
from roq.wire.recording import Record


class QueueTemplate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a queue gets that a publisher or subscriber makes because it is missing; see `Cluster.create_queue`."""

    replication: int = 1
    overflow: Overflow = Overflow.DROP
    max_frame_bytes: int = FRAME_BYTES_MAX
    policy: Policy | None = None
    record: Record | None = None

    @property
    def settings(self) -> QueueSettings:
        """As a queue keeps them."""
        return QueueSettings(self.replication, Overflow(self.overflow), self.max_frame_bytes)

    def check(self) -> QueueTemplate:
        """Itself. Raises InvalidConfiguration, InvalidPolicy."""
        if self.replication < 1:
            raise InvalidConfiguration(f"replication is at least 1, got {self.replication}")
        if self.overflow not in tuple(Overflow):
            raise InvalidConfiguration(f"overflow is 'drop' or 'block', got '{self.overflow}'")
        if not 2 * FRAME_OVERHEAD_BYTES <= self.max_frame_bytes <= FRAME_BYTES_CEILING:
            raise InvalidConfiguration(f"max_frame_bytes is between {2 * FRAME_OVERHEAD_BYTES} and {FRAME_BYTES_CEILING}")
        policy, record = self.policy and self.policy.check(), self.record and self.record.check()
        overflow = Overflow(self.overflow)
        return msgspec.structs.replace(self, overflow=overflow, policy=policy, record=record)


class ClusterOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """template: of missing queues. rebalance: Exchanges, Monitors and masters move by themselves to hosts that have much less
    of them."""

    template: QueueTemplate = QueueTemplate()
    rebalance: bool = True


class CreateMissing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Create this queue by the cluster's template, unless there is one, however it is. Answered when it serves."""

    name: str
    transaction: str


class SetTemplate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How queues are made that are missing, from now on."""

    template: QueueTemplate
    transaction: str


class SetRebalance(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whether the load of hosts is levelled from now on."""

    on: bool
    transaction: str


class GetOptions(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What is settled for the whole cluster?"""


class OptionsInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetOptions."""

    options: ClusterOptions
