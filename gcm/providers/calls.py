"""Calls of a provider without waiting for it: each in a thread of its own, with a bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from gcm.providers.provider import HostProvider, HostSpec, ProviderFailed
from roq.errors import RoqError

T = TypeVar("T")
THREADS_MAX = 32  # calls under way; one that hangs can't be ended, and keeps its thread


class ProviderCalls:
    """Of one process, whoever leads: a call of a term before is over before the next one about the same machine begins.
    seconds: longer than the provider's own bound, as what is given up here may still take effect."""

    def __init__(self, provider: HostProvider, seconds: float) -> None:
        self._provider, self._seconds = provider, seconds
        self._under_way: dict[str, asyncio.Future[object]] = {}  # by machine, "": a list

    async def create(self, spec: HostSpec) -> None:
        """See HostProvider."""
        await self._call(spec.name, f"creating {spec.name}", lambda: self._provider.create(spec))

    async def names(self, fleet: str) -> list[str]:
        """See HostProvider."""
        return await self._call("", "listing machines", lambda: self._provider.names(fleet))

    async def destroy(self, name: str, fleet: str) -> None:
        """See HostProvider."""
        await self._call(name, f"destroying {name}", lambda: self._provider.destroy(name, fleet))

    async def _call(self, key: str, what: str, work: Callable[[], T]) -> T:
        """Raises ProviderFailed."""
        try:
            async with asyncio.timeout(self._seconds):
                while (before := self._under_way.get(key)) is not None:
                    await asyncio.wait({before})
                if len(self._under_way) >= THREADS_MAX:
                    raise ProviderFailed(f"{what}: {THREADS_MAX} calls of the provider are under way or hang")
                done = self._in_thread(key, work)
                return await asyncio.shield(done)
        except TimeoutError:
            raise ProviderFailed(f"{what}: the provider did not answer within {self._seconds:g} s") from None

    def _in_thread(self, key: str, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._under_way[key] = done  # type: ignore[assignment]  # only waited for

        def finish(answer: T | None, error: BaseException | None) -> None:
            del self._under_way[key]
            if error is None:
                done.set_result(answer)  # type: ignore[arg-type]  # of `work`
                return
            done.set_exception(error)
            done.exception()  # nobody may wait any more

        def run() -> None:
            answer, error = None, None
            try:
                answer = work()
            except RoqError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001  of the provider's library: it goes to whoever waits
                error = ProviderFailed(f"{type(failure).__name__}: {failure}")
            with suppress(RuntimeError):  # the loop is closed: the GCM has ended meanwhile
                loop.call_soon_threadsafe(finish, answer, error)

        threading.Thread(target=run, name=f"provider {key}", daemon=True).start()  # one that hangs does not keep the GCM
        return done
