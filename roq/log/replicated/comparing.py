"""What stores hold, compared with what the metadata say they should: one question per store, answered from its memory.

So it can be asked in every round of repairs. That what is held can be read is found out elsewhere (scrub, `wire.Holes`): damage
that was found is no longer held. The disk's identity comes with the answer: on another disk nothing was verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from roq.errors import RoqError
from roq.log.replicated.repair import Holding, OpenPart
from roq.log.replicated.stores import Stores
from roq.runtime.observe import logger
from roq.wire import store as wire
from roq.wire.master import Shortage

log = logger(__name__)


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


async def compare(stores: Stores, what: Iterable[Holding], parts: Iterable[OpenPart], live: Iterable[str]) -> Comparison:
    """Ask every live node that is named. Who does not answer has proved nothing, neither way."""
    held: dict[str, list[Holding]] = {}
    opened: dict[str, list[OpenPart]] = {}
    for holding in what:
        for node in holding.nodes:
            held.setdefault(node, []).append(holding)
    for part in parts:
        opened.setdefault(part.node, []).append(part)
    found, alive = Comparison(), set(live)
    found.silent = dict.fromkeys((held.keys() | opened.keys()) - alive, "is away")
    asked = sorted((held.keys() | opened.keys()) & alive)
    await asyncio.gather(*(_ask(stores, node, held.get(node, []), opened.get(node, []), found) for node in asked))
    return found


async def _ask(stores: Stores, node: str, held: list[Holding], opened: list[OpenPart], found: Comparison) -> None:
    lacking: list[tuple[Holding, str]] = []
    parts: list[OpenPart] = []
    disk, most = "", wire.LIST_COUNT_MAX // 2
    try:
        for begin in range(0, max(len(held), len(opened), 1), most):
            some, open_some = held[begin : begin + most], opened[begin : begin + most]
            segments, blobs = [one for one in some if not one.is_blob], [one for one in some if one.is_blob]
            request = wire.Compare(
                [(one.name, one.first, one.last) for one in segments],
                [(one.name, one.first, one.last) for one in open_some],
                [(one.name, one.size) for one in blobs],
            )
            answer = await stores.request(node, request, wire.Compared)
            disk = answer.disk
            lacking += [(segments[place], node) for place in answer.segments]
            lacking += [(blobs[place], node) for place in answer.blobs]
            parts += [open_some[place] for place in answer.opened]
    except (RoqError, IndexError) as error:
        found.silent[node] = str(error)
        log.info("inventory of a store could not be compared", extra={"fields": {"node": node, "reason": str(error)}})
        return
    found.lacking.update(lacking)
    found.parts += parts
    found.disks[node] = disk


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
