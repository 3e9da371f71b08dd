"""What `status` and `peek` show: one listing of the folders, and a look into a few files."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from roq.wire.task import Status, TaskState, TaskView
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.directory import TaskDirectory
from roq.workqueue.file_queue.folder import Unreadable, modified_ms, read
from roq.workqueue.file_queue.names import Name
from roq.workqueue.file_queue.notes import DeadLetters, Notes

LOOKS = 1_000  # files looked into for one snapshot


class Listing(NamedTuple):
    """One listing: the names due by `now`, and the others."""

    now: float
    ready: list[str]
    later: list[str]


class FolderSnapshot:
    """Of one open queue. directories: by suffix. clock: Unix seconds."""

    def __init__(
        self, directories: Mapping[str, TaskDirectory], dead: DeadLetters, notes: Notes, clock: Callable[[], float]
    ) -> None:
        self._directories, self._dead, self._notes, self._clock = directories, dead, notes, clock

    def look(self) -> Listing:
        """List the folders."""
        now = self._clock()
        listed = [text for directory in self._directories.values() for text in os.listdir(directory.queue)]
        return Listing(now, *names.split_due(listed, int(now)))

    def status(self, look: Listing, inserted: int, completed: int) -> Status:
        """Counts."""
        now, ready, later = look
        waiting = sum(text[:2] == "00" for text in later)
        foreign = sum(1 for text in self._foreign(later) if self._is_new(text))
        delayed = waiting + foreign
        oldest = self._oldest(ready)
        age = -1 if oldest is None else max(0, int(now * 1000) - oldest)
        return Status(len(ready), delayed, len(later) - delayed, len(self._dead.all()), completed, inserted, age)

    def peek(self, look: Listing, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        if state is TaskState.DEAD:
            dead = sorted(self._dead.all(), key=lambda one: names.order(f"0--{one[0]}{one[1]}", ""))
            return [view for id, suffix in dead[:count] if (view := self._dead_view(id, suffix)) is not None]
        _, ready, later = look
        if state is TaskState.READY:
            chosen = iter(heapq.nsmallest(count, ready, key=lambda text: names.order(text, "")))
        else:
            foreign = {text for text in self._foreign(later) if self._is_new(text)}
            of_state = [text for text in later if (text[:2] == "00" or text in foreign) == (state is TaskState.DELAYED)]
            chosen = iter(heapq.nsmallest(count, of_state, key=lambda text: int(text[:-43])))
        holders = self._notes.holders() if state is TaskState.LEASED else {}
        return [view for text in chosen if (view := self._view(text, state, holders.get(text, ""))) is not None]

    def spent(self, look: Listing, attempts_max: int) -> Iterator[tuple[Name, int]]:
        """Tasks whose last allowed lease is over, with their attempts; LOOKS at most are looked at."""
        over = [text for text in look.ready if text[:2] not in ("0-", "00")]
        for text in over[:LOOKS]:
            name = names.parse(text)
            if (
                name is not None
                and (attempts := names.attempts(self._directories[name.suffix].history(name.id))) >= attempts_max
            ):
                yield name, attempts

    def _foreign(self, later: list[str]) -> list[str]:
        """Some of the names python-task-queue made, which don't tell whether the task was leased."""
        found = (text for text in later if text[:1] != "0" and text[-27] != "8")
        return [text for text, _ in zip(found, range(LOOKS), strict=False)]

    def _is_new(self, text: str) -> bool:
        """Whether it was put with a delay and never leased."""
        name = names.parse(text)
        return name is not None and self._directories[name.suffix].history(name.id) == [name]

    def _oldest(self, ready: list[str]) -> int | None:
        """Insertion time (ms) of the oldest ready task; of those of python-task-queue, some are looked at."""
        ours = min((text[-41:-28] for text in ready if text[-27] == "8"), default=None)
        found = [] if ours is None else [int(ours[:8] + ours[9:], 16)]
        others = (text for text in ready if text[-27] != "8")
        for text, _ in zip(others, range(LOOKS), strict=False):
            name = names.parse(text)
            try:
                if name is not None:
                    found.append(modified_ms(f"{self._directories[name.suffix].queue}/{text}"))
            except FileNotFoundError:
                continue
        return min(found, default=None)

    def _view(self, text: str, state: TaskState, holder: str) -> TaskView | None:
        name = names.parse(text)
        if name is None:
            return None
        directory = self._directories[name.suffix]
        path = f"{directory.queue}/{text}"
        try:
            payload, damage = shown(path, name.id, name.suffix)
            inserted = names.inserted_ms(name.id) or modified_ms(path)
        except FileNotFoundError:
            return None  # leased or done meanwhile
        attempts, error = names.attempts(directory.history(name.id)), damage or self._notes.read(name.id).error
        due = 0 if state is TaskState.READY else 1000 * name.due
        return TaskView(name.id, payload, state, attempts, names.priority(name.id), inserted, due, error, holder)

    def _dead_view(self, id: str, suffix: str) -> TaskView | None:
        path = self._dead.path(id, suffix)
        try:
            payload, damage = shown(path, id, suffix)
            inserted = names.inserted_ms(id) or modified_ms(path)
        except FileNotFoundError:
            return None
        note = self._notes.read(id)
        error = note.error or damage
        return TaskView(id, payload, TaskState.DEAD, note.attempts, names.priority(id), inserted, 0, error, "")


def shown(path: str, id: str, suffix: str) -> tuple[bytes, str]:
    """A task's payload, and what is wrong with its file. Nothing of a damaged payload is shown as if it were one; what another
    program left there is shown as it is. Raises FileNotFoundError."""
    try:
        data = read(path)
    except Unreadable as error:
        return b"", damaged(path, error)
    payload = names.decode(data, suffix, id)
    if payload is not None:
        return payload, ""
    return (b"", damaged(path)) if names.is_sealed(id) else (data, "")


def damaged(path: str, error: Unreadable | None = None) -> str:
    """What to tell of a task's file."""
    return f"damaged: {path} {f'can not be read: {error.strerror}' if error else 'does not match its checksum'}"
