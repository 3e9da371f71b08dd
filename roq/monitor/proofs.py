"""Which proofs of attachment are missing. Pure."""

from __future__ import annotations

from collections.abc import Collection

from roq.monitor.records import CARRYING, Exchange, ExchangeState, Instruction, Probe, Retire, Subscriber


def missing_proofs(exchanges: Collection[Exchange], subscribers: Collection[Subscriber]) -> list[Instruction]:
    """One probe through every Exchange that some subscriber has yet to prove; RETIRE again for who came late."""
    out: list[Instruction] = [Retire(one.address) for one in exchanges if one.state is ExchangeState.RETIRING]
    for one in exchanges:
        waits = one.state in (*CARRYING, ExchangeState.STARTING)
        if waits and any(one.address.token not in subscriber.attached for subscriber in subscribers):
            out.append(Probe(one.address))
    return out
