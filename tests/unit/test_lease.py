"""The lease of a host's processes: given by its HCM on the heartbeat board, and the end of those that live on without."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hcm.assignment import may_go_on
from roq.coordination.session import SessionState
from roq.errors import ProcessFailed
from roq.runtime.liveness import LEASE_MARGIN_SECONDS, HeartbeatBoard, HostLease, HostLoad, lease_left_seconds, lease_seconds


@pytest.fixture
def board(tmp_path: Path) -> HeartbeatBoard:
    return HeartbeatBoard(tmp_path / "board")


def test_without_a_lease_nothing_ends(board: HeartbeatBoard) -> None:
    assert not board.lease_is_over(1e9)
    HostLease(board).check()


def test_a_process_ends_when_its_lease_does(board: HeartbeatBoard) -> None:
    lease = HostLease(board)
    board.renew_lease(time.monotonic() + 60)
    lease.check()
    board.renew_lease(time.monotonic() - 0.001)
    with pytest.raises(ProcessFailed, match="lease"):
        lease.check()


def test_a_process_that_starts_after_the_end_waits_for_the_next_lease(board: HeartbeatBoard) -> None:
    """An HCM that is back starts what is wanted before it is registered and may renew."""
    board.renew_lease(time.monotonic() - 1)
    lease = HostLease(board)
    lease.check()
    board.renew_lease(time.monotonic() + 60)
    lease.check()
    board.renew_lease(time.monotonic() - 1)
    with pytest.raises(ProcessFailed):
        lease.check()


@pytest.mark.parametrize(
    ("state", "registered", "over", "unanswered", "expected"),
    [
        (None, False, False, False, False),  # just started: an earlier HCM's lease runs on until we are registered
        (None, False, True, True, True),  # ZooKeeper is away since before our start: this host's part shall be up
        (SessionState.CONNECTED, True, True, False, True),
        (SessionState.CONNECTED, False, False, False, False),  # a new session: what was replaced is stopped first
        (SessionState.SUSPENDED, True, False, False, True),  # ZooKeeper is away: messages flow
        (SessionState.LOST, True, False, False, True),
        (SessionState.LOST, True, True, False, False),  # we stood still for longer than our lease
    ],
)
def test_an_hcm_renews_while_nothing_can_have_been_replaced(
    state: SessionState | None, registered: bool, over: bool, unanswered: bool, expected: bool
) -> None:
    assert may_go_on(state, registered=registered, lease_over=over, unanswered=unanswered) is expected


def test_load_and_lease_share_the_board(board: HeartbeatBoard) -> None:
    board.renew_lease(12.5)
    board.set_host_load(HostLoad(0.5, 0.25, 3, 8))
    assert (board.lease(), board.host_load()) == (12.5, HostLoad(0.5, 0.25, 3, 8))


@pytest.mark.parametrize("session", [1.0, 6.0, 120.0])
def test_a_lease_outlives_the_session_and_is_over_when_it_is_said_to_be(session: float) -> None:
    """The HCM dies right after a renewal. ZooKeeper may have heard of it a third of the session before."""
    found_lost_at_the_earliest = session - session / 3
    assert lease_seconds(session) == session + LEASE_MARGIN_SECONDS
    assert found_lost_at_the_earliest + lease_left_seconds(session) >= lease_seconds(session) + 1.0
