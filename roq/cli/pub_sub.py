"""`roq pub`: a message per line of standard input. `roq sub`: a payload per line of standard output. Raw bytes and a newline.

Standard input and output run at full speed without ever blocking the event loop, which must go on while a pipe is full or
empty, or the Monitor takes us for dead: big blocks; pipes and terminals are waited for through the loop; regular files are
always ready. Sockets as standard output are written to blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import select
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.completion import group_names
from roq.cli.headers import HeaderOption, headers_row, message_headers_of, text_row
from roq.cli.output import counted, print_json, say
from roq.cli.progress import Told, how_far, progressing, untold
from roq.cli.quantities import EARLIEST, group_start, start_of
from roq.client.cluster import Cluster
from roq.client.group import GroupSubscriber
from roq.errors import MessagesLost, PayloadTooLarge
from roq.ids import topic_bytes
from roq.pubsub.publisher import ROUTED, STORED, Publisher, PublishReceipt
from roq.pubsub.subscriber import OPEN_SECONDS, Subscriber
from roq.pubsub.subscription import Message
from roq.wire.limits import FRAME_BYTES_CEILING
from roq.wire.where import Where
from roq.workqueue.prefetch import Task

STANDARD_INPUT = 0
EVERYTHING = ">"
STANDARD_OUTPUT = 1
LIVE = "live"
T = TypeVar("T")
Lines = Callable[[Sequence[Message]], bytes]
BLOCK_BYTES = 1024 * 1024  # read at once
PIPE_BYTES = 1024 * 1024  # asked of the kernel for a pipe; its default of 64 KiB costs a wake-up per 64 KiB


TopicsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TOPIC]...", help="Topics; * is one word, > the rest. Default: everything.", show_default=False),
]


def checked_where(text: str) -> str:
    """It again. Raises InvalidFilter before anything is connected."""
    if text:
        Where(text)
    return text


WhereOption = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="Only messages for which it is true, such as \"price > 100 and region == 'eu'\".",
        show_default=False,
        callback=checked_where,
    ),
]
MessageJsonOption = Annotated[
    bool, typer.Option("--json", help="A JSON object per message, with topic, publisher, sequence, time, headers.")
]


StartOption = Annotated[
    str | None,
    typer.Option(
        metavar="live|earliest|last|2h|TIME|POSITION",
        help="Where to begin in a recorded queue: 2h is so long ago, last the last message of each topic. "
        "[default: live; of a new group earliest]",
        show_default=False,
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Be a member of this group of a recorded queue: ack what was printed. A group is made if it is missing.",
        show_default=False,
        autocompletion=group_names,
    ),
]

DurableOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Go on where the one of this name before was, in a recorded queue; --start is for the first time.",
        show_default=False,
    ),
]


class ConfirmLevel(StrEnum):
    """What `roq pub` waits for."""

    ROUTED = ROUTED
    STORED = STORED


ProducerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Line n is message n of this name: begin behind the last one that is stored. Restarted with the same input, "
        "each line counts once (recorded queues; implies --confirm stored).",
        show_default=False,
    ),
]


def pub(
    queue: QueueArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of all messages.", show_default=False)],
    cluster: ClusterOption = None,
    header: HeaderOption = None,
    confirm: Annotated[
        ConfirmLevel, typer.Option(help="Wait until all were handed on, or are stored, too (recorded queues).")
    ] = ConfirmLevel.ROUTED,
    producer: ProducerOption = None,
    json: JsonOption = False,
) -> None:
    """Publish a message per line of standard input; tell how many on standard error."""
    topic_bytes(topic)  # a wrong topic or header is refused before anything is connected
    headers = message_headers_of(header)
    confirm = confirm if producer is None else ConfirmLevel.STORED

    async def work(connected: Cluster) -> None:
        receipt = None
        async with connected.publisher(queue, confirm=confirm, producer=producer) as publisher:
            skip = publisher.number if producer is not None else 0
            if skip:
                say(f"roq pub: {counted(skip, 'line')} of {producer} are stored, going on behind them")
            try:
                with progressing("publishing") as told:
                    so_far = how_far(told, STANDARD_INPUT)
                    async for lines in read_lines(STANDARD_INPUT, FRAME_BYTES_CEILING):
                        await publisher.publish_many(topic, lines[skip:], headers)
                        skip = max(0, skip - len(lines))
                        so_far()
                receipt = await publisher.flush()
            finally:
                _tell_published(publisher, confirm, receipt, json)

    with_cluster(cluster, work)


def _tell_published(publisher: Publisher, confirm: ConfirmLevel, receipt: PublishReceipt | None, json: bool) -> None:
    """receipt: of all messages, if they were confirmed."""
    copies = receipt.copies if receipt else 0
    dropped = f", dropped {publisher.dropped}" if publisher.dropped else ""
    stored = f", all stored on {counted(copies, 'store')}" if copies else ""
    say(f"roq pub: published {publisher.messages} messages{dropped}{stored}")
    if json:
        found = {"published": publisher.messages, "dropped": publisher.dropped}
        print_json(found if confirm is ConfirmLevel.ROUTED else {**found, "copies": copies})


def sub(  # noqa: PLR0913, PLR0917  one parameter per flag
    queue: QueueArgument,
    topics: TopicsArgument = None,
    cluster: ClusterOption = None,
    start: StartOption = None,
    group: GroupOption = None,
    durable: DurableOption = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Only what is stored, from the stores of a recorded queue: nobody waits for us.")
    ] = False,
    where: WhereOption = "",
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many messages; 0: never.")] = 0,
    until_idle: Annotated[
        float | None, typer.Option(min=0.01, help="End when nothing came for so many seconds.", show_default=False)
    ] = None,
    json: MessageJsonOption = False,
) -> None:
    """Print messages as they come. Standard error says when it is ready, what was lost, and of a recorded queue where to
    go on."""
    if group is not None and (stored or durable is not None):
        raise typer.BadParameter("--stored and --durable are not for a group: it gets what is stored, and keeps its place")
    if group is not None:
        first = group_start(start or EARLIEST)
        with_cluster(
            cluster,
            lambda connected: print_group(
                connected.subscriber(queue, *(topics or ()), group=group, start=first, where=where), json, count, until_idle
            ),
        )
        return
    begin, tally = start_of(start) if start not in (None, LIVE) else LIVE, MessageTally("roq sub", durable)

    async def work(connected: Cluster) -> None:
        wanted, follow = topics or [EVERYTHING], "stored" if stored else True
        subscriber = connected.subscriber(
            queue, *wanted, on_lost=tally.lost, start=begin, follow=follow, durable=durable, where=where
        )
        await _print_when_ready(subscriber, tally, begin == LIVE and durable is None, json, count, until_idle)

    with_cluster(cluster, work)


async def _print_when_ready(
    subscriber: Subscriber, tally: MessageTally, live: bool, json: bool, count: int, until_idle: float | None
) -> None:
    """live: nothing comes before it is ready."""
    async with subscriber:
        telling = asyncio.ensure_future(_tell_ready(subscriber, OPEN_SECONDS if live else math.inf))
        try:
            if live:
                await telling
            await print_messages(subscriber, tally, json, count, until_idle)
        finally:
            telling.cancel()
            tally.tell("received", subscriber, "--start")


async def _tell_ready(subscriber: Subscriber, seconds: float) -> None:
    await subscriber.ready(seconds)
    say("roq sub: ready")


class MessageTally:
    """What was received, what was reported as lost, and how many entries of tapes were gone. command: that tells it. durable:
    name of the subscriber, if it has one."""

    def __init__(self, command: str, durable: str | None = None) -> None:
        self._command, self._durable = command, durable
        self.told: Told = untold
        self.received = 0
        self.missing = 0
        self.expired = 0

    def lost(self, loss: MessagesLost) -> None:
        """A gap that can't be closed."""
        self.missing += loss.count
        if loss.publisher:
            say(f"{self._command}: MessagesLost: {loss}")
        else:
            self.expired += loss.last - loss.first + 1
            say(f"{self._command}: MessagesLost: entries {loss.first}..{loss.last} of a tape had expired")

    def tell(self, done: str, subscriber: Subscriber, option: str) -> None:
        """All of it, and where to go on with which option."""
        expired = f", entries that had expired {self.expired}" if self.expired else ""
        say(f"{self._command}: {done} {self.received} messages, lost {self.missing}{expired}")
        if self._durable is not None:
            say(f"{self._command}: go on with --durable {self._durable}")
        elif subscriber.position is not None:
            say(f"{self._command}: go on with {option} {subscriber.position}")


async def print_messages(
    subscriber: Subscriber, tally: MessageTally, json: bool, count: int = 0, until_idle: float | None = None
) -> None:
    """To standard output as they come, until there are no more, so many, or none for so long; or until its reader has gone."""
    out, lines = Output(STANDARD_OUTPUT), _json_lines if json else _plain_lines
    await _while_read(out, _copy(_until_idle(subscriber.batches(), until_idle), out, tally, lines, count))


async def print_group(member: GroupSubscriber, json: bool, count: int = 0, until_idle: float | None = None) -> None:
    """As print_messages, of a member of a group: each message is acked when it is printed."""
    out, acked = Output(STANDARD_OUTPUT), 0

    async def copy() -> None:
        nonlocal acked
        async for message in _until_idle(member, until_idle):
            line = msgspec.json.encode({**_described(message), "attempt": message.attempt}) if json else message.payload
            await out.write(line + b"\n")
            last = acked + 1 == count
            await (member.queue.ack_many([message]) if last else message.ack())  # the latter brings the next one along
            acked += 1
            if last:
                return

    try:
        async with member:
            say("roq sub: ready")
            await _while_read(out, copy())
    finally:
        say(f"roq sub: acked {counted(acked, 'message')}")


async def _while_read(out: Output, work: Coroutine[Any, Any, None]) -> None:
    """Until it is done, or the reader of what it writes has gone."""
    printing = asyncio.ensure_future(work)
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


async def _copy(batches: AsyncIterator[list[Message]], out: Output, tally: MessageTally, lines: Lines, count: int) -> None:
    async for batch in batches:
        wanted = batch[: count - tally.received] if count else batch
        await out.write(lines(wanted))
        tally.received += len(wanted)
        tally.told("messages", tally.received, count)
        if tally.received == count:
            if len(wanted) == len(batch):
                await _come_back(batches)
            return


async def _come_back(batches: AsyncIterator[list[Message]]) -> None:
    """Ask for more without waiting for it: what was handed out before counts for the position then."""
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(0):
            await anext(batches)


async def _until_idle(values: AsyncIterator[T], seconds: float | None) -> AsyncIterator[T]:
    """The values, ended by so many seconds of silence."""
    try:
        while True:
            async with asyncio.timeout(seconds):
                value = await anext(values)
            yield value
    except (StopAsyncIteration, TimeoutError):
        return


def _plain_lines(batch: Sequence[Message]) -> bytes:
    return b"\n".join([message.payload for message in batch]) + b"\n"


def _json_lines(batch: Sequence[Message]) -> bytes:
    encode = msgspec.json.encode
    return b"".join([encode(_described(message)) + b"\n" for message in batch])


def _described(message: Message | Task) -> dict[str, str | int | dict[str, str]]:
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
