"""The shuffles of a cluster (`roq://zk1:2181,zk2:2181`): a contract.Service. The leading GCM knows them, followers hold them.

Not covered: writing (cluster_sink.py), reading (cluster_source.py), the leader (gcm) and followers (roq/shuffle/node).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from roq.errors import (
    CallError,
    Closed,
    DeadlineExceeded,
    NoHosts,
    NotReady,
    RoqError,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
    TemporaryError,
    Unavailable,
)
from roq.ids import new_token
from roq.runtime.backoff import delays
from roq.runtime.extras import install
from roq.shuffle.cluster_sink import ROOM_SECONDS, ChosenBuffer, ClusterSink
from roq.shuffle.cluster_source import ClusterSource
from roq.shuffle.contract import AttemptSink, RangeSource
from roq.shuffle.follower_link import FollowerLink
from roq.shuffle.placement import buffer_of
from roq.wire import gcm
from roq.wire import shuffle as wire
from roq.wire.shuffle import Description, Receipt, ShuffleState, Spec

LEADER_SECONDS = 30.0  # longer than any fail-over
COMMIT_SECONDS = 600.0  # data may have to move
OPEN_SECONDS = 3.0  # one follower's answer


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
        transaction, size = new_token(), wire.WINNERS_AT_ONCE
        parts = [[*receipts[at : at + size]] for at in range(0, len(receipts), size)] if len(receipts) > size else []
        request = gcm.CommitShuffle(name, transaction, [] if parts else [*receipts], len(parts))
        deadline, pauses = time.monotonic() + COMMIT_SECONDS, delays(0.05, 1.0)
        while True:
            try:
                for number, part in enumerate(parts):
                    told = gcm.NameReceipts(name, transaction, number, part)
                    self._link.leader(told, gcm.Done, min(LEADER_SECONDS, deadline - time.monotonic()))
                return self._info(request, deadline - time.monotonic()).description
            except NotReady:  # the leader could not go on with it, or it is a new one that was not told all receipts
                pause = next(pauses)
                if time.monotonic() + pause > deadline:
                    raise
                self._link.pause(pause)

    def rebalance(self, name: str, ranges: int = 0) -> Description:
        """See Service. One after the other, and when data does not move for other reasons."""
        request = gcm.RebalanceShuffle(name, new_token(), ranges)
        deadline, pauses = time.monotonic() + COMMIT_SECONDS, delays(0.05, 1.0)
        while True:
            try:
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
        """Whether the leader knows that this host is of no use to the shuffle. False if it does not answer."""
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
