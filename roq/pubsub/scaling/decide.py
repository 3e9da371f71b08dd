"""When to scale: one KPI record and what is remembered in, decisions out (thesis §6.2.3 and §6.4.9, plus scaling in).

Pure. The only clock is the records' own time, and whatever became of a decision is learnt from later records, so that a
recorded stream and a policy determine every decision. What is over its limit, and who moves where: load.py. Which targets are
missed: targets.py.

Theory of operation
- Over a limit for OVER_RECORDS records in a row: *rebalance* if that cures it, else *scale out* by as many Exchanges as it
  takes, else rebalance if that helps at all, else *hold* (told once per cause).
- A target is missed: rebalance once if that evens the load out, else scale out by one, or by as many as the load per Exchange
  at which it was missed before calls for. Such an Exchange is on trial (TargetTrial): if each has less to do and is late all
  the same, it was in vain, and no other one is tried before they have as much to do again: hold. That is known for an hour
  after it was last so, however often the queue is in time in between. If it cured it, what they carried then is a limit from
  now on.
- What no Exchange can help is told once, and stops nothing else.
- Everything would stay below (1 - hysteresis) of every limit and target with one Exchange less, UNDER_RECORDS in a row, and for
  so long that the removal is worth its price (_price): *scale in*. One that had to be taken back soon doubles the price.
- Fewer than min_exchanges: scale out at once, but leave the GCM its time to bring back an Exchange that vanished.
- A decision is *pending* until a record shows its effect or its time is up. Then the records' rates settle, and the queue
  rests for the cool-down. Remedies that did not help are repeated ever more rarely (Backoff).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum, auto

import msgspec
from msgspec.structs import replace

from roq.pubsub.scaling import load, targets
from roq.pubsub.scaling.load import (
    Scope,
    Violation,
    balance_scale,
    hard_scale,
    hosts_above,
    hottest_host,
    in_words,
    violations,
)
from roq.wire.kpi import Decision, QueueKpi
from roq.wire.policy import Policy, TargetRule

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
CALM_SECONDS = 60.0  # without what it was about: then a hold may be told again
WAITING = "the Exchange that was added for it has not shown its effect yet"
IN_VAIN = "another Exchange did not help last time, so it is not the Exchanges"
LESS_EACH_TIME = "each time Exchanges had less to do than the time before, so it is not the Exchanges"
HOST_CURE, RATE_CURE = "moving publishers to calmer hosts", "moving publishers cures it"
RELIEF = 0.1  # a remedy helped a host if it is this much less busy
LOAD_CHANGE = 0.25  # another load than before: what did not help may help now
VERDICT_SECONDS = 20.0  # publishers move, rates settle, and a subscriber's p99 is one of its last 10 s
VAIN_RECORDS = 10  # a percentile is noisy, and what is known then holds for long
REFUTED_MAX = 2  # cures that did not last: before, machines and messages may have changed
NEAR = 0.8  # of the load at which it was missed: another Exchange comes now, in time for a rise of some seconds
LOADS_KEPT = 10  # records: the load that made it late is one of these
UNEVEN = 1.5  # times the mean: an Exchange with so much more than its share is relieved before there is another one
STRAIN_SECONDS = 3600.0  # messages and machines change: after this a scale-in may find out anew
EXCHANGE_COST_SECONDS = 3.0  # what an Exchange less, and one more again, takes: to decide, to start, to settle …
MOVE_COST_SECONDS = 0.1  # … and for each publisher that moves, there and back
TAKEN_BACK = 10.0  # a scale-in that does not last so many times its price came too early
PRICE_MAX_SECONDS, DOUBLINGS_MAX = 600.0, 10


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


class TargetTrial(msgspec.Struct, frozen=True):
    """An Exchange that a missed target asked for: how things stood then, see targets.level and targets.work."""

    level: float
    work: float
    exchanges: int
    until: float  # no verdict before
    vain: int = 0  # records in a row by which it was in vain

    @property
    def in_vain(self) -> bool:
        """That is known, whatever later records of the same work say."""
        return self.vain >= VAIN_RECORDS


class TrialVerdict(StrEnum):
    """What became of a trial."""

    NONE = auto()  # nothing against another one
    OPEN = auto()
    IN_VAIN = auto()


class ReportedHold(msgspec.Struct, frozen=True):
    """A hold that was reported. about: scope, group and hopelessness of what it was about; at: when that was last so."""

    key: str
    about: frozenset[tuple[Scope, str, str]]
    at: float


class Credit(msgspec.Struct, frozen=True):
    """What scale-ins have to earn. since: one Exchange less would do since then; doublings: of the price; spent_at, spent: when
    the last one was decided, for which price."""

    since: float = 0.0
    doublings: int = 0
    spent_at: float = 0.0
    spent: float = 0.0

    def taken_back(self, now: float) -> Credit:
        """A scale-out follows: too soon, or late enough to forget that any came too soon."""
        if not self.spent:
            return self
        early = now - self.spent_at < TAKEN_BACK * self.spent
        return Credit(self.since, min(DOUBLINGS_MAX, self.doublings + 1) if early else 0)


class Memory(msgspec.Struct, frozen=True):
    """All that is remembered from one record to the next. Times are on its own `clock` (seconds), which never goes back."""

    clock: float = 0.0
    time: float = 0.0  # of the last record
    term: int = 0
    over: int = 0  # records in a row: something is over its limit or misses its target, and an Exchange may help
    beyond: int = 0  # … and none can
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
    told: tuple[ReportedHold, ...] = ()
    aim: TargetRule = TargetRule()  # what follows is about these targets
    missed_at: float = 0.0  # one of them, last
    trial: TargetTrial | None = None
    loads: tuple[float, ...] = ()  # messages/s per Exchange, in the last records with these Exchanges
    strain: float = 0.0  # messages/s per Exchange at which a target was missed; 0: not known
    strained_at: float = 0.0  # and when, or when an Exchange added for that was last seen to be in vain
    proved: bool = False  # an Exchange more cured it, under the same load
    refuted: int = 0  # so many times in a row it was missed again with clearly less than that
    credit: Credit = Credit()


def decide(kpi: QueueKpi, policy: Policy, memory: Memory) -> tuple[list[Decision], Memory]:
    """The decisions that this record calls for (mostly none), and the memory for the next one."""
    if kpi.term < memory.term:
        return [], memory  # an old Monitor that doesn't know yet
    active = [each for each in kpi.exchanges if each.state == "active"]
    memory = _observe(kpi, policy, memory)
    decisions: list[Decision]
    if memory.pending is not None:
        decisions, memory = _follow_up(kpi, policy, memory, len(active))
        if decisions or memory.pending is not None:
            return decisions, memory
    found = violations(kpi, policy, active) + (_judged(kpi, policy, memory) if active else [])
    memory = _count(kpi, policy, memory, found, len(active))
    now, bounds = memory.clock, policy.bounds
    living = sum(each.state in LIVING for each in kpi.exchanges)
    if living < bounds.min_exchanges and memory.below >= BELOW_RECORDS:
        if now < memory.grace_until or now < memory.out.until:
            return [], memory
        missing = bounds.min_exchanges - living
        return _scale_out(kpi, policy, memory, f"{living} Exchanges, at least {bounds.min_exchanges} wanted", missing, ())
    if now < memory.rest_until:
        return [], memory
    decisions = []
    if memory.over >= OVER_RECORDS:
        decisions, memory = _relieve(kpi, policy, memory, [each for each in found if not each.hopeless])
    if not decisions and memory.beyond >= OVER_RECORDS:
        decisions, memory = _report(kpi, memory, [each for each in found if each.hopeless])
    if decisions or memory.over >= OVER_RECORDS:
        return decisions, memory
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
        beyond=0 if broken else memory.beyond,
        under=0 if broken or len(kpi.publishers) * 2 < memory.publishers else memory.under,
        below=0 if broken else memory.below,
        publishers=len(kpi.publishers),
        exchanges=ids,
        loads=memory.loads if ids is memory.exchanges else (),
        grace_until=clock + RECOVERY_SECONDS if _vanished(kpi, memory, ids) else memory.grace_until,
    )
    if memory.aim != policy.target:
        memory = _without_strain(replace(memory, aim=policy.target, loads=()))
    if policy.target != TargetRule():
        memory = replace(memory, loads=(*memory.loads[1 - LOADS_KEPT :], _load_each(kpi)))
    draining = next((each.id for each in kpi.exchanges if each.state not in LIVING), "")
    return memory if draining == memory.draining[0] else replace(memory, draining=(draining, clock))


def _vanished(kpi: QueueKpi, memory: Memory, ids: frozenset[str]) -> bool:
    """Did an Exchange go that nobody drained? None seen so far counts too: the Monitor may be waiting for reports."""
    if memory.exchanges is ids:
        return not memory.term and not ids
    return bool(memory.exchanges - ids - {memory.draining[0]})


def _judged(kpi: QueueKpi, policy: Policy, memory: Memory) -> list[Violation]:
    """Targets that are missed. An Exchange that they asked for has its time to show an effect, and if it had none, another one
    has none either."""
    found = targets.missed(kpi, policy)
    match _verdict(kpi, policy, memory):
        case TrialVerdict.OPEN:
            why, blocks = WAITING, True
        case TrialVerdict.IN_VAIN:
            why, blocks = (IN_VAIN if memory.trial else LESS_EACH_TIME), False
        case _:
            return found or _expected(kpi, memory)
    return [each._replace(hopeless=why, blocks=blocks) if each.blocks else each for each in found]


def _expected(kpi: QueueKpi, memory: Memory) -> list[Violation]:
    """A target that will be missed: Exchanges carry almost what they carried when it was."""
    load_each = _load_each(kpi)
    if not memory.proved or load_each <= NEAR * memory.strain:
        return []
    words = f"{load_each:,.0f} messages/s per Exchange, and at {memory.strain:,.0f} a target was missed"
    return [Violation(Scope.TARGET, "", words)]


def _load_each(kpi: QueueKpi) -> float:
    return kpi.messages_per_second / max(1, sum(each.state == "active" for each in kpi.exchanges))


def _verdict(kpi: QueueKpi, policy: Policy, memory: Memory) -> TrialVerdict:
    """On the last Exchange that a target asked for. It was in vain if lateness does not follow the work, see _as_late. With
    about as much to do as back then, another one may help as this one may have; at once if the load has outrun it. Those that
    seemed to cure it were in vain, too, if it is missed again and again with less to do."""
    trial = memory.trial
    if trial is None:
        passes_by_itself = memory.refuted >= REFUTED_MAX and _load_each(kpi) < (1 - RELIEF) * memory.strain
        return TrialVerdict.IN_VAIN if passes_by_itself else TrialVerdict.NONE
    work, level = targets.work(kpi), targets.level(kpi, policy)
    less, more = work < (1 - RELIEF) * trial.work, work > (1 + LOAD_CHANGE) * trial.work
    if not less and (level > (1 + RELIEF) * trial.level or targets.held_up(kpi)):
        return TrialVerdict.NONE
    if trial.in_vain:
        return TrialVerdict.IN_VAIN if less or more else TrialVerdict.NONE
    return TrialVerdict.OPEN if memory.clock < trial.until or _as_late(kpi, policy, trial) else TrialVerdict.NONE


def _as_late(kpi: QueueKpi, policy: Policy, trial: TargetTrial) -> bool:
    """Exchanges have clearly less to do than back then and are as late, or clearly more and are no later."""
    work = targets.work(kpi)
    less, more = work < (1 - RELIEF) * trial.work, work > (1 + LOAD_CHANGE) * trial.work
    return (less or more) and targets.level(kpi, policy) > max(1.0, (1 - RELIEF) * trial.level)


def _count(kpi: QueueKpi, policy: Policy, memory: Memory, found: Sequence[Violation], active: int) -> Memory:
    """Records in a row that call for something. None counts before the rates have settled."""
    now, living = memory.clock, sum(each.state in LIVING for each in kpi.exchanges)
    settled = now >= memory.settled_at
    blocked = any(each.blocks for each in found)
    under = (
        settled
        and not blocked
        and active == len(kpi.exchanges) > policy.bounds.min_exchanges
        and _spare(kpi, policy, memory) is not None
    )
    memory = replace(
        memory,
        over=memory.over + 1 if settled and not all(each.hopeless for each in found) else 0,
        beyond=memory.beyond + 1 if settled and any(each.hopeless for each in found) else 0,
        under=memory.under + 1 if under else 0,
        below=memory.below + 1 if living < policy.bounds.min_exchanges else 0,
        credit=replace(memory.credit, since=now) if under and not memory.under else memory.credit,
        told=_still_told(memory, found),
    )
    return _learn(kpi, policy, memory)


def _learn(kpi: QueueKpi, policy: Policy, memory: Memory) -> Memory:
    """What the record says of targets and Exchanges. Only targets that Exchanges have to do with count: others may be missed
    for ever."""
    now, trial, missed = memory.clock, memory.trial, targets.level(kpi, policy) > 1
    memory = replace(memory, missed_at=now if missed else memory.missed_at, proved=_proved(kpi, policy, memory))
    if trial is not None and now - memory.missed_at >= CALM_SECONDS:
        trial = replace(trial, level=0.0) if trial.in_vain else None  # in time with this work: if late with more, try again
    elif trial is not None and not trial.in_vain and now >= memory.settled_at:
        vain = _verdict(kpi, policy, memory) is TrialVerdict.OPEN and _as_late(kpi, policy, trial)
        known = trial.vain + 1 if now >= trial.until else min(trial.vain + 1, VAIN_RECORDS - 1)
        trial = replace(trial, vain=known if vain else 0)
    memory = replace(memory, trial=trial)
    if missed and _verdict(kpi, policy, memory) is TrialVerdict.IN_VAIN:
        memory = replace(memory, strained_at=now)
    open_yet = trial is not None and not trial.in_vain
    return memory if open_yet or now < memory.strained_at + STRAIN_SECONDS else _without_strain(memory)


def _without_strain(memory: Memory) -> Memory:
    """Without what is known of targets and Exchanges."""
    if memory.trial is None and not memory.strain:
        return memory
    return replace(memory, trial=None, strain=0.0, proved=False, refuted=0)


def _proved(kpi: QueueKpi, policy: Policy, memory: Memory) -> bool:
    """Whether it is known that the target is met by Exchanges which carry less, and not because the load fell."""
    trial = memory.trial
    if trial is None or memory.proved:
        return memory.proved and _verdict(kpi, policy, memory) is not TrialVerdict.IN_VAIN
    work = targets.work(kpi)
    active = sum(each.state == "active" for each in kpi.exchanges)
    as_much = work * active >= (1 - RELIEF) * trial.work * trial.exchanges
    return as_much and work < (1 - RELIEF) * trial.work and 0 < targets.level(kpi, policy) <= 1


def _spare(kpi: QueueKpi, policy: Policy, memory: Memory) -> tuple[load.Bin, load.Moves, float] | None:
    """The Exchange the queue can do without, if all limits would be kept with hysteresis; see load.drain."""
    if not policy.scales():
        return None
    ceiling, left, queue = 1 - policy.bounds.hysteresis, len(kpi.exchanges) - 1, policy.queue
    for amount, limit in (
        (kpi.messages_per_second, queue.max_messages_per_second_per_exchange),
        (len(kpi.publishers), queue.max_publishers_per_exchange),
        (len(kpi.subscribers), queue.max_subscribers_per_exchange),
        (kpi.messages_per_second, memory.strain or None),
    ):
        if limit is not None and amount > ceiling * limit * left:
            return None
    if targets.level(kpi, policy) > ceiling and _verdict(kpi, policy, memory) is not TrialVerdict.IN_VAIN:
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
        beyond=0,
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
    return [Decision(kpi.time, "hold", cause)], replace(memory, out=backoff, trial=None)


# --- remedies ----------------------------------------------------------------------------------------------------------


def _relieve(kpi: QueueKpi, policy: Policy, memory: Memory, found: Sequence[Violation]) -> tuple[list[Decision], Memory]:
    """Something is over its limit for long enough: rebalance, scale out, rebalance anyway, or hold."""
    now, bounds = memory.clock, policy.bounds
    cause = in_words(found)
    scopes = {each.scope for each in found}
    hot = {each.subject for each in found if each.scope is Scope.HOST}
    hottest = hottest_host(kpi, policy) if hot else 0.0
    basis = (memory.exchanges, len(kpi.publishers), kpi.messages_per_second + kpi.bytes_per_second)
    if memory.rebalance.wait and _changed(memory.rebalanced, basis):
        memory = replace(memory, rebalance=Backoff(), settled=frozenset())
    moves, cures = _rebalance_plan(kpi, policy, memory.settled, scopes, hot)
    if hottest < (1 - RELIEF) * memory.hottest:
        memory = replace(memory, host=Backoff())
    may_move = bool(moves) and now >= memory.rebalance.until
    why = ""
    if not (may_move and cures):
        if len(kpi.exchanges) >= bounds.max_exchanges:
            why = f"already {len(kpi.exchanges)} Exchanges (at most {bounds.max_exchanges})"
        elif now < memory.out.until:
            why = "the last scale-out brought no Exchange"
        elif scopes == {Scope.HOST} and now < memory.host.until:
            why = "one more Exchange did not relieve the host last time"
        else:
            decisions, grown = _scale_out(kpi, policy, memory, cause, _needed(kpi, policy, memory, scopes), hot)
            if decisions:
                grown = replace(grown, host=memory.host.longer(now), hottest=hottest) if hot else grown
                return decisions, _on_trial(kpi, policy, grown) if Scope.TARGET in scopes else grown
            why = "no other Exchange could carry what one publisher sends"
    if may_move:
        pending = Pending("rebalance", now + MOVE_SECONDS, moves=tuple(moves))
        reason = (HOST_CURE if hot else RATE_CURE) if cures else f"{why}; moving publishers helps"
        decision = Decision(kpi.time, "rebalance", f"{cause}; {reason}", moves=tuple(moves))
        settled = memory.settled | {publisher for publisher, _ in moves}
        memory = replace(memory, rebalance=memory.rebalance.longer(now), rebalanced=basis, settled=settled)
        return [decision], replace(memory, pending=pending, told=_about_groups(memory.told))
    return _hold(kpi, memory, "/".join(sorted(each.value for each in scopes)) + why, f"{cause}; {why}", found)


def _report(kpi: QueueKpi, memory: Memory, found: Sequence[Violation]) -> tuple[list[Decision], Memory]:
    """What no Exchange can help, each reason once (of a group: each group's)."""
    decisions: list[Decision] = []
    reasons = dict.fromkeys((each.scope, each.subject if each.scope is Scope.GROUP else "", each.hopeless) for each in found)
    for scope, group, hopeless in reasons:
        if hopeless == WAITING:
            continue
        same = [each for each in found if (each.scope, each.hopeless) == (scope, hopeless) and group in ("", each.subject)]
        said, memory = _hold(kpi, memory, f"{scope.value}/{group}/{hopeless}", f"{in_words(same)}; {hopeless}", same)
        decisions += said
    return decisions, memory


def _hold(kpi: QueueKpi, memory: Memory, key: str, cause: str, found: Sequence[Violation]) -> tuple[list[Decision], Memory]:
    """Told, unless something with this key was told already."""
    if any(each.key == key for each in memory.told):
        return [], memory
    told = ReportedHold(key, _about(found), memory.clock)
    return [Decision(kpi.time, "hold", cause)], replace(memory, told=(*memory.told, told))


def _about(found: Sequence[Violation]) -> frozenset[tuple[Scope, str, str]]:
    """See ReportedHold."""
    return frozenset((each.scope, each.subject if each.scope is Scope.GROUP else "", each.hopeless) for each in found)


def _still_told(memory: Memory, found: Sequence[Violation]) -> tuple[ReportedHold, ...]:
    """What need not be told again: what it is about has not been well for long enough."""
    if not memory.told:
        return ()
    about, now = _about(found), memory.clock
    told = (replace(each, at=now) if each.about & about else each for each in memory.told)
    return tuple(each for each in told if now - each.at < CALM_SECONDS)


def _about_groups(told: tuple[ReportedHold, ...]) -> tuple[ReportedHold, ...]:
    """What a change of Exchanges does not make news again."""
    return tuple(each for each in told if all(scope is Scope.GROUP for scope, _, _ in each.about))


def _on_trial(kpi: QueueKpi, policy: Policy, memory: Memory) -> Memory:
    """A missed target asked for this scale-out: whether it helps shows later."""
    active, level = sum(each.state == "active" for each in kpi.exchanges), targets.level(kpi, policy)
    if level <= 1:  # it is only expected
        return memory
    trial = TargetTrial(level, targets.work(kpi), active, memory.clock + VERDICT_SECONDS)
    strain = max(memory.loads)
    refuted = memory.refuted + memory.proved if strain < (1 - RELIEF) * memory.strain else 0
    return replace(memory, trial=trial, strain=strain, strained_at=memory.clock, proved=False, refuted=refuted)


def _changed(before: tuple[frozenset[str], int, float], now: tuple[frozenset[str], int, float]) -> bool:
    """Are these other circumstances than at the last rebalance?"""
    return before[:2] != now[:2] or abs(now[2] - before[2]) > LOAD_CHANGE * before[2]


def _rebalance_plan(
    kpi: QueueKpi, policy: Policy, settled: frozenset[int], scopes: set[Scope], hot: set[str]
) -> tuple[load.Moves, bool]:
    """(moves among existing Exchanges that help, whether they cure everything). Hot hosts get nothing more."""
    hard, warm = hard_scale(policy), hosts_above(kpi, policy, load.MARGIN)
    bins = load.bins_of(kpi)
    calm = [each for each in bins if each.host not in warm and each.level(hard) <= 1.0]
    moves: load.Moves = []
    cures = Scope.QUEUE not in scopes
    if Scope.EXCHANGE in scopes:
        sources = [each for each in bins if each.level(hard) > 1.0]
        before = load.worst(bins, hard)
        moves = load.relieve(sources, calm, hard, hard, load.MARGIN, settled)
        after = load.worst(bins, hard)
        if after > load.MARGIN and after > (1 - load.GAIN) * before:
            return [], False  # not worth a move
        cures = cures and after <= 1.0
    if Scope.HOST in scopes:
        scale = balance_scale(policy, kpi)
        sources = [each for each in bins if each.host in hot]
        relief = load.relieve(sources, calm, scale, hard, load.worst(sources, scale) / 2, settled)
        moves, cures = moves + relief, cures and bool(relief)
    if Scope.TARGET in scopes:
        scale = balance_scale(policy, kpi)
        mean = sum(each.level(scale) for each in bins) / max(1, len(bins))
        sources = [each for each in bins if each.level(scale) > UNEVEN * mean]
        evened = load.relieve(sources, calm, scale, hard, mean, settled)
        moves, cures = moves + evened, cures and bool(evened)
    return load.last_moves(moves), cures and bool(moves)


def _needed(kpi: QueueKpi, policy: Policy, memory: Memory, scopes: set[Scope]) -> int:
    """How many more Exchanges averages and targets call for (what single Exchanges and hosts call for is load.scale_out's
    business)."""
    wanted = have = sum(each.state in LIVING for each in kpi.exchanges)
    queue = policy.queue
    if Scope.QUEUE in scopes:
        for amount, limit in (
            (kpi.messages_per_second / load.MARGIN, queue.max_messages_per_second_per_exchange),
            (len(kpi.publishers), queue.max_publishers_per_exchange),
            (len(kpi.subscribers), queue.max_subscribers_per_exchange),
        ):
            wanted = max(wanted, _whole(amount / limit)) if limit is not None else wanted
    if Scope.TARGET in scopes:
        wanted = max(wanted, have + 1)
        if memory.proved:
            wanted = max(wanted, _whole(kpi.messages_per_second / (load.MARGIN * memory.strain)))
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
    told, credit = _about_groups(memory.told), memory.credit.taken_back(memory.clock)
    return decisions, replace(memory, pending=pending, told=told, credit=credit)


def _scale_in(kpi: QueueKpi, policy: Policy, memory: Memory) -> tuple[list[Decision], Memory]:
    """Drain the least loaded Exchange, if that has earned its price."""
    spare = _spare(kpi, policy, memory)
    if spare is None:
        return [], memory
    victim, moves, fullest = spare
    price, held = _price(policy, memory.credit, len(moves)), memory.clock - memory.credit.since
    if held < price:
        return [], memory
    left = len(kpi.exchanges) - 1
    detail = f"; the fullest would be at {fullest:.0%} of its limit" if any(hard_scale(policy)) else ""
    cause = (
        f"{left} of {left + 1} Exchanges keep every limit with {policy.bounds.hysteresis:.0%} to spare for {held:.0f} s"
        f" ({kpi.messages_per_second:,.0f} messages/s, {len(kpi.publishers)} publishers{detail})"
    )
    memory = replace(memory, credit=replace(memory.credit, spent_at=memory.clock, spent=price))
    return _drain(kpi, memory, victim.id, victim.host, cause, tuple(moves))


def _price(policy: Policy, credit: Credit, moves: int) -> float:
    """Seconds that a lower load must have held before an Exchange whose publishers take so many moves is given back."""
    price = policy.bounds.credit * (EXCHANGE_COST_SECONDS + MOVE_COST_SECONDS * moves) * 2.0**credit.doublings
    return min(PRICE_MAX_SECONDS, price)


def _finish_drain(kpi: QueueKpi, policy: Policy, memory: Memory, active: int) -> tuple[list[Decision], Memory]:
    """An Exchange that was drained but never stopped (a ScalingProcess died in between): stop it."""
    exchange, since = memory.draining
    if not exchange or memory.clock - since < IN_SECONDS or not active or not policy.scales():
        return [], memory
    host = next((each.host for each in kpi.exchanges if each.id == exchange), "")
    cause = f"Exchange {exchange} has been draining for {memory.clock - since:.0f} s and nobody stopped it"
    return _drain(kpi, replace(memory, draining=(exchange, memory.clock)), exchange, host, cause, ())


def _drain(
    kpi: QueueKpi, memory: Memory, exchange: str, host: str, cause: str, moves: tuple[tuple[int, str], ...]
) -> tuple[list[Decision], Memory]:
    decision = Decision(kpi.time, "scale-in", cause, exchange=exchange, host=host, moves=moves)
    pending = Pending("scale-in", memory.clock + IN_SECONDS, exchange=exchange)
    return [decision], replace(memory, pending=pending)
