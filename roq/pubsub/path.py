"""Publisher's path machine: on which Exchange it sends, and how that changes. Pure: no IO, no clock.

Theory of operation. The publisher sends along path k on one Exchange.

    planned move   connect to the new Exchange and wait for its welcome; then FIN(k) is the last frame on the old link and
                   OPEN(k+1, finished) the first on the new one, with nothing sent in between. The old link stays open until
                   the Monitor has seen the FIN come out of the old Exchange, so that closing it can't cut anything off.
    lost link      the Exchange died, or an old one before its FIN was confirmed. What is published waits in the replay buffer
                   until the Monitor names an Exchange that every subscriber has proved; OPEN(k+1, not finished) is followed
                   by everything in the replay buffer, and subscribers drop what they have.
    new Monitor    It counts on from the path that we are on. A higher one that the Monitor before it named and that never
                   opened is given up for the one in its welcome: nothing was sent there, and nobody looks after it.

Which state may follow which, and when: the table TRANSITIONS. Invariants (`check`): frames leave only on the current path; path
numbers grow; FIN(k) precedes OPEN(k+1, finished).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from roq.wire.monitor import ExchangeAddress


class OpenLink(NamedTuple):
    """Open a link to this Exchange, for this path."""

    exchange: ExchangeAddress
    path: int


class SendOpen(NamedTuple):
    """Make this path's link the current one; its first frame is OPEN."""

    path: int
    left: str  # id of the Exchange of the path before, "" for the first path
    finished: bool


class Replay(NamedTuple):
    """Send everything in the replay buffer on this path."""

    path: int


class SendFin(NamedTuple):
    """The last frame on this path's link, behind everything sent on it so far."""

    path: int


class Reuse(NamedTuple):
    """The link of path `old` is path `new`'s from now on."""

    old: int
    new: int


class CloseLink(NamedTuple):
    """Close this path's link."""

    path: int


class Finished(NamedTuple):
    """Everything ever sent was forwarded: the publisher may be closed."""


Instruction = OpenLink | SendOpen | Replay | SendFin | Reuse | CloseLink | Finished


class PathSafeguards(NamedTuple):
    """The rules that make the machine right. Only the model tests switch one off, to see it fail."""

    await_welcome: bool = True
    fin_before_open: bool = True
    keep_old_link: bool = True
    heed_welcome: bool = True  # of a Monitor that knows nothing of the path that we are being connected for


class PathState(StrEnum):
    """Where a publisher is: flowing is that frames leave."""

    JOINING = "joining"  # no Exchange was named yet
    OPENING = "opening"  # the first one has not welcomed us yet
    FLOWING = "flowing"
    MOVING = "moving"  # flowing, and the next Exchange has not welcomed us yet
    BROKEN = "broken"  # the link is lost, and no other Exchange was named
    REOPENING = "reopening"  # one was, and has not welcomed us yet
    CLOSING = "closing"  # not every FIN is confirmed
    BROKEN_CLOSING = "broken, closing"  # FIN will follow the replay
    REOPENING_CLOSING = "reopening, closing"
    FINISHED = "finished"


class PathEvent(StrEnum):
    """What changes the state."""

    ASSIGNED = "assigned"  # an Exchange was named
    GIVEN_UP = "given up"  # what is being connected to is of no use any more
    ATTACHED = "attached"
    TARGET_LOST = "target lost"  # the link that is being opened
    LOST = "lost"  # the link that frames leave on
    LEFT_LOST = "left lost"  # one whose FIN is not confirmed
    CLOSE = "close"
    FORWARDED = "forwarded"  # the last FIN


# ASSIGNED and CLOSE change nothing in a state that does not name them; no other event may come to such a state.
TRANSITIONS: Mapping[PathState, Mapping[PathEvent, PathState]] = {
    PathState.JOINING: {PathEvent.ASSIGNED: PathState.OPENING, PathEvent.CLOSE: PathState.FINISHED},
    PathState.OPENING: {
        PathEvent.ASSIGNED: PathState.OPENING,
        PathEvent.GIVEN_UP: PathState.JOINING,
        PathEvent.ATTACHED: PathState.FLOWING,
        PathEvent.TARGET_LOST: PathState.BROKEN,
        PathEvent.CLOSE: PathState.FINISHED,
    },
    PathState.FLOWING: {
        PathEvent.ASSIGNED: PathState.MOVING,
        PathEvent.LOST: PathState.BROKEN,
        PathEvent.LEFT_LOST: PathState.FLOWING,
        PathEvent.CLOSE: PathState.CLOSING,
    },
    PathState.MOVING: {
        PathEvent.ASSIGNED: PathState.MOVING,
        PathEvent.GIVEN_UP: PathState.FLOWING,
        PathEvent.ATTACHED: PathState.FLOWING,
        PathEvent.TARGET_LOST: PathState.FLOWING,
        PathEvent.LOST: PathState.REOPENING,
        PathEvent.LEFT_LOST: PathState.MOVING,
        PathEvent.CLOSE: PathState.CLOSING,
    },
    PathState.BROKEN: {
        PathEvent.ASSIGNED: PathState.REOPENING,
        PathEvent.LEFT_LOST: PathState.BROKEN,
        PathEvent.CLOSE: PathState.BROKEN_CLOSING,
    },
    PathState.REOPENING: {
        PathEvent.ASSIGNED: PathState.REOPENING,
        PathEvent.GIVEN_UP: PathState.BROKEN,
        PathEvent.ATTACHED: PathState.FLOWING,
        PathEvent.TARGET_LOST: PathState.BROKEN,
        PathEvent.LEFT_LOST: PathState.REOPENING,
        PathEvent.CLOSE: PathState.REOPENING_CLOSING,
    },
    PathState.CLOSING: {PathEvent.LEFT_LOST: PathState.BROKEN_CLOSING, PathEvent.FORWARDED: PathState.FINISHED},
    PathState.BROKEN_CLOSING: {PathEvent.ASSIGNED: PathState.REOPENING_CLOSING, PathEvent.LEFT_LOST: PathState.BROKEN_CLOSING},
    PathState.REOPENING_CLOSING: {
        PathEvent.ASSIGNED: PathState.REOPENING_CLOSING,
        PathEvent.GIVEN_UP: PathState.BROKEN_CLOSING,
        PathEvent.ATTACHED: PathState.CLOSING,
        PathEvent.TARGET_LOST: PathState.BROKEN_CLOSING,
        PathEvent.LEFT_LOST: PathState.REOPENING_CLOSING,
    },
    PathState.FINISHED: {},
}
SENDS = (PathState.FLOWING, PathState.MOVING)
CONNECTS = (PathState.OPENING, PathState.MOVING, PathState.REOPENING, PathState.REOPENING_CLOSING)
LOST_LINK = (PathState.BROKEN, PathState.REOPENING, PathState.BROKEN_CLOSING, PathState.REOPENING_CLOSING)


class PathMachine:
    """One publisher's paths. `current`: where frames go now (None: nowhere yet, they wait in the replay buffer). path, left:
    its paths are above that one, which was ended with FIN on this Exchange ("": it was not)."""

    def __init__(self, safeguards: PathSafeguards = PathSafeguards(), path: int = 0, left: str = "") -> None:
        self.path, self._left = path, left
        self.current: ExchangeAddress | None = None  # sent on; exactly while it SENDS
        self.target: ExchangeAddress | None = None  # being connected to; exactly while it CONNECTS
        self.target_path = 0  # of the target: above `path`
        self.leaving: dict[int, ExchangeAddress] = {}  # old links by path, up to ours, whose FIN is not confirmed
        self.broken: str | None = None  # id of the Exchange whose link was lost; exactly while it LOST_LINK
        self.state = PathState.JOINING  # CLOSING: something is left; FINISHED: nothing is
        self._safe = safeguards

    @property
    def closing(self) -> bool:
        """The application is done."""
        return PathEvent.CLOSE not in TRANSITIONS[self.state]

    def _on(self, event: PathEvent) -> None:
        """Take the transition; there must be one."""
        assert event in TRANSITIONS[self.state], f"{event}, while it is {self.state}"
        self.state = TRANSITIONS[self.state][event]

    def assign(self, exchange: ExchangeAddress, path: int) -> list[Instruction]:
        """Welcome or Relocate: publish on `exchange` as `path`. A path not above the current one is old news; the path
        being connected for, but on another Exchange, is the Monitor's second thought."""
        if path <= self.path or path < self.target_path or (path, exchange) == (self.target_path, self.target):
            return []
        if PathEvent.ASSIGNED not in TRANSITIONS[self.state]:
            return []
        self._on(PathEvent.ASSIGNED)
        out = [*self._drop_target(), OpenLink(exchange, path)]
        self.target, self.target_path = exchange, path
        if not self._safe.await_welcome:
            out += self.attached(path)
        return out

    def welcome(self, path: int) -> list[Instruction]:
        """The Monitor that we have joined says this path; `assign` follows."""
        if not self.path < path < self.target_path or not self._safe.heed_welcome:
            return []
        self._on(PathEvent.GIVEN_UP)
        return self._drop_target()

    def _drop_target(self) -> list[Instruction]:
        """Close the link that is being opened, if there is one."""
        out: list[Instruction] = [CloseLink(self.target_path)] if self.target is not None else []
        self.target, self.target_path = None, 0
        return out

    def attached(self, path: int) -> list[Instruction]:
        """The Exchange has welcomed us on this path's link: what we send there now is forwarded."""
        if self.target is None or self.target_path != path:
            return []
        self._on(PathEvent.ATTACHED)
        old, old_path, broken = self.current, self.path, self.broken
        self.current, self.path = self.target, self.target_path
        self.target, self.target_path, self.broken = None, 0, None
        if broken is not None:
            return self._reopen(broken)
        opening = SendOpen(self.path, old.id if old else self._left, old is not None or self._left != "")
        if old is None:
            return [opening]
        self.leaving[old_path] = old
        fin = SendFin(old_path)
        out: list[Instruction] = [fin, opening] if self._safe.fin_before_open else [opening, fin]
        if not self._safe.keep_old_link:
            out += self.forwarded(old_path)
        return out

    def _reopen(self, left: str) -> list[Instruction]:
        return [SendOpen(self.path, left, False), Replay(self.path), *(self._end() if self.closing else [])]

    def lost(self, path: int) -> list[Instruction]:
        """The link of this path is gone, and with it perhaps frames that were on their way."""
        if self.target is not None and path == self.target_path:
            self._on(PathEvent.TARGET_LOST)
            if self.state is PathState.BROKEN and self.broken is None:
                self.broken = ""  # the first Exchange went away before it took us
            return self._drop_target()
        out: list[Instruction] = [CloseLink(path)]
        if self.current is not None and path == self.path:
            self._on(PathEvent.LOST)
            self.broken, self.current = self.current.id, None
            return out
        old = self.leaving.pop(path, None)
        if old is None:
            return []
        self._on(PathEvent.LEFT_LOST)
        if self.current is not None:  # the new path flows: open it as the next path, with everything that may be missing
            self.path += 1
            if self.target_path == self.path:  # the number was meant for a move under way: that is asked for again
                self._on(PathEvent.GIVEN_UP)
                out += self._drop_target()
            return [*out, Reuse(self.path - 1, self.path), *self._reopen(self.current.id)]
        if self.broken is None:  # closing, and the FIN is not confirmed
            self.broken = old.id
        return out

    def forwarded(self, path: int) -> list[Instruction]:
        """The Monitor has seen FIN(path) come out of its Exchange (or the shell waited long enough)."""
        old = self.leaving.pop(path, None)
        if old is None:
            return []
        out: list[Instruction] = [CloseLink(path)]
        if self.state is PathState.CLOSING and not self.leaving:
            self._on(PathEvent.FORWARDED)
            out.append(Finished())
        return out

    def close(self) -> list[Instruction]:
        """The application is done: end the path."""
        if self.closing:
            return []
        self._on(PathEvent.CLOSE)
        if self.broken is not None:
            return []  # what waits in the replay buffer leaves on the next path, and then its FIN
        return [*self._drop_target(), *(self._end() if self.state is PathState.CLOSING else [Finished()])]

    def _end(self) -> list[Instruction]:
        assert self.current is not None
        self.leaving[self.path] = self.current
        self.current = None
        return [SendFin(self.path)]

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.target is None or self.target_path > self.path, "the next path is not above the current one"
        assert all(path <= self.path for path in self.leaving), "leaves a path it was never on"
        assert (self.current is not None) == (self.state in SENDS), f"sends on {self.current}, while it is {self.state}"
        assert (self.target is not None) == (self.state in CONNECTS), f"connects to {self.target}, while it is {self.state}"
        assert (self.broken is not None) == (self.state in LOST_LINK), f"has lost {self.broken}, while it is {self.state}"
        assert (self.state is not PathState.CLOSING) or self.leaving, "waits for no FIN"
        assert (self.state is not PathState.FINISHED) or not self.leaving, "has ended before its FIN was confirmed"
