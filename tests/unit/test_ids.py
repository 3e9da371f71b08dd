"""What can be a name: whatever one element of a ZooKeeper path can be, and a person can read."""

from __future__ import annotations

import pytest

from roq.errors import InvalidName
from roq.ids import check_name


@pytest.mark.parametrize("name", ["orders", "naïve queue, 2", "受注", "a@b", "x" * 100])
def test_a_name(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", " a", "a/b", "a\nb", "\ue000", "📈", "\ufffd", "\ufffc", "𠮷野家", "x" * 101])
def test_no_name(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)
