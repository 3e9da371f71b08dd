"""Lines between the load generator and its client processes, over their standard input and output: one JSON object each.

parent   Order                        Start                            Ended (subscribers only)
child            Ready, once it serves       Progress… Published | Delivered | Failed
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TypeVar

import msgspec

from roq.errors import FrameError
from roq.tools.bench.load import Load

T = TypeVar("T", bound=msgspec.Struct)
LINE_BYTES_MAX = 16 * 1024 * 1024  # a Delivered with SAMPLES_SENT latencies fits several times
SAMPLES_SENT = 100_000  # latencies one subscriber hands over


class PublishOrder(msgspec.Struct, frozen=True, tag=True):
    """Be publisher number `index`. system: "roq", or a peer's name; address: where to connect; queue: RoQ queue."""

    system: str
    address: str
    queue: str
    index: int
    load: Load


class SubscribeOrder(msgspec.Struct, frozen=True, tag=True):
    """Be subscriber number `index`. idle_seconds: give up on missing messages after this long without any."""

    system: str
    address: str
    queue: str
    index: int
    load: Load
    idle_seconds: float


class ClientReady(msgspec.Struct, frozen=True, tag=True):
    """Connected; a publisher tells its SDK id."""

    publisher: int = 0


class StartPublishing(msgspec.Struct, frozen=True, tag=True):
    """Begin. publishers: SDK id by publisher index, of those the receiver hears."""

    publishers: dict[int, int] = {}


class PublishersFinished(msgspec.Struct, frozen=True, tag=True):
    """The publishers have flushed. published: messages by publisher index."""

    published: dict[int, int]


class PublisherFinished(msgspec.Struct, frozen=True, tag=True):
    """A publisher has flushed and closed. Times in monotonic nanoseconds."""

    published: int
    first_ns: int
    last_ns: int
    cpu_seconds: float


class SubscriberFinished(msgspec.Struct, frozen=True, tag=True):
    """A subscriber has everything, or gave up. reported_lost: what the SDK itself reported as lost."""

    delivered: int
    duplicated: int
    reordered: int
    foreign: int
    reported_lost: int
    last_ns: int
    cpu_seconds: float
    latencies_ns: list[int]


class ClientFailed(msgspec.Struct, frozen=True, tag=True):
    """The client could not go on."""

    error: str
    message: str


Order = PublishOrder | SubscribeOrder
Command = StartPublishing | PublishersFinished
Report = ClientReady | PublisherFinished | SubscriberFinished | ClientFailed

_encode = msgspec.json.Encoder().encode
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(value: msgspec.Struct) -> bytes:
    """One line."""
    return _encode(value) + b"\n"


def decode_report(line: bytes) -> Report:
    """What a child reported."""
    return _reports.decode(line)


class ParentLink:
    """The child's end: commands come in on standard input, reports leave on standard output."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    @classmethod
    async def open(cls) -> ParentLink:
        """Take over standard input."""
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return cls(reader)

    async def order(self) -> Order:
        """The first line; EOFError if the parent is gone."""
        return _orders.decode(await self._line())

    async def command(self, expect: type[T]) -> T:
        """The next line; EOFError if the parent is gone."""
        command = _commands.decode(await self._line())
        if not isinstance(command, expect):
            raise FrameError(f"{type(command).__name__} where {expect.__name__} was due")
        return command

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            raise EOFError("the load generator is gone")
        return line

    def report(self, report: Report) -> None:
        """Tell the parent; it always reads."""
        rest = memoryview(encode(report))
        while rest:
            rest = rest[os.write(sys.stdout.fileno(), rest) :]
