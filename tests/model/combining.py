"""Processes that leave their requests to one of them, every interleaving: breadth-first search over the real code.

Each process runs the real `LogQueue._ask` with the real list, copy and fold. What they share is modelled: the list's words and
texts, the combiner's lock, the log. An access to one of these is a step, and between any two steps another process may go on or
one may be killed; the kernel then frees its lock and its place, which an heir may take. A process is what it has read so far:
its next access follows from that, and is worked out once (combining_memory.py).

The promises: a request is in the log at most once; who gets an answer gets the one to its own request, which is in the log and
on stable storage; tasks are handed out once; everybody who lives gets an answer. In the budget: kills, appends that find the
disk full; with `weak`, texts that others see later than the numbers written after them, as on ARM. Not covered: time (a wait
ends whenever the answer or the lock is there), signals, settlements of leases that are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from roq.errors import StorageFull
from roq.log.local import LocalLog
from roq.log.local.publication import _ANSWER, _REQUEST, _TAKEN
from roq.workqueue.folded_log import CommandAnswer
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.log_replica import Replica
from roq.workqueue.records import POP_SHIFT, Complete, Pop, Push, Record, encode
from tests.model.combining_memory import FULL, Access, Machine, ModelList, ModelLog, Pause, Trace
from tests.model.moves import Breach

TASKS, FEEDER, LEASE_MS = 8, 99, 10**15
FREE = -1
Step = tuple[bool, str, "World"]


class Limits(NamedTuple):
    """A search. impatient: processes that want to be the combiner at once, the others publish. mortal: places where one may be
    killed. The classes: for controls."""

    processes: int = 2
    impatient: tuple[int, ...] = ()
    asks: int = 1
    kills: int = 0
    mortal: tuple[int, ...] = (0, 1)
    heirs: bool = False
    fulls: int = 0
    weak: bool = False
    exclusive: bool = True
    publications: type[ModelList] | None = None
    queue: type[LogQueue] = LogQueue


class Process(NamedTuple):
    """life: which process this is, never the same again. asked: answers it has; delivery: of the task it works on. trace: what
    it has got since from what it shares, in order: after an answer its copy is as old as can be."""

    life: int
    delivery: int
    asked: int = 0
    alive: bool = True
    ended: bool = False
    trace: Trace = ()


class World(NamedTuple):
    """By place: processes, numbers, texts of requests and of answers. late: (place of the writer, slot, text) not seen yet.
    holder: place of who has the combiner's lock. synced: entries on stable storage. handed: deliveries told to their owners."""

    processes: tuple[Process, ...]
    words: tuple[int, ...]
    texts: tuple[bytes, ...]
    log: tuple[bytes, ...]
    synced: int
    holder: int
    late: tuple[tuple[int, int, bytes], ...]
    handed: frozenset[int]
    lives: int
    kills: int
    fulls: int


def prelude() -> list[Record]:
    """What is in the log before: tasks, one of them leased by each life."""
    pushes: list[Record] = [Push(0, FEEDER, number + 1, b"") for number in range(2 * TASKS)]
    return [*pushes, *(Pop(0, life + 1, 1, 1, LEASE_MS) for life in range(TASKS))]


def request(one: Process) -> list[Record]:
    """What a process asks next: that it is through with its task, and for another."""
    return [Complete(0, one.delivery, one.life + 1), Pop(0, one.life + 1, one.asked + 2, 1, LEASE_MS)]


def _born(life: int) -> Process:
    return Process(life, 2 * TASKS + life + 1 << POP_SHIFT)


class Model:
    """See the module. Explorable, within combining_memory.modelled."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._next: dict[tuple[int, int, int, Trace], Access] = {}

    def start(self) -> World:
        """Nobody has asked yet."""
        count = self.limits.processes
        return World(
            processes=tuple(_born(life) for life in range(count)),
            words=(0,) * (3 * count),
            texts=(bytes(8),) * (2 * count),
            log=(encode(prelude()),),
            synced=1,
            holder=FREE,
            late=(),
            handed=frozenset(),
            lives=count,
            kills=self.limits.kills,
            fulls=self.limits.fulls,
        )

    # --- what a process does ----------------------------------------------------------------------------------------------

    def _access(self, place: int, one: Process) -> Access:
        """What this process does next; ("answered", …) or ("failed",) when its call has ended."""
        key = (place, one.life, one.delivery, one.trace)
        found = self._next.get(key)
        if found is None:
            found = self._next[key] = self._run(place, one)
        return found

    def _run(self, place: int, one: Process) -> Access:
        limits, machine = self.limits, Machine(one.trace)
        queue = limits.queue(ModelLog.folder, log=cast(LocalLog, ModelLog(machine)))
        try:
            queue._list = (limits.publications or ModelList)(machine, place, patient=place not in limits.impatient)
            replica = queue._replica = Replica(queue._log, one.life + 1, queue._lock, 1 << 60)
            replica.now = lambda: 0  # type: ignore[method-assign]
            replica._living, replica.lives_at = True, float("inf")
            return ("answered", queue._ask(request(one)))
        except Pause as pause:
            return pause.access
        except StorageFull:
            return ("failed",)

    # --- steps ------------------------------------------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[Step]:
        """See Explorable."""
        for place, one in enumerate(world.processes):
            if one.alive and not one.ended:
                yield from self._goes_on(world, place, one)
                if world.kills and place in self.limits.mortal:
                    yield False, f"{one.life} is killed", self._kill(world, place)
            elif not one.alive and self.limits.heirs:
                born = world._replace(lives=world.lives + 1)
                yield True, f"{world.lives} takes its place", _put(born, place, _born(world.lives))
        for number in range(len(world.late)):
            if world.late[number][0] not in {each[0] for each in world.late[:number]}:
                yield True, "a text is seen", _seen(world, number)

    def _goes_on(self, world: World, place: int, one: Process) -> Iterator[Step]:
        """One access that others can tell from none, and those before it that they can't."""
        access = self._access(place, one)
        while _is_private(world, place, access):
            one = one._replace(trace=(*one.trace, self._look(world, place, access)))
            access = self._access(place, one)
        label = f"{one.life} {' '.join(map(str, access[:2]))}"
        match access:
            case ("failed",):
                yield True, label, _put(world, place, one._replace(ended=True, trace=()))
            case ("answered", answer):
                yield True, label, self._answered(world, place, one, answer)
            case ("held",):
                if world.holder == FREE:
                    yield True, label, _got(_flushed(world, place)._replace(holder=place), place, one, None)
            case ("wait", number):
                seen = 2 * place + 1 not in {slot for _, slot, _ in world.late}  # else it looks again and again
                if (world.words[_word(_ANSWER + place, world)] == number and seen) or world.holder == FREE:
                    yield True, label, _got(world, place, one, None)
            case ("append", entries):
                yield True, label, _got(self._append(world, entries), place, one, len(world.log) + len(entries))
                if world.fulls:
                    yield False, f"{label} finds the disk full", _got(world._replace(fulls=world.fulls - 1), place, one, FULL)
            case ("sync", position):
                yield True, label, _got(world._replace(synced=max(world.synced, position)), place, one, None)
            case ("lock",):
                free = world.holder == FREE or not self.limits.exclusive
                after = _flushed(world, place)._replace(holder=place) if free else world
                yield True, f"{label} {free}", _got(after, place, one, free)
            case ("unlock",):
                yield True, label, _got(_flushed(world, place)._replace(holder=FREE), place, one, None)
            case ("store", word, value):
                at = _word(word, world)
                yield (
                    True,
                    label,
                    _got(world._replace(words=(*world.words[:at], value, *world.words[at + 1 :])), place, one, None),
                )
            case ("write", slot, text):
                after = world._replace(late=(*world.late, (place, slot, text)))
                yield True, label, _got(after if self.limits.weak else _seen(after, len(world.late)), place, one, None)
            case _:
                yield True, label, _got(world, place, one, self._look(world, place, access))

    def _look(self, world: World, place: int, access: Access) -> Any:
        match access:
            case ("end",):
                return len(world.log)
            case ("entries", after):
                return tuple((at + 1, entry) for at, entry in enumerate(world.log) if at >= after)
            case ("load", word):
                return world.words[_word(word, world)]
            case ("settled",):
                count = self.limits.processes
                return world.words[:count] == world.words[2 * count :]
            case ("read", slot):
                mine = [text for who, where, text in world.late if (who, where) == (place, slot)]
                return (mine or [world.texts[slot]])[-1]
        raise AssertionError(f"not expected: {access}")

    def _kill(self, world: World, place: int) -> World:
        """What it wrote is there for all to see, as memory outlives it."""
        after = _flushed(world, place)._replace(kills=world.kills - 1)
        after = after._replace(holder=FREE) if world.holder == place else after
        return _put(after, place, world.processes[place]._replace(alive=False, trace=()))

    # --- promises ---------------------------------------------------------------------------------------------------------

    def _append(self, world: World, entries: tuple[bytes, ...]) -> World:
        log = (*world.log, *entries)
        twice = [entry for entry in entries if log.count(entry) > 1]
        if twice:
            raise Breach(f"a request is in the log twice: {twice[0]!r}")
        return world._replace(log=log)

    def _answered(self, world: World, place: int, one: Process, answer: CommandAnswer) -> World:
        entry = encode(request(one))
        if entry not in world.log:
            raise Breach(f"process {one.life} has an answer, and its request is not in the log")
        if world.log.index(entry) >= world.synced:
            raise Breach(f"process {one.life} is told what is not durable")
        if answer.settled != [True]:
            raise Breach(f"process {one.life} is told that it lost its lease: {answer.settled}")
        if not answer.handed or len(answer.handed) != 1 or answer.handed[0].task.order in world.handed:
            raise Breach(f"process {one.life} is handed {answer.handed}")
        task = answer.handed[0].task
        if (task.instance, task.nonce) != (one.life + 1, one.asked + 2):
            raise Breach(f"process {one.life} has the answer to another request")
        asked = one.asked + 1
        ended = asked == self.limits.asks
        after = one._replace(asked=asked, delivery=task.delivery, ended=ended, trace=())
        return _put(world._replace(handed=world.handed | {task.order}), place, after)

    def end(self, world: World) -> None:
        """See Explorable."""
        for one in world.processes:
            if one.alive and not one.ended:
                raise Breach(f"process {one.life} waits for ever")
        if world.holder != FREE:
            raise Breach("the lock is held by nobody who lives")


def _is_private(world: World, place: int, access: Access) -> bool:
    """Whether nobody else can change in between what this finds. The log can grow, which is the same as growing before."""
    if access[0] == "load":
        return bool(access[1] == _REQUEST + place or (world.holder == place and access[1] >= _TAKEN))
    return access[0] in {"end", "entries"}


def _word(word: int, world: World) -> int:
    """Where a word of the list is in the model's."""
    kind, place = divmod(word - _REQUEST, _TAKEN - _REQUEST)
    return kind * len(world.processes) + place


def _got(world: World, place: int, one: Process, value: Any) -> World:
    return _put(world, place, one._replace(trace=(*one.trace, value)))


def _put(world: World, place: int, one: Process) -> World:
    return world._replace(processes=(*world.processes[:place], one, *world.processes[place + 1 :]))


def _seen(world: World, number: int) -> World:
    """A text that was written gets visible."""
    _, slot, text = world.late[number]
    texts = (*world.texts[:slot], text, *world.texts[slot + 1 :])
    return world._replace(texts=texts, late=(*world.late[:number], *world.late[number + 1 :]))


def _flushed(world: World, place: int) -> World:
    """Everything that this process wrote is visible."""
    while mine := [number for number, late in enumerate(world.late) if late[0] == place]:
        world = _seen(world, mine[0])
    return world
