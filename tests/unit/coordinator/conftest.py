"""What the tests of the coordinator's tree share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roq.coordinator.changes import decode_image, decode_transaction, encode
from roq.coordinator.tree import Tree
from tests.unit.coordinator.tree_rig import Driven


@pytest.fixture
def driven() -> Iterator[Driven]:
    """A tree; what was written down of it makes the same tree again, from the start and from every image on the way."""
    made = Driven()
    yield made
    twin = Tree()
    for entry in made.log:
        twin.apply(decode_transaction(entry))
        twin = Tree(decode_image(encode(twin.image())))
        twin.check()
    assert twin.image() == made.tree.image()
