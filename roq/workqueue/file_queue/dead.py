"""Dead letters: task files taken out of the queue, each with a note that says why.

The note is durable before the task leaves the queue; a kill in between leaves a note too early, which is harmless.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from roq.errors import CallError
from roq.runtime.files import DISK
from roq.workqueue.file_queue.lane import Lane
from roq.workqueue.file_queue.names import ID, Name
from roq.workqueue.file_queue.notes import Note, Notes


class DeadLetters:
    """Of one folder. lanes: by suffix."""

    def __init__(self, folder: str, lanes: Mapping[str, Lane], notes: Notes) -> None:
        self._folder, self._lanes, self._notes = folder, lanes, notes

    def bury(self, name: Name, note: Note) -> bool:
        """Durable, but for the queue's folder. False: the lease was lost."""
        if not os.path.exists(f"{self._lanes[name.suffix].queue}/{name}"):
            return False
        self._notes.write(name.id, note)
        buried = self._lanes[name.suffix].take_out(name, f"{self._folder}/{name.id}{name.suffix}")
        DISK.sync_folder(self._folder)
        return buried

    def all(self) -> list[tuple[str, str]]:
        """(id, suffix) of all of them."""
        split = (os.path.splitext(text) for text in os.listdir(self._folder))
        return [(id, suffix) for id, suffix in split if suffix in self._lanes and ID.fullmatch(id)]

    def exists(self, id: str) -> bool:
        """Whether the task is dead."""
        return any(os.path.exists(f"{self._folder}/{id}{suffix}") for suffix in self._lanes)

    def path(self, id: str, suffix: str) -> str:
        """Its file."""
        return f"{self._folder}/{id}{suffix}"

    def requeue(self, ids: Sequence[str] | None) -> list[tuple[str, str]]:
        """Put these back as new, None: all; (id, suffix) of those that were dead. Durable."""
        back = [(id, suffix) for id, suffix in self._chosen(ids) if self._lanes[suffix].put_back(self.path(id, suffix), id)]
        for suffix in {suffix for _, suffix in back}:
            DISK.sync_folder(self._lanes[suffix].queue)
        DISK.sync_folder(self._folder)
        self._notes.forget(id for id, _ in back)
        return back

    def remove(self, ids: Sequence[str] | None) -> int:
        """Forget these, None: all; how many there were. Durable."""
        gone = [id for id, suffix in self._chosen(ids) if DISK.remove(self.path(id, suffix))]
        DISK.sync_folder(self._folder)
        self._notes.forget(gone)
        return len(gone)

    def _chosen(self, ids: Sequence[str] | None) -> Iterator[tuple[str, str]]:
        if ids is None:
            yield from self.all()
            return
        wrong = next((id for id in ids if not ID.fullmatch(id)), None)
        if wrong is not None:
            raise CallError(f"{wrong!r} is not the id of a task of this kind of work queue")
        for id in ids:
            yield from ((id, suffix) for suffix in self._lanes if os.path.exists(self.path(id, suffix)))
