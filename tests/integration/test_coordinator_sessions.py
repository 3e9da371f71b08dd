"""RoQ's own sessions, elections and registrations on the coordinator: the tests of a real ZooKeeper, run on it too.

The modules say what they cover; a fixture gives their tests the coordinator where they ask for a ZooKeeper.
"""

from __future__ import annotations

import pytest

from tests.integration.test_coordination import *  # noqa: F403
from tests.integration.test_election import (  # noqa: F401
    test_a_cut_leader_stops_leading_before_the_next_one_leads,
    test_the_first_leads_and_hands_over_in_order,
)
from tests.integration.test_session_states import *  # noqa: F403


@pytest.fixture
def zookeeper(coordinator: str) -> str:
    """ "address:port" of the coordinator."""
    assert coordinator
    return coordinator
