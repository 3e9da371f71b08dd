"""Beacons are repeated a few times, then never again, also when their last repetition comes back."""

from __future__ import annotations

from roq.monitor.beacons import BEACONS_KEPT, REPEATS, Beacons


def test_repetitions_end() -> None:
    beacons, now, sent = Beacons(), 0.0, 0
    beacons.saw("x", 1, b"frame", now)
    for _ in range(1000):
        now += 1.0
        for exchange, frame in beacons.due(now):
            sent += 1
            beacons.saw(exchange, 1, frame, now)  # it comes out of the Exchange again
    assert sent == REPEATS


def test_old_ones_make_room() -> None:
    beacons = Beacons()
    for number in range(BEACONS_KEPT + 5):
        beacons.saw("x", number, b"frame", 0.0)
    assert len(beacons.due(2.0)) == BEACONS_KEPT
