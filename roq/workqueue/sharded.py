"""The work queue of a cluster as programs open it: one shard, to which every call goes straight, or several, each of them a
work queue with a master of its own (remote.py).

    put      a batch to one open shard; tasks with a dedup_key to the shard of their key (spread.py)
    lease    from one shard after the other; when all are empty, from the first that gets a task (shard_polls.py)
    settle   at the shard that the token names
    the rest at all shards, and their answers added

Ids and tokens of all shards but the first begin with its number and a colon. Which shards there are stands in the record of the
queue. Masters tell with their answers how often that list has changed; a client that finds its own older asks the GCM, once. A
shard that closes says so to whoever puts: the tasks that it did not take go to others at once, and each to one of them only. It
still gives what it has, settles, and knows the dedup keys it has seen. Not covered: how shards come and go (gcm/shards.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from roq.errors import CallError, Closed, InvalidConfiguration, RoqError, TemporaryError, Unavailable, WorkQueueNotFound
from roq.ids import new_id
from roq.runtime.observe import logger
from roq.wire.shards import SHARDS_MAX, ShardList, marked, shard_name, unmarked
from roq.wire.task import LeasedTask, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.commit_sender import CommitSender
from roq.workqueue.contract import Asked, RoundTrip, check_lease, check_put
from roq.workqueue.master_link import PATIENCE_SECONDS
from roq.workqueue.remote import REFUSED, RemoteQueue
from roq.workqueue.shard_polls import ShardPolls
from roq.workqueue.spread import Rotation, ShardHealth, first_views, homes, joined_status

HEARD_SECONDS = 30.0  # shorter than a closed shard is kept: so a put never comes to one that is gone
GREET_SECONDS, HELLO_SECONDS = 5.0, 1.0  # between two tries to hear from a first shard that is silent; how long one takes
LOOK_SECONDS = 2.0  # between two questions to the GCM that were of no use
log = logger(__name__)
T = TypeVar("T")
Places = list[int]  # of tasks or settlements, in what was given


class ShardedQueue:
    """A Backend (contract.py). Arguments as RemoteQueue. shards: of a new queue."""

    def __init__(
        self,
        zookeeper: str,
        name: str,
        settings: TaskSettings | Asked | None = None,
        *,
        write_quorum: int = 0,
        ack_quorum: int = 0,
        standbys: int | None = None,
        inline_bytes: int = 0,
        shards: int = 0,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._name = name
        self._first = first = RemoteQueue(
            zookeeper,
            name,
            settings,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            standbys=standbys,
            inline_bytes=inline_bytes,
            shards=shards,
            patience_seconds=patience_seconds,
        )
        self.settings: TaskSettings = first.settings
        self._lock = threading.Lock()
        self._greeted, self._greeting = 0.0, threading.Lock()  # monotonic: when the first shard was asked last
        self._looked = 0.0  # monotonic: when the GCM was asked last, in vain or not
        self._list, self._shards = ShardList(), {0: first}
        self._rotation, self._health = Rotation(new_id()), ShardHealth(new_id())
        self._polls = ShardPolls(self, name)
        self._closed = False
        self._take(first.record.shards or ShardList())

    @property
    def transactions(self) -> CommitSender:
        """Of a queue of one shard. Raises InvalidConfiguration."""
        if not self._list.single:
            raise InvalidConfiguration(
                f"work queue {self._name!r} has {len(self._list.numbers)} shards, and a transaction is of one: ack its tasks "
                "without, or `roq task shards` it to 1"
            )
        return self._first.transactions

    # --- which shards there are -------------------------------------------------------------------------------------------

    @property
    def open_shards(self) -> int:
        """See contract.py."""
        return len(self._list.open)

    def _current(self) -> ShardList:
        """The list, not older than what a master told, nor than HEARD_SECONDS if there are several. Raises Closed."""
        first = self._first
        if self._closed:
            raise Closed(f"work queue {self._name!r} is closed")
        if len(self._shards) > 1 and time.monotonic() - first.heard > HEARD_SECONDS:
            self._greet()
        if first.shards > self._list.version:
            self._look()
        return self._list

    def _greet(self) -> None:
        """Hear from the first shard, which nobody has for long. If it does not answer either, those we know will say what they
        take; so nobody waits for it but one thread now and then."""
        if time.monotonic() < self._greeted + GREET_SECONDS or not self._greeting.acquire(blocking=False):
            return
        try:
            self._greeted = time.monotonic()
            with contextlib.suppress(TemporaryError):
                self._first.hello(HELLO_SECONDS)
        finally:
            self._greeting.release()

    def _look(self) -> None:
        """Ask the GCM for the list, unless another thread just has."""
        with self._lock:
            if self._first.shards <= self._list.version or time.monotonic() - self._looked < LOOK_SECONDS:
                return
            self._looked = time.monotonic()
            try:
                self._take(self._first.describe().shards or ShardList())
                self._looked = 0.0
            except TemporaryError as error:
                log.info("the shards of %s have changed, and nobody says how: %s", self._name, error)

    def _look_anew(self, known: int) -> None:
        """A shard takes no tasks, so there is a newer list than that of version `known`. Raises Unavailable, Closed."""
        with self._lock:
            if self._list.version <= known:
                self._take(self._first.describe().shards or ShardList())

    def _take(self, listed: ShardList) -> None:
        if listed.version < self._list.version:
            return
        shards = {number: self._shards.get(number) or self._beside(number) for number in listed.numbers}
        left = [shard for number, shard in self._shards.items() if number not in shards]
        if listed.numbers != self._list.numbers:
            fields = {"open": listed.open, "closing": [one.number for one in listed.closing]}
            log.info("work queue %s has other shards", self._name, extra={"fields": fields})
        self._shards = shards  # first: whoever finds a number in the list finds the shard
        self._list = listed
        for shard in shards.values():
            shard.wait_slice_seconds = self._polls.poll_seconds(len(shards))
        for shard in left:
            shard.close()

    def _beside(self, number: int) -> RemoteQueue:
        return self._first.beside(shard_name(self._name, number))

    def polled(self) -> Mapping[int, RemoteQueue]:
        """All shards; see ShardSource."""
        with contextlib.suppress(RoqError):
            self._current()
        return self._shards

    def gone(self, number: int) -> None:
        """It was removed: it was empty. See ShardSource."""
        with self._lock:
            shard = self._shards.get(number)
            if number and shard is not None:
                closing = tuple(one for one in self._list.closing if one.number != number)
                kept = tuple(one for one in self._list.open if one != number)
                self._list = msgspec.structs.replace(self._list, open=kept, closing=closing)
                self._shards = {other: queue for other, queue in self._shards.items() if other != number}
                shard.close()

    def _at(self, number: int, call: Callable[[RemoteQueue], T], gone: T) -> T:
        """The answer of one shard; `gone` if it was removed, which it is when it is empty."""
        shard = self._shards.get(number)
        if shard is None:
            return gone
        try:
            with self._health.call(number, time.monotonic()):
                answer = call(shard)
        except WorkQueueNotFound:
            if not number:
                raise
            self.gone(number)
            return gone
        except Closed:
            if self._closed or not number:
                raise
            return gone
        except TemporaryError:
            self._health.failed(number, time.monotonic())
            raise
        self._health.answered(number)
        return answer

    # --- put ----------------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """See Backend. Tasks without a dedup_key go to one shard, all or none."""
        listed = self._current()
        if listed.single:
            return self._first.put(tasks)
        check_put(tasks, self.settings)
        ids = [REFUSED] * len(tasks)
        for _ in range(SHARDS_MAX):
            left = [place for place, id in enumerate(ids) if id == REFUSED]
            if not left:
                return ids
            for number, places in self._spread(tasks, left, ids):
                self._put_at(number, tasks, places, ids)
            if REFUSED in ids:
                self._look_anew(listed.version)
                listed = self._list
        raise Unavailable(f"the shards of work queue {self._name!r} close one after the other: put these tasks again")

    def _put_at(self, number: int, tasks: Sequence[NewTask], places: Places, ids: list[str]) -> None:
        """Fill in the ids of those that this shard takes."""
        gone: list[str] = []
        try:
            put = self._at(number, lambda shard: shard.put_open([tasks[place] for place in places]), gone)
        except CallError as error:
            done = len(ids) - ids.count(REFUSED)
            if not done:
                raise
            raise TemporaryError(f"{done} of {len(ids)} tasks were put, then one was refused: {error}") from error
        if put is gone:
            raise Unavailable(f"a shard of work queue {self._name!r} was removed: whether it took these tasks is unknown")
        for place, id in zip(places, put, strict=True):
            ids[place] = marked(number, id)

    def _spread(self, tasks: Sequence[NewTask], left: Places, ids: list[str]) -> list[tuple[int, Places]]:
        """Which of these go where. Tasks whose keys a closed shard remembers get their ids at once."""
        listed = self._list
        keyed, bare = dict[int, Places](), Places()
        asked: dict[int, Places] = {}
        for place in left:
            key = tasks[place].dedup_key
            if not key:
                bare.append(place)
                continue
            closed, home = homes(key, listed)
            keyed.setdefault(home, []).append(place)
            for number in closed:
                asked.setdefault(number, []).append(place)
        for number, places in asked.items():
            keys = [tasks[place].dedup_key for place in places]
            nothing: list[str | None] = [None] * len(keys)
            for place, id in zip(places, self._find_keys(number, keys, nothing), strict=True):
                if id is not None:
                    ids[place] = marked(number, id)
        parts = [(home, [place for place in places if ids[place] == REFUSED]) for home, places in keyed.items()]
        if bare:
            parts.append((self._health.least_busy(listed.open, time.monotonic()), bare))
        return [(number, places) for number, places in parts if places]

    def _find_keys(self, number: int, keys: list[str], nothing: list[str | None]) -> list[str | None]:
        return self._at(number, lambda shard: shard.find_keys(keys), nothing)

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks under the caller's numbers, first, first + 1, … of this producer; what it has put before, not again: so
        all go to the shard that never closes."""
        self._current()
        self._first.put_numbered(producer, first, tasks)

    # --- lease and settle -----------------------------------------------------------------------------------------------------

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """See Backend."""
        listed, deadline = self._current(), time.monotonic() + wait_seconds
        if not listed.single:
            return self._lease(listed, seconds, count, deadline, settle)
        trip = self._first.lease(seconds, count, wait_seconds, settle)
        if trip.tasks or time.monotonic() >= deadline or self._first.shards <= listed.version:
            return trip
        later = self.lease(seconds, count, max(0.0, deadline - time.monotonic()))  # there are others now
        return RoundTrip(trip.settled, later.tasks, later.began)

    def _lease(self, listed: ShardList, seconds: float, count: int, deadline: float, settle: Sequence[Settlement]) -> RoundTrip:
        now = time.monotonic()
        check_lease(seconds, count, max(0.0, deadline - now))
        order, settled = self._rotation.order(listed.numbers), list[str | None]([None] * len(settle))
        asked = self._health.well(order, now)
        if deadline > now:
            asked = [number for number in asked if not self._polls.running(number, seconds)]
        parts = self._by_shard(settle)
        own = parts.pop(asked[0], []) if asked else []
        self._settle_parts(settle, parts, settled)
        found, failed = self._sweep(seconds, count, asked, own, settle, settled)
        if deadline <= now and not settle and len(found.tasks) < count and self._polls.recall():
            more, _ = self._sweep(seconds, count - len(found.tasks), asked, [], [], [])
            found = RoundTrip(settled, [*found.tasks, *more.tasks], found.began or more.began)
        if found.tasks or time.monotonic() >= deadline:
            if failed is not None and not settle:
                raise failed
            return found
        number, trip = self._polls.wait(seconds, count, deadline)
        return RoundTrip(settled, _of_queue(number, trip.tasks), trip.began)

    def _sweep(
        self,
        seconds: float,
        count: int,
        asked: Sequence[int],
        own: Places,
        settle: Sequence[Settlement],
        settled: list[str | None],
    ) -> tuple[RoundTrip, TemporaryError | None]:
        """Tasks of one shard; of several if it has fewer than asked for. And why none of them answered, if so. own: places of
        settlements at the first one, which travel with the lease."""
        tasks, began = list[LeasedTask[bytes]](), 0.0
        failures: list[TemporaryError] = []
        for number in asked:
            places = own if number == asked[0] else []
            call = _leasing(number, seconds, count - len(tasks), [settle[place] for place in places])
            try:
                trip = self._at(number, call, RoundTrip([None] * len(places), []))
            except TemporaryError as error:
                if places:
                    raise
                failures.append(error)
                continue
            _fill(settled, places, number, trip.settled)
            if trip.tasks and not tasks:
                began = trip.began
                self._rotation.gave(asked[0], number)
            tasks += _of_queue(number, trip.tasks)
            if len(tasks) >= count:
                break
        none = asked and len(failures) == len(asked)
        return RoundTrip(settled, tasks, began), failures[0] if none else None

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """See Backend."""
        if self._current().single and not any(map(_elsewhere, settlements)):
            return self._first.settle(settlements)
        settled: list[str | None] = [None] * len(settlements)
        self._settle_parts(settlements, self._by_shard(settlements), settled)
        return settled

    def _by_shard(self, settlements: Sequence[Settlement]) -> dict[int, Places]:
        parts: dict[int, Places] = {}
        for place, one in enumerate(settlements):
            parts.setdefault(unmarked(one.token)[0], []).append(place)
        return parts

    def _settle_parts(self, settle: Sequence[Settlement], parts: Mapping[int, Places], settled: list[str | None]) -> None:
        """At each shard what is its, side by side: those that answer have done it, whatever the others do. Where there is no
        shard the lease was lost: it was removed when nothing was leased. Raises what the first of those raised that failed."""
        self._know(parts)

        def settle_at(number: int) -> list[str | None]:
            given = [_at_shard(settle[place]) for place in parts[number]]
            return self._at(number, lambda shard: shard.settle(given), [None] * len(given))

        for number, tokens in _side_by_side(parts, settle_at).items():
            _fill(settled, parts[number], number, tokens)

    def _know(self, numbers: Iterable[int]) -> None:
        """Those of these shards that another program knows and we do not: with the list as it is now, what is not in it is no
        shard any more, and never will be. Raises Unavailable."""
        listed = self._current()
        if any(number >= listed.made for number in numbers):
            self._look_anew(listed.version)

    # --- administration -------------------------------------------------------------------------------------------------------

    def _all(self, call: Callable[[RemoteQueue], T], gone: T) -> dict[int, T]:
        """The answers of all shards, asked side by side behind the first one: that tells whether there are others by now."""
        answers: dict[int, T] = {}
        while left := [number for number in self._current().numbers if number not in answers]:
            answers |= _side_by_side(left if answers else left[:1], lambda number: self._at(number, call, gone))
        return answers

    def release_all(self) -> int:
        """See Backend."""
        return sum(self._all(RemoteQueue.release_all, 0).values())

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """See Backend."""
        nothing: list[TaskView] = []
        found = self._all(lambda shard: shard.peek(state, count), nothing)
        if len(found) == 1:
            return found[0]
        views = [
            msgspec.structs.replace(view, id=marked(number, view.id)) if number else view
            for number, some in found.items()
            for view in some
        ]
        return first_views(views, TaskState(state), count)

    def purge(self) -> int:
        """See Backend."""
        return sum(self._all(RemoteQueue.purge, 0).values())

    def status(self) -> Status:
        """See Backend."""
        found = self._all(RemoteQueue.status, Status(0, 0, 0, 0, 0, 0))
        return found[0] if len(found) == 1 else joined_status(list(found.values()))

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return self._letters(ids, RemoteQueue.requeue_dead)

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return self._letters(ids, RemoteQueue.remove_dead)

    def _letters(self, ids: Sequence[str] | None, do: Callable[[RemoteQueue, Sequence[str] | None], int]) -> int:
        if ids is None:
            return sum(self._all(lambda shard: do(shard, None), 0).values())
        parts: dict[int, list[str]] = {}
        for number, id in map(unmarked, ids):
            parts.setdefault(number, []).append(id)
        self._know(parts)
        return sum(_side_by_side(parts, lambda number: self._at(number, _letter_call(do, parts[number]), 0)).values())

    def close(self) -> None:
        """See Backend."""
        if self._closed:
            return
        self._closed = True
        self._polls.stop()
        with self._lock:
            shards = list(self._shards.values())
        for shard in reversed(shards):  # the first one, which has the connection to the GCM, last
            shard.close()
        self._polls.join()


def _side_by_side(numbers: Collection[int], do: Callable[[int], T]) -> dict[int, T]:
    """What it returns for each of these shards. Raises, when all are done, what the first of those raised that failed."""
    if len(numbers) < 2:
        return {number: do(number) for number in numbers}
    with ThreadPoolExecutor(len(numbers), thread_name_prefix="roq-shards") as pool:
        answers = {number: pool.submit(do, number) for number in numbers}
    return {number: answer.result() for number, answer in answers.items()}


def _elsewhere(one: Settlement) -> bool:
    return unmarked(one.token)[0] != 0


def _at_shard(one: Settlement) -> Settlement:
    number, token = unmarked(one.token)
    return one.of(token) if number else one


def _fill(settled: list[str | None], places: Iterable[int], number: int, tokens: Iterable[str | None]) -> None:
    for place, token in zip(places, tokens, strict=True):
        settled[place] = None if token is None else marked(number, token)


def _of_queue(number: int, tasks: list[LeasedTask[bytes]]) -> list[LeasedTask[bytes]]:
    if not number:
        return tasks
    return [msgspec.structs.replace(one, id=marked(number, one.id), token=marked(number, one.token)) for one in tasks]


def _leasing(number: int, seconds: float, count: int, settle: Sequence[Settlement]) -> Callable[[RemoteQueue], RoundTrip]:
    given = [_at_shard(one) for one in settle] if number else settle
    return lambda shard: shard.lease(seconds, count, 0.0, given)


def _letter_call(do: Callable[[RemoteQueue, Sequence[str] | None], int], ids: Sequence[str]) -> Callable[[RemoteQueue], int]:
    return lambda shard: do(shard, ids)
