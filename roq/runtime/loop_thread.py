"""An event loop in a daemon thread, for plain code that needs a little of the asynchronous side."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from roq.errors import Closed

T = TypeVar("T")
STOP_SECONDS = 2.0


class LoopThread:
    """Made running; stop() ends it. The thread is a daemon: a program that forgets to stop it exits all the same.

    ended: what Closed says to who comes later.
    """

    def __init__(self, name: str = "roq", ended: str | None = None) -> None:
        self._ended = ended
        self.loop = uvloop.new_event_loop()
        self._lock = threading.Lock()  # what was begun before the end is cut off by it
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for its result. Any thread but the loop's. Raises Closed after stop()."""
        with self._lock:
            if self._ending or not self._thread.is_alive():
                work.close()
                raise Closed(self._ended)
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed(self._ended) from None
        except BaseException:
            future.cancel()  # interrupted: what nobody waits for shall not go on
            raise

    def soon(self, function: Callable[[], None]) -> None:
        """Have `function` called on the loop. Any thread. Raises Closed after stop()."""
        with self._lock:
            if self._ending or not self._thread.is_alive():
                raise Closed(self._ended)
            self.loop.call_soon_threadsafe(function)

    async def _end(self) -> None:
        """On the loop. What is under way is cut off first: a thread may be waiting for it in `call`."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.stop()

    def stop(self) -> None:
        """End the thread; calls under way in other threads end with Closed."""
        with self._lock:
            first, self._ending = not self._ending, True
        if self._thread.is_alive():
            if first:
                asyncio.run_coroutine_threadsafe(self._end(), self.loop)
            self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
