"""Wall clocks: each machine has its own, which may be ahead or behind, and steps. The monotonic clock is the loop's."""

from __future__ import annotations

from random import Random

from roq.tools.simulation.loop import SimulatedLoop

EPOCH = 1_800_000_000.0  # seconds since 1970 when the loop's clock is 0
APART_SECONDS = 0.0, 0.5  # at most, of a machine's clock and the right time, at first


class Wall:
    """All wall clocks of a run, by the machines' addresses. seed: draws how far they are apart, if they are. apart:
    between what."""

    def __init__(self, loop: SimulatedLoop, seed: object, apart: tuple[float, ...] = APART_SECONDS) -> None:
        self._loop, self._seed = loop, seed
        self._apart = Random(f"{seed} clocks").choice(apart)
        self._ahead: dict[str, float] = {}
        self.stepped: set[str] = set()  # addresses

    def ahead(self, address: str) -> float:
        """How many seconds the clock of the machine with this address is ahead."""
        if address not in self._ahead:
            self._ahead[address] = Random(f"{self._seed} clock of {address}").uniform(-self._apart, self._apart)
        return self._ahead[address]

    def step(self, address: str, seconds: float) -> None:
        """Set it ahead, or back."""
        self._ahead[address] = self.ahead(address) + seconds
        self.stepped.add(address)

    def seconds(self, address: str) -> float:
        """Since 1970, as that machine has it."""
        return EPOCH + self._loop.time() + self.ahead(address)
