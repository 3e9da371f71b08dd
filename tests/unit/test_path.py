"""The publisher's path machine, one situation at a time. Every interleaving: tests/model/test_moves.py."""

from __future__ import annotations

import pytest

from roq.pubsub.path import CloseLink, Finished, OpenLink, PathMachine, PathState, Replay, Reuse, SendFin, SendOpen
from roq.wire.monitor import ExchangeAddress

A, B, C = (ExchangeAddress(name, "127.0.0.1", 1, 2, 5) for name in "ABC")


@pytest.fixture
def machine() -> PathMachine:
    """Publishing on A, path 1."""
    one = PathMachine()
    assert one.assign(A, 1) == [OpenLink(A, 1)]
    assert one.attached(1) == [SendOpen(1, "", False)]
    one.check()
    return one


def test_a_planned_move(machine: PathMachine) -> None:
    assert machine.assign(B, 2) == [OpenLink(B, 2)]
    assert (machine.path, machine.current) == (1, A), "it publishes on A until B has welcomed it"
    assert machine.attached(2) == [SendFin(1), SendOpen(2, "A", True)]
    assert (machine.path, machine.current, machine.leaving) == (2, B, {1: A})
    assert machine.forwarded(1) == [CloseLink(1)]
    assert machine.forwarded(1) == []
    machine.check()


def test_news_that_are_old_change_nothing(machine: PathMachine) -> None:
    assert machine.assign(B, 1) == []
    machine.assign(B, 3)
    assert machine.assign(C, 2) == []
    assert machine.assign(B, 3) == [], "the Monitor repeats itself"
    assert machine.attached(2) == []
    assert machine.attached(1) == []
    assert machine.forwarded(7) == []


def test_the_monitors_second_thought_replaces_the_target(machine: PathMachine) -> None:
    """B never welcomed the publisher; the same path is now to be on C."""
    machine.assign(B, 2)
    assert machine.assign(C, 2) == [CloseLink(2), OpenLink(C, 2)]
    assert machine.attached(2) == [SendFin(1), SendOpen(2, "A", True)]
    assert machine.current == C


def test_a_restarted_target_is_connected_to_anew(machine: PathMachine) -> None:
    machine.assign(B, 2)
    again = ExchangeAddress("B", "127.0.0.1", 1, 2, 6)
    assert machine.assign(again, 2) == [CloseLink(2), OpenLink(again, 2)]


def test_a_second_thought_after_the_move_is_too_late(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.attached(2)
    assert machine.assign(C, 2) == []


def test_there_and_back_before_the_old_link_is_closed(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.attached(2)
    assert machine.assign(A, 3) == [OpenLink(A, 3)]
    assert machine.attached(3) == [SendFin(2), SendOpen(3, "B", True)]
    assert machine.leaving == {1: A, 2: B}
    assert machine.forwarded(1) == [CloseLink(1)], "the new link to A is another one"
    machine.check()


def test_another_exchange_before_the_first_one_answered() -> None:
    one = PathMachine()
    one.assign(A, 1)
    assert one.assign(B, 2) == [CloseLink(1), OpenLink(B, 2)]
    assert one.attached(2) == [SendOpen(2, "", False)]


def test_the_welcome_of_a_monitor_that_takes_over_ends_what_the_one_before_began() -> None:
    """It counts on from where the publisher is; on path 2 nothing was sent."""
    one = PathMachine()
    one.assign(A, 1)
    one.assign(B, 2)
    assert one.welcome(1) == [CloseLink(2)]
    assert one.assign(C, 1) == [OpenLink(C, 1)]
    assert one.attached(1) == [SendOpen(1, "", False)]
    one.check()


def test_it_leaves_alone_what_is_above_the_path_that_we_are_on(machine: PathMachine) -> None:
    machine.assign(B, 3)
    assert machine.welcome(1) == [], "it confirms where we are: the move goes on"
    assert machine.welcome(3) == []
    assert machine.welcome(2) == [CloseLink(3)]
    assert (machine.path, machine.current, machine.target) == (1, A, None)
    machine.check()


def test_close_waits_for_every_path(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.attached(2)
    assert machine.close() == [SendFin(2)]
    assert machine.current is None
    assert machine.close() == []
    assert machine.assign(C, 3) == []
    assert machine.forwarded(2) == [CloseLink(2)]
    assert machine.forwarded(1) == [CloseLink(1), Finished()]
    machine.check()


def test_close_on_the_way_to_another_exchange(machine: PathMachine) -> None:
    machine.assign(B, 2)
    assert machine.close() == [CloseLink(2), SendFin(1)]
    assert machine.attached(2) == []
    machine.check()


@pytest.mark.parametrize("assigned", [False, True])
def test_close_before_the_first_path(assigned: bool) -> None:
    one = PathMachine()
    if assigned:
        one.assign(A, 1)
    assert one.close() == [*([CloseLink(1)] if assigned else []), Finished()]
    one.check()


def test_check_sees_what_is_wrong(machine: PathMachine) -> None:
    machine.target, machine.target_path = B, 1
    with pytest.raises(AssertionError, match="not above"):
        machine.check()
    machine.target = None
    machine.leaving[2] = B
    with pytest.raises(AssertionError, match="never on"):
        machine.check()
    del machine.leaving[2]
    machine.state = PathState.MOVING
    with pytest.raises(AssertionError, match="connects to None, while it is moving"):
        machine.check()


def test_what_the_table_does_not_name_is_an_error(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.state = PathState.CLOSING
    with pytest.raises(AssertionError, match="attached, while it is closing"):
        machine.attached(2)


# --- lost links -------------------------------------------------------------------------------------------------------


def test_a_lost_link_is_followed_by_a_replay(machine: PathMachine) -> None:
    assert machine.lost(1) == [CloseLink(1)]
    assert (machine.current, machine.broken) == (None, "A")
    assert machine.lost(1) == [], "it is told twice"
    assert machine.assign(B, 2) == [OpenLink(B, 2)]
    assert machine.attached(2) == [SendOpen(2, "A", False), Replay(2)]
    assert (machine.current, machine.broken, machine.leaving) == (B, None, {})
    machine.check()


def test_the_target_is_lost_and_the_move_is_off(machine: PathMachine) -> None:
    machine.assign(B, 2)
    assert machine.lost(2) == [CloseLink(2)]
    assert (machine.current, machine.target, machine.broken) == (A, None, None)
    assert machine.assign(C, 2) == [OpenLink(C, 2)]


def test_the_first_exchange_is_lost_before_it_took_us() -> None:
    machine = PathMachine()
    machine.assign(A, 1)
    assert machine.lost(1) == [CloseLink(1)]
    assert machine.assign(B, 2) == [OpenLink(B, 2)]
    assert machine.attached(2) == [SendOpen(2, "", False), Replay(2)]


def test_an_exchange_that_was_left_dies_before_its_fin_is_confirmed(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.attached(2)
    assert machine.lost(1) == [CloseLink(1), Reuse(2, 3), SendOpen(3, "B", False), Replay(3)]
    assert (machine.path, machine.current, machine.leaving) == (3, B, {})
    assert machine.forwarded(1) == []
    machine.check()


def test_that_happens_while_a_move_is_under_way(machine: PathMachine) -> None:
    machine.assign(B, 2)
    machine.attached(2)
    machine.assign(C, 3)
    assert machine.lost(1) == [CloseLink(1), CloseLink(3), Reuse(2, 3), SendOpen(3, "B", False), Replay(3)]
    assert machine.target is None, "the Monitor asks for the move again, on the next path"
    machine.check()


def test_closing_ends_only_after_the_replay(machine: PathMachine) -> None:
    machine.lost(1)
    assert machine.close() == []
    machine.assign(B, 2)
    assert machine.attached(2) == [SendOpen(2, "A", False), Replay(2), SendFin(2)]
    assert machine.forwarded(2) == [CloseLink(2), Finished()]


def test_the_link_is_lost_while_closing(machine: PathMachine) -> None:
    assert machine.close() == [SendFin(1)]
    assert machine.lost(1) == [CloseLink(1)]
    machine.assign(B, 2)
    assert machine.attached(2) == [SendOpen(2, "A", False), Replay(2), SendFin(2)]
    assert machine.forwarded(2) == [CloseLink(2), Finished()]
