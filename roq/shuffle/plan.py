"""The leader's machine of one shuffle: events in, instructions out. Pure; the shell is gcm/shuffle_driver.py.

Theory of operation. Everything that must survive the leader is in the record (record.py), and nothing is done on the strength
of a record before it is written (`RecordWritten`). What was asked of followers may be asked again by the next leader: every
request says what shall be so, not what shall be done. So a leader begins by looking at the record's state and stage, and does
what the table STAGES says; which stages may follow is in it, too. Within a stage there are steps, which are forgotten with the
leader: something is asked of followers, and when all have answered the table STEPS says how it goes on.

`former` is the last table whose holders had everything. They are told to forget only when all holders of the new table were
counted to be complete, and that is written. The rows that are counted must add up to the receipts. A shuffle that is being
filled, and that nobody has gone on with for a long time, is removed.
Not covered: how one record follows from another (record.py), what is asked (queries.py), who may ask for what
(gcm/shuffle_leader.py).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from msgspec.structs import replace

from roq.errors import NotReady, ShuffleNotSealed
from roq.shuffle import queries
from roq.shuffle import record as records
from roq.shuffle.events import (
    Answered,
    Ask,
    AttemptReported,
    Commit,
    ComputeTable,
    DeleteShuffle,
    Event,
    FollowerFailed,
    Instruction,
    Rebalance,
    RecordWritten,
    Refuse,
    Remove,
    TableComputed,
    TimePassed,
    Touched,
    Wake,
    WriteRecord,
)
from roq.shuffle.ranges import range_count
from roq.shuffle.record import FollowerHosts, NewTable, ShuffleRecord, Stage
from roq.shuffle.sampling import Gathered
from roq.wire import shuffle as wire
from roq.wire.shuffle import RunSample, ShuffleState

GATHER_SECONDS = 0.2  # from the first wish for a table until it is made: others report their samples, too
KEEP_SECONDS = 30.0  # former holders serve readers so long after a rebalancing
PATIENCE_SECONDS = 30.0  # for hosts that may have what is missing, before committed attempts are refused
RETRY_SECONDS = 5.0  # after data that must be somewhere was found nowhere
ABANDONED = "(abandoned)"  # in place of a removal's transaction; none is named so


class StageStep(StrEnum):
    """What is under way within a stage."""

    IDLE = "idle"
    NOTIFY = "notify"  # buffers stop sending by the table before
    FETCH = "fetch"
    COUNT = "count"
    REPAIR = "repair"  # who was counted to lack something fetches it
    ACCOUNT = "account"  # which attempt lacks rows?
    PAUSE = "pause"
    SAMPLE = "sample"
    COMPUTE = "compute"
    KEEP = "keep"
    FORGET = "forget"


class Round:
    """The step that is under way: what it asks of followers, and what they have answered. It begins in place of the one before,
    of which nothing is of interest any more."""

    def __init__(self) -> None:
        self.step = StageStep.IDLE
        self.asked: dict[int, Ask] = {}  # not answered yet; empty while a record is being written
        self.answers: list[tuple[str, wire.Request, wire.Reply]] = []
        self.until: float | None = None  # its end, if it is a pause
        self.last_id = 0  # grows: what is of an earlier step is known by its id

    def begin(self, step: StageStep, asks: queries.Asks = (), until: float | None = None) -> list[Ask]:
        """asks: (host, request) of each."""
        self.step, self.until = step, until
        self.asked.clear()
        self.answers.clear()
        for host, request in asks:
            self.last_id += 1
            self.asked[self.last_id] = Ask(self.last_id, host, request)
        return [*self.asked.values()]

    def answered(self, id: int, reply: wire.Reply) -> bool:
        """False: of an earlier step, or answered twice."""
        ask = self.asked.pop(id, None)
        if ask is not None:
            self.answers.append((ask.host, ask.request, reply))
        return ask is not None


class Alarm:
    """Ticks that were asked for. Timers may be early: who waits asks again then."""

    def __init__(self) -> None:
        self.due: list[float] = []  # in order; those that have not come

    def set(self, at: float, now: float) -> list[Wake]:
        """A tick comes at this time, or before it."""
        if self.due and self.due[0] <= at:
            return []
        insort(self.due, at)
        return [Wake(max(0.0, at - now))]

    def rang(self) -> None:
        """The tick that was due next has come."""
        del self.due[:1]


class ShufflePlan:
    """One shuffle. abandoned_seconds: after so long without a word of writers or a commit, a shuffle that is being filled is
    removed. Begin with `handle(FollowerHosts)`."""

    def __init__(self, record: ShuffleRecord, epoch: int, abandoned_seconds: float = math.inf) -> None:
        self.record = record  # as it is written
        self.writing: ShuffleRecord | None = None  # while it is set nothing is asked, and only RecordWritten may come
        self.stored: set[tuple[int, str]] = set()  # attempts, until it is sealed
        self._epoch, self._abandoned_seconds = epoch, abandoned_seconds
        self._round, self._alarm = Round(), Alarm()  # to forget intervals is asked at rest, to forget all once removed
        self._out: list[Instruction] = []
        self._now = 0.0
        self._heard_at: float | None = None  # somebody went on with it, or this leader began
        self._hosts = FollowerHosts(frozenset(), frozenset(), False)
        self._look = False  # hosts or record have changed since holders were compared
        self._samples = Gathered()  # while it is filled and has no table: later storage has better ones
        self._wanted_at: float | None = None
        self._rebalance_wanted: Rebalance | None = None  # of a sealed shuffle that neither moves nor is split
        self._moved = 0  # bytes, since the record was written
        self._missing_since: float | None = None
        self._repaired = False  # since it was counted before
        self._keep_at: float | None = None
        self._kept: frozenset[str] = frozenset()  # keep no more than this table gives them
        self._deleted = False

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What is to be done. Raises what a request's docstring says; nothing has changed then. now: seconds, steady."""
        assert self.writing is None or isinstance(event, RecordWritten), "one thing after the other"
        self._now, self._out = now, []
        if self._heard_at is None or isinstance(event, AttemptReported | Commit | Touched):
            self._heard_at = now
        match event:
            case FollowerHosts():
                self._hosts_are(event)
            case AttemptReported():
                self._report(event)
            case Commit(receipts):
                self._change(records.commit(self.record, receipts))
            case Rebalance():
                self._rebalance(event)
            case Remove(transaction):
                self._change(records.remove(self.record, transaction))
            case RecordWritten():
                self._written()
            case TableComputed(id, table):
                self._new_table(id, table)
            case Answered(id, reply):
                self._answered(id, reply)
            case FollowerFailed(id, final):
                self._failed(id, final)
            case TimePassed():
                self._alarm.rang()
            case Touched():
                pass
        while self.writing is None and self._advance():
            pass
        return self._out

    @property
    def step(self) -> StageStep:
        """What is under way."""
        return self._round.step

    def outstanding(self, id: int) -> bool:
        """Whether the answer to this Ask is still of interest."""
        return id in self._round.asked

    @property
    def forgotten(self) -> bool:
        """Removed, and every follower that runs has forgotten it."""
        return self.record.state is ShuffleState.REMOVED and not self._round.asked and self._hosts.running <= self._kept

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        records.check(self.record)
        if self.writing is not None:
            records.check(self.writing)
            assert not self._round.asked, "nothing is asked on the strength of what is not written"
        assert (self._round.until is not None) == (self.step is StageStep.PAUSE), "a pause ends, and nothing else does"
        told = [ask.request for ask in self._round.asked.values()]
        keeping = self.record.state is ShuffleState.SEALED and self.record.stage in (Stage.NONE, Stage.KEEPING)
        assert keeping or not any(isinstance(each, wire.KeepIntervals) for each in told), "forgotten before all have it"
        assert self.record.state is ShuffleState.REMOVED or not any(isinstance(each, wire.ForgetShuffle) for each in told)

    # --- what is reported and asked of us -----------------------------------------------------------------------------

    def _hosts_are(self, hosts: FollowerHosts) -> None:
        gone = self._hosts.running - hosts.running
        self._hosts, self._look = hosts, True
        self._kept &= hosts.running
        if self.step in (StageStep.KEEP, StageStep.FORGET):  # who is away is told when it comes back
            self._round.asked = {id: ask for id, ask in self._round.asked.items() if ask.host in hosts.running}
        elif self.step is StageStep.PAUSE or (
            gone and self.step in (StageStep.FETCH, StageStep.REPAIR, StageStep.SAMPLE, StageStep.ACCOUNT)
        ):
            self._round.begin(StageStep.IDLE)  # a source may be among those who are gone, or have come

    def _report(self, event: AttemptReported) -> None:
        if self.record.state in (ShuffleState.FILLING, ShuffleState.SEALING):  # later committed ones are all that is asked for
            self.stored |= {(receipt.partition, receipt.attempt) for receipt in event.stored}
        if self.record.state is not ShuffleState.FILLING or self.record.epoch:
            return
        for sample in event.samples:
            self._samples.add(sample)
        if event.wanted and self._wanted_at is None:
            self._wanted_at = self._now

    def _rebalance(self, event: Rebalance) -> None:
        record, wanted = self.record, self._rebalance_wanted
        if record.state is not ShuffleState.SEALED:
            raise ShuffleNotSealed(f"shuffle {record.name!r} is {record.state}")
        if event.transaction in (record.rebalanced, wanted.transaction if wanted else None):
            return
        if wanted is not None or record.stage in (Stage.CUTTING, Stage.MOVING):
            raise NotReady(f"shuffle {record.name!r} is being rebalanced, or its data moves: ask again when that is done")
        self._rebalance_wanted = event

    def _answered(self, id: int, reply: wire.Reply) -> None:
        moving = self.record.stage is Stage.MOVING and self.record.state is not ShuffleState.FILLING
        if self._round.answered(id, reply) and isinstance(reply, wire.Fetched) and moving:
            self._moved += reply.size

    def _failed(self, id: int, final: bool) -> None:
        ask = self._round.asked.get(id)
        if ask is None:
            return
        telling = isinstance(ask.request, wire.KeepIntervals | wire.ForgetShuffle) and ask.host not in self._hosts.running
        given_up = isinstance(ask.request, wire.TableChanged) or (final and isinstance(ask.request, wire.FetchInterval))
        if telling or given_up:  # what could not be fetched will be missing when it is counted
            del self._round.asked[id]
        else:
            self._out.append(ask)

    # --- moving on ----------------------------------------------------------------------------------------------------

    def _write(self, record: ShuffleRecord) -> bool:
        """Only when `RecordWritten` has come, anything is done on the strength of it."""
        before, after = (self.record.state, self.record.stage), (record.state, record.stage)
        assert after in (before, GONE) or after in STAGES[before].following, f"{before} is never followed by {after}"
        sent = record.sent + self._moved if record.former else 0
        self.writing = replace(record, moved=record.moved + self._moved, sent=sent)
        self._moved = 0
        self._round.begin(StageStep.IDLE)
        self._out.append(WriteRecord(self.writing))
        return True

    def _change(self, after: ShuffleRecord) -> bool:
        return after is not self.record and self._write(after)

    def _written(self) -> None:
        assert self.writing is not None
        before, self.record, self.writing = self.record, self.writing, None
        self._look = True
        if self.record.epoch or self.record.state is not ShuffleState.FILLING:
            self._samples = Gathered()
        if self.record.state in (ShuffleState.SEALED, ShuffleState.REMOVED):
            self.stored.clear()
        if self.record.state is ShuffleState.REMOVED:
            self._kept = frozenset()
        elif self.record.stage is Stage.KEEPING and before.stage is not Stage.KEEPING:
            self._kept = frozenset()
            self._keep_at = self._now + (KEEP_SECONDS if before.state is ShuffleState.SEALED else 0)

    def _advance(self) -> bool:
        """Whether something was done, so that there may be more to do."""
        if self.step is StageStep.KEEP and self._round.asked and self.record.state is ShuffleState.SEALED:
            return False  # what is told to forget must be done with it before it is told to fetch again
        if self._look and self._follow_hosts():
            return True
        return not self._round.asked and STEPS[self.step](self)

    def _begin(self) -> bool:
        at = self.record.state, self.record.stage
        if at != (ShuffleState.FILLING, Stage.NONE) and records.too_early(self.record, self._hosts):
            return False
        return STAGES[at].begin(self)

    def _follow_hosts(self) -> bool:
        self._look = False
        return self._change(records.follow_hosts(self.record, self._hosts))

    def _ask(self, step: StageStep, asks: queries.Asks) -> bool:
        self._out += self._round.begin(step, asks)
        return True

    def _wait_until(self, at: float) -> bool:
        """Whether it is not yet time."""
        if self._now < at:
            self._out += self._alarm.set(at, self._now)
        return self._now < at

    def _pause(self) -> bool:
        """Before it is tried again."""
        until = self._now + RETRY_SECONDS
        self._round.begin(StageStep.PAUSE, until=until)
        self._wait_until(until)
        return False

    def _paused(self) -> bool:
        if self._round.until is not None and self._wait_until(self._round.until):
            return False
        self._round.begin(StageStep.IDLE)
        return True

    # --- the table ----------------------------------------------------------------------------------------------------

    def _first_table(self) -> bool:
        record, members = self.record, self._hosts.members
        if record.table or self._wanted_at is None or not members or self._wait_until(self._wanted_at + GATHER_SECONDS):
            return False
        return self._compute(self._samples.taken(), range_count(self._samples.size, len(members), record.spec.ranges))

    def _abandoned(self) -> bool:
        if self.step is not StageStep.IDLE or self._heard_at is None or self._abandoned_seconds == math.inf:
            return False
        if self._wait_until(self._heard_at + self._abandoned_seconds):
            return False
        return self._write(records.remove(self.record, ABANDONED))

    def _sample(self) -> bool:
        asks = queries.sample(self.record, self._hosts.running) if self._hosts.members else []
        return bool(self._hosts.members) and self._ask(StageStep.SAMPLE, asks)

    def _sampled(self) -> bool:
        return self._compute(tuple(queries.samples_of(self._round.answers)), self.record.cut)

    def _compute(self, samples: tuple[RunSample, ...], count: int) -> bool:
        self._round.begin(StageStep.COMPUTE)
        self._round.last_id += 1
        self._out.append(ComputeTable(self._round.last_id, self.record, samples, count, self._hosts.members))
        return False

    def _new_table(self, id: int, new: NewTable) -> None:
        if self.step is not StageStep.COMPUTE or id != self._round.last_id:
            return  # of an earlier step
        if all(each.holders for each in new.table):
            self._write(records.with_table(self.record, new))
        else:
            self._round.begin(StageStep.IDLE)

    # --- having everything where it belongs ---------------------------------------------------------------------------

    def _fetch(self) -> bool:
        record, hosts = self.record, self._hosts
        if not record.table:
            return bool(hosts.members) and self._write(records.one_range(record, hosts.members))
        if record.state is ShuffleState.FILLING and self.step is StageStep.IDLE:
            return self._ask(StageStep.NOTIFY, queries.table_changed(record, self._epoch, hosts.running))
        return self._ask(StageStep.FETCH, queries.fetch(record, self._epoch, hosts.running))

    def _fetched(self) -> bool:
        if self.record.state is not ShuffleState.FILLING:
            return self._count()
        if self.record.former and records.stranded(self.record, self._hosts.running):
            return self._pause()  # not forgotten where it is: they may come back
        return self._write(replace(self.record, former=(), stage=Stage.NONE))

    def _count(self) -> bool:
        return self._ask(StageStep.COUNT, queries.count(self.record))

    def _counted(self) -> bool:
        """Who lacks what another holder has fetches it, once; then all must be complete, and nothing missing."""
        counted = queries.counted(self.record, self._epoch, self._round.answers)
        if counted.lacking and not self._repaired:
            self._repaired = True
            return self._ask(StageStep.REPAIR, counted.lacking)
        self._repaired = False
        if counted.lacking or counted.missing:
            return self._missing(counted)
        self._missing_since = None
        sent = replace(self.record, moved=self.record.moved + self._moved, sent=self.record.sent + self._moved)
        self._moved = 0
        return self._write(records.complete(sent, counted.table, self._hosts.members))

    def _missing(self, counted: queries.RowCount) -> bool:
        """Rows are missing. While a former holder is away it may have them; else attempts that are just committed can't be."""
        away = {host for each in self.record.former for host in each.holders} - self._hosts.running
        since = self._missing_since = self._now if self._missing_since is None else self._missing_since
        patient = bool(away) and self._now - since <= PATIENCE_SECONDS
        if self.record.state is ShuffleState.SEALING and counted.missing and not patient:
            return self._ask(StageStep.ACCOUNT, queries.account(self.record, counted.best))
        return self._pause()

    def _accounted(self) -> bool:
        error = queries.fault(self.record, queries.samples_of(self._round.answers), self.stored)
        if error is None:  # it has turned up
            return self._pause()
        self._missing_since = None
        self._write(records.refuse(self.record))
        self._out.append(Refuse(error))
        return True

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def _rest(self) -> bool:
        """It is sealed, and everything is where it belongs."""
        if (wanted := self._rebalance_wanted) is None:
            return self._keep()
        self._rebalance_wanted = None
        return self._write(records.rebalance(self.record, wanted.transaction, wanted.ranges))

    def _keep(self) -> bool:
        record = self.record
        hosts = records.may_forget(record, self._hosts) - self._kept
        if record.stage is Stage.KEEPING:
            if self._keep_at is None:  # the leader before us may just have written it
                self._keep_at = self._now + KEEP_SECONDS
            if self._wait_until(self._keep_at):
                return False
        elif not hosts:
            return False
        return self._ask(StageStep.KEEP, queries.keep(record, self._epoch, hosts))

    def _forget(self) -> bool:
        """Also those who come back."""
        if hosts := self._hosts.running - self._kept:
            return self._ask(StageStep.FORGET, queries.forget(self.record, self._epoch, hosts))
        if self._hosts.settled and not self._deleted:
            self._deleted = True
            self._out.append(DeleteShuffle())
        return False

    def _obeyed(self) -> bool:
        self._kept |= {host for host, _, _ in self._round.answers}
        self._round.begin(StageStep.IDLE)
        if self.record.stage is Stage.KEEPING:
            self._write(replace(self.record, stage=Stage.NONE))
        return True


# --- the tables -----------------------------------------------------------------------------------------------------------

At = tuple[ShuffleState, Stage]
Act = Callable[[ShufflePlan], bool]  # whether something was done


class Row(NamedTuple):
    """A state and stage of the record. begin: what is done first. following: the states and stages that may come after it,
    beside the same again, and being removed."""

    begin: Act
    following: tuple[At, ...] = ()


FILLING, SEALING, SEALED = ShuffleState.FILLING, ShuffleState.SEALING, ShuffleState.SEALED
GONE: At = (ShuffleState.REMOVED, Stage.NONE)
STAGES: dict[At, Row] = {
    # A table is made when a follower wants one.
    (FILLING, Stage.NONE): Row(
        lambda plan: plan._first_table() or plan._abandoned(), ((FILLING, Stage.MOVING), (SEALING, Stage.CHECKING))
    ),
    # Holders were lost: new ones fetch every attempt from the others, and wait for those that all of a range's data is with.
    (FILLING, Stage.MOVING): Row(lambda plan: plan._fetch(), ((FILLING, Stage.NONE), (SEALING, Stage.CHECKING))),
    # The rows of committed attempts are counted at every holder; who lacks some, fetches. Else other attempts may be committed.
    (SEALING, Stage.CHECKING): Row(
        lambda plan: plan._fetch(),
        (
            (SEALING, Stage.CUTTING),
            (SEALING, Stage.MOVING),
            (SEALED, Stage.KEEPING),
            (FILLING, Stage.NONE),
            (FILLING, Stage.MOVING),
        ),
    ),
    # Ranges are uneven: samples of what is stored, a new table.
    (SEALING, Stage.CUTTING): Row(lambda plan: plan._sample(), ((SEALING, Stage.MOVING), (SEALED, Stage.KEEPING))),
    # New holders fetch from the former ones; counted again.
    (SEALING, Stage.MOVING): Row(
        lambda plan: plan._fetch(),
        ((SEALING, Stage.CUTTING), (SEALED, Stage.KEEPING), (FILLING, Stage.NONE), (FILLING, Stage.MOVING)),
    ),
    # Whoever holds more than the table says may forget it.
    (SEALED, Stage.KEEPING): Row(
        lambda plan: plan._rest(), ((SEALED, Stage.NONE), (SEALED, Stage.CUTTING), (SEALED, Stage.MOVING))
    ),
    # Readers read; hosts join, are lost, or a rebalancing is asked for.
    (SEALED, Stage.NONE): Row(lambda plan: plan._rest(), ((SEALED, Stage.CUTTING), (SEALED, Stage.MOVING))),
    # As while sealing; readers are told both tables.
    (SEALED, Stage.CUTTING): Row(lambda plan: plan._sample(), ((SEALED, Stage.MOVING), (SEALED, Stage.KEEPING))),
    (SEALED, Stage.MOVING): Row(lambda plan: plan._fetch(), ((SEALED, Stage.CUTTING), (SEALED, Stage.KEEPING))),
    # All followers forget all of it; then the record is deleted.
    GONE: Row(lambda plan: plan._forget()),
}
STEPS: dict[StageStep, Act] = {  # what is done when all that was asked is answered
    StageStep.IDLE: lambda plan: plan._begin(),
    StageStep.NOTIFY: lambda plan: plan._fetch(),
    StageStep.FETCH: lambda plan: plan._fetched(),
    StageStep.COUNT: lambda plan: plan._counted(),
    StageStep.REPAIR: lambda plan: plan._count(),
    StageStep.ACCOUNT: lambda plan: plan._accounted(),
    StageStep.PAUSE: lambda plan: plan._paused(),
    StageStep.SAMPLE: lambda plan: plan._sampled(),
    StageStep.COMPUTE: lambda plan: False,
    StageStep.KEEP: lambda plan: plan._obeyed(),
    StageStep.FORGET: lambda plan: plan._obeyed(),
}
