"""The benchmarks of many groups, of one far behind, of a slow one, and of long recording run, small; everything that was
published came where it was due.

Not covered: figures (docs/benchmarks.md has the commands).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.recorded import behind, groups, slow_group, sustained

pytestmark = pytest.mark.timeout(120)


def _nothing(_: str) -> None:
    """Progress is told to nobody."""


@pytest.mark.parametrize("share", [False, True])
async def test_groups_are_made_and_fill_their_room(share: bool) -> None:
    found = await groups.step(2, 50, 0.5, share, _nothing)
    assert len(found.create_seconds) == 2
    assert found.full.masters.keys() == {"crowd@g0", "crowd@g1"}
    assert groups.each_master(found, found.full) > groups.each_master(found, found.idle) > 0
    assert min(found.taking.rate, found.still.rate) > 0
    for kind in ("exchange", "store", "hcm", "gcm", "zookeeper"):
        assert found.idle.kinds[kind] > 0


async def test_a_group_that_is_behind_catches_up_and_gets_each_message_once() -> None:
    found = await behind.run(20_000, 2, 60.0, _nothing)
    assert found.done
    stored = behind.ROOM_MESSAGES + 20_000
    assert stored // 4 < found.far_lag < stored  # the rest is in the group, or on its way there
    assert found.taken.messages == stored
    assert found.highest["master"] > 0


async def test_a_slow_group_holds_what_it_leased_and_the_other_gets_all() -> None:
    found = await slow_group.run(2_000, 1.0, slow=True)
    assert found.held == found.messages > 0


async def test_recording_is_measured_on_and_off(tmp_path: Path) -> None:
    await sustained.main(["--seconds", "1", "--rate", "1000", "--keep-gib", "0.5", "--json", str(tmp_path / "found.json")])
    found = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=sustained.Found)
    assert [run.recorded for run in (*found.flat_out, *found.steady)] == [False, True, False, True]
    assert found.flat_out[1].result.lost == 0
    assert found.flat_out[1].looks[-1].kinds["store"] > 0
