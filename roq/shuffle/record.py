"""What the leader keeps of a shuffle, pure questions to it, and how one record follows from another. A record alone says what
the next leader is to do; how it is laid out in ZooKeeper: gcm/shuffle_store.py. Whatever changes holders or borders keeps the
last complete table as `former`. Not covered: what happens when (plan.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from roq.errors import AttemptConflict, ShuffleSealed
from roq.shuffle.ranges import (
    IntervalMove,
    Placement,
    borders_of,
    even_borders,
    holder_table,
    identities,
    imbalance,
    intervals,
    moves,
    overlaps,
    range_count,
    table_of,
)
from roq.shuffle.sampling import Distribution, thinned
from roq.wire.shuffle import Description, Interval, Range, Receipt, RunSample, ShuffleState, Spec

IMBALANCE_MAX = 1.15  # largest / mean by bytes; above it a shuffle is split again when it is sealed
CUTS_MAX = 3  # of one sealing: a row larger than a range can't be cut
Table = tuple[Range, ...]


class Stage(StrEnum):
    """What is being done about the table."""

    NONE = "none"
    CHECKING = "checking"  # are the committed attempts complete at every holder?
    CUTTING = "cutting"  # samples of what is stored are asked for; a new table comes of them
    MOVING = "moving"  # from the former table to the new one
    KEEPING = "keeping"  # the new one is whole: who holds more may forget it


@dataclass(frozen=True)
class FollowerHosts:
    """running: followers that can be asked. members: those that ranges may be placed on. settled: who is in neither is lost;
    not so at the beginning of a term, when hosts may not have come back yet. joining: of those that run, who is about to be
    a member; what they have may be theirs again then."""

    running: frozenset[str]
    members: frozenset[str]
    settled: bool = True
    joining: frozenset[str] = frozenset()


class ShuffleRecord(msgspec.Struct, frozen=True):
    """A shuffle. epoch: number of the table, 0 while there is none. former: the last table that was complete, while the present
    one isn't. fresh: the next identity of a range. cut: ranges that are wanted of the next cut, 0: no cut is wanted. cuts: done
    while sealing. least, sent: bytes that the move under way demands, and those that were sent. rebalanced, removal: the
    transactions that asked for it last."""

    name: str
    id: str
    spec: Spec
    created: float
    transaction: str
    state: ShuffleState = ShuffleState.FILLING
    stage: Stage = Stage.NONE
    epoch: int = 0
    table: Table = ()
    former: Table = ()
    receipts: tuple[Receipt, ...] = ()
    fresh: int = 1
    cut: int = 0
    cuts: int = 0
    moved: int = 0
    least: int = 0
    sent: int = 0
    moved_least: int = 0
    rebalanced: str = ""
    removal: str = ""
    placement: Placement = Placement.SCORES  # of a record that says nothing, which an earlier version wrote

    @property
    def committed(self) -> dict[int, str]:
        """partition → attempt."""
        return {receipt.partition: receipt.attempt for receipt in self.receipts}

    @property
    def rows(self) -> int:
        """Of the committed attempts."""
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def size(self) -> int:
        """Bytes of the committed attempts."""
        return sum(receipt.size for receipt in self.receipts)

    def describe(self, stored: int, *, complete: bool = True) -> Description:
        """As clients see it. complete: with ranges and committed attempts. A sealed shuffle that was split anew is read by the
        table before until the new one was counted: how many rows a range should have is not known sooner, and a new holder may
        lack some."""
        table, former = self.table, self.former
        if self.state is ShuffleState.SEALED and any(each.rows < 0 for each in table):
            table, former = former, table
        return Description(
            self.name,
            self.id,
            self.spec,
            self.state,
            self.created,
            self.epoch,
            table if complete else (),
            former if complete else (),
            self.committed if complete else {},
            self.rows,
            self.size,
            max(stored, len(self.receipts)),
            self.moved,
            self.moved_least,
        )


def check(record: ShuffleRecord) -> None:
    """Raises AssertionError if the record can't be."""
    for table in (record.table, record.former):
        assert [each.number for each in table] == list(range(len(table))), "numbers count from 0"
        assert intervals(borders_of(table)) == [each.interval for each in table] or not table, "ranges cover everything once"
        assert all(one.lower < one.upper for one in [each.interval for each in table[1:-1]]), "no range is empty by its borders"  # type: ignore[operator]
        assert len({each.identity for each in table}) == len(table), "identities are distinct"
        assert all(each.identity < record.fresh for each in table), "identities were given out"
    assert bool(record.table) == bool(record.epoch), "a table has a number"
    assert record.state in (ShuffleState.SEALING, ShuffleState.SEALED, ShuffleState.REMOVED) or not record.receipts, (
        "committed attempts are named by commit"
    )
    if record.stage in (Stage.NONE, Stage.KEEPING, Stage.CUTTING):
        assert not record.former, "the table before is kept only while data moves"
    assert record.moved_least + record.sent <= record.moved, "no move demands more than was sent for it"
    if record.state is ShuffleState.SEALED:
        assert record.table, "what is sealed can be read"
        assert record.stage is Stage.MOVING or all(each.rows >= 0 for each in record.table), "what is sealed was counted"
        whole = record.former if record.stage is Stage.MOVING else record.table
        assert sum(each.rows for each in whole) == record.rows, "what is sealed is complete"


# --- tables --------------------------------------------------------------------------------------------------------------


def with_holders(record: ShuffleRecord, table: Table, hosts: Collection[str]) -> Table:
    """The same ranges, each at the hosts that its identity asks for."""
    asked = holder_table(record.id, hosts, record.spec.replicas, record.placement)
    return tuple(replace(each, holders=asked.holders(each.identity)) for each in table)


def refilled(record: ShuffleRecord, live: Collection[str], hosts: Collection[str]) -> Table:
    """The same ranges with their live holders, and hosts in place of lost ones. A range stays with lost ones if none lives of
    those who have all of it, which are the former ones while data moves: nobody else has it."""
    replicas, found = record.spec.replicas, list[Range]()
    asked = holder_table(record.id, hosts, replicas, record.placement)
    for each, complete in zip(record.table, record.former or record.table, strict=True):
        kept = tuple(host for host in each.holders if host in live)
        lacks = max(0, replicas - len(kept))
        ranked = asked.holders(each.identity) if lacks else ()
        filled = (*kept, *[host for host in ranked if host not in kept][:lacks])
        lives = any(host in live for host in complete.holders)
        found.append(replace(each, holders=filled) if lives else each)
    return tuple(found)


def stranded(record: ShuffleRecord, running: Collection[str]) -> bool:
    """While it is filled and data moves: a new holder lacks what only hosts that are away have."""
    return any(
        not {*new.holders} <= {*former.holders} and not any(host in running for host in former.holders)
        for former, new in zip(record.former, record.table, strict=True)
    )


def same_places(one: Table, other: Table) -> bool:
    """The same borders and holders."""
    return [(each.interval, sorted(each.holders)) for each in one] == [(each.interval, sorted(each.holders)) for each in other]


def cut_wanted(record: ShuffleRecord, table: Table, hosts: int) -> int:
    """Ranges a counted table should be cut into; 0 if it is good as it is."""
    wanted = range_count(record.size, hosts, record.spec.ranges)
    too_few = len(table) < min(wanted, record.rows) and (record.spec.ranges > 0 or 2 * len(table) <= wanted)
    uneven = imbalance([each.size for each in table]) > IMBALANCE_MAX
    return wanted if record.rows and (too_few or uneven) else 0


class NewTable(msgspec.Struct, frozen=True):
    """What came of a cut. fresh: the next identity. least: bytes that getting there demands."""

    table: Table
    fresh: int
    least: int


def new_table(record: ShuffleRecord, samples: Iterable[RunSample], count: int, hosts: Collection[str]) -> NewTable:
    """A new table from samples; identities are taken over from the present one. May take a second."""
    distribution = Distribution.of(thinned(samples))
    borders = even_borders(distribution, count)
    parts = intervals(borders)
    pairs = overlaps([each.interval for each in record.table], parts, distribution)
    named = identities(record.table, parts, pairs, record.fresh)
    table = with_holders(record, table_of(borders, named), hosts)
    least = moves(record.table, table, pairs).least if record.table else 0
    return NewTable(table, max(record.fresh, *(name + 1 for name in named)), least)


def moves_between(former: Table, table: Table, running: Collection[str]) -> list[IntervalMove]:
    """What the holders of the new table lack and a running host has. Sizes are not known (0)."""
    pairs = overlaps([each.interval for each in former], [each.interval for each in table], Distribution.of([]))
    return [move for move in moves(former, table, pairs, running).moves if move.sources]


def least_between(former: Table, table: Table) -> int:
    """Bytes that a change of holders alone demands."""
    return sum(max(0, old.size) * len({*new.holders} - {*old.holders}) for old, new in zip(former, table, strict=True))


def held_by(table: Sequence[Range]) -> dict[str, list[Range]]:
    """The ranges of each holder."""
    found: dict[str, list[Range]] = {}
    for each in table:
        for host in each.holders:
            found.setdefault(host, []).append(each)
    return found


def kept_intervals(table: Sequence[Range], host: str) -> list[Interval]:
    """What the host must keep, neighbouring ranges as one."""
    found: list[Interval] = []
    for each in held_by(table).get(host, []):
        if found and found[-1].upper is not None and found[-1].upper == each.interval.lower:
            found[-1] = Interval(found[-1].lower, each.interval.upper)
        else:
            found.append(each.interval)
    return found


def commit(record: ShuffleRecord, receipts: tuple[Receipt, ...]) -> ShuffleRecord:
    """The committed attempts are named. Raises AttemptConflict, ShuffleSealed."""
    unique = tuple({receipt.partition: receipt for receipt in receipts}.values())
    committed = {receipt.partition: receipt.attempt for receipt in unique}
    if any(committed[receipt.partition] != receipt.attempt for receipt in receipts):
        raise AttemptConflict("two attempts of one partition are to be committed")
    if record.state is ShuffleState.FILLING:
        return replace(record, state=ShuffleState.SEALING, stage=Stage.CHECKING, receipts=unique, cut=0, cuts=0)
    if record.state is ShuffleState.REMOVED or committed != record.committed:
        raise ShuffleSealed(f"shuffle {record.name!r} was committed with other attempts")
    return record


def refuse(record: ShuffleRecord) -> ShuffleRecord:
    """These attempts can't be committed: others may be written."""
    return replace(record, state=ShuffleState.FILLING, stage=Stage.MOVING if record.former else Stage.NONE, receipts=())


def rebalance(record: ShuffleRecord, transaction: str, ranges: int) -> ShuffleRecord:
    """A sealed shuffle is to be split anew."""
    count = range_count(record.size, 1, ranges or len(record.table))
    return replace(record, rebalanced=transaction, cut=count, stage=Stage.CUTTING)


def remove(record: ShuffleRecord, transaction: str) -> ShuffleRecord:
    """Nothing of it is wanted any more."""
    if record.state is ShuffleState.REMOVED:
        return record
    gone = replace(record, state=ShuffleState.REMOVED, stage=Stage.NONE, removal=transaction, cut=0)
    return replace(gone, epoch=0, table=(), former=(), receipts=())


def one_range(record: ShuffleRecord, members: Collection[str]) -> ShuffleRecord:
    """Committed before anyone wanted a table: one range will do."""
    whole = (Range(0, record.fresh, Interval(None, None)),)
    table = with_holders(record, whole, members)
    return replace(record, table=table, epoch=1, fresh=record.fresh + 1)


def with_table(record: ShuffleRecord, new: NewTable) -> ShuffleRecord:
    """The table that came of samples: the first one, or one to move to."""
    if not record.table:
        return replace(record, table=new.table, fresh=new.fresh, epoch=1)
    if same_places(new.table, record.table):
        return replace(record, cut=0, state=ShuffleState.SEALED, stage=Stage.KEEPING)
    return replace(_moving(record, new.table, new.least), cut=0, fresh=new.fresh)


def complete(record: ShuffleRecord, table: Table, members: Collection[str]) -> ShuffleRecord:
    """Every holder has everything of its ranges; `table` says how much that is. What was sent to get there may be less than was
    needed when it began, as some holders had kept what they had before."""
    least = record.moved_least + min(record.least, record.sent)
    done = replace(record, table=table, former=(), moved_least=least, least=0, sent=0)
    sealing, count = record.state is ShuffleState.SEALING, record.cut
    if sealing and not count and record.cuts < CUTS_MAX:
        count = cut_wanted(record, table, len(members))
    if count:
        return replace(done, stage=Stage.CUTTING, cut=count, cuts=record.cuts + sealing)
    placed = with_holders(record, table, members)
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
    table = with_holders(record, record.table, hosts.members)
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
