"""Tasks as the console shows and takes them: bytes as text where they are text, bounded. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Literal

import msgspec

from roq.cli.headers import headers_row
from roq.errors import InvalidConfiguration
from roq.wire.headers import split_headers
from roq.wire.master import PeekedTask
from roq.wire.task import PayloadReference

SHOWN_BYTES_MAX = 64 * 1024
Encoding = Literal["text", "json", "base64"]


class ShownPayload(msgspec.Struct, frozen=True):
    """encoding: json is text that is JSON, unchanged. bytes: of all of it; cut: text has only the beginning, or nothing of what
    stores keep beside the queue: it can't be edited."""

    encoding: Encoding
    text: str
    bytes: int
    cut: bool = False


class ShownTask(msgspec.Struct, frozen=True):
    """inserted, due: Unix seconds. error: of the last failed attempt. topic: of a group's message. headers: none are told where
    stores keep them with the payload."""

    id: str
    state: str
    topic: str
    attempts: int
    priority: int
    inserted: float
    due: float
    error: str
    holder: str
    headers: dict[str, str]
    payload: ShownPayload


class EditedPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """encoding: how text says the bytes; json: it must be JSON."""

    text: str
    encoding: Encoding = "text"

    def content(self) -> bytes:
        """Raises InvalidConfiguration."""
        if self.encoding == "base64":
            try:
                return base64.b64decode(self.text, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidConfiguration(f"the payload is no base64: {error}") from None
        try:
            data = self.text.encode()
            if self.encoding == "json":
                msgspec.json.decode(data)
        except (UnicodeEncodeError, msgspec.DecodeError, RecursionError) as error:
            raise InvalidConfiguration(f"the payload is no {'JSON' if self.encoding == 'json' else 'text'}: {error}") from None
        return data


def shown_payload(data: bytes) -> ShownPayload:
    """As text if it is some."""
    part = data[:SHOWN_BYTES_MAX]
    cut = len(part) < len(data)
    try:
        text = part.decode(errors="strict") if not cut else _text_of(part)
    except UnicodeDecodeError:
        return ShownPayload("base64", base64.b64encode(part).decode(), len(data), cut)
    return ShownPayload("json" if not cut and is_json(data) else "text", text, len(data), cut)


def _text_of(part: bytes) -> str:
    """Of what was cut anywhere, a character may be, too. Raises UnicodeDecodeError."""
    for less in range(4):
        try:
            return part[: len(part) - less].decode()
        except UnicodeDecodeError:
            continue
    return part.decode()


def is_json(data: bytes) -> bool:
    """An object or a list: every number is JSON, too, and no editor needed for it."""
    if not data.lstrip().startswith((b"{", b"[")):
        return False
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def shown_task(task: PeekedTask) -> ShownTask:
    """What stores keep beside the queue is not fetched."""
    payload, headers = task.payload, dict[str, str]()
    if isinstance(payload, PayloadReference):
        shown = ShownPayload("base64", "", payload.size, cut=True)
    else:
        content, told = split_headers(payload)
        headers, shown = headers_row(told or {}), shown_payload(content)
    return ShownTask(
        task.id,
        str(task.state),
        task.topic,
        task.attempts,
        task.priority,
        task.inserted,
        task.due,
        task.error,
        task.holder,
        headers,
        shown,
    )


def is_beginning(payload: bytes, shown: ShownPayload) -> bool:
    """Whether this is no more than what was shown of a payload that was cut, whatever an editor made of its line ends."""
    told = base64.b64decode(shown.text) if shown.encoding == "base64" else shown.text.encode()
    return shown.cut and (payload == told or payload.splitlines() == told.splitlines())
