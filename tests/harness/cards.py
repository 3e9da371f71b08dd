"""Who the tests' process is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from roq.runtime import security
from roq.runtime.security import load_card


@contextlib.contextmanager
def as_holder(card: Path | None) -> Iterator[None]:
    """This process has that card."""
    before = security._process
    security._process = security._ProcessCard(load_card(card) if card is not None else None, looked=True)
    try:
        yield
    finally:
        security._process = before
