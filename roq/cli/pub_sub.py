"""`roq pub`: a message per line of standard input. `roq sub`: a payload per line of standard output. Raw bytes and a newline.

Standard input and output run at full speed without ever blocking the event loop, which must go on while a pipe is full or
empty, or the Monitor takes us for dead: big blocks; pipes and terminals are waited for through the loop; regular files are
always ready. Sockets as standard output are written to blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.headers import HeaderOption, headers_of, headers_row, text_row
from roq.cli.output import print_json, say
from roq.client.cluster import Cluster
from roq.errors import MessagesLost, PayloadTooLarge
from roq.ids import topic_bytes
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Message
from roq.wire.limits import FRAME_BYTES_CEILING

STANDARD_INPUT = 0
EVERYTHING = ">"
STANDARD_OUTPUT = 1
Lines = Callable[[Sequence[Message]], bytes]
BLOCK_BYTES = 1024 * 1024  # read at once
PIPE_BYTES = 1024 * 1024  # asked of the kernel for a pipe; its default of 64 KiB costs a wake-up per 64 KiB


def pub(
    queue: QueueArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of all messages.", show_default=False)],
    cluster: ClusterOption = None,
    header: HeaderOption = None,
    json: JsonOption = False,
) -> None:
    """Publish a message per line of standard input; tell how many on standard error."""
    topic_bytes(topic)  # a wrong topic or header is refused before anything is connected
    headers = headers_of(header)

    async def work(connected: Cluster) -> None:
        async with connected.publisher(queue) as publisher:
            try:
                async for lines in read_lines(STANDARD_INPUT, FRAME_BYTES_CEILING):
                    await publisher.publish_many(topic, lines, headers)
                await publisher.flush()
            finally:
                dropped = f", dropped {publisher.dropped}" if publisher.dropped else ""
                say(f"roq pub: published {publisher.messages} messages{dropped}")
                if json:
                    print_json({"published": publisher.messages, "dropped": publisher.dropped})

    with_cluster(cluster, work)


def sub(
    queue: QueueArgument,
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
        bool, typer.Option("--json", help="A JSON object per message, with topic, publisher, sequence, time, headers.")
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
    """What was received and what was reported as lost."""

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


def _described(message: Message) -> dict[str, str | int | dict[str, str]]:
    """A payload that is not UTF-8 comes as `payload_base64`, likewise the header `name` as `name_base64`."""
    found: dict[str, str | int | dict[str, str]] = {"topic": message.topic, **text_row("payload", message.payload)}
    found.update(publisher=f"{message.publisher:016x}", sequence=message.sequence, timestamp=message.timestamp)
    if message.headers:
        found["headers"] = headers_row(message.headers)
    return found


def _enlarge(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # over the user's pipe quota: slower, not wrong
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


async def read_lines(descriptor: int, line_bytes_max: int) -> AsyncIterator[list[bytes]]:
    """Lists of complete lines without their newline, as they come; a last line without newline counts too.

    Raises PayloadTooLarge for a line longer than `line_bytes_max`.
    """
    rest = b""
    async for block in _blocks(descriptor):
        lines = (rest + block if rest else block).split(b"\n")
        rest = lines.pop()
        if len(rest) > line_bytes_max:
            raise PayloadTooLarge(f"a line of more than {line_bytes_max} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    waits = _can_be_waited_for(descriptor)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        _enlarge(descriptor)
    loop = asyncio.get_running_loop()
    while True:
        if waits:
            await _ready(descriptor, loop.add_reader, loop.remove_reader)
        else:
            await asyncio.sleep(0)
        block = os.read(descriptor, BLOCK_BYTES)
        if not block:
            return
        yield block


def _can_be_waited_for(descriptor: int) -> bool:
    with select.epoll() as probe:
        try:
            probe.register(descriptor, select.EPOLLIN)
        except PermissionError:  # a regular file, /dev/null: always ready
            return False
    return True


async def _ready(descriptor: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    """Wait until the descriptor can be read or written, or has failed."""
    event = asyncio.Event()
    add(descriptor, event.set)
    try:
        await event.wait()
    finally:
        remove(descriptor)


class Output:
    """Raw bytes to standard output. `write` returns when the kernel has all of them; raises BrokenPipeError."""

    def __init__(self, descriptor: int) -> None:
        self._original = self._descriptor = descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            _enlarge(descriptor)
        if stat.S_ISFIFO(mode) or os.isatty(descriptor):
            # An open file description of our own: O_NONBLOCK on the given one would reach the other programs that share it.
            with contextlib.suppress(OSError):  # another user's pipe: blocking then
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)

    async def write(self, data: bytes) -> None:
        """All of `data`."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await _ready(self._descriptor, loop.add_writer, loop.remove_writer)

    async def reader_gone(self) -> None:
        """Returns when the other end of the pipe was closed; never for anything else."""
        if self._descriptor == self._original or os.isatty(self._descriptor):
            await asyncio.Event().wait()
        watch = os.dup(self._descriptor)  # the loop takes one reader and one writer per descriptor
        try:
            loop = asyncio.get_running_loop()
            await _ready(watch, loop.add_reader, loop.remove_reader)
        finally:
            os.close(watch)

    def close(self) -> None:
        """Close our own description; standard output itself stays open."""
        if self._descriptor != self._original:
            os.close(self._descriptor)
            self._descriptor = self._original
