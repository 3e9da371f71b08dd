"""From a tape to the attachment that follows it: what an Exchange sends waits until its tape was read up to where that begins.

The Exchange says which entry that is (TAPED), at the place in its stream where the subscription begins. A connection that is
made anew begins again, with ATTACHED and another TAPED: what was lost in between is on the tape, up to there. What came before
lies on the tape, too, and is dropped as a repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from roq.pubsub.links import Attachment
from roq.pubsub.tape_list import TapeList
from roq.wire.frame import FrameKind, control_prefix, parse

TAPED_PREFIX = control_prefix(FrameKind.TAPED)
ATTACHED_PREFIX = control_prefix(FrameKind.ATTACHED)


class Told(NamedTuple):
    """What the Exchange said: its tape comes first, up to this entry. at: monotonic seconds."""

    entry: int
    at: float


class WaitingAttachment:
    """looked_at: so many of its frames were. begins: its connection's TAPED has not come. told: by the last one that has."""

    __slots__ = ("begins", "looked_at", "told")

    def __init__(self) -> None:
        self.looked_at, self.begins = 0, True
        self.told: Told | None = None

    def look(self, attachment: Attachment) -> bool:
        """At what has come. Whether the Exchange has said something new of its tape."""
        news = False
        for at in range(self.looked_at, len(attachment.frames)):
            frame = attachment.frames[at]
            if frame.startswith(ATTACHED_PREFIX):
                self.begins = True
            elif self.begins and frame.startswith(TAPED_PREFIX):
                self.told, self.begins, news = Told(parse(frame)[1].sequence, time.monotonic()), False, True
        self.looked_at = len(attachment.frames)
        return news


class Handover:
    """Of one subscriber. on_proved: an attachment is, and its messages wait."""

    def __init__(self, tapes: TapeList, on_proved: Callable[[], None]) -> None:
        self._tapes, self._on_proved = tapes, on_proved
        self.waiting: dict[Attachment, WaitingAttachment] = {}

    def hold(self, attachment: Attachment) -> None:
        """It was made just now."""
        self.waiting[attachment] = WaitingAttachment()
        self._tapes.take_up(attachment.exchange.id)

    def holds(self, attachment: Attachment) -> bool:
        """Whether what comes from it has to wait for the tape. Asked before anything of it is read, and when more came."""
        one = self.waiting.get(attachment)
        if one is None:
            if not (attachment.taped and any(frame.startswith(ATTACHED_PREFIX) for frame in attachment.frames)):
                return False
            self.hold(attachment)  # made anew while other tapes are read: what was lost in between would be taken for older
            one = self.waiting[attachment]
            one.begins = False  # not with what is stored by the connection before
        if one.look(attachment):
            attachment.proved = True
            self._tapes.looked = 0.0  # its tape may be new
            self._on_proved()
        if one.told is not None:  # before, `was_read` might stop the reading: that frame comes behind others if the tape is new
            attachment.was_read()
        return True

    def drop(self, attachment: Attachment) -> bool:
        """Its Exchange is gone. Whether it was held: what came over it is on the tape, or is sent again."""
        return self.waiting.pop(attachment, None) is not None

    def release(self) -> None:
        """Attachments whose tape is read."""
        for attachment, one in list(self.waiting.items()):
            told, exchange = one.told, attachment.exchange.id
            if told is None or self._tapes.looked < told.at:  # what was known before says nothing of a tape that was made since
                continue
            tape = self._tapes.reading.get(exchange)
            ends = not told.entry and not self._tapes.recorded  # it is not written any more
            if tape is None or tape.ended or (tape.is_open and tape.done >= told.entry and not ends):
                self._tapes.leave(exchange, for_good=True)
                del self.waiting[attachment]
                attachment.unread_at = time.monotonic()
                attachment.look_soon()
