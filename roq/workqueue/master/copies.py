"""Whether everything that stores keep for a work queue has all of its copies: asked by people who are about to replace a disk.

All who ask while the stores are being asked get one answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from roq.errors import Overloaded, RoqError
from roq.runtime.run import Tasks
from roq.wire import master as wire

ASKING_MAX = 100  # at the same time
Look = Callable[[], Awaitable[list[wire.Shortage]]]
log = logging.getLogger(__name__)


class CopiesDesk:
    """looks: each tells of one kind of data. answer(peer, id, reply or error)."""

    def __init__(
        self, looks: tuple[Look, ...], answer: Callable[[bytes, int, wire.Copies | RoqError], None], tasks: Tasks
    ) -> None:
        self._looks, self._answer, self._tasks = looks, answer, tasks
        self._asking: list[tuple[bytes, int]] = []

    def ask(self, peer: bytes, id: int) -> None:
        """`answer` follows."""
        if len(self._asking) >= ASKING_MAX:
            self._answer(peer, id, Overloaded("too many ask for the copies of this work queue: try again"))
            return
        self._asking.append((peer, id))
        if len(self._asking) == 1:
            self._tasks.start(self._tell(), "copies")

    async def _tell(self) -> None:
        answer: wire.Copies | RoqError
        try:
            found = [shortage for look in self._looks for shortage in await look()]
            answer = wire.Copies(found[: wire.SHORTAGES_MAX])
        except RoqError as error:
            answer = error
        asking, self._asking = self._asking, []
        for peer, id in asking:
            self._answer(peer, id, answer)
