"""A local cluster that lives in a thread of its own, so that fixtures of any scope and tests' own loops can use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from roq.tools.local.cluster import JAVA, LocalCluster

T = TypeVar("T")


class RunningCluster:
    """Started on construction, stopped by `stop`. `zookeeper`: what clients connect to; a real one unless said otherwise."""

    def __init__(
        self, directory: Path, *, zookeeper: str | None = JAVA, kind: type[LocalCluster] = LocalCluster, **options: Any
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.local = kind(directory, zookeeper=zookeeper, **options)
        self.call(self.local.start())
        self.zookeeper = self.local.zookeeper

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` beside the cluster's daemons' handles."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self) -> list[Any]:
        """Stop everything; what had to be killed."""
        left = self.call(self.local.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return list(left)
