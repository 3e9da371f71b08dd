"""What a policy would have decided on a recorded KPI stream (`roq policy replay`). Pure.

With the policy that was in force it gives the decisions that were taken. With another one, the record still shows what the
real queue did, so a decision of the other policy has no effect in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from roq.pubsub.scaling.decide import Memory, decide
from roq.wire.kpi import Decision, QueueKpi
from roq.wire.policy import Policy


def replay(lines: Iterable[QueueKpi], policy: Policy) -> list[Decision]:
    """All decisions, in order. The first record must be the first that the ScalingProcess saw for an exact repetition."""
    memory = Memory()
    decisions: list[Decision] = []
    for kpi in lines:
        found, memory = decide(kpi, policy, memory)
        decisions += found
    return decisions
