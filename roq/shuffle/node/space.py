"""The space of files that hold little that is wanted any more is given back: what lives in them is written again elsewhere.

On the follower's loop; nothing is deleted that something in the index lies in.
"""

from __future__ import annotations

from roq.errors import RoqError
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.committer import Committer
from roq.shuffle.node.datafile import DataFile
from roq.shuffle.node.stored import StoredShuffle, mostly_dead

log = logger(__name__)


async def give_back(stored: StoredShuffle, committer: Committer, counters: Counters) -> None:
    """One after the other, for one shuffle at a time."""

    def closed() -> list[DataFile]:
        if stored.current is not None and not stored.current.live:
            stored.close_current()
        return stored.closed()

    # Asked of the thread that writes: what was written to these files before is in the index when this returns, and nothing is
    # written to them any more. Asked on the loop, a file could be closed the moment after with blocks not in the index yet.
    for file in await committer.call(closed):
        if not mostly_dead(file):
            continue
        living = [(key, entry) for key, entry in stored.entries() if entry.file is file]
        try:
            moved = await committer.call(lambda: committer.rewrite(stored, file, living))  # noqa: B023
            for key, old, new in moved:
                stored.replace(key, old, new)
            for key, entry in living:
                if stored.remove(key, entry):  # still there: it was damaged
                    stored.hurt = True
            if file.live:
                log.error("file is in use and could not be freed", extra={"fields": {"file": str(file.path)}})
                continue
            stored.files.pop(file.number, None)
            await committer.call(file.remove)
        except (OSError, RoqError) as error:
            log.warning("space could not be freed", extra={"fields": {"shuffle": stored.id, "reason": str(error)}})
            return
        counters["files_given_back"] += 1
