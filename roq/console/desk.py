"""Work queues and groups as their masters tell of them, and what is done with dead letters.

Not covered: what letters have in common (patterns.py), routes (work_routes.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from roq.client.overview import with_counts
from roq.client.shard_answers import count_at, peek_at, status_of
from roq.console.errors import LetterTaken
from roq.console.letters import ShownTask, shown_task
from roq.console.patterns import ErrorPattern, FailedLetter, pattern_id, pattern_of, patterns_of
from roq.console.source import ConsoleSource
from roq.errors import DeadlineExceeded, InvalidConfiguration, RoqError, TaskNotFound
from roq.wire import master
from roq.wire.gcm import WorkQueueInfo
from roq.wire.headers import split_headers, with_headers
from roq.wire.task import PayloadReference, Status, TaskState
from roq.wire.work_queue import GroupOrder, GroupSource
from roq.workqueue.address import queue_address
from roq.workqueue.queue import open_queue

MASTERS_AT_ONCE = 32
LOOKED_AT_MAX = 1000  # letters: what people read; the rest follows when these are gone
IDS_AT_ONCE = 1000
ROUNDS_MAX = 200  # of one act: 200 000 letters
LetterAct = Callable[[list[str] | None], master.RequeueLetters | master.RemoveLetters]  # of these, None: of all


class WorkQueueView(msgspec.Struct, frozen=True):
    """A work queue or a group. queue, group, topics, order, start, where: of a group, "" and none else. master: its host; term:
    of it. copies: stores that keep each task, needed: that must have it. waiting: tasks nobody leases; dead: dead letters; what
    was completed, inserted and expired since it exists. oldest_seconds: of the tasks that are ready; behind_seconds, lag: of a
    group, how far it is behind its queue. problem: why its master did not say; then what only it knows is 0."""

    name: str
    queue: str
    group: str
    ready: bool
    master: str
    standbys: tuple[str, ...]
    term: int
    copies: int
    needed: int
    max_attempts: int
    created: float
    topics: tuple[str, ...] = ()
    order: GroupOrder | None = None
    start: str = ""
    where: str = ""
    waiting: int = 0
    leased: int = 0
    dead: int = 0
    completed: int = 0
    inserted: int = 0
    expired: int = 0
    oldest_seconds: float | None = None
    behind_seconds: float | None = None
    lag: int | None = None
    problem: str = ""


class PatternView(msgspec.Struct, frozen=True):
    """Dead letters with one cause, see patterns.py. first, last: when they were put, Unix seconds. example: the first one."""

    id: str
    pattern: str
    count: int
    first: float
    last: float
    attempts_most: int
    example: ShownTask
    ids: tuple[str, ...]


class DeskView(msgspec.Struct, frozen=True):
    """total: all there are; looked_at: the first of them, which the patterns are of."""

    total: int
    looked_at: int
    patterns: tuple[PatternView, ...]


class DeskOutcome(msgspec.Struct, frozen=True):
    """done: letters; left: that are dead now."""

    done: int
    left: int


def work_queue_view(info: WorkQueueInfo, status: Status | str) -> WorkQueueView:
    """status: of its master, or why there is none. Pure."""
    record, source = info.record, info.record.spec.source
    view = WorkQueueView(
        *(record.name, "", "", info.ready, record.master_host, record.standby_hosts, record.term),
        *(record.spec.write_quorum, record.spec.ack_quorum, record.spec.settings.max_attempts, record.created),
        problem=status if isinstance(status, str) else "",
    )
    if source is not None:
        view = msgspec.structs.replace(view, **_of_group(record.name, source))
    return view if isinstance(status, str) else with_counts(view, status)


def _of_group(name: str, source: GroupSource) -> dict[str, object]:
    return {
        "queue": source.queue,
        "group": name[len(source.queue) + 1 :],
        "topics": source.topics,
        "order": source.order,
        "start": source.start,
        "where": source.where,
    }


class Desk:
    """One work queue of the cluster. Its master is asked itself: opening it would create it if somebody has just removed it."""

    def __init__(self, source: ConsoleSource, info: WorkQueueInfo) -> None:
        self._source, self.info = source, info
        self.name = info.record.name

    @classmethod
    async def of(cls, source: ConsoleSource, name: str) -> Desk:
        """Raises WorkQueueNotFound."""
        return cls(source, await source.read(source.cluster.work_queue(name)))

    async def status(self) -> Status:
        """Raises TemporaryError."""
        return await status_of(self._source.masters, self.info)

    async def peek(self, state: TaskState, count: int) -> list[master.PeekedTask]:
        """The first ones."""
        return await peek_at(self._source.masters, self.info, state, count)

    async def letters(self) -> DeskView:
        """What they have in common."""
        found, status = await self.peek(TaskState.DEAD, LOOKED_AT_MAX), await self.status()
        return DeskView(max(status.dead, len(found)), len(found), pattern_views(found))

    async def act_on_all(self, chosen: Callable[[master.PeekedTask], bool] | None, act: LetterAct) -> DeskOutcome:
        """All letters, or the chosen. Looked at again until none is left that was not done before: one that dies again at once
        is not done again."""
        done, seen = 0, set[str]()
        for _ in range(ROUNDS_MAX):
            ids = None
            if chosen is not None:
                found = await self.peek(TaskState.DEAD, LOOKED_AT_MAX)
                ids = [one.id for one in found if one.id not in seen and chosen(one)]
            if ids == []:
                break
            done += await self._count(act, ids)
            if ids is None:
                break
            seen.update(ids)
        return DeskOutcome(done, (await self.status()).dead)

    async def act_on(self, ids: Sequence[str], act: LetterAct) -> DeskOutcome:
        """These letters; those that are none any more are left out."""
        parts = [list(ids[first : first + IDS_AT_ONCE]) for first in range(0, len(ids), IDS_AT_ONCE)]
        done = sum([await self._count(act, part) for part in parts])
        return DeskOutcome(done, (await self.status()).dead)

    async def _count(self, act: LetterAct, ids: list[str] | None) -> int:
        return await count_at(self._source.masters, self.info, act, ids)

    async def letter(self, id: str) -> master.PeekedTask:
        """One of the first. Raises TaskNotFound."""
        for one in await self.peek(TaskState.DEAD, LOOKED_AT_MAX):
            if one.id == id:
                return one
        raise TaskNotFound(f"{id} is no dead letter of {self.name}, or beyond the first {LOOKED_AT_MAX} that its master lists")

    async def requeue_one(self, id: str) -> None:
        """Raises TaskNotFound."""
        if not await self._count(master.RequeueLetters, [id]):
            raise TaskNotFound(f"{id} is no dead letter of {self.name} any more")

    async def put_edited(self, letter: master.PeekedTask, payload: bytes, headers: dict[str, str | bytes]) -> str:
        """A new task instead of the letter; its id. The same payload and headers again within the queue's `dedup_seconds` are
        the same task, even if that is done by now."""
        async with open_queue(queue_address(self._source.address, self.name)) as queue:
            key = edition_key(letter.id, payload, headers)
            return await queue.put(payload, priority=letter.priority, dedup_key=key, headers=headers or None)

    async def replaced(self, id: str, by: str) -> None:
        """Forget the letter in whose place something is. by: what, "" if it was published. Raises DeadlineExceeded: the letter
        may still be there; LetterTaken."""
        what = f"it was put as {by}" if by else "it was published"
        try:
            removed = await self._count(master.RemoveLetters, [id])
        except RoqError as error:
            told = f"{what}, but letter {id} may still be there: remove it, do not redrive it again ({error})"
            raise DeadlineExceeded(told) from None
        if not removed:
            raise LetterTaken(f"{what}, but somebody has redriven or removed letter {id} meanwhile")


def edition_key(id: str, payload: bytes, headers: Mapping[str, str | bytes]) -> str:
    """Of one edition of a letter, for deduplication."""
    return f"redriven-{id}-{hashlib.blake2b(with_headers(payload, headers), digest_size=8).hexdigest()}"


def original_headers(letter: master.PeekedTask) -> dict[str, str | bytes]:
    """Those it came with. Raises InvalidConfiguration: they are where its payload is."""
    if isinstance(letter.payload, PayloadReference):
        raise InvalidConfiguration("stores keep its headers with its payload: send `headers`, too, {} for none")
    return split_headers(letter.payload)[1]


def in_pattern(id: str) -> Callable[[master.PeekedTask], bool]:
    """Whether a letter is one of this pattern."""
    return lambda letter: pattern_id(pattern_of(letter.error)) == id


def pattern_views(found: Sequence[master.PeekedTask]) -> tuple[PatternView, ...]:
    """Pure."""
    letters = (FailedLetter(one.id, one.error, one.attempts, one.inserted) for one in found)
    return tuple(_pattern_view(one, found[one.example]) for one in patterns_of(letters))


def _pattern_view(one: ErrorPattern, example: master.PeekedTask) -> PatternView:
    shown = shown_task(example)
    return PatternView(one.id, one.pattern, len(one.ids), one.first, one.last, one.attempts_most, shown, one.ids)


async def work_queue_views(source: ConsoleSource, infos: Iterable[WorkQueueInfo]) -> list[WorkQueueView]:
    """Each with what its master says."""
    gate = asyncio.Semaphore(MASTERS_AT_ONCE)

    async def view(info: WorkQueueInfo) -> WorkQueueView:
        async with gate:
            try:
                return work_queue_view(info, await Desk(source, info).status())
            except RoqError as error:
                return work_queue_view(info, str(error))

    return list(await asyncio.gather(*map(view, infos)))
