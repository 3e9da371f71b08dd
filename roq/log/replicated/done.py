"""How an append ends: with the entry's position, or with what stopped the log. Its outcome is unknown then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roq.errors import RoqError

Done = Callable[[int | RoqError], None]


def resolve(future: asyncio.Future[int], result: int | RoqError) -> None:
    """The end of an append as a future has it."""
    if future.done():
        return
    if isinstance(result, int):
        future.set_result(result)
    else:
        future.set_exception(result)
        future.exception()  # a caller that has gone need not be told
