"""Task files: their names, which hold a task's whole state, what a movement file tells about the past, and their content. Pure.

    queue/{due}--{id}.json        due: Unix seconds from which the task may be leased; 0: from the beginning
    movement/{id}                 every name the task had, one per line, the current one last

python-task-queue reads `due` with int(), so leading zeros mean nothing to it. Here they tell why the task waits until then:
none: it is leased; one: the lease was extended; two: it was put with a delay or given back. A name is never used twice by one
task, so that a name is the token of one lease.

An id is a UUID; ours (version 8) can be sorted and carry the priority, so that one listing of the folder tells the order:

    tttttttt-tttt-8ccc-pppp-rrrrrrrrrrrr    t: milliseconds of the insertion; c: counter within them; r: random
    pppp = 0x8000 | (127 - priority) << 6 | 1       1: the file's content carries a checksum (below); not so in 0.1

Not covered: which tasks go first (candidates.py).

A `.json` file is what that program writes: {"payload": ..., "queueName": folder, "id": id}, the payload being a RegisteredTask
(an object with its "class") or a queueable function ([[module, name], [arguments], {keywords}, id]). The payload stands there
byte for byte as it was put. Every other payload, JSON or not, would make its workers fail: it goes into a `.data` file, in
folders that program does not look at.

    .json     {"payload": …, "queueName": …, "id": "…", "crc32": "01234567"}      crc32 of all before `, "crc32"`, in hex
    .data     payload · crc32 u32 of the id's text and the payload                (little endian)

Tasks whose id says so (above) have a checksum; a file of theirs that has not the right one is damaged. Files of 0.1, which
end before the checksum, and of python-task-queue can't be checked, but for being JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from roq.errors import InvalidConfiguration

JSON = ".json"  # tasks python-task-queue can run
DATA = ".data"  # any other payload; as long as JSON, the slices below rely on it
_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_NAME = re.compile(rf"(0?0?)([1-9]\d{{0,11}}|0)--({_ID})(\.json|\.data)", re.ASCII)
ID = re.compile(_ID, re.ASCII)
_OURS = "8"  # the version of our ids
_SEALED = 1
_FRESH_LENGTH = 44  # of the name of a task that was never leased
_PRIORITY_DEFAULT = "9fc"  # without the digit that says nothing about it
_MILLISECONDS_MAX = (1 << 48) - 1
_COUNTER_MAX = (1 << 12) - 1


class Why(IntEnum):
    """Why a task can't be leased before `due`: the number of leading zeros."""

    LEASED = 0
    EXTENDED = 1
    WAITING = 2


class Name(NamedTuple):
    """A task file's name, taken apart."""

    why: Why
    due: int  # Unix seconds
    id: str
    suffix: str

    def __str__(self) -> str:
        return f"{'0' * self.why if self.due else ''}{self.due}--{self.id}{self.suffix}"

    @property
    def is_lease(self) -> bool:
        """Whether this name is, or was, a lease's token."""
        return self.due > 0 and self.why is not Why.WAITING


def parse(text: str) -> Name | None:
    """The name, or None if no task file is called so."""
    match = _NAME.fullmatch(text)
    if match is None or (match[1] and match[2] == "0"):
        return None
    return Name(Why(len(match[1])), int(match[2]), match[3], match[4])


def parse_history(movement: bytes) -> list[Name]:
    """The names in a movement file; what a crash or another program left there besides is passed over."""
    found = (parse(line) for line in movement.decode("ascii", "replace").split("\n"))
    return [name for name in found if name is not None]


def attempts(history: Sequence[Name]) -> int:
    """Leases so far. A lease is a name without leading zero that is due later than the one before: python-task-queue's release
    and cancel are due earlier. (Its `renew` can't be told from a lease and counts.)"""
    pairs = itertools.pairwise(history)
    return sum(1 for before, name in pairs if name.why is Why.LEASED and name.due > before.due)


def unused(name: Name, movement: bytes, step: int) -> Name:
    """This name, or the nearest in steps of `step` seconds that the task never had."""
    while f"{name}\n".encode() in movement:
        name = name._replace(due=name.due + step)
    return name


def order(text: str, unknown: str) -> str:
    """Sorts valid names by priority, then by insertion. unknown: stands for the insertion time of ids not made here."""
    if text[-27] == _OURS:
        return text[-22:-19] + text[-41:-23]
    return _PRIORITY_DEFAULT + unknown


def stamp(milliseconds: int) -> str:
    """A time as it stands in our ids, for `order`."""
    digits = f"{min(max(milliseconds, 0), _MILLISECONDS_MAX):012x}"
    return f"{digits[:8]}-{digits[8:]}"


def priority(id: str) -> int:
    """The priority an id carries; 0 for ids not made here."""
    return 127 - (int(id[19:23], 16) >> 6 & 0xFF) if id[14] == _OURS else 0


def is_sealed(id: str) -> bool:
    """Whether the content of this task's file carries a checksum."""
    return id[14:15] == _OURS and int(id[22], 16) & _SEALED != 0


def unsealed(id: str) -> str:
    """The id 0.1 would have made."""
    return f"{id[:22]}0{id[23:]}"


def inserted_ms(id: str) -> int | None:
    """Milliseconds since 1970 of the insertion, None for ids not made here."""
    return int(id[:8] + id[9:13], 16) if id[14] == _OURS else None


def split_due(listed: Sequence[str], now: int) -> tuple[list[str], list[str]]:
    """The names due by `now` and the others; what no task file is called is left out. A quick look at a million names: a few
    that `parse` refuses may be among them."""
    ready = [text for text in listed if len(text) == _FRESH_LENGTH and text[:3] == "0--"]
    later: list[str] = []
    if len(ready) == len(listed):
        return ready, later
    limit = str(now)
    width = len(limit)
    for text in listed:
        due = text[:-43]
        if due == "0" or text[-43:-41] != "--" or text[-5:] not in (JSON, DATA) or not due.isdecimal():
            continue
        if len(due) == width and due[:1] != "0":  # most names: compared as text
            (ready if due <= limit else later).append(text)
        else:
            (ready if int(due) <= now else later).append(text)
    return ready, later


class IdMaker:
    """Makes ids that grow within this process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0  # milliseconds << 12 | counter

    def make(self, milliseconds: int, priorities: Sequence[int]) -> list[str]:
        """One id per priority, in order."""
        with self._lock:
            first = max(self._last + 1, milliseconds << 12)
            self._last = first + len(priorities)
        noise = os.urandom(6 * len(priorities)).hex()
        return [_id(first + k, value, noise[12 * k : 12 * k + 12]) for k, value in enumerate(priorities)]


def numbered(milliseconds: int, number: int, value: int, mark: bytes) -> str:
    """An id that is the same whenever it is made again. number: of the task, from 0. value: priority. mark: whose, 6 bytes."""
    return _id((milliseconds << 12) + number, value, mark.hex())


def _id(position: int, value: int, noise: str) -> str:
    group = 0x8000 | (127 - value) << 6 | _SEALED
    return f"{stamp(position >> 12)}-{_OURS}{position & _COUNTER_MAX:03x}-{group:04x}-{noise}"


# --- content ----------------------------------------------------------------------------------------------------------

_FUNCTION_PARTS = 4  # key, arguments, keywords, id
_SUM_BYTES = 4  # at the end of a .data file
_SEAL = b', "crc32": "%08x"}'
_SEAL_BYTES = len(_SEAL % 0)


class _Wrapper(msgspec.Struct):
    payload: msgspec.Raw = msgspec.Raw(b"")


_wrapper = msgspec.json.Decoder(_Wrapper)


def suffix(payload: bytes) -> str:
    """JSON if python-task-queue can run this payload, DATA if not. White space around it or NaN make it DATA."""
    match _content(payload):
        case {"class": str(name)} if name:
            return JSON
        case [[str(), str()], list(), dict(), _] as parts if len(parts) == _FUNCTION_PARTS:
            return JSON
    return DATA


def check_functions(payloads: Iterable[bytes]) -> None:
    """Raises InvalidConfiguration for what workers of python-task-queue would call, whatever function of whatever module it
    names. (Of classes they run those that they know.)"""
    if any(payload[:1] == b"[" and suffix(payload) == JSON for payload in payloads):
        raise InvalidConfiguration(
            "a payload is a function call that workers of python-task-queue on this folder would carry out; if you trust "
            "whoever made it, open the queue with trust_functions=True (or …?trust_functions=true)"
        )


def _content(payload: bytes) -> Any:
    """None if it is no JSON of an object or a list."""
    if payload[:1] + payload[-1:] not in (b"{}", b"[]"):
        return None
    try:
        payload.decode()
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def encode(payload: bytes, suffix: str, id: str, folder: str) -> bytes:
    """The file's content."""
    sealed = is_sealed(id)
    if suffix == DATA:
        return payload + _sum(payload, id) if sealed else payload
    head = b'{"payload": %s, "queueName": %s, "id": "%s"' % (payload, msgspec.json.encode(folder), id.encode())
    return head + (_SEAL % crc32(head) if sealed else b"}")


def decode(content: bytes, suffix: str, id: str = "") -> bytes | None:
    """The payload, or None if that is no task: damaged, a file cut short by a crash, or another program's. id: "" for one that
    tells nothing."""
    sealed = is_sealed(id)
    if suffix == DATA:
        return _checked(content, id) if sealed else content
    if sealed and not _is_whole(content, id):
        return None
    try:
        payload = bytes(_wrapper.decode(content).payload)
    except msgspec.DecodeError:
        return _decode_lax(content)
    return payload or content  # without "payload" the whole is one, as python-task-queue has it


def _sum(payload: bytes, id: str) -> bytes:
    return crc32(payload, crc32(id.encode())).to_bytes(_SUM_BYTES, "little")


def _checked(content: bytes, id: str) -> bytes | None:
    payload = content[:-_SUM_BYTES]
    return payload if content[-_SUM_BYTES:] == _sum(payload, id) else None


def _is_whole(content: bytes, id: str) -> bool:
    """Of a JSON file: as it was written, and for this task."""
    head = content[:-_SEAL_BYTES]
    return content[-_SEAL_BYTES:] == _SEAL % crc32(head) and head.endswith(b'"id": "%s"' % id.encode())


def _decode_lax(content: bytes) -> bytes | None:
    """As python-task-queue reads it: NaN and the like are JSON to it."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value["payload"]).encode() if "payload" in value else content
