"""An event loop in a daemon thread, for plain code that needs a little of the asynchronous side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from roq.errors import Closed

T = TypeVar("T")
STOP_SECONDS = 2.0


class LoopThread:
    """Made running; stop() ends it. The thread is a daemon: a program that forgets to stop it exits all the same."""

    def __init__(self, name: str = "roq") -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for its result. Any thread but the loop's. Raises Closed after stop()."""
        if not self._thread.is_alive():
            work.close()
            raise Closed
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: what nobody waits for shall not go on
            raise

    def stop(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
