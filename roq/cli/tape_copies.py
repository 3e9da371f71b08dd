"""For `roq doctor`: which stretches of a recorded queue's tapes are on fewer living hosts than they should be. Pure.

It is what the tapes' metadata say: a host that lives is taken to have what they name it for. A disk that was replaced under a
host's name is not seen here; its store is given everything again all the same.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from roq.cli.status import ID_SHOWN
from roq.log.replicated.metadata import LogMeta
from roq.wire.assignment import from_json
from roq.wire.gcm import TapeView
from roq.wire.master import Shortage


def tape_shortages(views: Sequence[TapeView], alive: Set[str]) -> list[Shortage]:
    """One for each tape that lacks some. alive: hosts. Sorted by the tapes' Exchanges."""
    found = []
    for view in sorted(views, key=lambda view: view.exchange):
        meta = from_json(view.meta, LogMeta)
        parts = [frozenset(part.nodes) for segment in meta.segments for part in segment.fragments]
        short = [hosts for hosts in parts if len(hosts & alive) < meta.write_quorum]
        if short:
            what = f"{len(short)} of {len(parts)} stretches of the tape of Exchange {view.exchange[:ID_SHOWN]}"
            away = tuple(sorted(frozenset[str]().union(*short) - alive))
            found.append(Shortage(what, min(len(hosts & alive) for hosts in short), meta.write_quorum, away))
    return found
