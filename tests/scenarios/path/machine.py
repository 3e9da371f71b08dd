"""The publisher's PathMachine for its scenarios: `relocate`, and its own `attached`, `lost`, `forwarded` and `close`."""

from __future__ import annotations

from roq.pubsub.path import Instruction, PathMachine
from roq.wire.monitor import ExchangeAddress


class Machine(PathMachine):
    """One publisher's paths."""

    def relocate(self, exchange: str, path: int, life: int = 1) -> list[Instruction]:
        """Welcome or Relocate of the Monitor. life: which one of the Exchange's process."""
        return self.assign(ExchangeAddress(exchange, "127.0.0.1", 1, 2, life), path)

    def state(self) -> str:
        """Where frames go."""
        current = self.current.token if self.current else "nowhere"
        leaving = "".join(f", FIN of path {path} on {old.token} unconfirmed" for path, old in self.leaving.items())
        return f"path {self.path} on {current}{leaving}"
