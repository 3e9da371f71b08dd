"""The shuffles of a cluster (`roq://zk1:2181,zk2:2181`): a contract.Service. The leading GCM knows them, followers hold them.
Blocking; any thread; every wait has an end.

Writing. A writer's runs go to one buffer follower, in numbered messages that may be sent again. A buffer that has no room is
asked again, with growing pauses. One that was started again, whose host the leader has given up, or that does not answer for
LOST_SECONDS, has lost the attempt: AttemptLost, and the task writes it again under another id.

Reading. A range comes from one of its holders. Readers begin with different ones, by hash: a round robin without state. A
holder that is busy, silent, damaged or incomplete is left for the next one; when all have failed, they are asked again after
growing pauses with jitter, up to a deadline, and the leader is asked who holds the range now. Rows have numbers, so another
holder goes on at the very row. Not covered: merging (merge.py), the leader (gcm) and followers (roq/shuffle/node).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar
from zlib import crc32

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import (
    AttemptLost,
    CallError,
    Closed,
    DataLost,
    DeadlineExceeded,
    FrameError,
    NoHosts,
    NotReady,
    Overloaded,
    RoqError,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
    TemporaryError,
    Unavailable,
    WinnersUnknown,
)
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.runtime.blocking_connection import ConnectionPool, StopEvent
from roq.runtime.installation import install
from roq.runtime.loop_thread import LoopThread
from roq.runtime.observe import logger
from roq.shuffle.committed import CommittedAttempts, parts
from roq.shuffle.contract import AttemptSink, Opened, RangeSource
from roq.shuffle.ranges import buffer_of, intersection, replica_order
from roq.wire import gcm
from roq.wire import shuffle as wire
from roq.wire.gcm import ShuffleInfo
from roq.wire.shuffle import (
    BLOCKS_BYTES_MAX,
    Block,
    Cursor,
    Description,
    Range,
    Receipt,
    RunSample,
    RunSlice,
    ShuffleState,
    Spec,
)

log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
_decode = msgspec.msgpack.Decoder(wire.Reply).decode
ANSWER_SECONDS = 10.0  # one message
LOOK_SECONDS = 1.0  # of silence between two looks whether its host is still there
LOOK_WAITING_SECONDS = 4.0  # … while it answers that it has no room, or isn't done
LOST_SECONDS = 15.0  # of silence: longer than a busy follower needs, shorter than a task's patience
ROOM_SECONDS = 300.0  # a buffer without room for so long will not get any
WAIT_SECONDS = 2.0  # asked of a FinishAttempt at once
ABANDON_SECONDS = 2.0
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.02, 1.0
TRY_SECONDS = 10.0  # one request to one holder
PATIENCE_SECONDS = 120.0  # without a single answer
ASK_PAUSE_SECONDS, ASK_PAUSE_SECONDS_MAX = 0.05, 5.0
AHEAD_BYTES = 8 * 1024 * 1024  # read at once, by all slices of a range together
LEADER_SECONDS = 30.0  # longer than any fail-over
COMMIT_SECONDS = 600.0  # data may have to move
OPEN_SECONDS = 3.0  # one follower's answer


class FollowerLink:
    """zookeeper: "h1:p,h2:p[/chroot]"."""

    def __init__(self, zookeeper: str) -> None:
        self._stop = StopEvent()
        self._connections = ConnectionPool(self._stop)
        self._loop = LoopThread("roq shuffles")
        self._gcm = GcmClient(zookeeper)

    def leader(self, request: msgspec.Struct, expect: type[T], seconds: float) -> T:
        """The leader's answer. Raises its refusal, Unavailable, DeadlineExceeded, Closed."""
        return self._loop.call(self._gcm.request(request, expect, seconds))

    def ask(self, endpoint: str, request: msgspec.Struct, expect: type[T], seconds: float) -> T:
        """A follower's answer, within so many seconds. Raises its refusal, Unavailable, DeadlineExceeded, Closed."""
        connection = self._connections.take(endpoint)
        try:
            return connection.ask(request, expect, _decode, seconds)
        finally:
            if connection.owes_answer:
                connection.close()  # a late answer, which may be large, must not be read before the next one
            self._connections.give(connection)

    def pause(self, seconds: float) -> None:
        """Wait. Raises Closed when the link is closed meanwhile."""
        if self._stop.wait(seconds):
            raise Closed("these shuffles were closed")

    def close(self) -> None:
        """Whoever waits gets Closed."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._connections.close()
        self._loop.loop.call_soon_threadsafe(self._gcm.close)
        self._loop.stop()


class ChosenBuffer(NamedTuple):
    """The follower that takes the attempt."""

    host: str
    endpoint: str


class ClusterSink:
    """A contract.AttemptSink. given_up(host): whether the leader has. One thread."""

    def __init__(
        self,
        link: FollowerLink,
        buffer: ChosenBuffer,
        shuffle: str,
        partition: int,
        attempt: str,
        given_up: Callable[[str], bool] = lambda host: False,
    ) -> None:
        self._link, self._buffer, self._shuffle, self._given_up = link, buffer, shuffle, given_up
        self._partition, self._attempt = partition, attempt
        self._run = self._number = 0

    def send(self, blocks: Sequence[Block]) -> None:
        """See AttemptSink."""
        request = wire.SendBlocks(self._shuffle, self._partition, self._attempt, self._number, self._run, [*blocks])
        self._say(request, ANSWER_SECONDS)
        self._number += 1

    def end(self, sample: RunSample) -> None:
        """See AttemptSink."""
        self._say(wire.EndRun(self._shuffle, self._number, sample), ANSWER_SECONDS)
        self._number += 1
        self._run += 1

    def finish(self, receipt: Receipt) -> None:
        """See AttemptSink."""
        self._say(wire.FinishAttempt(self._shuffle, receipt, WAIT_SECONDS), ANSWER_SECONDS)

    def abandon(self) -> None:
        """See AttemptSink."""
        request = wire.AbandonAttempt(self._shuffle, self._partition, self._attempt)
        with contextlib.suppress(RoqError):  # a buffer forgets attempts nobody speaks of
            self._link.ask(self._buffer.endpoint, request, wire.FollowerDone, ABANDON_SECONDS)

    def _say(self, request: msgspec.Struct, seconds: float) -> None:
        """Until it is answered. Raises AttemptLost, Overloaded, StorageFull, Closed, and what else the buffer refuses."""
        pauses, quick = delays(PAUSE_SECONDS, PAUSE_SECONDS_MAX), delays(PAUSE_SECONDS, PAUSE_SECONDS)
        heard = looked = began = time.monotonic()
        while True:
            failure: RoqError
            try:
                self._link.ask(self._buffer.endpoint, request, wire.FollowerDone, seconds)
                return
            except AttemptLost:
                raise
            except (Unavailable, DeadlineExceeded) as error:
                failure, now, look_seconds = error, time.monotonic(), LOOK_SECONDS
            except TemporaryError as error:  # no room, not done yet, too many requests: we reach it, but does anybody else?
                failure, now, look_seconds = error, time.monotonic(), LOOK_WAITING_SECONDS
                heard = now
                if now - began > ROOM_SECONDS:
                    raise
            lost = now - heard > LOST_SECONDS
            if not lost and now - looked > look_seconds:
                lost, looked = self._given_up(self._buffer.host), now
            if lost:
                raise AttemptLost(f"its buffer follower on host {self._buffer.host} is lost: {failure}") from failure
            waited = isinstance(request, wire.FinishAttempt) and isinstance(failure, Overloaded)
            self._link.pause(next(quick if waited else pauses))


class Holders(NamedTuple):
    """Who may have the range, the likeliest first: (host, endpoint)."""

    range: Range
    committed: CommittedAttempts
    found: list[tuple[str, str]]


class ClusterSource:
    """A contract.RangeSource. info: what the range is located by. describe(): the shuffle as the leader knows it now. Raises
    Unavailable, DataLost."""

    def __init__(self, link: FollowerLink, describe: Callable[[], ShuffleInfo], number: int, info: ShuffleInfo) -> None:
        self._link, self._describe, self._number = link, describe, number
        self._reader = new_token()
        self._shuffle, self._wanted = info.description.id, info.description.ranges[number]
        self.opened = Opened(self._shuffle, self._wanted.interval)
        self._name, self._spec = info.description.name, info.description.spec
        self._holders = self._locate(info)
        self._at = 0  # the holder that is asked
        self.slices: Sequence[RunSlice] = ()
        self._persist(self._list)
        self._ahead = max(1, AHEAD_BYTES // max(1, len(self.slices)))

    def _locate(self, info: ShuffleInfo) -> Holders:
        """Its holders, then those of what overlaps it now and in the table before: each row is with one of them."""
        description = info.description
        hosts = list(replica_order(self._reader, self._shuffle, self._number, self._wanted.holders))
        for each in (*description.ranges, *description.former):
            if intersection(each.interval, self._wanted.interval) is not None:
                hosts += replica_order(self._reader, self._shuffle, self._number, each.holders)
        known = [(host, info.followers[host]) for host in dict.fromkeys(hosts) if host in info.followers]
        return Holders(self._wanted, CommittedAttempts(description.winners), known)

    def _persist(self, attempt: Callable[[str], R]) -> R:
        """What attempt(endpoint) returns at the first holder that can. Raises Unavailable, DataLost, Closed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pauses = delays(ASK_PAUSE_SECONDS, ASK_PAUSE_SECONDS_MAX)
        failure: RoqError = Unavailable(f"no holder of range {self._number} is known")
        while True:
            for _ in range(len(self._holders.found)):
                host, endpoint = self._holders.found[self._at % len(self._holders.found)]
                try:
                    return attempt(endpoint)
                except Closed:
                    raise
                except RoqError as error:  # whatever is wrong with this one, another may be well
                    log.info("read failed over to another replica", extra={"fields": {"host": host, "reason": str(error)}})
                    if not (isinstance(error, Unavailable) and isinstance(failure, DataLost)):
                        failure = error
                    self._at += 1
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                raise failure if isinstance(failure, DataLost | TemporaryError) else Unavailable(str(failure))
            self._link.pause(pause)
            try:
                self._holders = self._locate(self._describe())
            except TemporaryError as error:
                failure = error

    def _list(self, endpoint: str) -> None:
        slices: list[RunSlice] = []
        begin: Cursor | None = wire.BEGIN
        while begin is not None:
            page = self._page(endpoint, begin)
            slices += page.slices
            if page.next is not None and page.next <= begin:
                raise FrameError(f"the pages of {endpoint} do not go on")
            begin = page.next
        rows = sum(each.rows for each in slices)
        if 0 <= self._wanted.rows != rows:
            raise DataLost(f"range {self._number} has {self._wanted.rows} rows, and {endpoint} has {rows} of them")
        self.slices = slices

    def _page(self, endpoint: str, begin: Cursor) -> wire.Slices:
        """Who does not know the committed attempts (any more) is told them."""
        committed = self._holders.committed
        digest = committed.digest if len(committed) else ""
        request = wire.ListSlices(self._shuffle, self._wanted.interval, {}, digest=digest, begin=begin)
        try:
            return self._link.ask(endpoint, request, wire.Slices, TRY_SECONDS)
        except WinnersUnknown:
            for part in parts(self._shuffle, self._name, self._spec, committed):
                self._link.ask(endpoint, part, wire.FollowerDone, TRY_SECONDS)
            return self._link.ask(endpoint, request, wire.Slices, TRY_SECONDS)

    def blocks(self, slice: RunSlice) -> Iterator[Block]:
        """See RangeSource."""
        row, last = slice.first, slice.first + slice.rows - 1
        size = min(self._ahead, BLOCKS_BYTES_MAX)
        while row <= last:
            request = wire.ReadBlocks(self._shuffle, slice.partition, slice.attempt, slice.run, row, last, size)
            for block in self._persist(lambda endpoint: self._read(endpoint, request)).blocks:  # noqa: B023
                yield block
                row = block.first + block.rows

    def _read(self, endpoint: str, request: wire.ReadBlocks) -> wire.Blocks:
        found = self._link.ask(endpoint, request, wire.Blocks, TRY_SECONDS)
        row = request.first
        for block in found.blocks:
            if crc32(block.data) != block.crc or not block.first <= row < block.first + block.rows:
                raise DataLost(f"{endpoint} sent a damaged block")
            row = block.first + block.rows
        if not found.blocks:
            raise DataLost(f"{endpoint} does not have row {row} of run {request.run} of partition {request.partition}")
        return found

    def close(self) -> None:
        """See RangeSource: lines belong to the link, nothing else is held."""


class ClusterService:
    """zookeeper: "h1:p,h2:p[/chroot]". Any thread; every wait has an end."""

    def __init__(self, zookeeper: str) -> None:
        self._link = FollowerLink(zookeeper)
        self._open = True

    def _check_open(self) -> None:
        if not self._open:
            raise Closed("these shuffles were closed")

    def _info(self, request: gcm.Request, seconds: float = LEADER_SECONDS) -> gcm.ShuffleInfo:
        self._check_open()
        return self._link.leader(request, gcm.ShuffleInfo, seconds)

    def create(self, name: str, spec: Spec) -> Description:
        """See Service."""
        return self._info(gcm.CreateShuffle(name, new_token(), spec)).description

    def describe(self, name: str) -> Description:
        """See Service."""
        return self._info(gcm.DescribeShuffle(name)).description

    def list(self) -> list[Description]:
        """See Service."""
        self._check_open()
        found = self._link.leader(gcm.ListShuffles(), gcm.ShuffleList, LEADER_SECONDS).shuffles
        return sorted(found, key=lambda each: each.name)

    def remove(self, name: str) -> None:
        """See Service."""
        self._check_open()
        self._link.leader(gcm.RemoveShuffle(name, new_token()), gcm.Done, LEADER_SECONDS)

    def commit(self, name: str, receipts: Sequence[Receipt]) -> Description:
        """See Service."""
        transaction, size = new_token(), wire.COMMITTED_AT_ONCE
        parts = [[*receipts[at : at + size]] for at in range(0, len(receipts), size)] if len(receipts) > size else []
        told = [gcm.NameReceipts(name, transaction, number, part) for number, part in enumerate(parts)]
        return self._when_ready(gcm.CommitShuffle(name, transaction, [] if parts else [*receipts], len(parts)), told)

    def rebalance(self, name: str, ranges: int = 0) -> Description:
        """See Service. One after the other, and when data does not move for other reasons."""
        return self._when_ready(gcm.RebalanceShuffle(name, new_token(), ranges))

    def _when_ready(self, request: gcm.Request, told: Sequence[gcm.Request] = ()) -> Description:
        """Asked again while the leader can't go on with it; it may be a new one that was not told all, too."""
        deadline, pauses = time.monotonic() + COMMIT_SECONDS, delays(0.05, 1.0)
        while True:
            try:
                for each in told:
                    self._link.leader(each, gcm.Done, min(LEADER_SECONDS, deadline - time.monotonic()))
                return self._info(request, deadline - time.monotonic()).description
            except NotReady:
                pause = next(pauses)
                if time.monotonic() + pause > deadline:
                    raise
                self._link.pause(pause)

    def open_attempt(self, name: str, partition: int, attempt: str) -> AttemptSink:
        """See Service. A follower that does not answer is passed over; one without room is asked again."""
        deadline = time.monotonic() + LEADER_SECONDS
        writer, pauses = new_token(), delays(0.05, 1.0)
        passed: set[str] = set()
        waiting = False
        while True:
            info = self._info(gcm.DescribeShuffle(name))
            shuffle = info.description
            if shuffle.state is not ShuffleState.FILLING:
                raise ShuffleSealed(f"shuffle {name!r} is {shuffle.state}: nothing can be written any more")
            hosts = set(info.followers) - passed or set(info.followers)
            failure: RoqError = NoHosts(f"no host takes part in shuffles: {install('shuffle')} there")
            if hosts:
                host = buffer_of(shuffle.id, partition, attempt, hosts)
                buffer = ChosenBuffer(host, info.followers[host])
                try:
                    request = wire.OpenAttempt(shuffle.id, name, shuffle.spec, partition, attempt, writer)
                    self._link.ask(buffer.endpoint, request, wire.FollowerDone, OPEN_SECONDS)
                    return ClusterSink(
                        self._link, buffer, shuffle.id, partition, attempt, partial(self._given_up, name, shuffle.id)
                    )
                except (Unavailable, DeadlineExceeded) as error:
                    failure = error
                    passed.add(host)
                except TemporaryError as error:  # no room: another attempt's end makes some
                    failure = error
                    if not waiting:
                        waiting, deadline = True, time.monotonic() + ROOM_SECONDS
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                raise failure
            self._link.pause(pause)

    def _given_up(self, name: str, id: str, host: str) -> bool:
        """Whether the leader knows that this host takes no part in the shuffle any more. False if it does not answer."""
        try:
            info = self._info(gcm.DescribeShuffle(name), OPEN_SECONDS)
        except (Unavailable, DeadlineExceeded):
            return False
        except ShuffleNotFound:
            return True
        return host not in info.followers or info.description.id != id

    def open_range(self, name: str, number: int) -> RangeSource:
        """See Service."""
        info = self._info(gcm.DescribeShuffle(name))
        shuffle = info.description
        if shuffle.state is not ShuffleState.SEALED:
            raise ShuffleNotSealed(f"shuffle {name!r} is {shuffle.state}: commit it before it is read")
        if not 0 <= number < len(shuffle.ranges):
            raise CallError(f"shuffle {name!r} has the ranges 0 to {len(shuffle.ranges) - 1}, not {number}")
        return ClusterSource(self._link, lambda: self._info(gcm.DescribeShuffle(name)), number, info)

    def close(self) -> None:
        """See Service."""
        if self._open:
            self._open = False
            self._link.close()
