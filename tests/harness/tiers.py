"""The tier `quick` of a matrix: `make test` runs its first case, all others are in `make test-all` only.

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
