"""The leader's machine of one shuffle: events in, instructions out. Pure; the shell is gcm/shuffle_leader.py.

Theory of operation. Everything that must survive the leader is in the record, and nothing is done on the strength of a record
before it is written (`Written`). What was asked of followers may be asked again by the next leader: every request says what
shall be so, not what shall be done. So a leader begins by looking at the record's stage, and does what it says:

    state    stage      what is done                                                        then
    FILLING  NONE       a table is cut when a follower wants one                            the same, with a table
    FILLING  MOVING     holders were lost: new ones fetch every attempt from the others,    NONE
                        and wait for those that all of a range's data is with
    SEALING  CHECKING   winners are counted at every holder; who lacks some, fetches        CUTTING, MOVING or SEALED KEEPING
    SEALING  CUTTING    uneven: samples of what is stored, a new table                      MOVING
    SEALING  MOVING     new holders fetch from the former ones; counted again               CUTTING or SEALED KEEPING
    SEALED   KEEPING    whoever holds more than the table says may forget it                NONE
    SEALED   NONE       readers read; hosts join, are lost, or a rebalancing is asked for   MOVING, CUTTING
    SEALED   CUTTING, MOVING  as above; readers are told both tables                        KEEPING
    REMOVED  NONE       all followers forget all of it                                      the record is deleted

`former` is the last table whose holders had everything. They are told to forget only when all holders of the new table were
counted to be whole, and that is written. The rows that are counted must add up to the receipts. A shuffle that is being filled,
and that nobody has gone on with for a long time, is removed.
Not covered: how a record is written, followers asked, time passed (machine.py); who may ask for what (gcm/shuffle_leader.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from roq.errors import NotReady, ShuffleNotSealed
from roq.shuffle import inquiries, transitions
from roq.shuffle import record as records
from roq.shuffle.events import (
    Answered,
    AttemptReported,
    Commit,
    DeleteShuffle,
    Event,
    FollowerFailed,
    FollowerHosts,
    Instruction,
    Rebalance,
    RecordWritten,
    Recut,
    Refuse,
    Remove,
    RunsCut,
    StageStep,
    TimePassed,
    Touched,
)
from roq.shuffle.machine import ShuffleMachine
from roq.shuffle.ranges import range_count
from roq.shuffle.record import NewTable, ShuffleRecord, Stage, stranded
from roq.shuffle.sampling import Gathered
from roq.wire import shuffle as wire
from roq.wire.shuffle import RunSample, ShuffleState

GATHER_SECONDS = 0.2  # from the first wish for a table until it is cut: others report their samples, too
KEEP_SECONDS = 30.0  # former holders serve readers so long after a rebalancing
PATIENCE_SECONDS = 30.0  # for hosts that may have what is missing, before winners are refused
ABANDONED = "(abandoned)"  # in place of a removal's transaction; none is named so


class ShufflePlan(ShuffleMachine):
    """One shuffle. record: as it is written. abandoned_seconds: after so long without a word of writers or a commit, a shuffle
    that is being filled is removed. Begin with `handle(Hosts)`. While `writing` is set, only `Written` may come."""

    def __init__(self, record: ShuffleRecord, epoch: int, abandoned_seconds: float = math.inf) -> None:
        super().__init__(record, epoch)
        self.stored: set[tuple[int, str]] = set()  # attempts, until it is sealed
        self._abandoned_seconds = abandoned_seconds
        self._heard_at: float | None = None  # somebody went on with it, or this term began
        self._hosts = FollowerHosts(frozenset(), frozenset(), False)
        self._look = False  # hosts or record have changed since holders were compared
        self._samples = Gathered()
        self._wanted_at: float | None = None
        self._rebalance_wanted: Rebalance | None = None
        self._missing_since: float | None = None
        self._repaired = False  # since it was counted before
        self._keep_at: float | None = None
        self._kept: frozenset[str] = frozenset()  # were told what to keep of this table
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
                self._change(transitions.commit(self.record, receipts))
            case Rebalance():
                self._rebalance(event)
            case Remove(transaction):
                self._change(transitions.remove(self.record, transaction))
            case RecordWritten():
                self._written()
            case RunsCut(id, table):
                self._cut(id, table)
            case Answered(id, reply):
                self._answered(id, reply)
            case FollowerFailed(id, final):
                self._failed(id, final)
            case TimePassed():
                self._ticked()
            case Touched():
                pass
        while self.writing is None and self._advance():
            pass
        return self._out

    @property
    def forgotten(self) -> bool:
        """Removed, and every follower that runs has forgotten it."""
        return self.record.state is ShuffleState.REMOVED and not self._asks and self._hosts.running <= self._kept

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        records.check(self.record)
        if self.writing is not None:
            records.check(self.writing)
            assert not self._asks, "nothing is asked on the strength of what is not written"
        told = [ask.request for ask in self._asks.values()]
        keeping = self.record.state is ShuffleState.SEALED and self.record.stage in (Stage.NONE, Stage.KEEPING)
        assert keeping or not any(isinstance(each, wire.KeepIntervals) for each in told), "forgotten before all have it"
        assert self.record.state is ShuffleState.REMOVED or not any(isinstance(each, wire.ForgetShuffle) for each in told)

    # --- what is told and asked of us ---------------------------------------------------------------------------------

    def _hosts_are(self, hosts: FollowerHosts) -> None:
        gone = self._hosts.running - hosts.running
        self._hosts, self._look = hosts, True
        self._kept &= hosts.running
        if self.step in (StageStep.KEEP, StageStep.FORGET):  # who is away is told when it comes back
            self._asks = {id: ask for id, ask in self._asks.items() if ask.host in hosts.running}
        elif self.step is StageStep.PAUSE or (
            gone and self.step in (StageStep.FETCH, StageStep.REPAIR, StageStep.SAMPLE, StageStep.ACCOUNT)
        ):
            self._reset()  # a source may be among those who are gone, or have come

    def _report(self, event: AttemptReported) -> None:
        if self.record.state in (ShuffleState.FILLING, ShuffleState.SEALING):  # later the winners are all that is asked for
            self.stored |= {(receipt.partition, receipt.attempt) for receipt in event.stored}
        if self.record.state is not ShuffleState.FILLING or self.record.epoch:
            return  # storage tells better samples
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

    def _failed(self, id: int, final: bool) -> None:
        ask = self._asks.get(id)
        if ask is None:
            return
        telling = isinstance(ask.request, wire.KeepIntervals | wire.ForgetShuffle) and ask.host not in self._hosts.running
        given_up = isinstance(ask.request, wire.TableChanged) or (final and isinstance(ask.request, wire.FetchInterval))
        if telling or given_up:  # what could not be fetched will be missing when it is counted
            del self._asks[id]
        else:
            self._out.append(ask)

    # --- moving on ----------------------------------------------------------------------------------------------------

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
        if self.step is StageStep.KEEP and self._asks and self.record.state is ShuffleState.SEALED:
            return False  # what is told to forget must be done with it before it is told to fetch again
        if self._look and self._follow_hosts():
            return True
        if self._asks:
            return False
        following: dict[StageStep, Callable[[], bool]] = {
            StageStep.IDLE: self._begin,
            StageStep.TELL: self._fetch,
            StageStep.FETCH: self._fetched,
            StageStep.COUNT: self._counted,
            StageStep.REPAIR: self._count,
            StageStep.ACCOUNT: self._accounted,
            StageStep.PAUSE: self._paused,
            StageStep.SAMPLE: lambda: self._compute(tuple(inquiries.told(self._answers)), self.record.cut),
            StageStep.COMPUTE: lambda: False,
            StageStep.KEEP: self._told,
            StageStep.FORGET: self._forgotten,
        }
        return following[self.step]()

    def _begin(self) -> bool:
        match self.record.state, self.record.stage:
            case ShuffleState.REMOVED, _:
                return self._forget()
            case ShuffleState.FILLING, Stage.NONE:
                return self._first_cut() or self._abandoned()
            case _ if transitions.too_early(self.record, self._hosts):
                return False
            case _, Stage.CHECKING | Stage.MOVING:
                return self._fetch()
            case _, Stage.CUTTING:
                return bool(self._hosts.members) and self._ask(
                    StageStep.SAMPLE, inquiries.sample(self.record, self._hosts.running)
                )
        if (wanted := self._rebalance_wanted) is not None:
            self._rebalance_wanted = None
            self._write(transitions.rebalance(self.record, wanted))
            return True
        return self._keep()

    def _follow_hosts(self) -> bool:
        self._look = False
        return self._change(transitions.follow_hosts(self.record, self._hosts))

    # --- the first table ----------------------------------------------------------------------------------------------

    def _first_cut(self) -> bool:
        record, members = self.record, self._hosts.members
        if record.table or self._wanted_at is None or not members:
            return False
        if self._now < self._wanted_at + GATHER_SECONDS:
            self._wake(self._wanted_at + GATHER_SECONDS)
            return False
        return self._compute(self._samples.taken(), range_count(self._samples.size, len(members), record.spec.ranges))

    def _abandoned(self) -> bool:
        if self.step is not StageStep.IDLE or self._heard_at is None or self._abandoned_seconds == math.inf:
            return False
        if self._now < self._heard_at + self._abandoned_seconds:
            self._wake(self._heard_at + self._abandoned_seconds)
            return False
        self._write(transitions.remove(self.record, ABANDONED))
        return True

    def _compute(self, samples: tuple[RunSample, ...], count: int) -> bool:
        self._reset()
        self.step = StageStep.COMPUTE
        self._ids += 1
        self._out.append(Recut(self._ids, self.record, samples, count, self._hosts.members))
        return False

    def _cut(self, id: int, new: NewTable) -> None:
        if self.step is not StageStep.COMPUTE or id != self._ids:
            return  # of an earlier step
        if not all(each.holders for each in new.table):
            self._reset()
            return
        self._write(transitions.cut(self.record, new))

    # --- having everything where it belongs ---------------------------------------------------------------------------

    def _fetch(self) -> bool:
        record, hosts = self.record, self._hosts
        if not record.table:
            if hosts.members:
                self._write(transitions.one_range(record, hosts.members))
            return bool(hosts.members)
        if record.state is ShuffleState.FILLING and self.step is StageStep.IDLE:
            return self._ask(StageStep.TELL, inquiries.tell_changed(record, self._epoch, hosts.running))
        return self._ask(StageStep.FETCH, inquiries.fetch(record, self._epoch, hosts.running))

    def _fetched(self) -> bool:
        if self.record.state is not ShuffleState.FILLING:
            return self._count()
        if self.record.former and stranded(self.record, self._hosts.running):
            return self._pause()  # not forgotten where it is: they may come back
        self._write(msgspec.structs.replace(self.record, former=(), stage=Stage.NONE))
        return True

    def _count(self) -> bool:
        return self._ask(StageStep.COUNT, inquiries.count(self.record))

    def _counted(self) -> bool:
        """Who lacks what another holder has fetches it, once; then all must be whole, and nothing missing."""
        counted = inquiries.counted(self.record, self._epoch, self._answers)
        if counted.lacking and not self._repaired:
            self._repaired = True
            return self._ask(StageStep.REPAIR, counted.lacking)
        self._repaired = False
        if counted.lacking or counted.missing:
            return self._missing(counted)
        self._missing_since = None
        sent = msgspec.structs.replace(self.record, moved=self.record.moved + self._moved, sent=self.record.sent + self._moved)
        self._moved = 0
        self._write(transitions.whole(sent, counted.table, self._hosts.members))
        return True

    def _missing(self, counted: inquiries.RowCount) -> bool:
        """Rows are missing. While a former holder is away it may have them; else winners that are just named can't win."""
        away = {host for each in self.record.former for host in each.holders} - self._hosts.running
        since = self._missing_since = self._now if self._missing_since is None else self._missing_since
        patient = bool(away) and self._now - since <= PATIENCE_SECONDS
        if self.record.state is ShuffleState.SEALING and counted.missing and not patient:
            return self._ask(StageStep.ACCOUNT, inquiries.tell(self.record, counted.best))
        return self._pause()

    def _accounted(self) -> bool:
        error = inquiries.fault(self.record, inquiries.told(self._answers), self.stored)
        if error is None:  # it has turned up
            return self._pause()
        self._missing_since = None
        self._write(transitions.refuse(self.record))
        self._out.append(Refuse(error))
        return True

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def _keep(self) -> bool:
        record = self.record
        hosts = transitions.may_forget(record, self._hosts) - self._kept
        if record.stage is Stage.KEEPING:
            if self._keep_at is None:  # the leader before us may just have written it
                self._keep_at = self._now + KEEP_SECONDS
            if self._now < self._keep_at:
                self._wake(self._keep_at)
                return False
        elif not hosts:
            return False
        return self._ask(StageStep.KEEP, inquiries.keep(record, self._epoch, hosts))

    def _told(self) -> bool:
        self._kept |= {host for host, _, _ in self._answers}
        self._reset()
        if self.record.stage is Stage.KEEPING:
            self._write(msgspec.structs.replace(self.record, stage=Stage.NONE))
        return True

    def _forget(self) -> bool:
        """Also those who come back."""
        if hosts := self._hosts.running - self._kept:
            return self._ask(StageStep.FORGET, inquiries.forget(self.record, self._epoch, hosts))
        if self._hosts.settled and not self._deleted:
            self._deleted = True
            self._out.append(DeleteShuffle())
        return False

    def _forgotten(self) -> bool:
        self._kept |= {host for host, _, _ in self._answers}
        self._reset()
        return True
