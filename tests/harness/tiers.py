"""Tiers of a matrix: of what is slow `make test` runs the first case (`quick_first`), of the models' searches all but the long
ones (`but_long`); the others are in `make test-all` only.

A whole test is `@pytest.mark.quick`; tests/unit/test_tiers.py says who has to have one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any]) -> list[Any]:
    """The cases of a `parametrize`, the first one marked."""
    first, *others = cases
    return [pytest.param(first, marks=pytest.mark.quick), *others]


def but_long(cases: Iterable[str], *long: str) -> list[Any]:
    """The cases of a `parametrize` by their names; these take long, and are marked."""
    names = list(cases)
    assert not {*long} - {*names}, f"no cases: {long}"
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]
