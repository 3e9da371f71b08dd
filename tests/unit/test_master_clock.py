"""The clock of a master: it never steps back, not even to its own machine's time when its predecessor's was ahead."""

from __future__ import annotations

import time

from roq.master.reign import Clock


def test_it_goes_on_where_its_predecessor_was() -> None:
    clock = Clock()
    assert abs(clock.now() - time.time() * 1000) < 1000
    ahead = clock.now() + 3_600_000
    clock.reach(ahead)
    assert 0 <= clock.now() - ahead < 1000
    clock.reach(ahead - 1_000_000)
    assert clock.now() >= ahead
