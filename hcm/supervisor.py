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
from dataclasses import dataclass
from enum import StrEnum

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
    """The template forked it."""

    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """The template could not, or died over it."""

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
    """The process has ended. reason: exit code or signal and its last words."""

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
        self.pid = 0
        self.restarts = 0  # deaths answered with a new process, in the life of this HCM
        self.error = ""  # why the last process ended, if it was not asked to
        self.again = False  # STOPPING only: start anew after the exit
        self._due = float("inf")
        self._forked_at = 0.0
        self._judged_from = 0.0  # no silence counts before: nobody watched, or a machine that stood still woke with us
        self._ready = False
        self._quick_deaths = 0
        self._deadline = float("inf")  # STOPPING only: the next escalation
        self._terminated = False  # STOPPING only: SIGTERM was sent, SIGKILL is next

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in at `now` (monotonic seconds); what is to be done, in order."""
        match event:
            case Beat(last_beat):
                return self._tick(last_beat, now)
            case ProcessReady(pid):
                return self._now_ready() if self.phase is Phase.STARTING and pid == self.pid else []
            case Exited(pid, reason):
                return self._exited(reason, now) if pid == self.pid and pid else []
            case Due(time):
                return self._fork(now) if self.phase is Phase.WAITING and time == self._due else []
            case Forked(pid):
                return self._forked(pid, now)
            case ForkFailed(reason):
                return self._exited(reason, now) if self.pid == 0 and self._process_expected() else []
            case ProcessWanted():
                return self._wanted(now)
            case Unwanted():
                return self._unwanted(now)
            case SpecificationReplaced():
                return self._replaced(now)
            case Adopted(pid, started):
                self.phase, self.pid, self._forked_at, self._ready = Phase.STARTING, pid, started, False
                self._judged_from = now + LATE_SECONDS
                return [Changed()]

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

    def _process_expected(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.STOPPING)

    def _fork(self, now: float) -> list[Instruction]:
        self.phase, self.pid, self._forked_at, self._ready, self._due = Phase.STARTING, 0, now, False, float("inf")
        return [Fork(), Changed()]

    def _forked(self, pid: int, now: float) -> list[Instruction]:
        self.pid, self._forked_at = pid, now
        if self.phase is Phase.STOPPING:  # it was unwanted before it existed; it has no control port to be asked at yet
            return self._terminate(now)
        return [Changed()]

    def _now_ready(self) -> list[Instruction]:
        self.phase, self._ready = Phase.RUNNING, True
        return [Changed()]

    def _tick(self, last_beat: float, now: float) -> list[Instruction]:
        if self.phase is Phase.RUNNING:
            if now - last_beat > LATE_SECONDS and now - self._forked_at > LATE_SECONDS:
                return self._kill(f"no heartbeat for {now - last_beat:.1f} s" if last_beat else "no heartbeat at all")
        elif self.phase is Phase.STARTING and self.pid:
            if last_beat and now - last_beat <= LATE_SECONDS and now - self._forked_at > READY_LOST_SECONDS:
                return self._now_ready()
            if now - self._forked_at > START_SECONDS and now > self._judged_from:
                return self._kill(f"not ready after {START_SECONDS:g} s")
        elif self.phase is Phase.STOPPING and now >= self._deadline and self.pid:
            return self._escalate(now)
        return []

    def _kill(self, error: str) -> list[Instruction]:
        self.phase, self.error = Phase.KILLING, error
        return [Signal(self.pid, signal.SIGKILL), Changed()]

    def _exited(self, reason: str, now: float) -> list[Instruction]:
        pid, self.pid = self.pid, 0
        if self.phase is Phase.STOPPING:
            self._deadline = float("inf")
            if self.again:
                self.again = False
                self._quick_deaths = 0
                return self._fork(now)
            self.phase = Phase.GONE
            return [Forget(), Changed()]
        self.error = f"{self.error}; {reason}" if self.phase is Phase.KILLING else reason
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

    def _wanted(self, now: float) -> list[Instruction]:
        if self.phase is Phase.STOPPING:
            self.again = True
            return []
        if self.phase is Phase.FAILED or (self.phase is Phase.WAITING and self._due == float("inf")):
            self._quick_deaths = 0
            return self._fork(now)
        return []

    def _unwanted(self, now: float) -> list[Instruction]:
        self.again = False
        if self.phase in (Phase.STOPPING, Phase.GONE):
            return []
        if self.phase in (Phase.WAITING, Phase.FAILED):
            self.phase, self._due = Phase.GONE, float("inf")
            return [Forget(), Changed()]
        before, self.phase = self.phase, Phase.STOPPING
        self._deadline, self._terminated = now + ASK_SECONDS, before is Phase.KILLING
        if before is Phase.RUNNING:
            return [AskShutdown(), Changed()]
        if before is Phase.STARTING and self.pid:  # its control port may not be there yet
            return [*self._terminate(now), Changed()]
        return [Changed()]

    def _replaced(self, now: float) -> list[Instruction]:
        if self.phase in (Phase.WAITING, Phase.FAILED):
            self._quick_deaths = 0
            return self._fork(now)
        instructions = self._unwanted(now)
        self.again = self.phase is Phase.STOPPING
        return instructions

    def _terminate(self, now: float) -> list[Instruction]:
        self._deadline, self._terminated = now + TERM_SECONDS, True
        return [Signal(self.pid, signal.SIGTERM)]

    def _escalate(self, now: float) -> list[Instruction]:
        if not self._terminated:
            return self._terminate(now)
        self._deadline = now + TERM_SECONDS
        return [Signal(self.pid, signal.SIGKILL)]
