"""What stands in a task file, and which payloads python-task-queue could run. Pure.

A `.json` file is what that program writes: {"payload": ..., "queueName": folder, "id": id}, the payload being a RegisteredTask
(an object with its "class") or a queueable function ([[module, name], [arguments], {keywords}, id]). The payload stands there
byte for byte as it was put. Every other payload, JSON or not, would make its workers fail: it goes into a `.data` file, in
folders that program does not look at.

    .json     {"payload": …, "queueName": …, "id": "…", "crc32": "01234567"}      crc32 of all before `, "crc32"`, in hex
    .data     payload · crc32 u32 of the id's text and the payload                (little endian)

Tasks whose id says so (names.py) have a checksum; a file of theirs that has not the right one is damaged. Files of 0.1, which
end before the checksum, and of python-task-queue can't be checked, but for being JSON.
"""

from __future__ import annotations

import json
from zlib import crc32

import msgspec

from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.names import DATA, JSON

_FUNCTION_PARTS = 4  # key, arguments, keywords, id
_SUM_BYTES = 4  # at the end of a .data file
_SEAL = b', "crc32": "%08x"}'
_SEAL_BYTES = len(_SEAL % 0)


class _Wrapper(msgspec.Struct):
    payload: msgspec.Raw = msgspec.Raw(b"")


_wrapper = msgspec.json.Decoder(_Wrapper)


def suffix(payload: bytes) -> str:
    """JSON if python-task-queue can run this payload, DATA if not. White space around it or NaN make it DATA."""
    if payload[:1] + payload[-1:] not in (b"{}", b"[]"):
        return DATA
    try:
        payload.decode()
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return DATA
    match value:
        case {"class": str(name)} if name:
            return JSON
        case [[str(), str()], list(), dict(), _] if len(value) == _FUNCTION_PARTS:
            return JSON
    return DATA


def encode(payload: bytes, suffix: str, id: str, folder: str) -> bytes:
    """The file's content."""
    sealed = names.is_sealed(id)
    if suffix == DATA:
        return payload + _sum(payload, id) if sealed else payload
    head = b'{"payload": %s, "queueName": %s, "id": "%s"' % (payload, msgspec.json.encode(folder), id.encode())
    return head + (_SEAL % crc32(head) if sealed else b"}")


def decode(content: bytes, suffix: str, id: str = "") -> bytes | None:
    """The payload, or None if that is no task: damaged, a file cut short by a crash, or another program's. id: "" for one that
    tells nothing."""
    sealed = names.is_sealed(id)
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
