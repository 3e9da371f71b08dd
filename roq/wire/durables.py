"""Durable subscribers, in the conversation with the Global Configuration Manager (roq/wire/gcm.py).

subscriber   OpenDurable → DurablePosition, then KeepPosition → Done once in a while
anybody      ListDurables → Durables, ForgetDurable → Done
"""

from __future__ import annotations

import msgspec


class OpenDurable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hold the position of this name from now on: whoever held it before keeps nothing any more. Answered with
    DurablePosition. holder: drawn anew by whoever opens it, so the same request again is harmless. owner: for people."""

    queue: str
    name: str
    holder: str
    owner: str = ""


class KeepPosition(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep how far its holder has got. number: grows with each position of a holder; one that was overtaken changes nothing.
    Raises DurableTaken."""

    queue: str
    name: str
    holder: str
    number: int
    position: str


class ListDurables(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Durable subscribers of a queue, by name. after: the last one of the answer before, if there were more."""

    queue: str
    after: str = ""


class ForgetDurable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep no position of this name any more; who holds it is fenced. Answered with Done also if there is none."""

    queue: str
    name: str


class DurablePosition(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to OpenDurable. position: text of a TapePosition, "" if none was kept yet."""

    position: str


class DurableView(msgspec.Struct, frozen=True, array_like=True):
    """One durable subscriber. position: text of a TapePosition that was kept last, "" if none was. owner: who opened it last.
    opened, kept: when, and when a position was kept last; seconds since 1970, 0: never."""

    name: str
    position: str
    owner: str
    opened: float
    kept: float


class Durables(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListDurables. more: ask for those after the last one."""

    views: tuple[DurableView, ...]
    more: bool
