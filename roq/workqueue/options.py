"""What a program may ask of a work queue as it opens it: in the address, behind `?`, or as arguments. One table for both.

    roq://zk1:2181/orders?write_quorum=3&ack_quorum=2&patience_seconds=5

Some are kept with the queue, some are of this opening alone (see Options). Not covered: what of an existing queue differs,
which its backend tells.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from roq.errors import InvalidConfiguration
from roq.wire.work_queue import INLINE_BYTES_MAX, QUORUM_MAX, STANDBYS_MAX, TaskSettings
from roq.workqueue.contract import Asked

ANY = ("memory", "file", "log", "roq")
CLUSTER = ("roq",)
WHOLE_MAX = 2**53  # of whole numbers without a limit of their own
SECONDS_MAX = 10 * 365 * 86_400.0
ACK_SYNC_SECONDS_MAX = 60.0  # more would be no promise at all


class _Kind(NamedTuple):
    """schemes: of the addresses that have it."""

    number: type[int] | type[float]
    least: float
    most: float
    schemes: tuple[str, ...]


KINDS = {
    "max_attempts": _Kind(int, 0, WHOLE_MAX, ANY),
    "dedup_seconds": _Kind(float, 0, SECONDS_MAX, ANY),
    "payload_bytes_max": _Kind(int, 1, WHOLE_MAX, ANY),
    "write_quorum": _Kind(int, 1, QUORUM_MAX, CLUSTER),
    "ack_quorum": _Kind(int, 1, QUORUM_MAX, CLUSTER),
    "standbys": _Kind(int, 0, STANDBYS_MAX, CLUSTER),
    "inline_bytes": _Kind(int, 1, INLINE_BYTES_MAX, CLUSTER),
    "patience_seconds": _Kind(float, 0.001, SECONDS_MAX, CLUSTER),
    "ack_sync_seconds": _Kind(float, 0, ACK_SYNC_SECONDS_MAX, ("file",)),
}


class Options(msgspec.Struct, frozen=True):
    """None: not asked for. A new queue gets the default then, and an existing one is taken as it is.

    Kept with the queue: all but the last two. Of this opening: patience_seconds, ack_sync_seconds.
    """

    max_attempts: int | None = None
    dedup_seconds: float | None = None
    payload_bytes_max: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    standbys: int | None = None
    inline_bytes: int | None = None
    patience_seconds: float | None = None
    ack_sync_seconds: float | None = None

    def given(self) -> dict[str, float]:
        """Those that were asked for."""
        return {name: value for name in KINDS if (value := getattr(self, name)) is not None}

    def checked(self) -> Options:
        """The same, if each value is one the option can have. Raises InvalidConfiguration."""
        for name, value in self.given().items():
            _check(name, value)
        if self.write_quorum is not None and (self.ack_quorum or 0) > self.write_quorum:
            raise InvalidConfiguration(
                f"ack_quorum is at most write_quorum: {self.ack_quorum} stores can't acknowledge what {self.write_quorum} keep"
            )
        return self

    def of(self, scheme: str) -> Options:
        """The same, if these addresses have them all. Raises InvalidConfiguration."""
        for name in self.given():
            if scheme not in KINDS[name].schemes:
                owners = " and ".join(f"{one}:" for one in KINDS[name].schemes)
                raise InvalidConfiguration(f"{name} is an option of {owners} addresses; this one is {scheme}:")
        return self

    def joined(self, other: Options) -> Options:
        """What both ask for. Raises InvalidConfiguration where they contradict each other."""
        mine, its = self.given(), other.given()
        for name in mine.keys() & its.keys():
            if mine[name] != its[name]:
                raise InvalidConfiguration(f"{name} is {its[name]} in the address, but {mine[name]} is asked for beside it")
        return msgspec.convert({**mine, **its}, Options).checked()

    def settings(self) -> Asked:
        """Of what every queue keeps."""
        return {name: value for name, value in self.given().items() if name in TaskSettings.__struct_fields__}


def from_query(query: str) -> Options:
    """The options of an address, as they stand behind its `?`. Raises InvalidConfiguration."""
    values: dict[str, float] = {}
    for part in query.split("&"):
        name, equals, text = part.partition("=")
        if name not in KINDS or not equals:
            raise InvalidConfiguration(
                f"{part!r} is no option; options are {', '.join(f'{name}=' for name in KINDS)}; '?' in a name is %3F"
            )
        if name in values:
            raise InvalidConfiguration(f"{name} is given twice")
        values[name] = _number(name, unquote(text))
    return msgspec.convert(values, Options).checked()


def _number(name: str, text: str) -> float:
    try:
        return KINDS[name].number(text)
    except ValueError:
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {text!r}") from None


def _check(name: str, value: object) -> None:
    kind = KINDS[name]
    right = isinstance(value, int) if kind.number is int else isinstance(value, int | float)
    if not right or isinstance(value, bool) or not kind.least <= value <= kind.most:  # type: ignore[operator]
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {value!r}")


def _range(name: str) -> str:
    kind = KINDS[name]
    what = "a whole number" if kind.number is int else "a number"
    return (
        f"{what}, at least {kind.least:g}"
        if kind.most in (WHOLE_MAX, SECONDS_MAX)
        else (f"{what} from {kind.least:g} to {math.floor(kind.most)}")
    )
