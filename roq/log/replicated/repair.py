"""What must be copied where so that everything immutable is whole on enough hosts again. Pure; one mechanism for the closed
fragments of logs, snapshots and task payloads.

Order of a repair: copy from a verified source, then change who is named by compare-and-set, then, much later and only after
reading the metadata again, delete what nobody names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from roq.log.replicated.metadata import LogMeta, State
from roq.log.replicated.placement import choose


@dataclass(frozen=True)
class Holding:
    """Something immutable and the nodes that are named for it. first, last: of a fragment, 0 and -1 for a blob."""

    name: str
    nodes: tuple[str, ...]
    first: int = 0
    last: int = -1

    @property
    def is_blob(self) -> bool:
        """A blob, or a fragment of a segment?"""
        return self.last < self.first


@dataclass(frozen=True)
class Copy:
    """Have `target` fetch what it lacks of `holding` from one of `sources`; then the nodes are `after`."""

    holding: Holding
    sources: tuple[str, ...]
    target: str
    after: tuple[str, ...]


def holdings(meta: LogMeta) -> Iterator[Holding]:
    """Everything immutable of a log: its newest snapshot first, since nothing is readable without it."""
    if meta.snapshot is not None:
        yield Holding(meta.snapshot.blob, meta.snapshot.nodes)
    for segment in meta.segments:
        if segment.state is State.CLOSED:
            for fragment in segment.fragments:
                yield Holding(segment.id, fragment.nodes, fragment.first, segment.end_of(fragment))


def plan(
    what: Iterable[Holding],
    wanted: int,
    live: Collection[str],
    gone: Collection[str],
    lacking: Collection[tuple[Holding, str]] = (),
) -> list[Copy]:
    """At most one Copy per holding. wanted: copies; live: hosts that may get some; gone: given up (a host that is neither is
    waited for); lacking: (holding, node) known to be incomplete.

    A node is never taken off the list unless another one takes its place, and nothing happens without a live source.
    """
    copies = []
    for holding in what:
        incomplete = {node for node in holding.nodes if (holding, node) in lacking}
        sources = tuple(node for node in holding.nodes if node in live and node not in incomplete)
        fill = [node for node in holding.nodes if node in incomplete and node in live]
        lost = [node for node in holding.nodes if node in gone and node not in live]
        if not sources:
            continue
        if fill:
            copies.append(Copy(holding, sources, fill[0], holding.nodes))
        elif lost or len(holding.nodes) < wanted:
            spares = choose(f"{holding.name}.{holding.first}", set(live) - set(holding.nodes), 1)
            if spares:
                kept = tuple(node for node in holding.nodes if node not in lost[:1])
                copies.append(Copy(holding, sources, spares[0], (*kept, spares[0])))
    return copies


def garbage(meta: LogMeta, log_id: str, epoch: int, names: Iterable[str], host: str) -> list[str]:
    """Which segments and snapshots of this log on a host are named by nobody. `epoch` is the owner's and has just been read.

    What later epochs made, and what this epoch may be about to use, is not garbage.
    """
    named: set[str] = set()
    for segment in meta.segments:
        if segment.state is not State.CLOSED or any(host in one.nodes for one in segment.fragments):
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
