"""Tasks that Spark has committed and the queue does not know: their leases were over before the ack. Whoever leases one again
acks it. As long as nobody has, its id is kept here:

    done-{number}.json         ids of tasks of manifest {number}
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from roq.spark.queue_files import write_note

KEEP_SECONDS = 7 * 86_400.0  # a task that nobody leased again for so long is another reader's


class DoneTasks:
    """Of one folder of manifests. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notes: dict[str, Path] = {}  # id → where it is noted
        self._left: dict[Path, set[str]] = {}
        self._noted: dict[Path, float] = {}  # Unix seconds
        for path in folder.glob("done-*.json"):
            self._remember(path, msgspec.json.decode(path.read_bytes(), type=list[str]), path.stat().st_mtime)
        self._prune()

    def __contains__(self, id: str) -> bool:
        return id in self._notes

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, number: int, ids: Sequence[str]) -> None:
        """These tasks of a manifest are done. Durable on return; what has been here for too long goes."""
        path = self._folder / f"done-{number}.json"
        write_note(path, ids)
        self._remember(path, ids, time.time())
        self._prune()

    def acked(self, ids: Iterable[str]) -> None:
        """The queue knows now: it will not lease these again."""
        for id in ids:
            if (path := self._notes.pop(id, None)) is not None:
                self._left[path].discard(id)
                if not self._left[path]:
                    self._forget(path)

    def _remember(self, path: Path, ids: Iterable[str], noted: float) -> None:
        self._left[path], self._noted[path] = set(ids), noted
        self._notes.update(dict.fromkeys(self._left[path], path))

    def _prune(self) -> None:
        oldest = time.time() - KEEP_SECONDS
        for path in [path for path, noted in self._noted.items() if noted < oldest]:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        del self._noted[path]
        for id in self._left.pop(path):
            if self._notes.get(id) == path:
                del self._notes[id]
        path.unlink(missing_ok=True)
