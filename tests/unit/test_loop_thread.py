"""A loop in a thread: who waits for it is told when it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from roq.errors import Closed
from roq.runtime.loop_thread import LoopThread


async def ever(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_a_call_under_way_ends_with_closed() -> None:
    thread, begun, errors = LoopThread("test"), threading.Event(), list[BaseException]()

    def wait() -> None:
        try:
            thread.call(ever(begun))
        except Closed as error:
            errors.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert begun.wait(5)
    thread.stop()
    waiter.join(5)
    assert not waiter.is_alive()
    assert len(errors) == 1
    with pytest.raises(Closed):
        thread.call(asyncio.sleep(0))
