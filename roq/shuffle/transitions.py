"""From one record of a shuffle to the next. Pure; when each one happens is plan.py's, which also has the picture of all of
them. Whatever changes holders or borders keeps the last whole table as `former`."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from roq.errors import AttemptConflict, ShuffleSealed
from roq.shuffle.events import FollowerHosts, Rebalance
from roq.shuffle.ranges import range_count
from roq.shuffle.record import (
    CUTS_MAX,
    NewTable,
    ShuffleRecord,
    Stage,
    Table,
    cut_wanted,
    least_between,
    refilled,
    same_places,
    with_holders,
)
from roq.wire.shuffle import Interval, Range, Receipt, ShuffleState


def commit(record: ShuffleRecord, receipts: tuple[Receipt, ...]) -> ShuffleRecord:
    """The winners are named. Raises AttemptConflict, ShuffleSealed."""
    unique = tuple({receipt.partition: receipt for receipt in receipts}.values())
    winners = {receipt.partition: receipt.attempt for receipt in unique}
    if any(winners[receipt.partition] != receipt.attempt for receipt in receipts):
        raise AttemptConflict("two attempts of one partition are to win")
    if record.state is ShuffleState.FILLING:
        return replace(record, state=ShuffleState.SEALING, stage=Stage.CHECKING, receipts=unique, cut=0, cuts=0)
    if record.state is ShuffleState.REMOVED or winners != record.winners:
        raise ShuffleSealed(f"shuffle {record.name!r} was committed with other winners")
    return record


def refuse(record: ShuffleRecord) -> ShuffleRecord:
    """The winners can't win: others may be written."""
    return replace(record, state=ShuffleState.FILLING, stage=Stage.MOVING if record.former else Stage.NONE, receipts=())


def rebalance(record: ShuffleRecord, wanted: Rebalance) -> ShuffleRecord:
    """A sealed shuffle is to be cut anew."""
    count = range_count(record.size, 1, wanted.ranges or len(record.table))
    return replace(record, rebalanced=wanted.transaction, cut=count, stage=Stage.CUTTING)


def remove(record: ShuffleRecord, transaction: str) -> ShuffleRecord:
    """Nothing of it is wanted any more."""
    if record.state is ShuffleState.REMOVED:
        return record
    gone = replace(record, state=ShuffleState.REMOVED, stage=Stage.NONE, removal=transaction, cut=0)
    return replace(gone, epoch=0, table=(), former=(), receipts=())


def one_range(record: ShuffleRecord, members: Collection[str]) -> ShuffleRecord:
    """Committed before anyone wanted a table: one range will do."""
    whole = (Range(0, record.fresh, Interval(None, None)),)
    table = with_holders(record.id, whole, members, record.spec.replicas)
    return replace(record, table=table, epoch=1, fresh=record.fresh + 1)


def cut(record: ShuffleRecord, new: NewTable) -> ShuffleRecord:
    """The table that came of samples: the first one, or one to move to."""
    if not record.table:
        return replace(record, table=new.table, fresh=new.fresh, epoch=1)
    if same_places(new.table, record.table):
        return replace(record, cut=0, state=ShuffleState.SEALED, stage=Stage.KEEPING)
    return replace(_moving(record, new.table, new.least), cut=0, fresh=new.fresh)


def whole(record: ShuffleRecord, table: Table, members: Collection[str]) -> ShuffleRecord:
    """Every holder has everything of its ranges; `table` says how much that is. What was sent to get there may be less than was
    needed when it began, as some holders had kept what they had before."""
    least = record.moved_least + min(record.least, record.sent)
    done = replace(record, table=table, former=(), moved_least=least, least=0, sent=0)
    sealing, count = record.state is ShuffleState.SEALING, record.cut
    if sealing and not count and record.cuts < CUTS_MAX:
        count = cut_wanted(record, table, len(members))
    if count:
        return replace(done, stage=Stage.CUTTING, cut=count, cuts=record.cuts + sealing)
    placed = with_holders(record.id, table, members, record.spec.replicas)
    if sealing and members and not same_places(placed, table):
        return _moving(done, placed, least_between(table, placed))
    return replace(done, state=ShuffleState.SEALED, stage=Stage.KEEPING)


def follow_hosts(record: ShuffleRecord, hosts: FollowerHosts) -> ShuffleRecord:
    """Other holders if some are lost, or ranges that are being filled have fewer than they could have, or others should hold a
    sealed shuffle as hosts have come or go. Who joins else while a shuffle is filled, or while its data moves, holds ranges
    when that is done. The same record: nothing is to be done."""
    if not record.table or not hosts.members or not hosts.settled:
        return record
    live = hosts.running | hosts.members
    lost = any(host not in live for each in record.table for host in each.holders)
    busy = record.state is not ShuffleState.SEALED or record.stage in (Stage.MOVING, Stage.CUTTING)
    if busy and not lost and not (record.state is ShuffleState.FILLING and _short(record, len(hosts.members))):
        return record
    if record.state is ShuffleState.FILLING or record.stage is Stage.CHECKING:
        table = refilled(record, live, hosts.members)
        if same_places(table, record.table):
            return record
        stage = Stage.CHECKING if record.stage is Stage.CHECKING else Stage.MOVING
        return replace(_moving(record, table, 0), stage=stage)
    table = with_holders(record.id, record.table, hosts.members, record.spec.replicas)
    if same_places(table, record.table):
        return record
    return _moving(record, table, record.least if record.former else least_between(record.table, table))


def may_forget(record: ShuffleRecord, hosts: FollowerHosts) -> frozenset[str]:
    """Who may be told to keep no more than the table gives it. Not those who are about to join: they will hold ranges, and may
    have come back with them. Nobody while a range has fewer holders than it will have then."""
    return frozenset() if _short(record, len(hosts.members | hosts.joining)) else hosts.running - hosts.joining


def _short(record: ShuffleRecord, hosts: int) -> bool:
    """Whether any range is held by fewer than so many hosts can."""
    return any(len(each.holders) < min(record.spec.replicas, hosts) for each in record.table)


def too_early(record: ShuffleRecord, hosts: FollowerHosts) -> bool:
    """A term has just begun, and hosts whose data is needed are about to be seen."""
    holders = {host for table in (record.table, record.former) for each in table for host in each.holders}
    return not hosts.settled and not holders <= hosts.running


def _moving(record: ShuffleRecord, table: Table, least: int) -> ShuffleRecord:
    former = record.former or record.table
    return replace(record, table=table, former=former, epoch=record.epoch + 1, stage=Stage.MOVING, least=least)
