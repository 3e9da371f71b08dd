"""The witness: reads ZooKeeper once a second during a run and keeps every state of the metadata it saw, with its zxid.

It misses what is written and overwritten between two looks; what it did see is enough to show a write of a reign that was over.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import ZooKeeperUnavailable
from roq.tools.chaos.invariants import EpochWritten, HostReported, Order, Seen, Term
from roq.wire.assignment import Assignment, HostReport, QueueRecord, from_json

EVERY_SECONDS = 1.0
REMOVAL_KEPT_SECONDS = 75.0  # a GCM keeps it for 60 s


class _TransactionEntry(msgspec.Struct):
    """What transactions of all kinds have in common."""

    action: str = ""
    created: float = 0.0


class Witness:
    """`async with Witness(zookeeper) as witness`; `await witness.run()` until it is cancelled; `seen` holds it all."""

    def __init__(self, zookeeper: str) -> None:
        self._zookeeper = zookeeper
        self._session: Session | None = None
        self.seen: set[Seen] = set()

    async def __aenter__(self) -> Witness:
        self._session = await Session.connect(self._zookeeper)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.close()

    @property
    def _open(self) -> Session:
        assert self._session is not None
        return self._session

    async def run(self) -> None:
        """Look again and again; while ZooKeeper is away there is nothing to see."""
        while True:
            try:
                await self.look()
            except ZooKeeperUnavailable:
                await self._open.wait_connected()
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> set[Seen]:
        """Everything as it is now. Raises ZooKeeperUnavailable."""
        session, now = self._open, set[Seen]()
        if (node := await session.get(paths.EPOCH)) is not None:
            now.add(EpochWritten(node.mzxid, node.version))
        for host in await session.children(paths.HOST_STATES):
            if (node := await session.get(paths.assignment(host))) is not None:
                order = from_json(node.data, Assignment)
                now.add(Order(node.mzxid, host, order.epoch, order.revision))
            if (node := await session.get(paths.running(host))) is not None:
                report = from_json(node.data, HostReport)
                now.add(HostReported(node.mzxid, host, report.epoch, report.revision))
        for queue in await session.children(paths.QUEUES):
            if (node := await session.get(paths.queue(queue))) is not None:
                record = from_json(node.data, QueueRecord)
                now.add(Term(node.mzxid, f"{queue} made at {node.czxid}", record.term, record.monitor_host))
        self.seen |= now
        return now

    async def transactions(self) -> list[str]:
        """Paths of what is under way. Raises ZooKeeperUnavailable."""
        found = []
        for kind in paths.TransactionKind:
            for name in await self._open.children(paths.transactions(kind)):
                path = paths.transaction(kind, name)
                node = await self._open.get(path)
                if node is not None and not _kept(node.data):
                    found.append(path)
        return found


def _kept(data: bytes) -> bool:
    """Whether this is a removal that may have been done and stays for a minute, so that its repetition gets the same answer."""
    entry = from_json(data, _TransactionEntry)
    return entry.action.startswith("remove-") and time.time() - entry.created < REMOVAL_KEPT_SECONDS
