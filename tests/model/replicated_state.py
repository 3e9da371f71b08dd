"""States of the model in replicated_log.py: scenarios, worlds, and the real machines frozen into values and thawed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from roq.log.replicated.appending import Appending, AppendingSafeguards
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.recovery import SegmentRecovery

SEGMENT = "s"
ALL_ON = AppendingSafeguards()
Message = tuple[Any, ...]


class Breach(Exception):
    """A promise is broken."""


@dataclass(frozen=True)
class Scenario:
    """Bounds of a search, and which rules are in force."""

    nodes: str = "abc"
    spares: str = ""
    ack_quorum: int = 2
    entries: int = 1
    recoverers: int = 1
    crashes: int = 0
    losses: int = 0  # disks
    images: int = 0  # disks that are put back to how they were at the beginning
    rots: int = 0  # entries that become unreadable
    changes: int = 0  # ensemble changes of the writer
    replacements: int = 0  # of nodes by a recovery
    planted: str = ""  # the old writer is gone and has left its entries on these nodes
    planted_acked: int = 0  # so many of them were acknowledged
    # the rules
    reads_fence: bool = True
    start_behind_fragment: bool = True
    fenced_means_unknown: bool = True
    sync_before_ack: bool = True
    fence_is_durable: bool = True
    lost_disk_is_unsure: bool = True
    lost_disk_refuses: bool = True
    old_image_is_noticed: bool = True
    rot_is_unknown: bool = True
    compare_and_set: bool = True
    fragments_with_the_end: bool = True
    named_stay_as_they_are: bool = True  # a recovery announces the segment to no node that it asks
    count_copies_while_open: bool = True  # off: only what is lost for good counts
    coverage: bool = True
    safeguards: AppendingSafeguards = ALL_ON


class Store(NamedTuple):
    """One store's twin. unsynced: what a crash takes back (only if a rule is off)."""

    fenced: int = 0
    opened: bool = True
    held: frozenset[int] = frozenset()
    rotten: frozenset[int] = frozenset()
    confirmed: int = 0
    unsynced: frozenset[int] = frozenset()
    fenced_durably: int = 0


class Writer(NamedTuple):
    """The old writer: Appending, frozen, and what it knows. change: (first, nodes) while it changes the ensemble."""

    machine: tuple[Any, ...]
    meta: LogMeta
    stopped: bool = False
    change: tuple[int, tuple[str, ...]] | None = None


class Recoverer(NamedTuple):
    """One recovery, frozen. committed: its close was written."""

    machine: tuple[Any, ...]
    meta: LogMeta
    committed: bool = False


class World(NamedTuple):
    """One state."""

    meta: LogMeta
    stores: tuple[Store, ...]
    writer: Writer
    recoverers: tuple[Recoverer, ...]
    net: frozenset[Message]
    acked: int  # the client of the old writer was told so
    failed: frozenset[int]  # ... that these failed
    budget: tuple[int, ...]  # crashes, losses, rots, changes, replacements, images left


def value(position: int) -> bytes:
    return b"entry %d" % position


def freeze_appending(one: Appending | None) -> tuple[Any, ...]:
    if one is None:
        return ()
    order = sorted(one.nodes)
    return (
        one.nodes, one.epoch, one.acked, one.next, one.changing,
        tuple(one.upto[node] for node in order), tuple(one.sent[node] for node in order),
    )  # fmt: skip


def thaw_appending(frozen: tuple[Any, ...], scenario: Scenario) -> Appending | None:
    if not frozen:
        return None
    nodes, epoch, acked, after, changing, upto, sent = frozen
    one = Appending(SEGMENT, epoch, nodes, scenario.ack_quorum, acked + 1, scenario.safeguards)
    for position in range(acked + 1, after):
        one.append(value(position))
    order = sorted(nodes)
    one.upto, one.sent, one.changing = dict(zip(order, upto, strict=True)), dict(zip(order, sent, strict=True)), changing
    return one


def freeze_recovery(one: SegmentRecovery) -> tuple[Any, ...]:
    return (
        one.segment, one.epoch, tuple(sorted(one.fenced.items())), freeze_appending(one.writing), one.end, one.written,
        tuple(sorted((position, frozenset(nodes)) for position, nodes in one._absent.items() if one.end is None)),
        tuple(sorted(one._found)) if one.end is None else (),
    )  # fmt: skip


def thaw_recovery(frozen: tuple[Any, ...], scenario: Scenario) -> SegmentRecovery:
    segment, epoch, fenced, writing, end, written, absent, found = frozen
    one = SegmentRecovery(segment, epoch, scenario.ack_quorum)
    if not scenario.coverage:
        one.coverage -= 1
    one.fenced, one.end, one.written = dict(fenced), end, written
    one.writing = thaw_appending(writing, scenario)
    one._absent = {position: set(nodes) for position, nodes in absent}
    one._found = {position: value(position) for position in found}
    return one
