"""Whether this host's Monitors, ScalingProcesses and Exchanges may go on, decided once a second. Pure.

The lease: roq/runtime/liveness.py."""

from __future__ import annotations

from roq.coordination.session import SessionState


def may_go_on(state: SessionState | None, *, registered: bool, lease_over: bool, unanswered: bool) -> bool:
    """Whether the HCM renews the lease.

    state: of the session, None while there is none yet; registered: in this session; unanswered: no ZooKeeper answered at our
    start. They go on while we are registered, and while ZooKeeper is away: nothing is replaced then. Not between a lost session
    and its new registration: what is not wanted here any more must be stopped first. Nor, until then, once the lease is over.
    """
    if state is None:
        return unanswered
    if state is SessionState.CONNECTED:
        return registered
    return not lease_over
