"""A shared log in a stream of NATS JetStream, on file storage: one entry a message.

    stream ROQ_<name>           subject roq.log.<name>; position = the stream's sequence, time = the message's
    key-value ROQ_<name>        `snapshot`: which object is the newest snapshot, changed by compare-and-set
    object store ROQ_<name>     snapshots, `<position>-<random>`

`<name>` has characters that NATS takes: others are written _hex_. A stream that is there is used as it is, if it loses nothing
by itself. An entry that is confirmed is as durable as the stream: with one replica it is with the server's operating system
until it is synced (sync_interval), with three a majority has it.

The client (nats-py) runs on a loop in a thread of its own; what follows comes by a consumer (jetstream_tail.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.js import api

from roq.errors import (
    AppendUnknown,
    CallError,
    Closed,
    InvalidConfiguration,
    LogTrimmed,
    LogUnavailable,
    RoqError,
    StorageFailed,
    StorageFull,
    WorkQueueNotFound,
)
from roq.ids import new_id
from roq.log.arrivals import Arrivals
from roq.log.clock import AppendTimes, LogClock
from roq.log.contract import READ_BYTES, LogEntry
from roq.log.jetstream_connection import NatsServers, connect
from roq.log.jetstream_tail import StreamTail
from roq.log.joint import Joint
from roq.runtime.loop_thread import LoopThread

ASK_SECONDS = 10.0
DELIVER_SECONDS = 2.0  # an entry that is there has come by then, or is asked for again
READ_SECONDS = 15.0
SNAPSHOT_SECONDS = 120.0
HEAD_BYTES = 1024  # of a message, around an entry
POINTER = "snapshot"
FULL_CODES = (10023, 10047, 10048, 10077)  # resources, storage, memory, limits of a stream
NO_CLUSTER = 10074  # replicas are asked of a single server
Result = TypeVar("Result")


class Pointer(msgspec.Struct, frozen=True):
    """Which object is the newest snapshot."""

    position: int
    size: int
    object: str


class JetStreamLog:
    """A SharedLog (contract.py), made if there is none. server: jetstream://[user:password@]host:port,…[?replicas=3&…]. place:
    the same for messages, without a password. Raises InvalidConfiguration, AccessDenied, LogUnavailable."""

    def __init__(self, server: str, log: str, place: str) -> None:
        self.name = f"log {log!r} in {place}"
        self._stream, self._subject = f"ROQ_{_escaped(log)}", f"roq.log.{_escaped(log)}"
        self._clock, self._arrivals, self._joint = LogClock(), Arrivals(), Joint(self.name)
        self._times = AppendTimes(self._clock)
        self._connection = nats.NATS()
        self._context = self._connection.jetstream(timeout=ASK_SECONDS)
        self._broken: asyncio.Future[None] | None = None  # done when the connection breaks
        self._connected = self._closed = False
        self._tail = StreamTail(
            self._connection, self._context, self._stream, self.name, self._joint, self._came, self._clock.observe
        )
        self._loop = LoopThread("roq-jetstream", f"{self.name} was closed")
        try:
            self._loop.call(self._open(NatsServers.of(server)))
        except BaseException:
            self.close()
            raise

    @property
    def entry_bytes_max(self) -> int:
        """See SharedLog."""
        return int(self._connection.max_payload) - HEAD_BYTES

    # --- opening --------------------------------------------------------------------------------------------------------

    async def _open(self, server: NatsServers) -> None:
        await connect(self._connection, server, self.name, self._disconnected, self._reconnected)
        self._connected = True
        await self._make(server.replicas)
        self._watching = asyncio.get_running_loop().create_task(self._tail.watch())

    async def _make(self, replicas: int) -> None:
        config = api.StreamConfig(
            name=self._stream,
            subjects=[self._subject],
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW,
            num_replicas=replicas or 1,
            description="a work queue of RoQ; entries go by its snapshots",
        )
        try:
            try:
                found = (await self._context.stream_info(self._stream)).config
            except nats.js.errors.NotFoundError:
                found = (await self._context.add_stream(config)).config
        except (TimeoutError, nats.errors.Error) as error:
            raise self._failed(error, LogUnavailable) from error
        wrong = [
            said
            for said, right in (
                ("retention is not limits", found.retention == api.RetentionPolicy.LIMITS),
                ("max_age is set", not found.max_age),
                ("discard is not new", found.discard == api.DiscardPolicy.NEW),
                ("max_msgs_per_subject is set", (found.max_msgs_per_subject or 0) <= 0),
                ("deny_purge is set", not found.deny_purge),
                ("no_ack is set", not found.no_ack),
                ("storage is not file", found.storage == api.StorageType.FILE),
                (f"subjects are not {self._subject}", found.subjects == [self._subject]),
                (f"num_replicas is {found.num_replicas}, not {replicas}", replicas in (0, found.num_replicas)),
            )
            if not right
        ]
        if wrong:
            raise InvalidConfiguration(f"{self.name}: its stream {self._stream} can't keep a log as asked: {', '.join(wrong)}")

    async def _disconnected(self) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(None)

    async def _reconnected(self) -> None:
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):  # else `watch` does it
            if self._tail.is_on:
                await self._tail.go_on()

    # --- entries --------------------------------------------------------------------------------------------------------

    def now(self) -> int:
        """See SharedLog."""
        return self._clock.now()

    def latest(self) -> int:
        """See SharedLog."""
        return self._clock.latest()

    def append(self, entry: bytes) -> int:
        """See SharedLog."""
        if len(entry) > self.entry_bytes_max:
            raise CallError(f"an entry of {len(entry)} bytes; {self.name} takes {self.entry_bytes_max} at once")
        self._joint.check()
        before = self._joint.position
        position = self._loop.call(self._publish(entry))
        self._joint.appended(before, position)
        self._arrivals.rise(position)
        return position

    async def _publish(self, entry: bytes) -> int:
        sent = time.monotonic()
        try:
            publish = self._context.publish(self._subject, entry, timeout=ASK_SECONDS, stream=self._stream)
            ack = await self._unbroken(publish, AppendUnknown)
        except nats.js.errors.NoStreamResponseError as error:
            raise LogUnavailable(f"{self.name}: no server keeps its stream {self._stream} just now") from error
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionReconnectingError) as error:
            raise LogUnavailable(f"{self.name}: the connection to NATS is down") from error
        except (TimeoutError, nats.errors.Error) as error:
            raise self._failed(error, AppendUnknown) from error
        self._times.confirmed(int(ack.seq), sent)
        return int(ack.seq)

    async def _unbroken(self, work: Coroutine[Any, Any, Result], lost: type[AppendUnknown | LogUnavailable]) -> Result:
        """What `work` returns, unless the connection is down, or breaks meanwhile."""
        if not self._connection.is_connected:
            work.close()
            raise LogUnavailable(f"{self.name}: the connection to NATS is down")
        if self._broken is None or self._broken.done():
            self._broken = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(work)
        waited: set[asyncio.Future[Any]] = {task, self._broken}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise lost(f"{self.name}: the connection to NATS broke")
        finally:
            task.cancel()

    def _came(self, entry: LogEntry) -> None:
        """On the loop."""
        self._times.came(entry.position, entry.time)
        self._arrivals.rise(entry.position)

    def end(self) -> int:
        """See SharedLog."""
        self._joint.check()
        return self._loop.call(self._state())[1]

    async def _state(self) -> tuple[int, int]:
        """The first position that can be read, and the last one."""
        try:
            info = await self._unbroken(self._context.stream_info(self._stream), LogUnavailable)
        except nats.js.errors.NotFoundError as error:
            raise WorkQueueNotFound(f"{self.name} was removed: there is no stream {self._stream}") from error
        except (TimeoutError, nats.errors.Error) as error:
            raise self._failed(error, LogUnavailable) from error
        self._arrivals.rise(info.state.last_seq)
        return max(info.state.first_seq, 1), info.state.last_seq

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        """See SharedLog."""
        deadline = time.monotonic() + READ_SECONDS
        expected = self._arrivals.end > after
        while True:
            self._check_open()
            came = expected and self._tail.follows(after) and self._tail.wait(DELIVER_SECONDS) and self._tail.follows(after)
            self._joint.check()
            if came and (found := _in_a_row(self._tail.take(after, bytes_max), after)):
                self._joint.read(found[-1])
                return found
            first, last = self._loop.call(self._state())
            if after + 1 < first:
                raise LogTrimmed(f"{self.name}: entries behind position {after} are in the snapshot")
            if after > last:
                raise StorageFailed(
                    f"{self.name} ends at {last}, before position {after}, which was confirmed: its server lost the end of it. "
                    "Close the work queue everywhere and open it anew"
                )
            if after == last:
                return []
            if time.monotonic() >= deadline:
                raise LogUnavailable(f"{self.name}: NATS does not deliver what is behind position {after}")
            if not self._tail.follows(after):
                self._loop.call(self._follow(after))
            self._check_hole(after)
            expected = True

    async def _follow(self, after: int) -> None:
        try:
            await self._unbroken(self._tail.start(after), LogUnavailable)
        except (TimeoutError, nats.errors.Error) as error:
            raise self._failed(error, LogUnavailable) from error

    def _check_hole(self, after: int) -> None:
        """What comes first from `after` on must be what follows it, if it was not trimmed just now."""
        if self._tail.wait(DELIVER_SECONDS) and not self._tail.follows(after):
            first, _ = self._loop.call(self._state())
            if first <= after + 1 and self._tail.is_on:
                raise StorageFailed(f"{self.name} has lost entries behind position {after}: restore them, or begin a new queue")

    def wait(self, after: int, seconds: float) -> bool:
        """See SharedLog."""
        deadline = time.monotonic() + seconds
        if self._arrivals.end <= after and not self._tail.is_on:
            with contextlib.suppress(LogUnavailable):
                self._loop.call(self._follow(after))
        return self._arrivals.wait(after, deadline - time.monotonic())

    # --- snapshots ------------------------------------------------------------------------------------------------------

    def snapshot(self, position: int, data: bytes) -> None:
        """See SharedLog."""
        self._loop.call(self._bounded(self._keep(position, data)))

    async def _keep(self, position: int, data: bytes) -> None:
        try:
            pointers = await self._context.key_value(self._stream)
            objects = await self._context.object_store(self._stream)
        except nats.js.errors.NotFoundError:
            replicas = (await self._context.stream_info(self._stream)).config.num_replicas or 1
            pointers = await self._context.create_key_value(bucket=self._stream, history=1, replicas=replicas)
            objects = await self._context.create_object_store(self._stream, replicas=replicas)
        pointer, revision = await self._pointer(pointers)
        if pointer is not None and pointer.position >= position:
            return
        made = Pointer(position, len(data), f"{position}-{new_id():x}")
        await objects.put(made.object, data)
        text = msgspec.json.encode(made)
        try:
            await (pointers.create(POINTER, text) if pointer is None else pointers.update(POINTER, text, last=revision))
        except nats.js.errors.KeyWrongLastSequenceError:  # another one's is newer, or comes next
            await objects.delete(made.object)
            return
        await self._context.purge_stream(self._stream, seq=position + 1)
        for each in await objects.list():
            if each.name is not None and int(each.name.partition("-")[0]) < position:
                await objects.delete(each.name)

    async def _pointer(self, pointers: Any) -> tuple[Pointer | None, int]:
        try:
            entry = await pointers.get(POINTER)
        except nats.js.errors.KeyNotFoundError:
            return None, 0
        return msgspec.json.decode(entry.value, type=Pointer), int(entry.revision)

    def newest_snapshot(self) -> tuple[int, int]:
        """See SharedLog."""
        pointer = self._loop.call(self._bounded(self._newest()))
        return (0, 0) if pointer is None else (pointer.position, pointer.size)

    async def _newest(self) -> Pointer | None:
        try:
            return (await self._pointer(await self._context.key_value(self._stream)))[0]
        except nats.js.errors.NotFoundError:
            return None

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """See SharedLog."""
        return self._loop.call(self._bounded(self._load()))

    async def _load(self) -> tuple[int, bytes] | None:
        before = None
        while (pointer := await self._newest()) is not None:
            try:
                found = await (await self._context.object_store(self._stream)).get(pointer.object)
                return pointer.position, bytes(found.data)
            except nats.js.errors.NotFoundError as error:
                if pointer == before:
                    raise StorageFailed(f"{self.name}: its snapshot {pointer.object} is gone: restore it") from error
                before = pointer  # perhaps a newer one has just replaced it
        return None

    async def _bounded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Work on snapshots."""
        try:
            return await asyncio.wait_for(self._unbroken(work, LogUnavailable), SNAPSHOT_SECONDS)
        except (TimeoutError, nats.errors.Error) as error:
            raise self._failed(error, LogUnavailable) from error

    # --- the end --------------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception, lost: type[AppendUnknown | LogUnavailable]) -> RoqError:
        """What the client's error means for the caller."""
        said = f"{self.name}: NATS says: {error or type(error).__name__}"
        if isinstance(error, nats.js.errors.APIError):
            if error.err_code in FULL_CODES:  # some of them are told as "unavailable"
                return StorageFull(said)
            if error.err_code == NO_CLUSTER:
                return InvalidConfiguration(said)
            if not isinstance(error, nats.js.errors.ServiceUnavailableError):
                return StorageFailed(said)
        if isinstance(error, nats.errors.ConnectionClosedError):
            return Closed(f"{self.name} was closed")
        return lost(said)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.name} was closed")

    def close(self) -> None:
        """See SharedLog."""
        if self._closed:
            return
        self._closed = True
        self._arrivals.close()
        self._tail.close()
        with contextlib.suppress(Closed, nats.errors.Error, TimeoutError):
            self._loop.call(self._end())
        self._loop.stop()

    async def _end(self) -> None:
        if self._connected:
            await asyncio.wait_for(self._connection.close(), ASK_SECONDS)


def _in_a_row(entries: list[LogEntry], after: int) -> list[LogEntry]:
    """Those that follow `after` without a hole."""
    found: list[LogEntry] = []
    for position, entry in enumerate(entries, after + 1):
        if entry.position != position:
            break
        found.append(entry)
    return found


def _escaped(name: str) -> str:
    """The name with characters that NATS takes in names of streams and buckets; different ones stay different."""
    return re.sub(r"[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}_", name)


def log_exists(server: str, log: str, place: str) -> bool:
    """Whether the servers have this log. Raises AccessDenied, LogUnavailable, InvalidConfiguration."""
    name = f"log {log!r} in {place}"
    where = NatsServers.of(server)

    async def look() -> bool:
        connection = nats.NATS()
        await connect(connection, where, name)
        try:
            await connection.jetstream(timeout=ASK_SECONDS).stream_info(f"ROQ_{_escaped(log)}")
        except nats.js.errors.NotFoundError:
            return False
        except (TimeoutError, nats.errors.Error) as error:
            raise LogUnavailable(f"{name}: NATS says: {error or type(error).__name__}") from error
        finally:
            await connection.close()
        return True

    return asyncio.run(look())
