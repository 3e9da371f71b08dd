"""The paths of a producer: what is stored of it is always all up to some number, whoever dies.

So a path opens only when everything on the one before is stored, or is sent again. Nothing leaves while it is held: until it is
known what the producer's life before has stored, and while it could not keep its name (producer.py).
"""

from __future__ import annotations

from collections.abc import Callable

from roq.pubsub.links import ExchangeLink
from roq.pubsub.path import PathMachine, PathState
from roq.pubsub.path_sender import PathSender
from roq.pubsub.replay_buffer import ReplayBuffer
from roq.wire.frame import PathOpening, StoredUpTo
from roq.wire.member_id import MemberId
from roq.wire.monitor import ExchangeAddress


class ProducerSender(PathSender):
    """Held when made. on_unstored: called, instead of a confirmation, when something was not stored."""

    def __init__(
        self,
        before_change: Callable[[], None],
        on_change: Callable[[], None],
        last_sequence: Callable[[], int],
        on_unstored: Callable[[], None],
    ) -> None:
        super().__init__(MemberId(0), before_change, on_change, last_sequence)
        self.left = ""  # the Exchange of the last path that was opened
        self._on_unstored = on_unstored
        self._held = True
        self._later: tuple[ExchangeAddress, int] | None = None  # where to go on, as the Monitor said last
        self._postponed: tuple[int, int, PathOpening] | None = None  # a path, which opens when that one before it is stored

    def begin(self, publisher: MemberId, path: int, left: str) -> None:
        """Before it joins: its paths are above that one, which was ended with FIN on this Exchange ("": it was not)."""
        (self._publisher, self.proof), self._machine = publisher, PathMachine(path=path, left=left)

    def begin_behind(self, number: int) -> None:
        """Messages up to this one are stored. Before `resume`."""
        self._buffer = ReplayBuffer(begin=number, lossless=True)

    def hold(self) -> None:
        """Send nothing more until `resume`; what is under way is stopped as far as it can be, and sent again then."""
        self._held = True
        token = self.token
        for _, link in sorted(self._links.items(), reverse=True):  # the current one first: the others are not sent again on it
            self._lost(link)
        self.lost_token = token or self.lost_token

    def resume(self) -> None:
        """Go on where the Monitor said last."""
        self._held = False
        self._go_on()

    def _go_on(self) -> None:
        if self._later is not None and not self._held and self._postponed is None:
            later, self._later = self._later, None
            super().assign(*later)

    def assign(self, exchange: ExchangeAddress, path: int, abandon: str = "") -> None:
        """As ever, in its turn."""
        if abandon:
            self.abandoned(abandon, path - 1)
        self._later = exchange, path
        self._go_on()

    def forwarded(self, path: int, mark: int) -> None:
        """As ever; with its FIN all of a path is stored, so the next one opens."""
        super().forwarded(path, mark)
        if mark == 0 and self._postponed is not None and self._postponed[0] == path:
            _, following, opening = self._postponed
            self._postponed = None
            self._open(following, opening)
            if self._fin_waits and not self._buffer.waiting:
                self._fin(self._fin_waits)
            self._go_on()

    def _open(self, path: int, opening: PathOpening) -> None:
        before = max((left for left in self._machine.leaving if left < path), default=0)
        if opening.finished and before:
            self._link, self._postponed = None, (before, path, opening)
            return
        self._postponed = None
        self.left = self._links[path].exchange.id
        super()._open(path, opening)

    @property
    def _waits(self) -> bool:
        return super()._waits or self._postponed is not None

    @property
    def ended(self) -> bool:
        """Whether its last path is, and everything on it stored."""
        return self._machine.state is PathState.FINISHED

    @property
    def reveals_up_to(self) -> int:
        """What is not stored may be sent by the producer's next life, and must not show as lost before."""
        return self._buffer.confirmed

    def _lost(self, link: ExchangeLink) -> None:
        if self._postponed is not None and self._postponed[1] == link.path:
            self._postponed, self._fin_waits = None, 0  # the next path is sent everything again
        super()._lost(link)

    def _is_stored(self, link: ExchangeLink, stored: StoredUpTo) -> None:
        if stored.copies:
            super()._is_stored(link, stored)
        else:
            self._on_unstored()
