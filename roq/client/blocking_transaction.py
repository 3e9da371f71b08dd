"""Transactions for plain code: the names of roq/client/transaction.py without `await`; acks go straight to their master."""

from __future__ import annotations

from types import TracebackType

from roq.client.transaction import TransactionHub, TransactionStage, TransactionSteps
from roq.runtime.loop_thread import LoopThread
from roq.wire.headers import Headers
from roq.workqueue.blocking_queue import Task


class Transaction(TransactionSteps):
    """See roq.Transaction. One thread."""

    def __init__(self, loop: LoopThread, hub: TransactionHub) -> None:
        super().__init__(hub.zookeeper)
        self._loop, self._hub = loop, hub

    def __enter__(self) -> Transaction:
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None and self._is_to_be_committed:
                self.commit()
        finally:
            self._leave()

    def publish(self, queue: str, topic: str, payload: bytes, headers: Headers | None = None) -> None:
        """See roq.Transaction.publish."""
        self._check_open()
        self._collect(queue, topic, payload, headers, self._loop.call(self._hub.payload_max(queue)))

    def ack(self, task: Task) -> None:
        """See roq.Transaction.ack."""
        self._check_open()
        self._claim(task)

    def commit(self) -> None:
        """See roq.Transaction.commit."""
        self._check_open(TransactionStage.UNDECIDED)
        failure: BaseException | None = None
        try:
            if self._collected.tasks:
                self._collected.commit()
            elif self._collected:
                self._loop.call(self._hub.commit(self._collected))
        except BaseException as error:
            failure = error
            raise
        finally:
            self._ended(failure)

    def rollback(self) -> None:
        """See roq.Transaction.rollback."""
        self._end()
