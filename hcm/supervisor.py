"""One child process as a state machine: events in, instructions out. No IO, no clock, no randomness.

    waiting --due--> starting --ready--> running
       ^                |  |               |
       |   died         |  | too slow      | late (3 beats), or spec changed
       +----------------+  v               v
       |                 killing       killing / stopping
       +------- exited ----+---------------+          stopping --exited--> gone (forgotten)
       |
       v  QUICK_DEATHS_MAX in a row
     failed --wanted again--> starting

A death is *quick* when the process never became ready or lived less than QUICK_SECONDS. Quick deaths in a row are
answered with growing waits and at last with FAILED; any other death is answered with a restart at once.
Stopping escalates: Shutdown request, then SIGTERM, then SIGKILL. Every exit is awaited: nothing is forked on the same
ports before the predecessor's exit was seen.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roq.runtime.liveness import BEAT_SECONDS, LATE_BEATS

LATE_SECONDS = BEAT_SECONDS * LATE_BEATS  # a process silent for longer is hung
START_SECONDS = 10.0  # from fork to ready, on a machine that starts hundreds of processes at once
READY_LOST_SECONDS = 2.0  # a process that beats this long after its fork serves, even if its ready datagram was lost
QUICK_SECONDS = 2.0
QUICK_DEATHS_MAX = 10
BACK_OFF_SECONDS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)  # wait before restart, by quick deaths in a row; the last repeats
ASK_SECONDS = 2.0  # from the Shutdown request to SIGTERM
TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL


class Phase(StrEnum):
    """Where the child is in its life."""

    WAITING = "waiting"  # no process; forked at `due`
    STARTING = "starting"  # fork ordered (pid 0) or forked, not ready yet
    RUNNING = "running"
    KILLING = "killing"  # hung or too slow: SIGKILL sent, restarted when its exit is seen
    STOPPING = "stopping"
    FAILED = "failed"  # given up
    GONE = "gone"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessWanted:
    """The assignment wants this process (said at every new assignment)."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The assignment does not want it any more: stop and forget."""


@dataclass(frozen=True, slots=True)
class SpecificationReplaced:
    """Wanted with another specification: stop, then start anew."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A living process of an earlier HCM. started: monotonic seconds of its fork."""

    pid: int
    started: float


@dataclass(frozen=True, slots=True)
class Forked:
    """The fork server forked it."""

    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """The fork server could not, or died over it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """The process says that it serves."""

    pid: int


@dataclass(frozen=True, slots=True)
class Beat:
    """Once a second. last_beat: monotonic seconds of the process's last heartbeat, 0 if none."""

    last_beat: float


@dataclass(frozen=True, slots=True)
class Due:
    """The moment asked for with WakeAt has come; `time` is the one asked for."""

    time: float


@dataclass(frozen=True, slots=True)
class Exited:
    """The process has ended. reason: exit code or signal, and what it logged last."""

    pid: int
    reason: str


Event = ProcessWanted | Unwanted | SpecificationReplaced | Adopted | Forked | ForkFailed | ProcessReady | Beat | Due | Exited


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fork:
    """Clear the heartbeat slot and have the process forked with the newest specification."""


@dataclass(frozen=True, slots=True)
class AskShutdown:
    """Send a Shutdown request to its control port."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process."""

    pid: int
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Feed Due at this time (monotonic seconds)."""

    time: float


@dataclass(frozen=True, slots=True)
class Changed:
    """Something worth reporting changed."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Gone for good: free its ports and slot."""


Instruction = Fork | AskShutdown | Signal | WakeAt | Changed | Forget


class Child:
    """The machine. Read its fields freely; change it through `handle` only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.WAITING
        self.pid = 0  # 0 while WAITING, FAILED or GONE; never while RUNNING or KILLING
        self.restarts = 0  # deaths answered with a new process, in the life of this HCM
        self.error = ""  # why the last process ended, if it was not asked to; FAILED always has one
        self.again = False  # STOPPING only: start anew after the exit
        self._due = float("inf")
        self._forked_at = 0.0
        self._judged_from = 0.0  # no silence counts before: nobody watched, or a machine that stood still woke with us
        self._ready = False
        self._quick_deaths = 0  # QUICK_DEATHS_MAX at most
        self._deadline = float("inf")  # the next escalation; exactly while STOPPING
        self._terminated = False  # STOPPING only: SIGTERM was sent, SIGKILL is next

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in at `now` (monotonic seconds); what is to be done, in order."""
        transition = TRANSITIONS[self.phase].get(type(event))
        return transition(self, event, now) if transition is not None else []

    def check(self) -> None:
        """Invariants, for tests."""
        if self.phase in (Phase.WAITING, Phase.FAILED, Phase.GONE):
            assert self.pid == 0, f"{self.phase} with pid {self.pid}"
        if self.phase in (Phase.RUNNING, Phase.KILLING):
            assert self.pid > 0, f"{self.phase} without a pid"
        assert not self.again or self.phase is Phase.STOPPING
        assert (self._deadline < float("inf")) == (self.phase is Phase.STOPPING)
        assert 0 <= self._quick_deaths <= QUICK_DEATHS_MAX
        assert (self.phase is Phase.FAILED) <= bool(self.error)

    # --- wanted or not ------------------------------------------------------------------------------------------------

    def _wanted_at_first(self, event: ProcessWanted, now: float) -> list[Instruction]:
        return self._begin(event, now) if self._due == float("inf") else []  # else its back-off ends first

    def _begin(self, event: ProcessWanted | SpecificationReplaced, now: float) -> list[Instruction]:
        self._quick_deaths = 0
        return self._fork(now)

    def _drop(self, event: Unwanted, now: float) -> list[Instruction]:
        self.phase, self._due = Phase.GONE, float("inf")
        return [Forget(), Changed()]

    def _stop_starting(self, event: Event, now: float) -> list[Instruction]:
        self._stopping(now)
        return [*self._terminate(now), Changed()] if self.pid else [Changed()]  # its control port may not be there yet

    def _stop_running(self, event: Event, now: float) -> list[Instruction]:
        self._stopping(now)
        return [AskShutdown(), Changed()]

    def _stop_killed(self, event: Event, now: float) -> list[Instruction]:
        self._stopping(now)
        self._terminated = True
        return [Changed()]

    def _stopping(self, now: float) -> None:
        self.phase, self._deadline, self._terminated = Phase.STOPPING, now + ASK_SECONDS, False

    def _restart(self, event: SpecificationReplaced, now: float) -> list[Instruction]:
        instructions = TRANSITIONS[self.phase][Unwanted](self, event, now)
        self.again = True
        return instructions

    def _stop_for_good(self, event: Unwanted, now: float) -> list[Instruction]:
        self.again = False
        return []

    def _start_again(self, event: ProcessWanted | SpecificationReplaced, now: float) -> list[Instruction]:
        self.again = True
        return []

    # --- the process begins -------------------------------------------------------------------------------------------

    def _adopted(self, event: Adopted, now: float) -> list[Instruction]:
        self.phase, self.pid, self._forked_at, self._ready = Phase.STARTING, event.pid, event.started, False
        self._judged_from = now + LATE_SECONDS
        return [Changed()]

    def _back_off_over(self, event: Due, now: float) -> list[Instruction]:
        return self._fork(now) if event.time == self._due else []

    def _fork(self, now: float) -> list[Instruction]:
        self.phase, self.pid, self._forked_at, self._ready, self._due = Phase.STARTING, 0, now, False, float("inf")
        return [Fork(), Changed()]

    def _forked(self, event: Forked, now: float) -> list[Instruction]:
        self.pid, self._forked_at = event.pid, now
        return [Changed()]

    def _forked_unwanted(self, event: Forked, now: float) -> list[Instruction]:
        self.pid, self._forked_at = event.pid, now
        return self._terminate(now)  # it has no control port to be asked at yet

    def _said_ready(self, event: ProcessReady, now: float) -> list[Instruction]:
        return self._now_ready() if event.pid == self.pid else []

    def _now_ready(self) -> list[Instruction]:
        self.phase, self._ready = Phase.RUNNING, True
        return [Changed()]

    # --- it is watched ------------------------------------------------------------------------------------------------

    def _watch_start(self, event: Beat, now: float) -> list[Instruction]:
        if not self.pid:
            return []
        if event.last_beat and now - event.last_beat <= LATE_SECONDS and now - self._forked_at > READY_LOST_SECONDS:
            return self._now_ready()
        if now - self._forked_at > START_SECONDS and now > self._judged_from:
            return self._kill(f"not ready after {START_SECONDS:g} s")
        return []

    def _watch_heartbeat(self, event: Beat, now: float) -> list[Instruction]:
        silent = now - event.last_beat
        if silent <= LATE_SECONDS or now - self._forked_at <= LATE_SECONDS:
            return []
        return self._kill(f"no heartbeat for {silent:.1f} s" if event.last_beat else "no heartbeat at all")

    def _kill(self, error: str) -> list[Instruction]:
        self.phase, self.error = Phase.KILLING, error
        return [Signal(self.pid, signal.SIGKILL), Changed()]

    def _escalate(self, event: Beat, now: float) -> list[Instruction]:
        if now < self._deadline or not self.pid:
            return []
        if not self._terminated:
            return self._terminate(now)
        self._deadline = now + TERM_SECONDS
        return [Signal(self.pid, signal.SIGKILL)]

    def _terminate(self, now: float) -> list[Instruction]:
        self._deadline, self._terminated = now + TERM_SECONDS, True
        return [Signal(self.pid, signal.SIGTERM)]

    # --- it ends ------------------------------------------------------------------------------------------------------

    def _ended(self, event: Exited | ForkFailed) -> bool:
        """Whether this is about our process: the one that runs, or the fork that was ordered and not answered."""
        return event.pid == self.pid != 0 if isinstance(event, Exited) else self.pid == 0

    def _stopped(self, event: Exited | ForkFailed, now: float) -> list[Instruction]:
        if not self._ended(event):
            return []
        self.pid, self._deadline = 0, float("inf")
        if self.again:
            self.again = False
            self._quick_deaths = 0
            return self._fork(now)
        self.phase = Phase.GONE
        return [Forget(), Changed()]

    def _died(self, event: Exited | ForkFailed, now: float) -> list[Instruction]:
        if not self._ended(event):
            return []
        pid, self.pid = self.pid, 0
        self.error = f"{self.error}; {event.reason}" if self.phase is Phase.KILLING else event.reason
        quick = pid == 0 or not self._ready or now - self._forked_at < QUICK_SECONDS
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self._quick_deaths >= QUICK_DEATHS_MAX:
            self.phase = Phase.FAILED
            self.error = f"gave up after {self._quick_deaths} quick deaths; the last: {self.error}"
            return [Changed()]
        self.restarts += 1
        wait = BACK_OFF_SECONDS[min(max(self._quick_deaths - 1, 0), len(BACK_OFF_SECONDS) - 1)]
        if not wait:
            return self._fork(now)
        self.phase, self._due = Phase.WAITING, now + wait
        return [WakeAt(self._due), Changed()]


# What an event does in a phase; what is not here changes nothing.
Transition = Callable[[Child, Any, float], list[Instruction]]
TRANSITIONS: Mapping[Phase, Mapping[type[Event], Transition]] = {
    Phase.WAITING: {
        ProcessWanted: Child._wanted_at_first,
        SpecificationReplaced: Child._begin,
        Unwanted: Child._drop,
        Adopted: Child._adopted,
        Due: Child._back_off_over,
    },
    Phase.STARTING: {
        Forked: Child._forked,
        ForkFailed: Child._died,
        ProcessReady: Child._said_ready,
        Beat: Child._watch_start,
        Exited: Child._died,
        SpecificationReplaced: Child._restart,
        Unwanted: Child._stop_starting,
    },
    Phase.RUNNING: {
        Beat: Child._watch_heartbeat,
        Exited: Child._died,
        SpecificationReplaced: Child._restart,
        Unwanted: Child._stop_running,
    },
    Phase.KILLING: {
        Exited: Child._died,
        SpecificationReplaced: Child._restart,
        Unwanted: Child._stop_killed,
    },
    Phase.STOPPING: {
        Forked: Child._forked_unwanted,
        ForkFailed: Child._stopped,
        Beat: Child._escalate,
        Exited: Child._stopped,
        ProcessWanted: Child._start_again,
        SpecificationReplaced: Child._start_again,
        Unwanted: Child._stop_for_good,
    },
    Phase.FAILED: {
        ProcessWanted: Child._begin,
        SpecificationReplaced: Child._begin,
        Unwanted: Child._drop,
    },
    Phase.GONE: {},
}
