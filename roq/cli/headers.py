"""Headers on the command line: `-H NAME=TEXT`, and how they are shown in JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from roq.errors import InvalidHeaders
from roq.wire.headers import check_headers, check_message_headers

HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=TEXT", help="A header of each; repeatable.", show_default=False),
]


def headers_of(options: Sequence[str] | None) -> dict[str, str | bytes]:
    """Of NAME=TEXT each. Raises InvalidHeaders."""
    return check_headers(_pairs(options))[0]


def message_headers_of(options: Sequence[str] | None) -> dict[str, str | bytes]:
    """The same of a message, which may have `roq-priority` and `roq-ttl`. Raises InvalidHeaders."""
    return check_message_headers(_pairs(options))[0]


def _pairs(options: Sequence[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in options or ()]
    for name, equals, _ in pairs:
        if not equals:
            raise InvalidHeaders(f"a header is NAME=TEXT, got {name!r}")
    return {name: text for name, _, text in pairs}


def headers_row(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    """For JSON."""
    row: dict[str, str] = {}
    for name, value in headers.items():
        row.update({name: value} if isinstance(value, str) else text_row(name, value))
    return row


def text_row(name: str, value: bytes) -> dict[str, str]:
    """`name` with the text, or `name_base64` if it is not UTF-8."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
