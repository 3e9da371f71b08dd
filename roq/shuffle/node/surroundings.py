"""What all shuffles of a buffer share: its memory, threads, outboxes, and the leader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from roq.runtime.observe import Counters
from roq.shuffle.node.attempt import Attempt, Held
from roq.shuffle.node.cutter import Cutter
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.peers import Outbox
from roq.wire.gcm import ReportRuns, TableInfo

T = TypeVar("T")


class BlockMemory(Protocol):
    """Blocks in memory, and those in temporary files."""

    @property
    def pressed(self) -> bool:
        """It can't go on without sending."""

    def room_to_cut(self, size: int) -> bool:
        """So much may come out of a file."""

    def took(self, attempt: Attempt, held: Held) -> None:
        """A block is in memory."""

    def dropped(self, held: Held) -> None:
        """It is not needed any more."""


class WorkThread(Protocol):
    """Runs blocking work elsewhere."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Its result."""


class NodeContext(NamedTuple):
    """report: to the leader. outbox: of a host."""

    host: str
    report: Callable[[ReportRuns], Awaitable[TableInfo]]
    outbox: Callable[[str], Outbox]
    room: BlockMemory
    budget: Budget
    cutter: Cutter
    thread: WorkThread
    counters: Counters
    endpoints: dict[str, str]  # of followers by host, as last told
