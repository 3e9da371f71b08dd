"""Which proofs of attachment are missing, and who is ready because none is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from roq.monitor.records import CARRYING, Exchange, ExchangeState, Instruction, Probe, Retire, Subscriber


def missing_proofs(exchanges: Collection[Exchange], subscribers: Collection[Subscriber]) -> list[Instruction]:
    """One probe through every Exchange that some subscriber has yet to prove; RETIRE again for who came late."""
    out: list[Instruction] = [Retire(one.address) for one in exchanges if one.state is ExchangeState.RETIRING]
    for one in exchanges:
        waits = one.state in (*CARRYING, ExchangeState.STARTING)
        if waits and any(one.address.token not in subscriber.attached for subscriber in subscribers):
            out.append(Probe(one.address))
    return out


def carrying_tokens(exchanges: Mapping[str, Exchange]) -> set[str]:
    """Tokens of the Exchanges that a subscriber has to be attached to before it is ready."""
    return {one.address.token for one in exchanges.values() if one.state in CARRYING}


def become_ready(exchanges: Mapping[str, Exchange], subscribers: Mapping[int, Subscriber]) -> list[Subscriber]:
    """Mark those ready that are attached to all that carries messages now; those that were not ready before."""
    carrying = carrying_tokens(exchanges)
    fresh = [one for one in subscribers.values() if carrying and not one.ready and carrying <= one.attached]
    for subscriber in fresh:
        subscriber.ready = True
    return fresh
