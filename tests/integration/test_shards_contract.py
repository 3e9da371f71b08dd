"""The contract of work queues (test_workqueue_contract.py) with a queue of three shards, through both faces. Left out: what is
promised within a shard only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import test_workqueue_contract as contract
from tests.integration.running import RunningCluster
from tests.integration.workqueue_rig import FACES, new_address, removed_at_the_end

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.parametrize(("work_address", "faces"), [("roq", face) for face in FACES], indirect=True),
]
WITHIN_A_SHARD = frozenset({"test_order_is_by_priority_then_by_insertion", "test_a_task_has_headers_until_it_is_gone"})
TESTS = {name: test for name, test in vars(contract).items() if name.startswith("test_")}
assert TESTS.keys() > WITHIN_A_SHARD, "each of these is a test"
globals().update({name: test for name, test in TESTS.items() if name not in WITHIN_A_SHARD})


@pytest.fixture
def work_address(cluster: RunningCluster) -> Iterator[str]:
    """A work queue of three shards that nobody has opened yet."""
    with removed_at_the_end(cluster, new_address("roq", cluster.zookeeper)) as address:
        yield f"{address}?shards=3"
