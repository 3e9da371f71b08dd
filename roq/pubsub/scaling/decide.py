"""When to scale: one KPI record and what is remembered in, decisions out (thesis §6.4.9; EQS figure 6.1, plus scaling in).

Pure. The only clock is the records' own time, and whatever became of a decision is learnt from later records, so that a
recorded stream and a policy determine every decision. What is over its limit, and who moves where: load.py.

Theory of operation
- Over a limit for OVER_RECORDS records in a row: *rebalance* if that cures it, else *scale out* by as many Exchanges as it
  takes, else rebalance if that helps at all, else *hold* (told once per cause).
- Everything would stay below (1 - hysteresis) of every limit with one Exchange less, UNDER_RECORDS in a row: *scale in*.
- Fewer than min_exchanges: scale out at once, but leave the GCM its time to bring back an Exchange that vanished.
- A decision is *pending* until a record shows its effect or its time is up. Then the records' rates settle, and the queue
  rests for the cool-down. Remedies that did not help are repeated ever more rarely (Backoff).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from roq.pubsub.scaling import load
from roq.pubsub.scaling.load import (
    Scope,
    Violation,
    balance_scale,
    hard_scale,
    has_rules,
    hosts_above,
    hottest_host,
    in_words,
    violations,
)
from roq.wire.kpi import Decision, QueueKpi
from roq.wire.policy import Policy

LIVING = ("starting", "active")  # states of Exchanges that stay; the others are on their way out
OVER_RECORDS = 2  # one record may straddle a move or a burst; two in a row still leave time to follow a rise within 5 s
UNDER_RECORDS = 6  # longer than members take to rejoin a restarted Monitor, whose first rates are 0
BELOW_RECORDS = 2
GAP_SECONDS = 3.0  # records further apart than this are not "in a row"
SETTLE_SECONDS = 2.0  # a rate is a mean over the last second: after this it is one of the new arrangement only
RECOVERY_SECONDS = 10.0  # ZooKeeper session + restart elsewhere: how long the GCM may take to replace an Exchange
CLOCK_STEP_MAX = 60.0  # seconds that one record may advance the clock: the records' clock may jump
OUT_SECONDS = 15.0  # a new Exchange shows up active within this, or the scale-out failed
MOVE_SECONDS = 15.0  # publishers show up at their new Exchange within this
IN_SECONDS = 60.0  # a drained Exchange disappears within this
BACKOFF_FIRST_SECONDS = 30.0
BACKOFF_MAX_SECONDS = 600.0
CALM_SECONDS = 60.0  # without any violation: then a hold may be told again
RELIEF = 0.1  # a remedy helped a host if it is this much less busy
LOAD_CHANGE = 0.25  # another load than before: a rebalance may help again


class Pending(msgspec.Struct, frozen=True):
    """A decision whose effect has not shown yet."""

    action: str
    until: float
    active: int = 0  # scale-out: so many Exchanges active means done …
    before: frozenset[str] = frozenset()  # … once no publisher of `moves` is on one of these any more
    exchange: str = ""  # scale-in: gone means done
    moves: tuple[tuple[int, str], ...] = ()  # rebalance: each there or gone means done


class Backoff(msgspec.Struct, frozen=True):
    """Not before `until`; each time longer."""

    until: float = 0.0
    wait: float = 0.0

    def longer(self, now: float) -> Backoff:
        """Twice the wait, from now on."""
        wait = min(BACKOFF_MAX_SECONDS, max(BACKOFF_FIRST_SECONDS, 2 * self.wait))
        return Backoff(now + wait, wait)


class Memory(msgspec.Struct, frozen=True):
    """All that is remembered from one record to the next. Times are on its own `clock` (seconds), which never goes back."""

    clock: float = 0.0
    time: float = 0.0  # of the last record
    term: int = 0
    over: int = 0  # records in a row
    under: int = 0
    below: int = 0
    publishers: int = 0
    exchanges: frozenset[str] = frozenset()
    draining: tuple[str, float] = ("", 0.0)  # an Exchange somebody drains, and since when
    pending: Pending | None = None
    settled_at: float = 0.0
    rest_until: float = 0.0
    grace_until: float = 0.0
    out: Backoff = Backoff()  # scale-outs that brought no Exchange
    host: Backoff = Backoff()  # scale-outs that a host rule asked for and that did not relieve it
    hottest: float = 0.0  # how far above its limit the busiest host was then
    rebalance: Backoff = Backoff()
    rebalanced: tuple[frozenset[str], int, float] = (frozenset(), 0, 0.0)  # Exchanges, publishers, load back then
    settled: frozenset[int] = frozenset()  # publishers rebalanced since then: none goes to and fro
    told: tuple[str, ...] = ()  # causes of holds already told
    calm_since: float = 0.0


def decide(kpi: QueueKpi, policy: Policy, memory: Memory) -> tuple[list[Decision], Memory]:
    """The decisions that this record calls for (mostly none), and the memory for the next one."""
    if kpi.term < memory.term:
        return [], memory  # an old Monitor that doesn't know yet
    active = [each for each in kpi.exchanges if each.state == "active"]
    found = violations(kpi, policy, active)
    memory = _observe(kpi, policy, memory)
    if memory.pending is not None:
        decisions, memory = _follow_up(kpi, policy, memory, len(active))
        if decisions or memory.pending is not None:
            return decisions, memory
    memory = _count(kpi, policy, memory, bool(found), len(active))
    now, bounds = memory.clock, policy.bounds
    living = sum(each.state in LIVING for each in kpi.exchanges)
    if living < bounds.min_exchanges and memory.below >= BELOW_RECORDS:
        if now < memory.grace_until or now < memory.out.until:
            return [], memory
        missing = bounds.min_exchanges - living
        return _scale_out(kpi, policy, memory, f"{living} Exchanges, at least {bounds.min_exchanges} wanted", missing, ())
    if now < memory.rest_until:
        return [], memory
    if memory.over >= OVER_RECORDS:
        return _relieve(kpi, policy, memory, found)
    if memory.under >= UNDER_RECORDS:
        return _scale_in(kpi, policy, memory)
    return _finish_drain(kpi, policy, memory, len(active))


# --- what the record shows ---------------------------------------------------------------------------------------------


def _observe(kpi: QueueKpi, policy: Policy, memory: Memory) -> Memory:
    """The clock, and who came and went."""
    step = kpi.time - memory.time if memory.time else 0.0
    clock = memory.clock + min(max(step, 0.0), CLOCK_STEP_MAX)
    ids = memory.exchanges
    if len(ids) != len(kpi.exchanges) or any(each.id not in ids for each in kpi.exchanges):
        ids = frozenset(each.id for each in kpi.exchanges)
    broken = kpi.term != memory.term or not 0 <= step <= GAP_SECONDS
    memory = replace(
        memory,
        clock=clock,
        time=kpi.time,
        term=kpi.term,
        over=0 if broken else memory.over,
        under=0 if broken or len(kpi.publishers) * 2 < memory.publishers else memory.under,
        below=0 if broken else memory.below,
        publishers=len(kpi.publishers),
        exchanges=ids,
        grace_until=clock + RECOVERY_SECONDS if _vanished(kpi, memory, ids) else memory.grace_until,
    )
    draining = next((each.id for each in kpi.exchanges if each.state not in LIVING), "")
    return memory if draining == memory.draining[0] else replace(memory, draining=(draining, clock))


def _vanished(kpi: QueueKpi, memory: Memory, ids: frozenset[str]) -> bool:
    """Did an Exchange go that nobody drained? None seen so far counts too: the Monitor may be waiting for reports."""
    if memory.exchanges is ids:
        return not memory.term and not ids
    return bool(memory.exchanges - ids - {memory.draining[0]})


def _count(kpi: QueueKpi, policy: Policy, memory: Memory, over: bool, active: int) -> Memory:
    """Records in a row that call for something. None counts before the rates have settled."""
    living = sum(each.state in LIVING for each in kpi.exchanges)
    below = memory.below + 1 if living < policy.bounds.min_exchanges else 0
    settled = memory.clock >= memory.settled_at
    under = (
        settled and not over and active == len(kpi.exchanges) > policy.bounds.min_exchanges and _spare(kpi, policy) is not None
    )
    calm_since = memory.clock if over else memory.calm_since
    return replace(
        memory,
        over=memory.over + 1 if over and settled else 0,
        under=memory.under + 1 if under else 0,
        below=below,
        calm_since=calm_since,
        told=() if memory.clock - calm_since >= CALM_SECONDS else memory.told,
    )


def _spare(kpi: QueueKpi, policy: Policy) -> tuple[load.Bin, load.Moves, float] | None:
    """The Exchange the queue can do without, if all limits would be kept with hysteresis; see load.drain."""
    if not has_rules(policy):
        return None
    ceiling, left, queue = 1 - policy.bounds.hysteresis, len(kpi.exchanges) - 1, policy.queue
    messages, publishers = queue.max_messages_per_second_per_exchange, queue.max_publishers_per_exchange
    if messages is not None and kpi.messages_per_second > ceiling * messages * left:
        return None
    if publishers is not None and len(kpi.publishers) > ceiling * publishers * left:
        return None
    hard = hard_scale(policy)
    if max(kpi.messages_per_second * hard.message, kpi.bytes_per_second * hard.byte) > ceiling * left:
        return None
    spare = load.drain(load.bins_of(kpi), balance_scale(policy, kpi), hard, ceiling)
    return spare if spare is not None and _hosts_allow(kpi, policy, spare[0], ceiling) else None


def _hosts_allow(kpi: QueueKpi, policy: Policy, victim: load.Bin, ceiling: float) -> bool:
    """Would every other host stay below its limits? On the safe side: as if each had one core and got all of the work."""
    limit = policy.host.max_cpu_fraction
    moved = next(each.cpu_fraction for each in kpi.exchanges if each.id == victim.id)
    others = {each.host for each in kpi.exchanges if each.id != victim.id}
    if others & hosts_above(kpi, policy, ceiling):
        return False
    return limit is None or all(
        host.cpu_fraction + moved <= ceiling * limit for host in kpi.hosts if host.host in others and host.host != victim.host
    )


def _follow_up(kpi: QueueKpi, policy: Policy, memory: Memory, active: int) -> tuple[list[Decision], Memory]:
    """Has the pending decision taken effect, or has its time run out?"""
    pending = memory.pending
    assert pending is not None
    at = {each.id: each.exchange for each in kpi.publishers}
    match pending.action:
        case "scale-out":
            created = active >= pending.active
            done = created and all(at.get(publisher) not in pending.before for publisher, _ in pending.moves)
        case "scale-in":
            done = pending.exchange not in memory.exchanges
        case _:
            done = all(at.get(publisher, exchange) == exchange for publisher, exchange in pending.moves)
    now = memory.clock
    if not done and now < pending.until:
        return [], memory
    memory = replace(
        memory,
        pending=None,
        over=0,
        under=0,
        below=0,
        settled_at=now + SETTLE_SECONDS,
        rest_until=now + policy.bounds.cooldown_seconds,
    )
    if pending.action != "scale-out":
        return [], memory
    if created:
        return [], replace(memory, out=Backoff())
    backoff = memory.out.longer(now)
    shown = f"{active} of {pending.active} Exchanges are active {OUT_SECONDS:g} s after scaling out"
    cause = f"{shown}; no other try for {backoff.wait:g} s"
    return [Decision(kpi.time, "hold", cause)], replace(memory, out=backoff)


# --- remedies ----------------------------------------------------------------------------------------------------------


def _relieve(kpi: QueueKpi, policy: Policy, memory: Memory, found: Sequence[Violation]) -> tuple[list[Decision], Memory]:
    """Something is over its limit for long enough: rebalance, scale out, rebalance anyway, or hold."""
    now, bounds = memory.clock, policy.bounds
    cause = in_words(found)
    scopes = {each.scope for each in found if each.ours}
    hot = {each.subject for each in found if each.scope is Scope.HOST and each.ours}
    hottest = hottest_host(kpi, policy) if hot else 0.0
    basis = (memory.exchanges, len(kpi.publishers), kpi.messages_per_second + kpi.bytes_per_second)
    if memory.rebalance.wait and _changed(memory.rebalanced, basis):
        memory = replace(memory, rebalance=Backoff(), settled=frozenset())
    moves, cures = _rebalance_plan(kpi, policy, memory.settled, scopes, hot)
    if hottest < (1 - RELIEF) * memory.hottest:
        memory = replace(memory, host=Backoff())
    may_move = bool(moves) and now >= memory.rebalance.until
    room = bounds.max_exchanges - len(kpi.exchanges)
    why = ""
    if not (may_move and cures):
        if not scopes:
            why = "this queue's Exchanges are not what keeps it busy"
        elif room <= 0:
            why = f"already {len(kpi.exchanges)} Exchanges (at most {bounds.max_exchanges})"
        elif now < memory.out.until:
            why = "the last scale-out brought no Exchange"
        elif scopes == {Scope.HOST} and now < memory.host.until:
            why = "one more Exchange did not relieve the host last time"
        else:
            decisions, grown = _scale_out(kpi, policy, memory, cause, _needed(kpi, policy, scopes), hot)
            if decisions:
                return decisions, replace(grown, host=memory.host.longer(now), hottest=hottest) if hot else grown
            why = "no other Exchange could carry what one publisher sends"
    if may_move:
        pending = Pending("rebalance", now + MOVE_SECONDS, moves=tuple(moves))
        cure = "moving publishers to calmer hosts" if hot else "moving publishers cures it"
        reason = cure if cures else f"{why}; moving publishers helps"
        decision = Decision(kpi.time, "rebalance", f"{cause}; {reason}", moves=tuple(moves))
        settled = memory.settled | {publisher for publisher, _ in moves}
        memory = replace(memory, rebalance=memory.rebalance.longer(now), rebalanced=basis, settled=settled)
        return [decision], replace(memory, pending=pending, told=())
    key = "/".join(sorted({each.scope.value for each in found})) + why
    if key in memory.told:
        return [], memory
    return [Decision(kpi.time, "hold", f"{cause}; {why}")], replace(memory, told=(*memory.told, key))


def _changed(before: tuple[frozenset[str], int, float], now: tuple[frozenset[str], int, float]) -> bool:
    """Are these other circumstances than at the last rebalance?"""
    return before[:2] != now[:2] or abs(now[2] - before[2]) > LOAD_CHANGE * before[2]


def _rebalance_plan(
    kpi: QueueKpi, policy: Policy, settled: frozenset[int], scopes: set[Scope], hot: set[str]
) -> tuple[load.Moves, bool]:
    """(moves among existing Exchanges that help, whether they cure everything). Hot hosts get nothing more."""
    hard, warm = hard_scale(policy), hosts_above(kpi, policy, load.MARGIN)
    bins = load.bins_of(kpi)
    targets = [each for each in bins if each.host not in warm and each.level(hard) <= 1.0]
    moves: load.Moves = []
    cures = Scope.QUEUE not in scopes
    if Scope.EXCHANGE in scopes:
        sources = [each for each in bins if each.level(hard) > 1.0]
        before = load.worst(bins, hard)
        moves = load.relieve(sources, targets, hard, hard, load.MARGIN, settled)
        after = load.worst(bins, hard)
        if after > load.MARGIN and after > (1 - load.GAIN) * before:
            return [], False  # not worth a move
        cures = cures and after <= 1.0
    if Scope.HOST in scopes:
        scale = balance_scale(policy, kpi)
        sources = [each for each in bins if each.host in hot]
        relief = load.relieve(sources, targets, scale, hard, load.worst(sources, scale) / 2, settled)
        moves, cures = moves + relief, cures and bool(relief)
    return load.last_moves(moves), cures and bool(moves)


def _needed(kpi: QueueKpi, policy: Policy, scopes: set[Scope]) -> int:
    """How many more Exchanges the averages call for (what single Exchanges and hosts call for is load.scale_out's business)."""
    wanted = have = sum(each.state in LIVING for each in kpi.exchanges)
    messages, publishers = policy.queue.max_messages_per_second_per_exchange, policy.queue.max_publishers_per_exchange
    if Scope.QUEUE in scopes and messages is not None:
        wanted = max(wanted, _whole(kpi.messages_per_second / (load.MARGIN * messages)))
    if Scope.QUEUE in scopes and publishers is not None:
        wanted = max(wanted, _whole(len(kpi.publishers) / publishers))
    return wanted - have


def _whole(number: float) -> int:
    """The next whole number, up."""
    return -int(-number // 1)


def _scale_out(
    kpi: QueueKpi, policy: Policy, memory: Memory, cause: str, needed: int, hot: Collection[str]
) -> tuple[list[Decision], Memory]:
    """One decision per Exchange to create, with the publishers that will move to it; none if it would not help."""
    room = policy.bounds.max_exchanges - len(kpi.exchanges)
    plans = load.scale_out(load.bins_of(kpi), needed, hot, room, balance_scale(policy, kpi), hard_scale(policy))
    if not plans:
        return [], memory
    total = len(plans)
    decisions = [
        Decision(kpi.time, "scale-out", f"{cause}; new Exchange {index} of {total}", moves=tuple(moves))
        for index, moves in enumerate(plans, 1)
    ]
    active = sum(each.state == "active" for each in kpi.exchanges)
    moved = tuple(move for moves in plans for move in moves)
    pending = Pending("scale-out", memory.clock + OUT_SECONDS, active + total, memory.exchanges, moves=moved)
    return decisions, replace(memory, pending=pending, told=())


def _scale_in(kpi: QueueKpi, policy: Policy, memory: Memory) -> tuple[list[Decision], Memory]:
    """Drain the least loaded Exchange."""
    spare = _spare(kpi, policy)
    if spare is None:
        return [], memory
    victim, moves, fullest = spare
    left = len(kpi.exchanges) - 1
    detail = f"; the fullest would be at {fullest:.0%} of its limit" if any(hard_scale(policy)) else ""
    cause = (
        f"{left} of {left + 1} Exchanges keep every limit with {policy.bounds.hysteresis:.0%} to spare for {memory.under} s"
        f" ({kpi.messages_per_second:,.0f} messages/s, {len(kpi.publishers)} publishers{detail})"
    )
    return _drain(kpi, memory, victim.id, victim.host, cause, tuple(moves))


def _finish_drain(kpi: QueueKpi, policy: Policy, memory: Memory, active: int) -> tuple[list[Decision], Memory]:
    """An Exchange that was drained but never stopped (a ScalingProcess died in between): stop it."""
    exchange, since = memory.draining
    if not exchange or memory.clock - since < IN_SECONDS or not active or not has_rules(policy):
        return [], memory
    host = next((each.host for each in kpi.exchanges if each.id == exchange), "")
    cause = f"Exchange {exchange} has been draining for {memory.clock - since:.0f} s and nobody stopped it"
    return _drain(kpi, replace(memory, draining=(exchange, memory.clock)), exchange, host, cause, ())


def _drain(
    kpi: QueueKpi, memory: Memory, exchange: str, host: str, cause: str, moves: tuple[tuple[int, str], ...]
) -> tuple[list[Decision], Memory]:
    decision = Decision(kpi.time, "scale-in", cause, exchange=exchange, host=host, moves=moves)
    pending = Pending("scale-in", memory.clock + IN_SECONDS, exchange=exchange)
    return [decision], replace(memory, pending=pending, told=())
