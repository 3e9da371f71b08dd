"""Producers and workers of a work queue in threads, a record of what they saw, and the verdict over it.

lost         acked puts that were never leased, or never came back after a lease that did not end with an ack (must be none)
unexpected   leased, and never put (must be none)
returned     leased by a request that began after the task's ack was answered (must be none)
duplicated   deliveries beyond the first one; unknown: puts without an answer; recovered: those of them that were leased later
             (told, not judged)
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from roq.errors import Closed, RoqError
from roq.wire.task import NewTask, Settlement
from roq.workqueue.contract import Backend
from roq.workqueue.master_link import PATIENCE_SECONDS
from roq.workqueue.remote import RemoteQueue

LEASE_SECONDS = 3.0


@dataclass
class Verdict:
    """What came of a load."""

    acked: int
    done: int
    lost: list[bytes]
    unexpected: list[bytes]
    returned: list[bytes]
    duplicated: int
    unknown: int
    recovered: int
    longest_put_seconds: float
    longest_big_put_seconds: float

    def line(self, fault: str, **figures: object) -> str:
        """One line of JSON that tells it all."""
        told = {
            "fault": fault,
            "acked": self.acked,
            "lost": len(self.lost),
            "unexpected": len(self.unexpected),
            "returned": len(self.returned),
            "duplicated": self.duplicated,
            "unknown": self.unknown,
            "recovered": self.recovered,
            "longest_put_seconds": round(self.longest_put_seconds, 2),
            "longest_big_put_seconds": round(self.longest_big_put_seconds, 2),
        }
        return json.dumps(told | figures)

    def check(self) -> None:
        """Raises AssertionError unless it is right."""
        assert self.acked > 0, "nothing was put"
        assert not self.lost, f"{len(self.lost)} of {self.acked} lost: {self.lost[:5]}"
        assert not self.unexpected, f"never put: {self.unexpected[:5]}"
        assert not self.returned, f"came back after their ack: {self.returned[:5]}"


@dataclass
class TaskLoad:
    """start(), some faults, finish(). Every big_every-th payload of a producer has big_bytes."""

    zookeeper: str
    name: str
    producers: int = 2
    workers: int = 2
    payload_bytes: int = 100
    pause_seconds: float = 0.0
    big_every: int = 0
    big_bytes: int = 100_000
    patience_seconds: float = PATIENCE_SECONDS
    tried: set[bytes] = field(default_factory=set)
    acked: set[bytes] = field(default_factory=set)
    done: dict[bytes, float] = field(default_factory=dict)  # when the ack was answered
    leases: Counter[bytes] = field(default_factory=Counter)
    returned: list[bytes] = field(default_factory=list)
    doubtful: set[bytes] = field(default_factory=set)  # puts without an answer
    settling: set[bytes] = field(default_factory=set)  # tasks an ack of which had no answer: they may be done
    errors: Counter[str] = field(default_factory=Counter)  # of puts, by class
    longest: float = 0.0  # seconds of a put of payload_bytes
    longest_big: float = 0.0  # … of big_bytes: an upload to a store that fell silent waits for it once

    def start(self) -> None:
        """Begin to put and to work."""
        self._stop, self._drained = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._producers = [
            threading.Thread(target=self._run, args=(self._produce, n), daemon=True) for n in range(self.producers)
        ]
        self._workers = [threading.Thread(target=self._run, args=(self._work, n), daemon=True) for n in range(self.workers)]
        for thread in (*self._producers, *self._workers):
            thread.start()

    def _run(self, body, number: int) -> None:  # type: ignore[no-untyped-def]
        try:
            queue = RemoteQueue(self.zookeeper, self.name, patience_seconds=self.patience_seconds)
            try:
                body(queue, number)
            finally:
                queue.close()
        except BaseException as error:  # noqa: BLE001 - told by finish()
            self._errors.append(error)

    def _produce(self, queue: Backend, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            size = self.big_bytes if self.big_every and count % self.big_every == 0 else self.payload_bytes
            payload = f"{number}.{count}.".encode().ljust(size, b"x")
            self.tried.add(payload)
            started = time.monotonic()
            try:
                queue.put([NewTask(payload)])
                self.acked.add(payload)
            except Closed:
                raise
            except RoqError as error:
                self.doubtful.add(payload)
                self.errors[type(error).__name__] += 1
            took = time.monotonic() - started
            if size == self.payload_bytes:
                self.longest = max(self.longest, took)
            else:
                self.longest_big = max(self.longest_big, took)
            time.sleep(self.pause_seconds)

    def _work(self, queue: Backend, number: int) -> None:
        while not self._drained.is_set():
            started = time.monotonic()
            try:
                _, leases, _ = queue.lease(LEASE_SECONDS, 5, 0.5)
            except RoqError:
                continue
            for lease in leases:
                with self._lock:
                    self.leases[lease.payload] += 1
                    if self.done.get(lease.payload, started) < started:
                        self.returned.append(lease.payload)
            try:
                answers = queue.settle([Settlement.ack(lease.token) for lease in leases])
            except RoqError:
                with self._lock:
                    self.settling.update(lease.payload for lease in leases)
                continue
            with self._lock:
                for lease, answer in zip(leases, answers, strict=True):
                    if answer is not None:
                        self.done.setdefault(lease.payload, time.monotonic())

    def stop(self) -> None:
        """End at once, without a verdict."""
        self._stop.set()
        self._drained.set()

    def finish(self, seconds: float = 30.0) -> Verdict:
        """Stop putting, work until nothing is left, and judge."""
        self._stop.set()
        for thread in self._producers:
            thread.join(seconds)
        deadline = time.monotonic() + seconds
        queue = RemoteQueue(self.zookeeper, self.name)
        try:
            while time.monotonic() < deadline:
                status = queue.status()
                if not status.ready and not status.leased:
                    break
                time.sleep(0.1)
        finally:
            queue.close()
            self._drained.set()
        for thread in self._workers:
            thread.join(seconds)
        if self._errors:
            raise self._errors[0]
        return Verdict(
            len(self.acked),
            len(self.done),
            sorted(self.acked - self.done.keys() - self.settling),
            sorted(self.leases.keys() - self.tried),
            self.returned,
            sum(self.leases.values()) - len(self.leases),
            len(self.doubtful),
            len(self.doubtful & self.leases.keys()),
            self.longest,
            self.longest_big,
        )
