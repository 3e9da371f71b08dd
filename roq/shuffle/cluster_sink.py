"""Where a writer's runs go in a cluster: to one buffer follower, in numbered messages that may be sent again.

A buffer that has no room is asked again, with growing pauses. One that was started again, whose host the leader has given up,
or that does not answer for LOST_SECONDS, has lost the attempt: AttemptLost, and the task writes it again under another id.
Not covered: which buffer (cluster.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from roq.errors import AttemptLost, DeadlineExceeded, Overloaded, RoqError, TemporaryError, Unavailable
from roq.runtime.backoff import delays
from roq.shuffle.follower_link import FollowerLink
from roq.wire import shuffle as wire
from roq.wire.shuffle import BLOCKS_BYTES_MAX, Block, Receipt, RunSample

ANSWER_SECONDS = 10.0  # one message
LOOK_SECONDS = 1.0  # of silence between two looks whether its host is still there
LOOK_WAITING_SECONDS = 4.0  # … while it answers that it has no room, or isn't done
LOST_SECONDS = 15.0  # of silence: longer than a busy follower needs, shorter than a task's patience
ROOM_SECONDS = 300.0  # a buffer without room for so long will not get any
WAIT_SECONDS = 2.0  # asked of a FinishAttempt at once
ABANDON_SECONDS = 2.0
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.02, 1.0


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

    def begin(self, run: int) -> None:
        """See AttemptSink."""
        self._run = run

    def send(self, blocks: Sequence[Block]) -> None:
        """See AttemptSink."""
        for part in _parts(blocks):
            self._say(
                wire.SendBlocks(self._shuffle, self._partition, self._attempt, self._number, self._run, part), ANSWER_SECONDS
            )
            self._number += 1

    def end(self, sample: RunSample) -> None:
        """See AttemptSink."""
        self._say(wire.EndRun(self._shuffle, self._number, sample), ANSWER_SECONDS)
        self._number += 1

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
                raise AttemptLost(f"its buffer on host {self._buffer.host} is of no use: {failure}") from failure
            waited = isinstance(request, wire.FinishAttempt) and isinstance(failure, Overloaded)
            self._link.pause(next(quick if waited else pauses))


def _parts(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """As they fit one message."""
    part: list[Block] = []
    size = 0
    for block in blocks:
        if part and size + len(block.data) > BLOCKS_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(block)
        size += len(block.data)
    if part:
        yield part
