"""Which proofs of attachment are missing, and who is ready because none is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from roq.pubsub.monitor.records import CARRYING, Exchange, ExchangeState, Instruction, Probe, Retire, SubscriberRecord

JOINING_SECONDS = 2.0  # moves and proofs wait at most this long for a subscriber to become ready
JOINING_ALL_SECONDS = 5.0  # and this long while one joins after the other, as a consumer does that crashes at once
PROVING_SILENT_SECONDS = 2.5  # two reports missed: with the report before its death, the living wait less than 3 s
PROVING_SECONDS = 10.0  # whoever reports and has not proved an Exchange by then does not read


def missing_proofs(exchanges: Collection[Exchange], subscribers: Collection[SubscriberRecord]) -> list[Instruction]:
    """One probe through every Exchange that some subscriber, or the Monitor, has yet to prove; RETIRE again for late ones."""
    out: list[Instruction] = [Retire(one.address) for one in exchanges if one.state is ExchangeState.RETIRING]
    for one in exchanges:
        waits, token = one.state in (*CARRYING, ExchangeState.STARTING), one.address.token
        if waits and (not one.heard or any(token not in subscriber.attached for subscriber in subscribers)):
            out.append(Probe(one.address))
    return out


def carrying_tokens(exchanges: Mapping[str, Exchange]) -> set[str]:
    """Tokens of the Exchanges that a subscriber has to be attached to before it is ready."""
    return {one.address.token for one in exchanges.values() if one.state in CARRYING}


def possible_tokens(exchanges: Mapping[str, Exchange]) -> set[str]:
    """Those, and of the Exchanges that may have carried messages before this Monitor: before it is told that it is ready."""
    starting = {one.address.token for one in exchanges.values() if one.state is ExchangeState.STARTING and one.may_carry}
    return carrying_tokens(exchanges) | starting


def proved(exchange: Exchange, subscribers: Collection[SubscriberRecord], now: float) -> bool:
    """Whether this Exchange may take publishers: the Monitor hears it, and nobody is waited for any more. One that is dead or
    frozen is not, nor for ever one that reads nothing although others do: it is not ready then, and sees from the numbers
    what it missed. Nor, for ever, are those that join one after the other."""
    if not exchange.heard:
        return False
    token = exchange.address.token
    missing = [one for one in subscribers if token not in one.attached and _waited_for(one, now)]
    if missing and now - exchange.proving_since > PROVING_SECONDS:
        return not any(one.ready or one.returning for one in missing) or any(token in one.attached for one in subscribers)
    return not missing


def _waited_for(subscriber: SubscriberRecord, now: float) -> bool:
    if now - subscriber.last_report > PROVING_SILENT_SECONDS:
        return False
    return subscriber.ready or now - subscriber.joined < (PROVING_SECONDS if subscriber.returning else JOINING_SECONDS)


def become_ready(exchanges: Mapping[str, Exchange], subscribers: Mapping[int, SubscriberRecord]) -> list[SubscriberRecord]:
    """Mark those ready that are attached to all that carries messages now; those that were not ready before."""
    carrying = carrying_tokens(exchanges)
    fresh = [one for one in subscribers.values() if carrying and not one.ready and carrying <= one.attached]
    for subscriber in fresh:
        subscriber.ready = True
    return fresh
