"""A machine's states, as the table has them."""

from __future__ import annotations

import pytest

from gcm import fleet
from gcm.cluster import ClusterState, Host
from gcm.fleet import TRANSITIONS, FleetWrite, MachineEvent
from roq.wire.fleet import FleetLimits, FleetRecord, MachineRecord, MachineState


@pytest.mark.parametrize("event", MachineEvent)
@pytest.mark.parametrize("state", MachineState)
def test_a_record_goes_by_its_table_and_no_other_way(state: MachineState, event: MachineEvent) -> None:
    """So what was decided from another state changes nothing."""
    name = "roq-f-1"
    before = ClusterState(
        hosts={name: Host(name)}, fleet=FleetRecord("f", FleetLimits(0, 2), 1), machines={name: MachineRecord(name, state, 0.0)}
    )
    after = fleet.after(before, FleetWrite(name, event), 1.0)
    if (state, event) in TRANSITIONS:
        assert getattr(after.machines.get(name), "state", None) is TRANSITIONS[state, event]
    else:
        assert after is before


def test_a_name_that_is_recorded_no_longer_stays_forgotten() -> None:
    empty = ClusterState(fleet=FleetRecord("f", FleetLimits(0, 2), 1))
    for event in set(MachineEvent) - {MachineEvent.WANTED}:
        assert fleet.after(empty, FleetWrite("roq-f-1", event), 1.0) is empty


def test_every_state_is_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == {None, *MachineState} == {*TRANSITIONS.values()}
    assert {event for _, event in TRANSITIONS} == {*MachineEvent}
