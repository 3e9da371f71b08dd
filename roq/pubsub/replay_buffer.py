"""Publisher's replay buffer: frames that subscribers may miss, until an Exchange has confirmed them. Pure: no IO, no clock.

Theory of operation. Frames are appended in the order of their numbers and lie in two parts: *sent* on the current path (or on
one before it whose FIN is not confirmed), and *waiting* behind them: there was no link, or a replay is under way, which they
follow. Positions within this one sequence say everything:

    gone        forgotten up to here
    confirmed   passed an Exchange up to here, as the MARKs and FINs that came out of it say, or is `unknown`
    sent_to     handed to the current path up to here; what follows waits

    published ─► waiting ─ take ─► sent ─ confirmed, and older than KEPT_SECONDS ─► gone
                    ▲                │
                    └──── broken ────┘   the path is lost: all that is kept is to be sent again, in order

Only what is confirmed is forgotten by age, and not at once: what has left its Exchange may still lie unread in an Exchange
that dies. Bytes are bounded (ENTRY_BYTES counted for each frame), whatever is confirmed: the oldest go first. As long as the
path holds that is no loss, for the next confirmation covers them. If the path breaks before it, or if they had not been sent
yet, it is not known whether they arrived: `unknown`, of which `flush` and `close` must speak. A MARK confirms what was sent
before it on its path, but only when the paths before that are confirmed to their FIN.

A producer's messages must not be given up, whatever happens (`lossless`): its bytes are bounded by the publisher alone, which
waits once HOLD_BYTES are not confirmed.

Invariants (`check`): gone ≤ sent_to ≤ last; confirmed ≤ last; what is kept is in order, and waits behind what is sent.
Lossless: gone ≤ confirmed, and nothing is ever unknown.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

from roq.wire.frame import HEADER, parse

KEPT_SECONDS = 5.0  # confirmed frames are kept for so long: subscribers may not have read them when their Exchange dies
KEPT_BYTES = 64 * 1024 * 1024
ENTRY_BYTES = (
    208  # what keeping a frame costs besides its bytes (tuple, numbers, heads), measured: most of it when frames are tiny
)
HOLD_BYTES = KEPT_BYTES * 3 // 4  # unconfirmed: from here on a publisher that may wait does; the rest takes its open batch
MARK_BYTES = 16 * 1024 * 1024  # a confirmation is asked for after so many, 60 times a second at 1 GB/s: far below HOLD_BYTES
MARKS_KEPT = 64  # questions that nobody has answered; a later one covers the earlier ones of its path
PATH_OFFSET = 10  # of the path number within the header
_path = struct.Struct("<I")


class ReplaySafeguards(NamedTuple):
    """The rules that make the buffer right. Only the model tests switch one off, to see it fail."""

    keep_unconfirmed: bool = True  # age alone forgets nothing
    know_what_is_gone: bool = True
    paths_in_order: bool = True  # a MARK waits for the FIN of the path before its own
    open_before_unknown: bool = True  # who has met nothing of this publisher yet misses what is unknown, too


class Unknown(NamedTuple):
    """Messages of which it is not known whether they passed an Exchange, by their numbers."""

    first: int
    last: int


class _Mark:
    """A MARK or a FIN under way: what was sent before it."""

    __slots__ = ("done", "fin", "last", "number", "path", "total")

    def __init__(self, number: int, path: int, last: int, total: int, fin: bool) -> None:
        self.number, self.path, self.last, self.total, self.fin = number, path, last, total, fin
        self.done = False


class ReplayBuffer:
    """`now` is monotonic, in seconds. `last` is the number of a frame's last payload. begin: number of the last payload
    that another publisher of this id has sent. lossless: only what is confirmed is forgotten."""

    def __init__(
        self,
        seconds: float = KEPT_SECONDS,
        max_bytes: int = KEPT_BYTES,
        safeguards: ReplaySafeguards = ReplaySafeguards(),
        begin: int = 0,
        *,
        lossless: bool = False,
    ) -> None:
        self._seconds, self._max_bytes, self._safe, self._lossless = seconds, max_bytes, safeguards, lossless
        # (when, last, total, frame); total: bytes of all frames ever appended, this one and ENTRY_BYTES each included
        self._sent: deque[tuple[float, int, int, bytes]] = deque()  # up to `sent_to`, in order
        self.waiting: deque[tuple[float, int, int, bytes]] = deque()  # behind `sent_to`, in order
        self._marks: deque[_Mark] = deque()
        self._total = self._sent_total = self._marked_total = self._confirmed_total = self._gone_total = 0
        self._ever_sent = begin  # on any path
        # gone <= sent_to <= last; confirmed <= last; lossless: gone <= confirmed, and nothing is unknown
        self.last = self.sent_to = self.confirmed = self.gone = begin
        self.mark_number = 0  # of the newest MARK or FIN
        self.confirmed_mark = 0  # everything before this MARK or FIN has passed
        self.unknown: Unknown | None = None  # not spoken of yet; whoever does sets it to None
        self._floor: int | None = None  # what is unknown begins behind this, until something behind it is confirmed

    # --- frames -------------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes kept, ENTRY_BYTES for each frame included; likewise wherever bytes are counted here."""
        return self._total - self._gone_total

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes kept that no confirmation covers."""
        return self._total - max(self._confirmed_total, self._gone_total)

    @property
    def mark_due(self) -> bool:
        """Whether so much was sent since the last MARK that it is time for one."""
        return self._sent_total - self._marked_total >= MARK_BYTES

    @property
    def open_question(self) -> bool:
        """Whether something sent is not confirmed, or a MARK is not answered."""
        return bool(self._marks) or self._sent_total > self._marked_total

    def sent(self, frame: bytes, last: int, now: float) -> None:
        """A frame that was handed to the current link, behind everything else."""
        total = self._total = self._sent_total = self._total + len(frame) + ENTRY_BYTES
        self.last = self.sent_to = self._ever_sent = last
        self._sent.append((now, last, total, frame))
        if total - self._gone_total > self._max_bytes or self._sent[0][0] < now - self._seconds:
            self.prune(now)

    def keep(self, frame: bytes, last: int, now: float) -> int:
        """A frame that waits: there is no link, or others wait before it. How many payloads that no link was ever given had to
        be given up for it (0 while there is room)."""
        self._total += len(frame) + ENTRY_BYTES
        self.last = last
        self.waiting.append((now, last, self._total, frame))
        lost = 0
        while self.kept_bytes > self._max_bytes and len(self._sent) + len(self.waiting) > 1:
            if self._lossless and (self._sent or self.waiting)[0][1] > self.confirmed:
                break
            if self._sent:
                self._forget(self._sent)
                continue
            _, oldest, _, dropped = self.waiting[0]
            count = parse(dropped)[1].count
            lost += count if oldest > self._ever_sent else 0
            self._forget(self.waiting)
            self.sent_to, self._sent_total = self.gone, self._gone_total
            if oldest > self.confirmed:
                self._not_known(max(self.confirmed, oldest - count) + 1)
        return lost

    def prune(self, now: float) -> None:
        """Forget what is confirmed and old, and whatever the bound on bytes demands."""
        kept, oldest = self._sent, now - self._seconds
        while kept:
            when, last, _, _ = kept[0]
            old = when < oldest and (last <= self.confirmed or not self._safe.keep_unconfirmed)
            if not old and (self.kept_bytes <= self._max_bytes or len(kept) + len(self.waiting) == 1):
                break
            if self._lossless and last > self.confirmed:
                break
            self._forget(kept)

    def _forget(self, kept: deque[tuple[float, int, int, bytes]]) -> None:
        _, self.gone, self._gone_total, _ = kept.popleft()

    def _not_known(self, first: int) -> None:
        """From this number to `gone`. They are spoken of once, so they count as settled from here on."""
        if self._safe.know_what_is_gone:
            self.unknown = Unknown(min(first, self.unknown.first) if self.unknown else first, self.gone)
        self._floor = first - 1 if self._floor is None else min(self._floor, first - 1)
        self.confirmed, self._confirmed_total = self.gone, self._gone_total

    # --- paths and confirmations --------------------------------------------------------------------------------------

    def broken(self) -> None:
        """What was sent and not confirmed may be missing: everything kept waits to be sent again."""
        self.waiting = self._sent + self.waiting if self.waiting else self._sent
        self._sent = deque()
        self._marks.clear()
        self.sent_to, self._sent_total = self.gone, self._gone_total
        self._marked_total = self._sent_total
        if self.gone > self.confirmed:
            self._not_known(self.confirmed + 1)

    def opens_after(self) -> int:
        """For the OPEN of a path with a replay: what is missing behind this number shows as a gap."""
        return self.gone if self._floor is None or not self._safe.open_before_unknown else min(self._floor, self.gone)

    def take(self, path: int, max_bytes: int) -> list[bytes]:
        """The next waiting frames, as frames of this path; at most `max_bytes`, but at least one. They count as sent."""
        number, size = _path.pack(path), 0
        out: list[bytes] = []
        while self.waiting and (not out or size + len(self.waiting[0][3]) <= max_bytes):
            entry = self.waiting.popleft()
            self._sent.append(entry)
            _, self.sent_to, self._sent_total, frame = entry
            at = frame.index(0) + 1 + PATH_OFFSET
            out.append(b"".join((frame[:at], number, frame[at + 4 :])))
            size += len(frame)
        self._ever_sent = max(self._ever_sent, self.sent_to)
        return out

    def mark(self, path: int, *, fin: bool = False) -> int:
        """A MARK (or the FIN) of this path leaves now, behind everything sent. Its number."""
        self.mark_number += 1
        self._marked_total = self._sent_total
        self._marks.append(_Mark(self.mark_number, path, self.sent_to, self._sent_total, fin))
        if len(self._marks) > MARKS_KEPT:
            # never the oldest, whose answer comes next: with many under way nothing would ever be confirmed
            superseded = next((one for one in list(self._marks)[-2::-1] if not one.fin and not one.done), None)
            if superseded is not None:
                self._marks.remove(superseded)
        return self.mark_number

    def forwarded(self, path: int, mark: int) -> bool:
        """MARK `mark` of this path came out of its Exchange, or its FIN (0). Whether more is confirmed than before."""
        for one in self._marks:
            if one.path == path and (mark == 0 or (one.number <= mark and not one.fin)):
                one.done = True
        before = self.confirmed_mark
        anyhow = not self._safe.paths_in_order
        while self._marks and (self._marks[0].done or (anyhow and any(later.done for later in self._marks))):
            one = self._marks.popleft()
            self.confirmed_mark = one.number
            if one.last > self.confirmed:
                self.confirmed, self._confirmed_total, self._floor = one.last, one.total, None
        return self.confirmed_mark > before

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.gone <= self.sent_to <= self.last, "what was sent is not between what is gone and what there is"
        assert self.confirmed <= self.last, "more is confirmed than there is"
        assert not self._lossless or (self.gone <= self.confirmed and self.unknown is None), "forgotten, and not confirmed"
        numbers = [entry[1] for entry in (*self._sent, *self.waiting)]
        assert numbers == sorted(numbers), "not in order"
        assert all(entry[1] <= self.sent_to for entry in self._sent), "sent, but not counted as sent"
        assert all(entry[1] > self.sent_to for entry in self.waiting), "waits, but counts as sent"
        kept = sum(len(entry[3]) + ENTRY_BYTES for entry in (*self._sent, *self.waiting))
        assert self.kept_bytes == kept, "bytes are not what is kept"


assert HEADER.format == "<BBQIQQQIQ", "PATH_OFFSET belongs to this layout"
