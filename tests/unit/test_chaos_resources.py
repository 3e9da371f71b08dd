"""The resource watch of roq chaos: what counts as flat and what as a leak, what a process takes, who is spared."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from roq.tools.chaos.history import FaultDone
from roq.tools.chaos.nemesis import Spared
from roq.tools.chaos.resources import (
    CLIENT_FLOOR,
    DESCRIPTORS_MORE,
    THREADS_MORE,
    ZNODES_MORE,
    Resources,
    ResourceSample,
    Series,
    ZnodeCount,
    judge,
    warm_up,
)
from roq.tools.chaos.result import memory
from roq.tools.chaos.schedule import ChaosFault, ChaosKind, Role, gentle
from roq.tools.chaos.watch import read

MIB = 1 << 20
HOUR = 3600.0
STEADY = ResourceSample(50 * MIB, 10 * MIB, 30, 5)
ZNODES = [ZnodeCount(float(at), 40) for at in range(0, int(HOUR), 5)]


def life(reading_at: Callable[[float], ResourceSample], begin: float = 0.0, end: float = HOUR) -> Series:
    series = Series("host-1", "monitor/q", 7)
    for at in range(int(begin), int(end), 5):
        series.add(float(at), reading_at(float(at)))
    return series


def judged(reading_at: Callable[[float], ResourceSample], *, znodes: list[ZnodeCount] = ZNODES) -> Resources:
    return judge([life(reading_at)], znodes, HOUR)


def with_memory(megabytes: float) -> ResourceSample:
    return STEADY._replace(memory=int(megabytes * MIB))


def test_what_stays_is_flat() -> None:
    found = judged(lambda _: STEADY)
    assert found.problems == ()
    assert [one.judged for one in found.lives] == [True]
    assert found.lives[0].memory.windows == (50.0 * MIB,) * 8
    assert (found.warm_up_seconds, found.znodes.windows[0]) == (600.0, 40.0)


@pytest.mark.parametrize(("per_hour", "leaks"), [(3.0, False), (-3.0, False), (4.0, True), (-4.0, True), (60.0, True)])
def test_a_slow_leak_is_found(per_hour: float, leaks: bool) -> None:
    assert bool(judged(lambda at: with_memory(50 + per_hour * at / HOUR)).problems) is leaks


def test_growth_in_the_warm_up_and_peaks_are_no_leak() -> None:
    assert judged(lambda at: with_memory(50 + min(at, 590.0) / 10)).problems == ()
    dice = random.Random(1)
    assert judged(lambda _: with_memory(50 + (200 if dice.random() < 0.2 else dice.random()))).problems == ()


def test_a_step_that_stays_is_a_leak() -> None:
    found = judged(lambda at: with_memory(50 if at < 2400 else 53))
    assert found.problems == ("host-1 monitor/q (pid 7): memory is not flat: 50.0 MiB after the warm-up, later 53.0 MiB",)


def test_a_small_process_has_an_absolute_floor() -> None:
    assert judged(lambda at: with_memory(8 if at < 2000 else 8.9)).problems == ()
    assert judged(lambda at: with_memory(8 if at < 2000 else 9.1)).problems


def test_the_client_has_another_floor() -> None:
    def client(megabytes: float) -> Resources:
        series = life(lambda at: with_memory(48 if at < 2400 else megabytes))
        series.floor = CLIENT_FLOOR
        return judge([series], ZNODES, HOUR)

    assert client(55.9).problems == ()
    assert "not flat" in client(56.1).problems[0]


def test_descriptors_threads_and_znodes_may_not_grow() -> None:
    def later(reading: ResourceSample) -> Callable[[float], ResourceSample]:
        return lambda at: reading if at > 3000 else STEADY

    assert judged(later(STEADY._replace(descriptors=30 + DESCRIPTORS_MORE))).problems == ()
    assert "descriptors grow" in judged(later(STEADY._replace(descriptors=31 + DESCRIPTORS_MORE))).problems[0]
    assert judged(later(STEADY._replace(descriptors=3))).problems == ()
    assert "threads grow" in judged(later(STEADY._replace(threads=6 + THREADS_MORE))).problems[0]
    grown = [one._replace(nodes=40 if one.at < 3000 else 41 + ZNODES_MORE) for one in ZNODES]
    assert "znodes grow" in judged(lambda _: STEADY, znodes=grown).problems[0]


def test_znodes_that_go_when_it_is_time_are_no_growth_but_shuffles_may_not_pile_up() -> None:
    def tapes(at: float) -> int:
        return int(at) // 150

    def shuffles(at: float, per_minute: int) -> int:
        return 20 + int(at) * per_minute // 60

    kept = [ZnodeCount(at, 40 + tapes(at) + 20 + int(at) % 20, tapes(at), 20 + int(at) % 20) for at, *_ in ZNODES]
    found = judged(lambda _: STEADY, znodes=kept)
    assert (found.problems, found.znodes.most, found.tapes.last) == ((), 40, tapes(HOUR - 5))
    left = [ZnodeCount(at, 40 + shuffles(at, 2), 0, shuffles(at, 2)) for at, *_ in ZNODES]
    assert "znodes of shuffles grow" in judged(lambda _: STEADY, znodes=left).problems[0]


def test_who_lived_shortly_is_not_judged_and_nobody_judged_is_a_problem() -> None:
    def leaking(at: float) -> ResourceSample:
        return with_memory(50 + at)

    whole, brief = life(lambda _: STEADY), life(leaking, 1000.0, 2000.0)
    found = judge([whole, brief], ZNODES, HOUR)
    assert ([one.judged for one in found.lives], found.problems) == ([True, False], ())
    assert found.lives[1].memory.most == int((50 + 1995) * MIB)
    assert judge([brief], ZNODES, HOUR).problems == ("no process lived long enough to be judged",)
    assert judge([life(leaking, 1000.0, 2300.0)], ZNODES, HOUR).problems, "judged by its own age"
    assert "znodes" in judge([whole], [], HOUR).problems[0]


def test_nobody_may_have_more_than_a_process_ever_may() -> None:
    assert judged(lambda at: with_memory(511 if at == 100 else 50)).beyond == ()
    assert judged(lambda at: with_memory(513 if at == 100 else 50)).beyond == ("D6: host-1 monitor/q (pid 7) had 513 MiB",)


def test_a_short_run_has_a_shorter_warm_up() -> None:
    assert (warm_up(300.0), warm_up(7200.0)) == (100.0, 600.0)
    found = judge([life(lambda at: with_memory(50 + at / 10), end=300.0)], ZNODES[:60], 300.0)
    assert any("not flat" in text for text in found.problems)


def test_reading_this_process() -> None:
    began, reading = read(os.getpid())
    assert began.isdigit()
    assert reading is not None
    assert reading.memory > 5 * MIB < reading.private
    assert reading.threads >= 1
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    again = read(os.getpid())[1]
    for descriptor in descriptors:
        os.close(descriptor)
    assert again is not None
    assert again.descriptors == reading.descriptors + 20
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert read(child.pid)[1] is None, "a zombie takes nothing"
    assert read(child.pid)[1] is None


def test_who_is_spared() -> None:
    spared = Spared(frozenset({"host-1", "gcm-1"}), "chaos")
    assert spared.covers("host-1", "")
    assert spared.covers("host-1", "roq-hcm")
    assert spared.covers("host-1", "exchange/chaos/3f")
    assert not spared.covers("host-1", "exchange/beside/3f")
    assert not spared.covers("host-2", "monitor/chaos")
    assert not Spared().covers("host-1", "")
    assert gentle(ChaosFault(1.0, ChaosKind.PAUSE, Role.ZOOKEEPER, 6.0, 2)) == ChaosFault(
        1.0, ChaosKind.PAUSE, Role.ZOOKEEPER, 1.5, 2
    )


def test_the_picture_of_memory() -> None:
    lives = [life(lambda _: STEADY), life(lambda _: STEADY, 3000.0)]
    text = memory("a <title>", lives, ZNODES, [FaultDone(5.0, "kill", "host-2", 2.0)], HOUR)
    labels = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"host-1 monitor/q: MiB in 2 lives, the longest 3595 s", "50", "znodes", "40"} <= set(labels)
