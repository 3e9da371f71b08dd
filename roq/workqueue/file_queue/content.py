"""What stands in a task file, and which payloads python-task-queue could run. Pure.

A `.json` file is what that program writes: {"payload": ..., "queueName": folder, "id": id}, the payload being a RegisteredTask
(an object with its "class") or a queueable function ([[module, name], [arguments], {keywords}, id]). The payload stands there
byte for byte as it was put. Every other payload, JSON or not, would make its workers fail: it goes into a `.data` file that
holds the payload alone, in folders that program does not look at.
"""

from __future__ import annotations

import json

import msgspec

from roq.workqueue.file_queue.names import DATA, JSON

_FUNCTION_PARTS = 4  # key, arguments, keywords, id


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
    if suffix == DATA:
        return payload
    return b'{"payload": %s, "queueName": %s, "id": "%s"}' % (payload, msgspec.json.encode(folder), id.encode())


def decode(content: bytes, suffix: str) -> bytes | None:
    """The payload, or None if that is no task: a file cut short by a crash, or another program's."""
    if suffix == DATA:
        return content
    try:
        payload = bytes(_wrapper.decode(content).payload)
    except msgspec.DecodeError:
        return _decode_lax(content)
    return payload or content  # without "payload" the whole is one, as python-task-queue has it


def _decode_lax(content: bytes) -> bytes | None:
    """As python-task-queue reads it: NaN and the like are JSON to it."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value["payload"]).encode() if "payload" in value else content
