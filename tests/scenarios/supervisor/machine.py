"""A host's child process for its scenarios: what its HCM hears of it, and what the HCM does then.

The clock begins at 0 s. `wait 5` lets so many seconds pass with the HCM's look at the process once a second, and a restart
that was put off is made when it is due; only what comes of them is shown. A process that beats has done so at every look,
from `ready` (or `beats`) until it `hangs`. Each process that is forked has the next pid, beginning with 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from hcm.supervisor import (
    Adopted,
    AskShutdown,
    Beat,
    Changed,
    Child,
    Due,
    Event,
    Exited,
    Forget,
    Fork,
    Forked,
    ForkFailed,
    Instruction,
    ProcessReady,
    ProcessWanted,
    Signal,
    SpecificationReplaced,
    Unwanted,
    WakeAt,
)
from roq.runtime.liveness import BEAT_SECONDS


class Machine:
    """One child, that nobody has asked for yet."""

    def __init__(self) -> None:
        self._child, self._now = Child("exchange/orders/1"), 0.0
        self._pid = 0  # the last one that was given
        self._beats, self._last_beat = False, 0.0
        self._due: float | None = None

    def check(self) -> None:
        """The invariants of the child."""
        self._child.check()

    def wanted(self) -> Iterator[str]:
        """By an assignment."""
        yield from self._heard(ProcessWanted())

    def unwanted(self) -> Iterator[str]:
        """By an assignment, which no longer has it."""
        yield from self._heard(Unwanted())

    def replaced(self) -> Iterator[str]:
        """By an assignment, with another specification."""
        yield from self._heard(SpecificationReplaced())

    def adopted(self, pid: int, age: float) -> Iterator[str]:
        """It lives since an earlier HCM, that forked it so many seconds ago."""
        self._pid = pid
        yield from self._heard(Adopted(pid, self._now - age))

    def forked(self) -> Iterator[str]:
        """The fork server's answer."""
        self._pid += 1
        yield from self._heard(Forked(self._pid))

    def fork_failed(self, reason: str) -> Iterator[str]:
        """The fork server's answer."""
        yield from self._heard(ForkFailed(reason))

    def ready(self) -> Iterator[str]:
        """It serves, and beats from now on."""
        self.beats()
        yield from self._heard(ProcessReady(self._pid))

    def beats(self) -> None:
        """From now on, whether it has said that it is ready or not."""
        self._beats = True
        self._last_beat = self._now

    def hangs(self) -> None:
        """No beat from now on."""
        self._beats = False

    def exits(self, reason: str) -> Iterator[str]:
        """Its end was seen."""
        self._beats, self._last_beat = False, 0.0
        yield from self._heard(Exited(self._pid, reason))

    def wait(self, seconds: float) -> Iterator[str]:
        """So long."""
        end = self._now + seconds
        look = self._now
        while self._now < end:
            look = look + BEAT_SECONDS if look <= self._now else look
            self._now = min(end, look, self._due if self._due is not None else end)
            if self._due == self._now:
                self._due = None
                yield from self._heard(Due(self._now))
            if self._now == look:
                self._last_beat = self._now if self._beats else self._last_beat
                yield from self._heard(Beat(self._last_beat))

    def state(self) -> str:
        """What the HCM reports of it."""
        child = self._child
        facts = (
            f"pid {child.pid}" if child.pid else "no process",
            f"restarts: {child.restarts}" if child.restarts else "",
            "to be started again" if child.again else "",
            f"error: {child.error}" if child.error else "",
        )
        return ", ".join((child.phase.value, *filter(None, facts)))

    def _heard(self, event: Event) -> Iterator[str]:
        before = self._child.phase
        instructions = self._child.handle(event, self._now)
        for line in filter(None, map(self._done, instructions)):
            yield f"{self._now:g} s: {line}"
        if self._child.phase is not before:
            yield f"{self._now:g} s: {before} -> {self._child.phase}"

    def _done(self, instruction: Instruction) -> str:
        match instruction:
            case Fork():
                return "fork it"
            case AskShutdown():
                return "ask it to shut down"
            case Signal(pid, number):
                return f"send {number.name} to pid {pid}"
            case WakeAt(time):
                self._due = time
                return f"restart it at {time:g} s"
            case Forget():
                return "forget it"
            case Changed():
                return ""
