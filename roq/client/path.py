"""Publisher's path machine: on which Exchange it sends, and how it changes. Pure: no IO, no clock.

Theory of operation. The publisher sends along path k on one Exchange. A planned move to Exchange B is: connect to B and wait
until B has welcomed us; then FIN(k) is the last frame on the old link and OPEN(k+1) the first on the new one, with nothing
sent in between; the old link stays open until the Monitor has seen the FIN come out of the old Exchange (or the shell's bound
is over), so that closing it can't cut off what is still on its way.

    joining ── Welcome ──► opening ── Attached ──► flowing ── Relocate ──► moving ── Attached ──► flowing
                                                     └──────── Close ──► closing ── Forwarded(FIN) ──► closed

Invariants (`check`): frames leave only on the current path; path numbers grow by one per OPEN; FIN(k) precedes OPEN(k+1).
"""

from __future__ import annotations

from typing import NamedTuple

from roq.wire.monitor import ExchangeAddress


class Connect(NamedTuple):
    """Open a link to this Exchange, for this path."""

    exchange: ExchangeAddress
    path: int


class SendOpen(NamedTuple):
    """Make this path's link the current one; its first frame is OPEN."""

    path: int
    left: str  # id of the Exchange of the path before, "" for the first path
    finished: bool


class SendFin(NamedTuple):
    """The last frame on this path's link, behind everything sent on it so far."""

    path: int


class CloseLink(NamedTuple):
    """Close this path's link."""

    path: int


class Finished(NamedTuple):
    """Everything ever sent was forwarded (or given up on): the publisher may be closed."""


Instruction = Connect | SendOpen | SendFin | CloseLink | Finished


class Safeguards(NamedTuple):
    """The rules that make the machine right. Only the model tests switch one off, to see it fail."""

    await_welcome: bool = True
    fin_before_open: bool = True
    keep_old_link: bool = True


class PathMachine:
    """One publisher's paths. `current`: where frames go now (None: nowhere yet, they wait)."""

    def __init__(self, safeguards: Safeguards = Safeguards()) -> None:
        self.path = 0
        self.current: ExchangeAddress | None = None
        self.target: ExchangeAddress | None = None  # being connected to
        self.target_path = 0
        self.leaving: dict[int, ExchangeAddress] = {}  # old links by path whose FIN is not confirmed
        self.closing = False
        self._safe = safeguards

    def assign(self, exchange: ExchangeAddress, path: int) -> list[Instruction]:
        """Welcome or Relocate: publish on `exchange` as `path`. A path not above the current one is old news; the path
        being connected for, but on another Exchange, is the Monitor's second thought."""
        if self.closing or path <= self.path or path < self.target_path or (path, exchange) == (self.target_path, self.target):
            return []
        out: list[Instruction] = []
        if self.target is not None:
            out.append(CloseLink(self.target_path))
        self.target, self.target_path = exchange, path
        out.append(Connect(exchange, path))
        if not self._safe.await_welcome:
            out += self.attached(path)
        return out

    def attached(self, path: int) -> list[Instruction]:
        """The Exchange has welcomed us on this path's link: what we send there now is forwarded."""
        if self.target is None or self.target_path != path:
            return []
        out: list[Instruction] = []
        old, old_path = self.current, self.path
        self.current, self.path = self.target, self.target_path
        self.target, self.target_path = None, 0
        opening = SendOpen(self.path, old.id if old else "", old is not None)
        if old is None:
            return [opening]
        self.leaving[old_path] = old
        fin = SendFin(old_path)
        out += [fin, opening] if self._safe.fin_before_open else [opening, fin]
        if not self._safe.keep_old_link:
            out += self.forwarded(old_path)
        return out

    def forwarded(self, path: int) -> list[Instruction]:
        """The Monitor has seen FIN(path) come out of its Exchange (or the shell waited long enough)."""
        old = self.leaving.pop(path, None)
        if old is None:
            return []
        out: list[Instruction] = [CloseLink(path)]
        if self.closing and not self.leaving:
            out.append(Finished())
        return out

    def close(self) -> list[Instruction]:
        """The application is done: end the path."""
        if self.closing:
            return []
        self.closing = True
        out: list[Instruction] = []
        if self.target is not None:
            out.append(CloseLink(self.target_path))
            self.target, self.target_path = None, 0
        if self.current is None:
            return [*out, Finished()]
        self.leaving[self.path] = self.current
        out.append(SendFin(self.path))
        self.current = None
        return out

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.target is None or self.target_path > self.path, "the next path is not above the current one"
        assert all(path <= self.path for path in self.leaving), "leaves a path it was never on"
        assert not (self.closing and self.target is not None), "moves while closing"
