"""What must be copied where so that everything immutable is complete on enough hosts again. Pure; one plan for the closed
fragments of logs, snapshots, task payloads and what a follower keeps of shuffles (decision 0053).

Order of a repair: copy from a verified source, then change who is named by compare-and-set, then, much later and only after
reading the metadata again, delete what nobody names. repairer.py performs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from roq.log.replicated.appending import Appending
from roq.log.replicated.health import choose
from roq.log.replicated.metadata import LogMeta, SegmentMetadata, SegmentState
from roq.wire.master import Shortage


@dataclass(frozen=True)
class Holding:
    """Something immutable and the nodes that are named for it. first, last: of a fragment, 0 and -1 for a blob; size:
    bytes of a blob."""

    name: str
    nodes: tuple[str, ...]
    first: int = 0
    last: int = -1
    size: int = 0

    @property
    def is_blob(self) -> bool:
        """A blob, or a fragment of a segment?"""
        return self.last < self.first

    @property
    def key(self) -> str:
        """By which hosts are ranked for it: a blob's are those that it was stored on first."""
        return self.name if self.is_blob else f"{self.name}.{self.first}"

    def __str__(self) -> str:
        if self.is_blob:
            return f"snapshot {self.name}" if "~snapshot-" in self.name else f"payload {self.name}"
        return f"entries {self.first} to {self.last} of segment {self.name}"


@dataclass(frozen=True)
class OpenPart:
    """What `node` must have of a segment that is being written: its opening, and entries first … last, if last >= first."""

    name: str
    node: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"open segment {self.name}"


@dataclass(frozen=True)
class Copy:
    """Have each of `targets` fetch what it lacks of `holding` from one of `sources`. A target that is not named yet takes the
    place of one of `replaced`, or is named besides."""

    holding: Holding
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    replaced: tuple[str, ...] = ()

    def nodes(self, done: Collection[str]) -> tuple[str, ...]:
        """Who is to be named when these targets have it: nobody is left out in whose place nobody has come."""
        fresh = tuple(target for target in self.targets if target in done and target not in self.holding.nodes)
        left = self.replaced[: len(fresh)]
        return (*(node for node in self.holding.nodes if node not in left), *fresh)


@dataclass
class Comparison:
    """lacking, parts: what answering nodes do not hold; disks: identities by host that answered; silent: who did not."""

    lacking: set[tuple[Holding, str]] = field(default_factory=set)
    parts: list[OpenPart] = field(default_factory=list)
    disks: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)  # host -> reason

    def good(self, holding: Holding) -> list[str]:
        """Nodes that answered and hold all of it."""
        return [node for node in holding.nodes if node in self.disks and (holding, node) not in self.lacking]


def holdings(meta: LogMeta) -> Iterator[Holding]:
    """Everything immutable of a log: its newest snapshot first, since nothing is readable without it."""
    if meta.snapshot is not None:
        yield Holding(meta.snapshot.blob, meta.snapshot.nodes, size=meta.snapshot.size)
    for segment in meta.segments:
        if segment.state is SegmentState.CLOSED:
            for fragment in segment.fragments:
                yield Holding(segment.id, fragment.nodes, fragment.first, segment.end_of(fragment))


def open_parts(segment: SegmentMetadata, appending: Appending) -> Iterator[OpenPart]:
    """What the nodes of the open segment have confirmed. A node that is known to miss entries is asked for its opening only."""
    for place, fragment in enumerate(segment.fragments):
        later = segment.fragments[place + 1 :]
        end = later[0].first - 1 if later else appending.acked
        for node in fragment.nodes:
            last = fragment.first - 1 if node in appending.holed else min(end, appending.upto.get(node, end))
            yield OpenPart(segment.id, node, fragment.first, last)


def plan(
    what: Iterable[Holding],
    wanted: int,
    live: Collection[str],
    gone: Collection[str] = (),
    lacking: Collection[tuple[Holding, str]] = (),
    refusing: Collection[tuple[Holding, str]] = (),
    targets_max: int = 1,
    leaving: Collection[str] = (),
) -> list[Copy]:
    """At most one Copy per holding. wanted: copies; live: hosts that may get some; gone: given up (a host that is neither is
    waited for); lacking: (holding, node) known to be incomplete; refusing: those that could not be filled lately; targets_max:
    of one holding at a time; leaving: live hosts that are being evacuated: they are sources, and others take their places.
    While another named host is only waited for they don't: if it never came back, fewer copies would be left than could be.

    Nothing happens without a live source. Named nodes are filled before others are taken. Where no node is complete, entries
    are gathered from several; a blob is there or not.
    """
    copies = []
    for holding in what:
        incomplete = [node for node in holding.nodes if (holding, node) in lacking]
        complete = tuple(node for node in holding.nodes if node in live and node not in incomplete)
        filled = (node for node in incomplete if node in live and node not in leaving)
        fill = sorted(filled, key=lambda node: (holding, node) in refusing)
        stuck = tuple(node for node in fill if (holding, node) in refusing)
        given_up = tuple(node for node in holding.nodes if node in gone and node not in live)
        settled = all(node in live for node in holding.nodes if node not in gone)
        replaced = stuck or (*given_up, *(node for node in holding.nodes if node in leaving and settled))
        count = min(len(replaced) + max(wanted - len(holding.nodes), 0), targets_max)
        candidates = {host for host in live if host not in holding.nodes and host not in leaving}
        fit = {host for host in candidates if (holding, host) not in refusing} or candidates
        spares = choose(holding.key, fit, count) if complete and count else ()
        if fill and (fill[0] not in stuck or not spares):
            sources = complete if holding.is_blob else complete + tuple(fill[1:])
            if sources:
                copies.append(Copy(holding, sources, (fill[0],)))
        elif spares:
            copies.append(Copy(holding, complete, spares, replaced[: len(spares)]))
    return copies


def under_replicated(
    what: Iterable[Holding], parts: Iterable[OpenPart], wanted: int, behind: Collection[str], found: Comparison
) -> list[Shortage]:
    """What has not `wanted` copies. behind: nodes of the open segment that miss some of its newest entries. Pure."""
    short = []
    for holding in what:
        good = found.good(holding)
        if len(good) < wanted:
            short.append(Shortage(str(holding), len(good), wanted, tuple(one for one in holding.nodes if one not in good)))
    fragments: dict[tuple[str, int], list[OpenPart]] = {}
    for part in parts:
        fragments.setdefault((part.name, part.first), []).append(part)
    newest = max(fragments, key=lambda key: key[1], default=None)
    for key, nodes in fragments.items():
        late = behind if key == newest else ()
        bad = [one.node for one in nodes if one in found.parts or one.node not in found.disks or one.node in late]
        if len(nodes) - len(bad) < wanted:
            short.append(Shortage(f"open segment {key[0]} from entry {key[1]} on", len(nodes) - len(bad), wanted, tuple(bad)))
    return short


def garbage(
    meta: LogMeta, log_id: str, epoch: int, names: Iterable[str], host: str, uploads: Collection[str] = ()
) -> list[str]:
    """Which segments and snapshots of this log on a host are named by nobody. `epoch` is the owner's and has just been read.

    What later epochs made, and what this epoch may be about to use, is not garbage; nor is what it is uploading, however long
    that takes and whatever was opened meanwhile.
    """
    named: set[str] = set(uploads)
    for segment in meta.segments:
        if segment.state is not SegmentState.CLOSED or any(host in one.nodes for one in segment.fragments):
            named.add(segment.id)
    if meta.snapshot is not None and host in meta.snapshot.nodes:
        named.add(meta.snapshot.blob)
    return [name for name in names if name not in named and _older(name, log_id, epoch, meta.serial)]


def _older(name: str, log_id: str, epoch: int, serial: int) -> bool:
    """Was it made before `epoch`, or by it before `serial`?"""
    rest = name.removeprefix(f"{log_id}~").removeprefix("snapshot-").split(".")
    if len(rest) < 2 or not name.startswith(f"{log_id}~") or not (rest[0].isdigit() and rest[1].isdigit()):
        return False
    return (int(rest[0]), int(rest[1])) < (epoch, serial)
