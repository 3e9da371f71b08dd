"""`roq sub`: the payload of every message on a line of standard output, raw bytes and a newline."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

import msgspec
import typer

from roq.cli.address import ClusterOption, with_cluster
from roq.cli.output import say
from roq.cli.streams import Output
from roq.client.cluster import Cluster
from roq.errors import MessagesLost
from roq.pubsub.message import Message
from roq.pubsub.subscriber import Subscriber

EVERYTHING = ">"
STANDARD_OUTPUT = 1
Lines = Callable[[Sequence[Message]], bytes]


def sub(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)],
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]...", help="Topics; * is one word, > the rest. Default: everything.", show_default=False
        ),
    ] = None,
    cluster: ClusterOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many messages; 0: never.")] = 0,
    until_idle: Annotated[
        float | None, typer.Option(min=0.01, help="End when nothing came for so many seconds.", show_default=False)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="A JSON object per message, with topic, publisher, sequence, time.")
    ] = False,
) -> None:
    """Print messages as they come. Standard error tells when it is ready, and what was lost."""
    tally = _Tally()

    async def work(connected: Cluster) -> None:
        async with connected.subscriber(queue, *(topics or [EVERYTHING]), on_lost=tally.lost) as subscriber:
            try:
                await _print_messages(subscriber, tally, _json_lines if json else _plain_lines, count, until_idle)
            finally:
                say(f"roq sub: received {tally.received} messages, lost {tally.missing}")

    with_cluster(cluster, work)


class _Tally:
    """What was received and what was told as lost."""

    def __init__(self) -> None:
        self.received = 0
        self.missing = 0

    def lost(self, loss: MessagesLost) -> None:
        """A gap that can't be closed."""
        self.missing += loss.count
        say(f"roq sub: MessagesLost: {loss}")


async def _print_messages(subscriber: Subscriber, tally: _Tally, lines: Lines, count: int, until_idle: float | None) -> None:
    await subscriber.ready()
    say("roq sub: ready")
    out = Output(STANDARD_OUTPUT)
    printing = asyncio.ensure_future(_copy(_until_idle(subscriber.batches(), until_idle), out, tally, lines, count))
    gone = asyncio.ensure_future(out.reader_gone())
    try:
        await asyncio.wait({printing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            printing.result()
    finally:
        for task in (printing, gone):
            task.cancel()
        await asyncio.gather(printing, gone, return_exceptions=True)
        out.close()


async def _copy(batches: AsyncIterator[list[Message]], out: Output, tally: _Tally, lines: Lines, count: int) -> None:
    async for batch in batches:
        if count:
            batch = batch[: count - tally.received]
        await out.write(lines(batch))
        tally.received += len(batch)
        if tally.received == count:
            return


async def _until_idle(batches: AsyncIterator[list[Message]], seconds: float | None) -> AsyncIterator[list[Message]]:
    """The batches, ended by so many seconds of silence."""
    try:
        while True:
            async with asyncio.timeout(seconds):
                batch = await anext(batches)
            yield batch
    except (StopAsyncIteration, TimeoutError):
        return


def _plain_lines(batch: Sequence[Message]) -> bytes:
    return b"\n".join([message.payload for message in batch]) + b"\n"


def _json_lines(batch: Sequence[Message]) -> bytes:
    encode = msgspec.json.encode
    return b"".join([encode(_described(message)) + b"\n" for message in batch])


def _described(message: Message) -> dict[str, str | int]:
    """A payload that is not UTF-8 comes as `payload_base64`."""
    found: dict[str, str | int] = {"topic": message.topic}
    try:
        found["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(message.payload).decode()
    found.update(publisher=f"{message.publisher:016x}", sequence=message.sequence, timestamp=message.timestamp)
    return found
