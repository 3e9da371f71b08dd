"""The publisher's PathMachine for its scenarios: `relocate`, and its own `attached`, `lost`, `forwarded` and `close`."""

from __future__ import annotations

from roq.pubsub.path import Instruction, PathMachine
from roq.wire.monitor import ExchangeAddress


class Machine:
    """One publisher's paths."""

    def __init__(self) -> None:
        self._machine = PathMachine()
        self.check, self.attached, self.lost = self._machine.check, self._machine.attached, self._machine.lost
        self.forwarded, self.close = self._machine.forwarded, self._machine.close

    def relocate(self, exchange: str, path: int, life: int = 1) -> list[Instruction]:
        """Welcome or Relocate of the Monitor. life: which one of the Exchange's process."""
        return self._machine.assign(ExchangeAddress(exchange, "127.0.0.1", 1, 2, life), path)

    def state(self) -> str:
        """Where frames go."""
        one = self._machine
        current = one.current.token if one.current else "nowhere"
        leaving = "".join(f", FIN of path {path} on {old.token} unconfirmed" for path, old in one.leaving.items())
        return f"{one.state}: path {one.path} on {current}{leaving}"
