"""The benchmarks of many groups, of one far behind, of a slow one, and of long recording: what they say of what was measured.
No process is started."""

from __future__ import annotations

import pytest

from benchmarks.recorded import behind, groups, slow_group, sustained
from benchmarks.recorded.footprint import MEGABYTE, Footprint
from roq.tools.bench.harness import PubSubResult
from roq.tools.bench.load import Load

GIB = 1 << 30
PUBLISHED = groups.Published(1_000, 2.0, 10.0, 20.0, {})


def footprint(masters: int, each: int, **others: int) -> Footprint:
    return Footprint({**others, "master": masters * each}, {f"crowd@g{number}": each for number in range(masters)})


def step(number: int, create_seconds: list[float], each: int = 50 * MEGABYTE) -> groups.Step:
    idle, full = footprint(number, 14 * MEGABYTE), footprint(number, each, store=500 * MEGABYTE)
    return groups.Step(number, create_seconds, 1.0, idle, {"master": 0.5}, PUBLISHED, full, 3.0, PUBLISHED)


def result(throughput: float, p99: float) -> PubSubResult:
    latency: dict[str, float | None] = {"p50": p99 / 2, "p99": p99}
    return PubSubResult(throughput, 10, 10, 0, 0, 0, latency, {}, 1.0, throughput, 0, 0, 0.0, Load(duration=1.0))


def recorded_run(on: bool, throughput: float, p99: float, stores: list[int]) -> sustained.Run:
    return sustained.Run(on, result(throughput, p99), [footprint(0, 0, store=size, exchange=1) for size in stores])


def test_every_topic_belongs_to_one_tenant() -> None:
    names = [groups.topic_of(number, 10, 3) for number in range(20)]
    assert len(set(names)) == 10
    assert names[0] == names[10] == "tenant0.t0"
    assert names[7] == "tenant1.t7"


def test_memory_holds_as_many_groups_as_it_has_room_for_full_masters() -> None:
    found = groups.room_for(step(10, [0.1] * 10), 24 * GIB)
    assert found == int((24 * GIB - groups.NOISE_BYTES - 500 * MEGABYTE) / (50 * MEGABYTE))
    assert groups.room_for(step(0, []), 24 * GIB) == 0


@pytest.mark.parametrize(("taken", "grown"), [([0.1] * 30, 1.0), ([0.1] * 20 + [0.4] * 10, 4.0), ([], 1.0)])
def test_the_last_groups_are_compared_with_the_first(taken: list[float], grown: float) -> None:
    assert groups.growth(step(len(taken), taken)) == pytest.approx(grown)


def test_a_line_for_each_number_of_groups() -> None:
    found = groups.rows(groups.Found(10_000, False, 1.0, [step(0, []), step(10, [0.1] * 10)]), 24 * GIB)
    assert [line[0] for line in found] == ["0", "10"]
    assert {len(line) for line in found} == {len(groups.COLUMNS)}
    assert found[1][2] == "14.0, 50.0"


def test_who_is_far_behind_is_compared_with_who_is_not() -> None:
    little, far = footprint(1, 50 * MEGABYTE, store=20, exchange=30), footprint(1, 75 * MEGABYTE, store=20, exchange=30)
    taken = behind.Taken(100, 4_950)
    found = behind.Found(100, 2, 1e6, little, far, 100, far, dict(far.kinds), [10.0, 30.0, 20.0, 1.0], taken, done=True)
    assert found.ratio("master") == 1.5
    assert behind.rows(found)[0] == ["master", "50.0", "75.0", "75.0", "1.50"]
    said = behind.told(found)
    assert "10/s in the first half and 25/s in the second" in said  # the last round is left out: it had little to take
    assert "each came once" in said


def test_a_slow_group_beside_a_quick_one_is_compared_with_none() -> None:
    alone, beside = slow_group.Beside(False, 10, 0.001, 2.0, 1.0, 4.0, 0), slow_group.Beside(True, 10, 0.002, 9.0, 1.0, 6.0, 7)
    assert slow_group.ratio([alone, beside]) == 1.5
    assert slow_group.rows([alone, beside]) == [
        ["alone", "1", "2", "1", "4", "-"],
        ["beside a slow group", "2", "9", "1", "6", "7"],
    ]


def test_recording_is_compared_with_not_recording() -> None:
    mb = MEGABYTE
    flat = [recorded_run(False, 100.0, 0.0, [0]), recorded_run(True, 45.0, 0.0, [mb * size for size in (9, 20, 22, 24, 25)])]
    steady = [recorded_run(False, 10.0, 300.0, [0]), recorded_run(True, 10.0, 450.0, [0])]
    found = sustained.Found(300.0, 10_000.0, flat, steady)
    assert (found.throughput_ratio, found.p99_ratio) == (0.45, 1.5)
    lines = {line[0]: line[-1] for line in sustained.rows(found)}
    assert lines["messages/s"] == "MISSED"
    assert lines["p99 at 10,000/s, us"] == "met"
    assert flat[1].grown("store") == 5 * mb  # from the look after a fifth of the time on
